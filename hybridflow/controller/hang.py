"""Notices that a job makes no progress any more, and finds out where each rank is then. No torch.

The driver notes each phase that it enters (`progress`), before the first one each rank the pieces of its start (`starting`);
every rank registers for a dump of its stacks by a signal (`register`), which works in C while Python stands still; and
`hybridflow train`, which is no rank and cannot hang with them, watches (`Watch`). They meet in the folder of the job's notes,
which the nodes of a job share: node 0's decides, each node's asks its own ranks. On Ray, whose ranks may be out of reach of our
notes and signals, the driver notes where they are in their start (`at_start`, `note_start`) and asks for their stacks (`asked`,
`stacks`, `leave`).
"""

import faulthandler
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hybridflow.controller import faults
from hybridflow.controller.notes import read, write
from hybridflow.processes import DUMP

_PROGRESS, _HUNG, _STOPPED = "progress", "hung", "signal-stopped-"
_STACKS = re.compile(r"stacks-(-?\d+)@(.*)@(\d+)")  # rank, host, process
START = "the start"  # the progress of a job that has no phase yet
_PIECE = "start-"  # of the start, in which a rank is
# Node 0 may have been lost: the others end by themselves so much later.
NODE_0_IS_LOST = 120.0  # seconds
_rank: int | None = None  # of this process, which has registered
_piece = ""  # of the start, that it is in


def progress(what: str) -> None:
    """The driver is at `what` now, such as "update, after 3 steps"."""
    folder = os.environ.get(faults.FOLDER)
    if folder:
        write(Path(folder) / _PROGRESS, what)


def starting(what: str) -> None:
    """This rank begins `what`, a piece of the job's start, such as "making the actor". The shorter the pieces, the better: one
    that takes longer than `run.hang_minutes` ends the job."""
    global _piece
    _piece = what
    if _rank is not None:
        note_start(_rank, what)


def at_start() -> str:
    """The piece of the start that this process has begun last."""
    return _piece


def note_start(rank: int, what: str) -> None:
    """`starting` of a rank that cannot note it itself."""
    folder = os.environ.get(faults.FOLDER)
    if folder:
        write(Path(folder) / f"{_PIECE}{rank}", what)
        progress(START)  # the same text from all ranks: they may write at the same time


def latest(folder: Path) -> str:
    """What the driver noted last that it is at; empty where it has noted nothing yet."""
    return read(folder / _PROGRESS)


def register(rank: int) -> None:
    """On the signal DUMP the stacks of all threads of this rank go to a file of its own among the job's notes. What it is
    `starting` goes there, too, and a fault of it finds room there."""
    global _rank
    _rank = rank
    faults.set_room_aside(rank)
    folder = os.environ.get(faults.FOLDER)
    if folder:
        path = Path(folder) / f"stacks-{rank}@{socket.gethostname()}@{os.getpid()}"
        faulthandler.register(DUMP, file=path.open("w"), all_threads=True)


def asked() -> bool:
    """Whether the job counts as hung, and the stacks of its ranks are wanted."""
    folder = os.environ.get(faults.FOLDER)
    return folder is not None and (Path(folder) / _HUNG).exists()


