"""Processes that tests start, and that may end while they are asked."""

import contextlib
from collections.abc import Iterable
from subprocess import Popen

import psutil


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between two questions
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process | Popen]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
