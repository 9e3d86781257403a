"""Runs what `hybridflow train` starts, and leaves no process behind however the job ends."""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from hybridflow.controller import faults
from hybridflow.processes import adopt_orphans

STOP_SECONDS = 20  # from the first signal until what is left is killed
CLEAN_UP_SECONDS = 3  # for Python's resource trackers to delete what killed ranks left


def supervise(command: list[str], environment: dict[str, str], name: str) -> int:
    """Run the command and wait; returns the exit status: 0, 1, or 2 where the command found the configuration wrong.

    Ctrl-C, SIGTERM and SIGHUP are passed on; a second one, or STOP_SECONDS, kills. Descendants whose parent died are adopted
    and killed as well. The last line of a job that failed says which rank failed, in what and why; `name` is the command's.
    """
    adopt_orphans()
    before = set(psutil.Process().children(recursive=True))
    with _stopped_by_signals() as stop, tempfile.TemporaryDirectory(prefix="hybridflow-") as notes:
        child = subprocess.Popen(command, env={**environment, faults.FOLDER: notes}, start_new_session=True)
        try:
            status = _wait(child, stop)
        finally:
            kill_descendants(before)
        if status == 1:
            print(f"hybridflow: {_why(child, stop, Path(notes), name)}", file=sys.stderr, flush=True)
    return status


class _Stop:
    """Signals that came in, counted; `deadline` is when the patience ends."""

    def __init__(self):
        self.signal: int | None = None
        self.count = 0
        self.deadline = float("inf")

    def __call__(self, number: int, frame) -> None:
        self.count += 1
        self.signal = number
        self.deadline = 0 if self.count > 1 else time.monotonic() + STOP_SECONDS


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen, stop: _Stop) -> int:
    told = False
    while child.poll() is None:
        if stop.signal and not told:
            print(f"hybridflow: stopping the ranks ({signal.Signals(stop.signal).name}; once more to kill)", file=sys.stderr)
            child.send_signal(signal.SIGTERM)
            told = True
        if time.monotonic() > stop.deadline:
            break  # the caller kills what is left
        time.sleep(0.1)
    if stop.signal:
        return 1
    return child.returncode if child.returncode in (0, 2) else 1


def _why(child: subprocess.Popen, stop: _Stop, notes: Path, name: str) -> str:
    if stop.signal:
        return f"stopped by {signal.Signals(stop.signal).name}; all ranks have ended"
    cause = faults.cause(notes)
    if cause is None and child.returncode < 0:
        cause = f"{name}'s process was ended by {signal.Signals(-child.returncode).name}"
    return f"error: {cause or f'{name} failed: see its message above'}"


def kill_descendants(spared: set[psutil.Process]) -> None:
    left = [process for process in psutil.Process().children(recursive=True) if process not in spared]
    # Python's resource trackers delete the shared memory of ranks that died; killed with them, it would stay on the host
    trackers = [process for process in left if _is_tracker(process)]
    _kill([process for process in left if process not in trackers])
    _, stuck = psutil.wait_procs(trackers, timeout=CLEAN_UP_SECONDS)
    _kill(stuck)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False
