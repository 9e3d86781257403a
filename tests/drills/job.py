"""A job of a drill: PPO on CPU ranks to which something is done, with what is left of it in the end."""

import os
import re
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hybridflow.controller import notes, stopping
from tests.checkpoints.test_killed_job import assert_same_run, start
from tests.processes import ahead_of_others, living

PATIENCE = 1200  # seconds for a job, on a busy machine
MARK = "HYBRIDFLOW_DRILL"  # in the environment of all of a job's processes
STARTED: list[subprocess.Popen] = []  # by drills, to be ended where one of them fails


class Drilled:
    """A job to which something is done; it has a folder for temporary files and a mark in its environment of its own."""

    def __init__(self, folder: Path, run: str, *options: str, disk: Path | None = None):
        """`disk`: where the run's folder and that for temporary files are to be, instead of `folder` and /tmp."""
        self._temporary = tempfile.TemporaryDirectory(prefix="hf-", dir=disk or "/tmp")  # short: Ray's sockets live in it
        self._mark, self.run = uuid.uuid4().hex, (disk or folder) / run
        environment = {MARK: self._mark, "TMPDIR": self._temporary.name}
        self.process = start(folder, run, *options, f"run.dir={self.run}", **environment)
        self.memory: set[str] = set()
        self.was_at = ""  # when it was killed
        self._known: list[psutil.Process] = []
        STARTED.append(self.process)
        self._since = time.monotonic()

    def steps(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def await_steps(self, count: int) -> None:
        self.wait_for(lambda: self.steps() >= count, f"step {count}")

    def wait_for(self, condition: Callable[[], object], what: str, pause: float = 0.05) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0][-4000:]
            assert time.monotonic() < deadline, f"{what} did not come about"
            time.sleep(pause)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def rank(self, number: int) -> psutil.Process:
        """Under torchrun by its environment; under Ray, whose actors don't have their number there, by their order."""
        members = self.family()
        actors = [member for member in members if member.name().startswith("ray::RankActor")]
        return actors[number] if actors else next(m for m in members if m.environ().get("RANK") == str(number))

    def driver(self) -> psutil.Process:
        """The process in which the driver runs."""
        own = [member for member in self.family() if "hybridflow.ray_driver" in member.cmdline()]
        return own[0] if own else self.rank(0)

    def note(self, name: str) -> str:
        """What is written under this name among the job's notes."""
        found = list(Path(self._temporary.name).glob(f"hybridflow-*/{name}"))
        return notes.read(found[0]) if found else ""

    def has_note(self, name: str) -> bool:
        return any(Path(self._temporary.name).glob(f"hybridflow-*/{name}"))

    def await_first_step(self) -> None:
        self.wait_for(lambda: self.has_note(stopping.READY), "the first step")

    @contextmanager
    def caught_in(self, phase: str) -> Iterator[None]:
        """Within, the driver stands still in a phase of a step."""
        self.await_first_step()
        driver = self.driver()
        with ahead_of_others():
            while driver.status() != psutil.STATUS_STOPPED:
                self.wait_for(lambda: self.is_in(phase), phase, 0.001)
                driver.suspend()
                self.wait_for(lambda: driver.status() == psutil.STATUS_STOPPED, "a stop", 0.001)
                if not self.is_in(phase):  # it has gone on meanwhile: in the next step
                    driver.resume()
                    self.wait_for(lambda: driver.status() != psutil.STATUS_STOPPED, "an end of the stop", 0.001)
        try:
            yield
        finally:
            driver.resume()

    def is_in(self, phase: str) -> bool:
        return self.note("progress").startswith(f"phase {phase} after")

    def kill(self) -> str:
        """SIGKILL to all that was known when it was `about_to` be done and, at once, to what has been started since; what the
        job had said. Nothing of it is left, but for what a job that is killed cannot delete: its temporary files."""
        for process in self._known:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self._marked():
            process.kill()
        output, _ = self.process.communicate(timeout=PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while left := [*living(self._known), *self._marked()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        self.was_at = self.note("progress")
        self._temporary.cleanup()
        return output

    def _marked(self) -> set[psutil.Process]:
        """What runs with the job's mark, whoever its parent is."""
        return {other for other in psutil.process_iter(["environ"]) if (other.info["environ"] or {}).get(MARK) == self._mark}

    def about_to(self) -> None:
        """Before anything is done to the job: what it consists of, and the memory that it shares."""
        self._known = [psutil.Process(self.process.pid), *self.family()]
        for process in self._known:
            try:
                self.memory |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self._since = time.monotonic()

    def ended(self, what: str, status: int, says: str = "hybridflow: ") -> str:
        """The job's end: its status is right and nothing is left of it. Prints that, and the last line that the job said with
        these words; returns all that it printed."""
        try:
            output, _ = self.process.communicate(timeout=PATIENCE)
        finally:
            self.process.kill()
        seconds = time.monotonic() - self._since
        left = set(living(self._known))
        left |= self._marked()
        memory = [path for path in self.memory if Path(path.removesuffix(" (deleted)")).exists()]
        files = os.listdir(self._temporary.name)
        remains = f"left: {len(left)} processes, {len(memory)} of {len(self.memory)} in /dev/shm, {len(files)} files in /tmp"
        print(f"{what:34} status {self.process.returncode:2} after {seconds:5.1f} s  {remains}", flush=True)
        said = [line for line in output.splitlines() if says in line]
        assert said, output[-4000:]
        print(f"    {shown(said[-1].strip())}", flush=True)
        assert self.process.returncode == status, output[-4000:]
        assert not left and not memory and not files, (left, memory, files)
        self._temporary.cleanup()
        return output


def shown(line: str) -> str:
    """Without this machine's paths and name."""
    return re.sub(r"/\S*?/(?=killed|hung|stopped|poisoned|disk|whole)", "", line).replace(os.uname().nodename, "HOST")


def in_the_end_same(run: Path, whole: Path) -> None:
    """The run ended as the one that was left alone."""
    assert_same_run(run, whole)
    print("    in the end: metrics, samples and weights of a run that was left alone", flush=True)
