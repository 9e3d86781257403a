"""Processes that tests start, and that may end while they are asked."""

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil

# for PYTHONPATH: this checkout, and behind it what the tests themselves were started with
PYTHON_PATH = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(command: Sequence[str], timeout: float, **options: Any) -> subprocess.CompletedProcess:
    """`subprocess.run` with the output as text, and with an end of all its descendants, as torchrun's ranks, where it takes
    too long."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            printed, said = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                kill([*psutil.Process(process.pid).children(recursive=True), process])
    return subprocess.CompletedProcess(command, process.returncode, printed, said)


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between two questions
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def ahead_of_others() -> Iterator[None]:
    """Whoever watches for something short gets a core at once, where it may; what it starts within inherits that."""
    own = psutil.Process()
    before = own.nice()
    with contextlib.suppress(psutil.AccessDenied):
        own.nice(-15)
    try:
        yield
    finally:
        own.nice(before)


def kill(processes: Iterable[psutil.Process | Popen]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
