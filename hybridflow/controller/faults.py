"""What ended a job, in one line: ranks note their faults, and `hybridflow train` shows the one that all others follow from.

A rank that fails prints its traceback at once. Its peers fail after it, with broken connections, and torchrun ends the rest:
so each also leaves its line in a folder (`FOLDER` in the environment), from which `cause` takes the first real one. No torch.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hybridflow.controller import notes

FOLDER = "HYBRIDFLOW_FAULTS"  # in the ranks' environment; not set where the user started torchrun
DRIVER = -1  # for a rank: the driver, where it is a process of its own
_EXITS = "exits-*.json"  # one for each node
_ROOM = 16 << 10  # bytes set aside for a note: a full disk may be the very fault
LAST_WORDS: list[Callable[[], None]] = []  # what there is to be said elsewhere before a fault ends this process at once
# How the loss of a peer looks from here: gloo raises RuntimeError and nothing else, NCCL and the store errors of their own.
_LOST = re.compile(r"gloo/transport|Connection (closed|reset|refused)|Broken pipe")
_LOST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True)
class Fault:
    """`lost`: a connection to another rank broke, so that the fault is most likely that rank's. `seconds`: since the epoch.
    `text`: what to print: with the traceback, or the line alone where only a peer was lost."""

    rank: int
    line: str
    lost: bool
    seconds: float
    text: str


class RankFailed(RuntimeError):
    """A rank's fault as an exception that can be pickled and raised again in another process."""

    def __init__(self, fault: Fault):
        super().__init__(fault)
        self.fault = fault

    def __str__(self) -> str:
        return self.fault.text


@contextlib.contextmanager
def as_rank_failed(rank: int, where: str) -> Iterator[None]:
    """Any exception within becomes the `RankFailed` of this rank, at `where`.

    Raises:
        RankFailed: from the exception.
    """
    try:
        yield
    except RankFailed:
        raise
    except Exception as error:
        raise RankFailed(describe(rank, where, error)) from error


def describe(rank: int, where: str, error: BaseException) -> Fault:
    """What failed on this rank, in what."""
    if isinstance(error, RankFailed):
        return error.fault
    lost = type(error).__name__ in _LOST_TYPES or bool(_LOST.search(str(error)))
    what = " ".join(str(error).split())
    if lost:  # without the library's source line and its advice to see the other rank's log
        what = re.sub(r"^\[\S+\] ", "", what).partition(". This is typically")[0]
    start = f"{'the driver' if rank == DRIVER else f'rank {rank}'} on {socket.gethostname()} failed in {where}:"
    line = f"{start} {type(error).__name__}{what and f': {what}'}"
    trace = f"{start}\n" + "".join(traceback.format_exception(error))
    return Fault(rank, line, lost, time.time(), line if lost else trace.rstrip())


def report(fault: Fault) -> None:
    """Print the fault, and note it for `cause`."""
    _note(fault)
    with contextlib.suppress(OSError):  # the rank's log may be on a disk that is full
        print(fault.text, file=sys.stderr, flush=True)


def say_last_words() -> None:
    """All of `LAST_WORDS`; the fault itself has been reported, and a further one would hide it."""
    for say in list(LAST_WORDS):
        with contextlib.suppress(Exception):
            say()


def _note(fault: Fault) -> None:
    folder = os.environ.get(FOLDER)
    if folder:
        try:
            _write(Path(folder) / f"rank-{fault.rank}.json", asdict(replace(fault, text="")))
        except OSError as error:  # the line is printed in any case
            with contextlib.suppress(OSError):
                print(f"rank {fault.rank}: could not note the fault in {folder}: {error}", file=sys.stderr)


def note_exits(statuses: dict[int, int]) -> None:
    """By torchrun's process: the ranks that failed by themselves, with their exit status (negative: a signal's number)."""
    folder = os.environ.get(FOLDER)
    if folder:
        note = {"host": socket.gethostname(), "statuses": statuses}
        _write(Path(folder) / _EXITS.replace("*", socket.gethostname()), note)


def set_room_aside(rank: int | None = None) -> None:
    """For this rank's fault; without a rank for the exits of this node's."""
    folder = os.environ.get(FOLDER)
    if folder:
        name = _EXITS.replace("*", socket.gethostname()) if rank is None else f"rank-{rank}.json"
        notes.write(_being_written(Path(folder) / name), "", _ROOM)


def _write(path: Path, content: dict) -> None:
    """At once: another node may be reading."""
    notes.write(_being_written(path), json.dumps(content), _ROOM)
    _being_written(path).replace(path)


def _being_written(path: Path) -> Path:
    return path.with_suffix(".new")


def only_lost(folder: Path) -> bool:
    """All that is known so far is that connections were lost, and not to whom."""
    return not any(folder.glob(_EXITS)) and all(json.loads(p.read_text())["lost"] for p in folder.glob("rank-*.json"))


def cause(folder: Path, placed: Sequence[str] = (), at: str = "") -> str | None:
    """The line that says why the job ended, or None where nothing is known.

    Args:
        placed: the roles of every rank as `its_roles` takes them.
        at: what the driver was at, in which a rank was killed that could not say so itself.
    """
    faults = sorted((Fault(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")), key=lambda f: f.seconds)
    own = [fault for fault in faults if not fault.lost]
    if own:
        return own[0].line
    noted = [json.loads(path.read_text()) for path in sorted(folder.glob(_EXITS))]
    exits = [(rank, status, note["host"]) for note in noted for rank, status in note["statuses"].items()]
    # torchrun ends the others with SIGTERM
    killed = [(rank, -status, host) for rank, status, host in exits if status < 0 and -status != signal.SIGTERM]
    if killed:
        rank, number, host = killed[0]
        hint = ": the machine may have run out of memory" if number == signal.SIGKILL else ""
        seen = f"; {faults[0].line}" if faults else ""
        phase = f" in {at}" if at else ""
        return f"rank {rank} on {host} was ended by {_name(number)}{phase}{hint}{its_roles(placed, int(rank))}{seen}"
    if faults:
        return faults[0].line
    silent = [f"rank {rank} on {host} ended with status {status}" for rank, status, host in exits]
    return silent[0] if silent else None


def its_roles(placed: Sequence[str], rank: int) -> str:
    """For a rank that was lost, whatever it was at: the end of a line that says what had lived on it.

    Args:
        placed: of every rank, such as "actor, rollout"; none where ranks have no roles.
    """
    return f"; its roles: {placed[rank]}" if placed else ""


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
