"""The Ray launcher's transport: the driver is a process of its own, and every rank an actor that runs its calls in order."""

import collections
import contextlib
import datetime
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
import torch.distributed as dist

from hybridflow.batch import Batch
from hybridflow.controller import faults, hang
from hybridflow.controller.faults import Fault
from hybridflow.controller.kept import Partial
from hybridflow.controller.ray_cluster import Seat, seat_here
from hybridflow.controller.torchrun import quiet
from hybridflow.controller.waiting import waiting
from hybridflow.controller.worker import Call

BEAT = 5.0  # seconds between two signs of life of a rank
SILENCE = 30.0  # seconds without one after which a rank counts as lost
LAST_WORDS = 1.0  # seconds for what a dying rank printed to arrive, and for the faults of its peers
_FIRST_BEAT = 300.0  # seconds until a rank must have imported what its first call needs
_STORE_TIMEOUT = datetime.timedelta(minutes=10)
_ASKED = "stacks asked"  # in the store: every rank is to put its stacks there


@dataclass(frozen=True)
class Meeting:
    """Where the job's ranks meet: the driver's store."""

    host: str
    port: int

    def store(self) -> dist.TCPStore:
        """A connection to it, for one thread."""
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)


class RankActor:
    """A rank's process. Ray runs the methods one after the other in its main thread; a failure comes back as a `Fault`."""

    def __init__(self):
        self._process: Any = None

    def seat(self, device: str) -> Seat:
        quiet()
        return seat_here(device)

    def join(
        self, make_process: Callable[..., Any], rank: int, local_rank: int, ranks_here: int, meeting: Meeting
    ) -> Fault | None:
        """Enter the pool's world, and let the driver hear a heart beat.

        Args:
            make_process: `Process` with its config; takes rank, store and local_rank.
            local_rank: the number of the rank's device on its node.
            ranks_here: the job's ranks on this node.
        """
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks_here), "TORCHELASTIC_RUN_ID": f"{meeting.host}-{meeting.port}"}
        os.environ |= {"MASTER_ADDR": meeting.host, "MASTER_PORT": str(meeting.port)}
        hang.starting("meeting the other ranks")

        def work() -> None:
            threading.Thread(target=_beat, args=(meeting.store(), rank), daemon=True).start()
            self._process = make_process(rank=rank, store=meeting.store(), local_rank=local_rank)
            self._process.join()

        return _or_fault(rank, "joining the job", work)

    def build(self) -> Fault | None:
        return _or_fault(self._process.rank, "building the roles", self._process.build)

    def execute(self, call: Call) -> Any:
        result = _or_fault(self._process.rank, call.where, lambda: self._process.execute(call))
        return result if call.reply or isinstance(result, Fault) else None

    def close(self) -> Fault | None:
        return _or_fault(self._process.rank, "leaving the job", self._process.close)