def stacks() -> str:
    """Of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def leave(rank: int, host: str, text: str) -> None:
    """The stacks of a rank that has told them to the driver."""
    path = Path(os.environ[faults.FOLDER]) / f"stacks-{rank}@{host}@0"
    partial = path.with_name("told")  # at once: `hybridflow train` may be looking
    partial.write_text(text)
    partial.replace(path)


@dataclass
class Watch:
    """Attributes:
    minutes: without progress, after which a job counts as hung; 0: never.
    ranks: whose stacks there should be: those of all nodes, and faults.DRIVER where the driver is a process of its own.
    report: the folder in which the stacks are left.
    leader: this is node 0.
    patience: seconds in which ranks must have written their stacks.
    """

    minutes: float
    ranks: Sequence[int]
    report: Path
    leader: bool = True
    patience: float = 10.0
    clock: Callable[[], float] = time.monotonic
    _seen: tuple[str, int] | None = None  # the progress noted last, and when by the clock of its writer
    _since: float = field(default=0.0)

    def __post_init__(self):
        self._since = self.clock()

    def look(self, notes: Path) -> str | None:
        """To be called often. Once the job hangs: the line that says in what and which ranks did not report; their stacks are
        in `report` then."""
        if not self.minutes:
            return None
        if not (notes / _HUNG).exists() and not self._overdue(notes):
            return None
        if self.leader:
            (notes / _HUNG).touch()
        for rank, path in self._registered(notes).items():
            _, host, process = _STACKS.fullmatch(path.name).groups()
            if host == socket.gethostname() and _is_of(notes, int(process)):
                _ask(notes, rank, int(process))
        silent = self._collect(notes)
        stopped = sorted(int(path.name.removeprefix(_STOPPED)) for path in notes.glob(f"{_STOPPED}*"))
        found = [f"{_names(stopped)} had been stopped by a signal"] if stopped else []
        found += [f"{_names(silent)} did not report"] if silent else []
        return (
            f"no progress for {self.minutes:g} minutes (run.hang_minutes) in {self._where(notes)}:"
            f" {', '.join(found) or 'all ranks reported'}; stacks of the ranks in {self.report}"
        )

    def _where(self, notes: Path) -> str:
        """The driver's phase; of the start, what each rank is at."""
        if self._seen is None:
            return f"{START} (no rank has begun)"
        if self._seen[0] != START:
            return self._seen[0]
        pieces: dict[str, list[int]] = {}
        for rank, path in sorted((int(path.name.removeprefix(_PIECE)), path) for path in notes.glob(f"{_PIECE}*")):
            pieces.setdefault(read(path), []).append(rank)
        return f"{START} ({'; '.join(f'{_names(ranks)}: {piece}' for piece, ranks in pieces.items())})"

    def _overdue(self, notes: Path) -> bool:
        path = notes / _PROGRESS
        if path.exists():
            seen = read(path), path.stat().st_mtime_ns
            if seen != self._seen:
                self._seen, self._since = seen, self.clock()
        waited = self.clock() - self._since
        if self.leader:
            return waited > 60 * self.minutes
        # without a shared folder nothing is ever to be seen from here but the start of this node's ranks
        driven = self._seen is not None and self._seen[0] != START
        return driven and waited > 60 * self.minutes + NODE_0_IS_LOST

    def _registered(self, notes: Path) -> dict[int, Path]:
        found = (path for path in notes.glob("stacks-*") if _STACKS.fullmatch(path.name))
        return {int(_STACKS.fullmatch(path.name)[1]): path for path in found}

    def _collect(self, notes: Path) -> list[int]:
        """Wait for the stacks, keep them; returns the ranks without. Only node 0 sees those of all nodes."""
        deadline = self.clock() + self.patience
        silent = list(self.ranks)
        while silent and self.clock() < deadline:
            time.sleep(0.2)
            done = {rank for rank, path in self._registered(notes).items() if path.stat().st_size}
            silent = [rank for rank in self.ranks if rank not in done]
        time.sleep(0.5)  # the last of them may still be writing
        if self.leader:
            self.report.mkdir(parents=True, exist_ok=True)
            for rank, path in self._registered(notes).items():
                if path.stat().st_size:
                    shutil.copy(path, self.report / ("driver.txt" if rank == faults.DRIVER else f"rank-{rank}.txt"))
            (self.report / "phase.txt").write_text(f"{self._where(notes)}\n")
        return silent


def _ask(notes: Path, rank: int, process: int) -> None:
    """Have a rank write its stacks. One that a signal has stopped takes no other until it goes on."""
    if psutil.Process(process).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        (notes / f"{_STOPPED}{rank}").touch()
    os.kill(process, DUMP)
    os.kill(process, signal.SIGCONT)


def _is_of(notes: Path, process: int) -> bool:
    """The process is still one of this job, not another one under its number."""
    try:
        return f"{faults.FOLDER}={notes}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _names(ranks: list[int]) -> str:
    numbers = [str(rank) for rank in ranks if rank != faults.DRIVER]
    driver = ["the driver"] if faults.DRIVER in ranks else []
    return " and ".join(driver + ([f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"] if numbers else []))
