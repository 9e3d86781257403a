"""What each rank prints, in a file of its own in the run's folder; rank 0 also speaks on the console. No torch."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = "HYBRIDFLOW_LOGS"  # in the ranks' environment; not set where the user started torchrun, which has logs of its own


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def to_file(rank: int) -> None:
    """From now on stdout and stderr go to the rank's file, whatever writes to them; those of rank 0 to the console as well,
    where a terminal keeps its stdout to itself: the progress table is drawn for one."""
    if FOLDER not in os.environ:
        return
    path = log_file(Path(os.environ[FOLDER]), rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank != 0:
        with path.open("ab") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is sys.stderr or not stream.isatty():
            _tee(stream.fileno(), path)


def _tee(descriptor: int, path: Path) -> None:
    """By a process of its own, which also brings to the end what a dying rank has written."""
    tee = subprocess.Popen(["tee", "-a", "--output-error=warn", str(path)], stdin=subprocess.PIPE, stdout=os.dup(descriptor))
    os.dup2(tee.stdin.fileno(), descriptor)
    tee.stdin.close()


def tail(path: Path, lines: int = 30) -> str:
    """The end of a file; empty where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 20_000, 0))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
