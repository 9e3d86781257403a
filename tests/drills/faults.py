"""Drills of what may befall a job, each with a real one on CPU ranks, by hand:

python -m tests.drills.faults [NAME ...]          # such as hang nan; all of them: about an hour on 2 cores

A drill prints a line for each job: seconds from the fault to its end, exit status, what is left of it, and what was seen. The
job is PPO with an adapted KL penalty (tests/checkpoints/test_killed_job.py): three models, two optimizers.
"""

import argparse
import dataclasses
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from hybridflow.algorithms.skipped import load_batch
from hybridflow.checkpoints.folder import find
from hybridflow.controller import stopping
from hybridflow.data.tiny_model import make_tiny_model
from tests.checkpoints.test_killed_job import finish, rows, start
from tests.drills import checkpoints
from tests.drills.job import PATIENCE, STARTED, Drilled, in_the_end_same

# minutes of run.hang_minutes: a phase, and a piece of the start, take as long on a machine with ten times its load
HANG, HANG_START = 6, 4
TWO = ("cluster.ranks_per_node=2", "roles.actor.pp=2", "roles.rollout.tp=2", "run.steps=16", "run.save_every=3")
THREE = ("cluster.ranks_per_node=3", "roles.actor.pp=3", "run.steps=8", "run.save_every=1")
RAY = ("cluster.launcher=ray",)
PHASES = ("wake", "reshard", "rollout", "save", "reward", "log_probs", "update")