def _or_fault(rank: int, where: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return faults.describe(rank, where, error)


def _beat(store: dist.TCPStore, rank: int) -> None:
    while True:
        try:
            _tell_start(store, rank)
            store.add(_beats_of(rank), 1)
            _tell_stacks(store, rank)
        except RuntimeError:  # the driver is gone, and Ray ends its actors
            return
        time.sleep(BEAT)


def _beats_of(rank: int) -> str:
    return f"beats/{rank}"


def _tell_stacks(store: dist.TCPStore, rank: int) -> None:
    """On a rank, beside whatever it hangs in: what its threads are at, for the driver that has asked."""
    if store.add(_ASKED, 0):
        store.set(_stacks_of(rank), hang.stacks())


def _take_stacks(store: dist.TCPStore, seats: Sequence[Seat]) -> None:
    """In the driver of a job that hangs: ask all ranks, and leave what they have told among the job's notes."""
    store.add(_ASKED, 1)
    for rank, seat in enumerate(seats):
        if store.check([_stacks_of(rank)]):
            hang.leave(rank, seat.host, store.get(_stacks_of(rank)).decode())


def _stacks_of(rank: int) -> str:
    return f"stacks/{rank}"


def _tell_start(store: dist.TCPStore, rank: int) -> None:
    store.set(_start_of(rank), hang.at_start())


def _take_starts(store: dist.TCPStore, known: dict[int, str], ranks: int) -> None:
    """In the driver: note which piece of the start each of the ranks is in, where that is not the one that is `known`."""
    for rank in range(ranks):
        if store.check([_start_of(rank)]):
            piece = store.get(_start_of(rank)).decode()
            if known.get(rank) != piece:
                known[rank] = piece
                hang.note_start(rank, piece)


def _start_of(rank: int) -> str:
    return f"start/{rank}"


class _Answer:
    """What a rank is at, and its result once it is `there`."""

    def __init__(self, rank: int, where: str):
        self.rank, self.where = rank, where
        self.there, self.value = False, None


class RayTransport:
    """The driver's side. The first fault of any rank, whatever the driver is waiting for, ends the whole job at once.

    Args:
        actors, seats: in the order of the ranks.
        host: the address of this machine as the ranks see it. The store where they meet listens there and nowhere else.
        port: of the store; 0 for a free one.
        silence: seconds without a sign of life after which a rank counts as lost.
        placed: the roles of every rank, for messages.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        seats: Sequence[Seat],
        host: str,
        port: int = 0,
        silence: float = SILENCE,
        placed: Sequence[str] = (),
    ):
        self.phase: Callable[[], str] = lambda: ""
        self._actors, self._seats, self._silence, self._placed = actors, seats, silence, placed
        self._open: dict[ray.ObjectRef, _Answer] = {}
        self._ending = threading.Lock()
        self._store = _listening_store(host, port)  # lives as long as the transport
        self._meeting = Meeting(host, self._store.port)

    def start(self, make_process: Callable[..., Any]) -> Callable[[], None]:
        """Let all ranks join and build their roles; the returned function waits for them."""
        here = collections.Counter(seat.node for seat in self._seats)
        answers = []
        for rank, (actor, seat) in enumerate(zip(self._actors, self._seats, strict=True)):
            joined = actor.join.remote(make_process, rank, seat.device, here[seat.node], self._meeting)
            answers += [self._expect(rank, "joining the job", joined)]
            answers += [self._expect(rank, "building the roles (engine start, model load)", actor.build.remote())]
        threading.Thread(target=self._listen, daemon=True).start()
        return lambda: self._await(answers, say=False)  # ranks themselves say what they wait for

    def submit(self, calls: dict[int, Call]) -> Callable[[], dict[int, Any]]:
        """Send every rank its call and return the wait for the replies.

        A call with batches is stored once for all ranks that share it. Their tensors travel as numpy arrays, which readers map
        read-only: a `Batch` copies them as it is unpacked.
        """
        stored: dict[int, Any] = {}
        for call in calls.values():
            if id(call) not in stored:
                stored[id(call)] = ray.put(call) if any(isinstance(arg, Batch | Partial) for arg in call.args) else call
        answers = {
            rank: self._expect(rank, call.where, self._actors[rank].execute.remote(stored[id(call)]))
            for rank, call in calls.items()
        }
        replies = {rank: answers[rank] for rank, call in calls.items() if call.reply}

        def wait() -> dict[int, Any]:
            self._await(list(replies.values()))
            return {rank: answer.value for rank, answer in replies.items()}

        return wait

    def close(self) -> None:
        """Let all ranks leave, after their last call."""
        self._await([self._expect(rank, "leaving the job", actor.close.remote()) for rank, actor in enumerate(self._actors)])

    def end(self, found: Sequence[Fault]) -> NoReturn:
        """Report the faults, and end all ranks and this process: a driver that went on could only wait for ranks that hang."""
        self._ending.acquire()  # for good: whoever comes second waits for the end
        for fault in found:
            faults.report(fault)
        for actor in self._actors:
            ray.kill(actor)
        sys.stdout.flush()
        os._exit(1)

    def _expect(self, rank: int, where: str, ref: ray.ObjectRef) -> _Answer:
        self._open[ref] = _Answer(rank, where)
        return self._open[ref]

    def _await(self, answers: Sequence[_Answer], say: bool = True) -> None:
        for answer in answers:
            if not answer.there:
                with waiting(f"{answer.where} on rank {answer.rank}") if say else contextlib.nullcontext():
                    while not answer.there:
                        self._take(1.0)

    def _take(self, seconds: float) -> None:
        """Take an answer of any rank, waiting for it: also of calls that reply nothing, since they may fail."""
        found = self._take_one(seconds)
        if found is None:
            return
        # the peers of a rank that died may be heard before it is, and its last output takes a moment
        faults_found, deadline = [found], time.monotonic() + LAST_WORDS
        while self._open and (left := deadline - time.monotonic()) > 0:
            faults_found += filter(None, [self._take_one(left)])
        time.sleep(max(0.0, deadline - time.monotonic()))
        self.end(faults_found)

    def _take_one(self, seconds: float) -> Fault | None:
        ready, _ = ray.wait(list(self._open), timeout=seconds)
        for ref in ready:
            answer = self._open.pop(ref)
            try:
                value = ray.get(ref)
            except ray.exceptions.RayError as error:
                value = self._died(answer, error)
            if isinstance(value, Fault):
                return value
            answer.there, answer.value = True, value
        return None

    def _died(self, answer: _Answer, error: ray.exceptions.RayError) -> Fault:
        host = self._seats[answer.rank].host
        if isinstance(
            error, ray.exceptions.RayTaskError
        ):  # outside the call itself: a result that cannot be pickled, an import
            start = f"rank {answer.rank} on {host} failed in {answer.where}:"
            return Fault(answer.rank, f"{start} {_last_line(error)}", False, time.time(), f"{start}\n{error}")
        detail = str(error).partition("Worker exit detail: ")[2] or str(error)
        reason = " ".join(detail.partition("Some common causes")[0].partition("There are some potential")[0].split())
        return _lost(
            answer.rank,
            f"rank {answer.rank} on {host} died in {answer.where}: its process was killed or crashed,"
            f" or the machine ran out of memory ({reason}){faults.its_roles(self._placed, answer.rank)}",
        )

    def _listen(self) -> None:
        """In a thread of its own: a rank whose beats cease is stopped or out of reach, and its peers would wait for it."""
        store = self._meeting.store()
        heard = dict.fromkeys(range(len(self._actors)), (0, time.monotonic()))
        starts: dict[int, str] = {}
        while True:
            time.sleep(min(BEAT, self._silence / 4))
            if not self.phase():  # the driver has none yet
                _take_starts(store, starts, len(self._actors))
            if hang.asked():
                _take_stacks(store, self._seats)
            for rank, (beats, since) in heard.items():
                now = store.add(_beats_of(rank), 0)
                if now != beats:
                    heard[rank] = now, time.monotonic()
                elif time.monotonic() - since > (self._silence if beats else _FIRST_BEAT):
                    self.end([self._silent(rank)])

    def _silent(self, rank: int) -> Fault:
        phase = self.phase()
        idle = f"the wait for calls{phase and f' ({phase})'}"
        at = next((answer.where for answer in list(self._open.values()) if answer.rank == rank), idle)
        return _lost(
            rank,
            f"rank {rank} on {self._seats[rank].host} gave no sign of life for {self._silence:g} s in {at}:"
            f" its process is stopped, or its machine out of reach{faults.its_roles(self._placed, rank)}",
        )


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]


def _lost(rank: int, line: str) -> Fault:
    return Fault(rank, line, False, time.time(), line)


def _listening_store(host: str, port: int) -> dist.TCPStore:
    """A store that listens at this address only; torch's own way is to listen at all of them."""
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, master_listen_fd=listener.detach()
    )
