"""Runs what `hybridflow train` starts, and leaves no process behind however the job ends."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridflow.controller import faults, hang, rank_log, stopping
from hybridflow.controller.hang import Watch
from hybridflow.processes import END, POLITE, adopt_orphans, ignore_polite_signals

STOP_SECONDS = 20  # from the first signal until what is left is killed
CLEAN_UP_SECONDS = 3  # for Python's resource trackers to delete what killed ranks left
ENGINE_SOCKETS = "VLLM_RPC_BASE_PATH"  # in the ranks' environment: those of an engine that is not built to the end
OTHER_NODES_SECONDS = 5  # for what ranks of other nodes note, once a connection to them is lost


@dataclass(frozen=True)
class Job:
    """What there is to watch over besides the processes of this node.

    Attributes:
        notes: a folder that the job's nodes share; None on a single node: a temporary one.
        logs: where the ranks' output goes; None: nowhere but where the command sends it.
        leader: this is node 0, which speaks for all.
        watch: over the job's progress.
        placed: the roles of every rank, for messages.
    """

    notes: Path | None = None
    logs: Path | None = None
    leader: bool = True
    watch: Watch | None = None
    placed: Sequence[str] = ()

    @contextlib.contextmanager
    def open_notes(self) -> Iterator[Path]:
        if self.notes is None:
            with tempfile.TemporaryDirectory(prefix="hybridflow-") as folder:
                yield Path(folder)
            return
        if self.leader:  # before any rank runs: they need this node to meet
            shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir(parents=True, exist_ok=True)
        yield self.notes
        if self.leader:
            time.sleep(1)  # the others read them, too
            shutil.rmtree(self.notes, ignore_errors=True)
            return
        # srun ends a job's other nodes when one has ended badly: node 0 comes first, which says why
        deadline = time.monotonic() + OTHER_NODES_SECONDS
        while self.notes.exists() and time.monotonic() < deadline:
            time.sleep(0.2)


def supervise(command: list[str], environment: dict[str, str], name: str, job: Job = Job()) -> int:
    """Run the command and wait; returns the exit status: 0, 1, 2 where the command found the configuration wrong, or REQUEUE.

    SIGTERM and SIGUSR1 let the job end after the step that it is in, with REQUEUE. Before the first step they end it now, as
    Ctrl-C and SIGHUP do at any time, a second one or STOP_SECONDS later by force. Descendants whose parent died are adopted and
    killed as well. The last lines of a job that failed say which rank failed, in what and why; `name` is the command's.
    """
    adopt_orphans()
    before = set(psutil.Process().children(recursive=True))
    with _stopped_by_signals() as stop, job.open_notes() as notes, tempfile.TemporaryDirectory(prefix="hybridflow-") as sockets:
        ours = {**environment, faults.FOLDER: str(notes), ENGINE_SOCKETS: sockets}
        child = subprocess.Popen(command, env=ours, start_new_session=True)
        try:
            status, why = _wait(child, stop, notes, job)
        finally:
            kill_descendants(before)
        if status in (1, stopping.REQUEUE):
            why = why or _why(child, notes, name, job)
            print(f"hybridflow: {why}", file=sys.stderr, flush=True)
    if job.notes:  # nothing is left to be ended, and srun, which ends the nodes that are slower to leave, shall see the status
        ignore_polite_signals()
    return status


class _Stop:
    """Signals that came in. `polite`: the job may go on to the end of its step; `deadline`: when the patience ends."""

    def __init__(self):
        self.polite: int | None = None
        self.signal: int | None = None
        self.deadline = float("inf")

    def __call__(self, number: int, frame) -> None:
        if number in POLITE:
            self.polite = number
            return
        self.deadline = time.monotonic() + STOP_SECONDS if self.signal is None else 0
        self.signal = number


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGHUP, *POLITE)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen, stop: _Stop, notes: Path, job: Job) -> tuple[int, str]:
    """Until the child has ended or is to be killed: the exit status, and why where that is known here."""
    asked = told = False
    while child.poll() is None:
        if stop.polite and not asked and not stop.signal:
            asked = True
            if stopping.ask(notes, _name(stop.polite)):
                _say(f"{_name(stop.polite)}: the job ends after this step (Ctrl-C: now)")
            else:  # there is nothing yet to be saved
                stop(signal.SIGHUP, None)
        if stop.signal and not told:
            told = True
            _say(f"stopping the ranks ({_name(stop.polite or stop.signal)}; Ctrl-C to kill)")
            child.send_signal(END)
        if time.monotonic() > stop.deadline:
            break  # the caller kills what is left
        hung = job.watch and not stop.signal and job.watch.look(notes)
        if hung:
            return 1, f"error: {hung}"
        time.sleep(0.1)
    if stop.signal:
        name = _name(stop.polite or stop.signal)
        return 1, f"stopped by {name}; all ranks have ended"
    if child.returncode == 0 and stopping.has_left(notes):
        return stopping.REQUEUE, "stopped after a step; all ranks have ended"
    return (child.returncode if child.returncode in (0, 2) else 1), ""


def _say(line: str) -> None:
    print(f"hybridflow: {line}", file=sys.stderr, flush=True)


def _name(number: int) -> str:
    return signal.Signals(number).name


def _why(child: subprocess.Popen, notes: Path, name: str, job: Job) -> str:
    deadline = time.monotonic() + (OTHER_NODES_SECONDS if job.notes else 0)
    while (cause := faults.cause(notes, job.placed, hang.latest(notes))) is None or faults.only_lost(notes):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    if cause is None and child.returncode < 0:
        cause = f"{name}'s process was ended by {_name(-child.returncode)}"
    said = _last_words(cause or "", job)
    return f"{said}error: {cause or f'{name} failed: see its message above'}"


def _last_words(cause: str, job: Job) -> str:
    """The end of the log of the rank that the cause names, unless the console had it all: what rank 0 says is there already."""
    named = re.match(r"rank (\d+) ", cause)
    if not named or job.logs is None or int(named[1]) == 0:
        return ""
    path = rank_log.log_file(job.logs, int(named[1]))
    text = rank_log.tail(path)
    return f"the end of {path}:\n{text}\nhybridflow: " if text else ""


def kill_descendants(spared: set[psutil.Process]) -> None:
    end([process for process in psutil.Process().children(recursive=True) if process not in spared])


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill them and wait until they are gone. They may have ended already."""
    # Python's resource trackers delete the shared memory of ranks that died; killed with them, it would stay on the host
    finishing = [process for process in processes if _ends_by_itself(process)]
    _kill([process for process in processes if process not in finishing])
    _, stuck = psutil.wait_procs(finishing, timeout=CLEAN_UP_SECONDS)
    _kill(stuck)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _ends_by_itself(process: psutil.Process) -> bool:
    """Python's resource trackers, and what brings a rank's last words to its log: once the ranks are gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        return words[:1] == ["tee"] or any("multiprocessing.resource_tracker" in word for word in words)
    return False