@dataclasses.dataclass
class Drills:
    """Every method is a drill; its name, with hyphens, is that of the command line."""

    folder: Path

    def sigterm(self) -> None:
        """In each phase, to every process of the job, as Slurm does; each start goes on where the last one ended."""
        finish(start(self.folder, "whole-2", *TWO), PATIENCE)
        for phase in PHASES:
            self._leave("stopped", phase, *TWO)
        job = Drilled(self.folder, "stopped", *TWO)
        job.await_steps(15)
        with job.caught_in("rollout"):
            job.about_to()
            job.process.send_signal(signal.SIGTERM)
        job.ended("SIGTERM in the last step", 0, "finished after")
        self._same("stopped", "whole-2")

    def sigterm_before_the_first_step(self) -> None:
        job = Drilled(self.folder, "early", *TWO)
        job.wait_for(lambda: job.has_note("progress"), "the warm start")
        job.about_to()
        job.process.send_signal(signal.SIGTERM)
        job.ended("SIGTERM before the first step", 1)

    def sigterm_ray(self) -> None:
        finish(start(self.folder, "whole-ray", *TWO, *RAY), PATIENCE)
        for phase in ("rollout", "update", "save"):
            self._leave("stopped-ray", phase, *TWO, *RAY)
        finish(start(self.folder, "stopped-ray", *TWO, *RAY), PATIENCE)
        self._same("stopped-ray", "whole-ray")

    def _leave(self, run: str, phase: str, *options: str) -> None:
        job = Drilled(self.folder, run, *options)
        before = job.steps()
        with job.caught_in(phase):
            job.about_to()
            members = [] if RAY[0] in options else job.family()  # Ray's own processes would end at once
            for member in (psutil.Process(job.process.pid), *members):
                member.send_signal(signal.SIGTERM)
            job.wait_for(lambda: job.note(stopping.ASKED), "the question")
        output = job.ended(f"SIGTERM in {phase}{', Ray' if RAY[0] in options else ''}", 99, "ending after step")
        step = int(re.search(r"SIGTERM: ending after step (\d+) of 16; run.resume=auto goes on from there", output)[1])
        whole, broken_ones = find(job.run / "checkpoints")
        assert whole[0].step == job.steps() == step and not broken_ones, (whole, step, broken_ones)
        assert before == 0 or f"resumes after step {before} " in output, output
        resumed = f"this start had resumed after step {before}; " if before else ""
        print(f"    {resumed}the newest whole checkpoint is that of step {step}", flush=True)

    def kill(self) -> None:
        """SIGKILL to rank 0, beside which the driver lives, and to the middle one of three."""
        finish(start(self.folder, "whole-3", *THREE), PATIENCE)
        for number, name in ((0, "rank 0"), (1, "the middle rank")):
            self._kill_rank("killed", number, f"kill -9 of {name} of 3", *THREE)
        finish(start(self.folder, "killed", *THREE), PATIENCE)
        self._same("killed", "whole-3")

    def kill_ray(self) -> None:
        """SIGKILL to a worker of Ray, and to the driver."""
        options = (*TWO, "run.save_every=1", *RAY)
        finish(start(self.folder, "whole-ray-1", *options), PATIENCE)
        self._kill_rank("killed-ray", 1, "kill -9 of a worker, Ray", *options)
        job = Drilled(self.folder, "killed-ray", *options)
        job.await_steps(job.steps() + 1)
        job.about_to()
        job.driver().kill()
        job.ended("kill -9 of the driver, Ray", 1)
        finish(start(self.folder, "killed-ray", *options), PATIENCE)
        self._same("killed-ray", "whole-ray-1")

    def _kill_rank(self, run: str, number: int, what: str, *options: str) -> None:
        job = Drilled(self.folder, run, *options)
        job.await_steps(job.steps() + 2)
        job.about_to()
        job.rank(number).kill()
        output = job.ended(what, 1)
        assert re.search(r"hybridflow: error: rank \d on \S+ (was ended by SIGKILL|died in )", output), output[-3000:]

    def hang(self) -> None:
        """A rank that never comes back from a call; the others wait for it."""
        stuck = "roles.actor.implementation=tests.drills.broken:StuckActor"
        job = Drilled(self.folder, "hung", *TWO, f"run.hang_minutes={HANG}", stuck)
        job.await_steps(1)
        job.about_to()
        output = job.ended("a rank is stuck in a call", 1)
        assert f"no progress for {HANG} minutes (run.hang_minutes) in phase update after 1 steps: all ranks reported" in output
        stacks = {path.name: path.read_text() for path in (job.run / "hang").iterdir()}
        assert sorted(stacks) == ["phase.txt", "rank-0.txt", "rank-1.txt"], sorted(stacks)
        assert "sit_still" in stacks["rank-1.txt"] and "sit_still" not in stacks["rank-0.txt"]
        print(f"    hang/: {', '.join(sorted(stacks))}; rank-1.txt names the line where it sits", flush=True)

    def hang_start(self, *launcher: str) -> None:
        """A rank that never comes to the end of its start; the last line says what each rank is at."""
        stuck = "roles.actor.implementation=tests.drills.broken:UnmadeActor"
        job = Drilled(self.folder, "hung-start", *TWO, *launcher, f"run.hang_minutes={HANG_START}", stuck)
        job.about_to()
        output = job.ended(f"a rank is stuck in the start{', Ray' if launcher else ''}", 1)
        assert f"no progress for {HANG_START} minutes (run.hang_minutes) in the start (" in output, output[-3000:]
        assert "rank 1: reading the actor's model.safetensors (file 1 of 1)" in output, output[-3000:]
        assert "sit_still" in (job.run / "hang" / "rank-1.txt").read_text()

    def hang_start_ray(self) -> None:
        """The same on Ray."""
        self.hang_start(*RAY)

    def stop(self) -> None:
        """SIGSTOP to a rank: nobody else notices."""
        job = Drilled(self.folder, "hung-by-stop", *TWO, f"run.hang_minutes={HANG}")
        job.await_steps(1)
        job.about_to()
        job.rank(1).suspend()
        output = job.ended("SIGSTOP of a rank", 1)
        assert f"no progress for {HANG} minutes (run.hang_minutes) in phase " in output
        print(f"    hang/: {', '.join(sorted(path.name for path in (job.run / 'hang').iterdir()))}", flush=True)

    def hang_ray(self) -> None:
        """The same on Ray."""
        stuck = "roles.actor.implementation=tests.drills.broken:StuckActor"
        job = Drilled(self.folder, "hung-ray", *TWO, *RAY, f"run.hang_minutes={HANG}", stuck)
        job.await_steps(1)
        job.about_to()
        output = job.ended("a rank is stuck in a call, Ray", 1)
        assert f"no progress for {HANG} minutes (run.hang_minutes) in phase update after 1 steps" in output
        print(f"    hang/: {', '.join(sorted(path.name for path in (job.run / 'hang').iterdir()))}", flush=True)

    def stop_ray(self) -> None:
        job = Drilled(self.folder, "hung-ray-by-stop", *TWO, *RAY)
        job.await_steps(1)
        job.about_to()
        job.rank(1).suspend()
        assert "gave no sign of life for 30 s" in job.ended("SIGSTOP of a rank, Ray", 1)

    def nan(self) -> None:
        """In the gradient of one rank: one update is skipped; three in a row end the run, and the batch of the last is kept."""
        poisoned = "roles.actor.implementation=tests.drills.broken:PoisonedActor"
        job = Drilled(self.folder, "poisoned", *TWO, "run.save_every=1", "run.max_skipped=3", poisoned)
        job.await_steps(1)
        job.about_to()
        output = job.ended("NaN in a gradient", 1)
        assert output.count("warning: update of the actor skipped, its gradient's norm is nan: nothing was changed") == 4
        skipped = [row["actor/skipped"] for row in rows(job.run / "metrics.jsonl")]
        assert skipped == [0, 0.5, 0, 1], skipped
        batch = load_batch(job.run / "skipped" / "step-5-actor.safetensors")
        assert len(batch) == 8 and {"tokens", "loss_mask", "log_probs", "advantages"} <= set(batch.names), batch.names
        print(
            f"    skipped of each step's updates: {skipped}; kept: {len(batch)} samples, {', '.join(batch.names)}", flush=True
        )
        assert "resumes after step 4 " in finish(start(self.folder, "poisoned", *TWO), PATIENCE)
        print("    without the fault it resumed after step 4 and came to its end", flush=True)

    def full_disk(self) -> None:
        """Too small a disk, and one that another user fills while a checkpoint, records or the trained model are written."""
        checkpoints.full_disk(self.folder)

    def kills(self) -> None:
        """SIGKILL to everything, ten times, at random moments: three times each in rollout, update and save, once anywhere."""
        checkpoints.kills(self.folder, seed=0)

    def _same(self, run: str, whole: str) -> None:
        in_the_end_same(self.folder / run, self.folder / whole)


def main() -> int:
    names = {name.replace("_", "-"): name for name, method in vars(Drills).items() if name[0] != "_" and callable(method)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    asked = parser.parse_args().names or list(names)
    unknown = [name for name in asked if name not in names]
    if unknown:
        parser.error(f"there is no drill {', '.join(unknown)}: use some of {', '.join(names)}")
    for name in asked:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hybridflow-drill-") as folder:
            make_tiny_model(Path(folder) / "tiny")
            try:
                getattr(Drills(Path(folder)), names[name])()
            finally:
                for process in STARTED:
                    process.kill()  # what it started ends with it
        print(f"{name}: passed, {time.monotonic() - begun:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
