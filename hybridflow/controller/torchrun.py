"""The torchrun launcher: the driver lives in rank 0 beside that rank's own share; all other ranks wait for calls.

Calls travel pickled over a gloo group of all ranks, whatever their pools: inside the job only, between processes that torchrun
started.
"""

import collections
import contextlib
import datetime
import logging
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from hybridflow.controller import faults
from hybridflow.controller.waiting import waiting
from hybridflow.controller.worker import Call

# Ranks wait for calls as long as the driver computes alone (rewards, a debugger); dead peers are noticed at once.
_CONTROL_TIMEOUT = datetime.timedelta(days=30)


class Executor(Protocol):
    """What runs a rank's calls: its `Process`."""

    def execute(self, call: Call) -> Any: ...


def job_store() -> tuple[dist.Store, int, int]:
    """The store that torchrun's environment describes, this rank's number and how many there are."""
    world_size = os.environ["WORLD_SIZE"]
    with waiting(f"the store at which the {world_size} ranks meet"):
        return next(dist.rendezvous("env://"))


class TorchrunTransport:
    """Built on every rank. Rank 0 submits; the others `serve` until rank 0 closes.

    Rank 0's own share of a call waits until a result is asked for: by then the driver has submitted all that it can, and roles
    on other ranks are at work while this one is.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        """Collective over all ranks of the job, which meet at `store`."""
        self.rank, self._world_size = rank, world_size
        with waiting(f"the other ranks of the {world_size} to take calls"):
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("calls", store), rank, world_size, _CONTROL_TIMEOUT)
        self.phase: Callable[[], str] = lambda: ""
        self._executor: Executor | None = None
        self._where = "the wait for calls"
        self._own: collections.deque[tuple[Call, _Slot | None]] = collections.deque()
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._poster = threading.Thread(target=self._post, daemon=True)
        self._poster.start()
        self._expected: dict[int, collections.deque] = collections.defaultdict(collections.deque)

    def attach(self, executor: Executor) -> None:
        self._executor = executor

    def serve(self) -> None:
        """Run calls until the driver says stop. A failing call ends this process, and torchrun the others."""
        while True:
            call = self._receive(0)
            if call is None:
                self.close()
                return
            result = self._execute(call)
            if call.reply:
                self._send(pickle.dumps(result), 0)

    def submit(self, calls: dict[int, Call]) -> Callable[[], dict[int, Any]]:
        """Send every other rank its call, queue rank 0's own, and return the wait for the replies."""
        payloads: dict[int, bytes] = {}
        for rank, call in calls.items():
            if rank != 0:
                if id(call) not in payloads:
                    payloads[id(call)] = pickle.dumps(call)
                self._send(payloads[id(call)], rank)
        slots = {rank: _Slot() for rank, call in calls.items() if call.reply}
        for rank, slot in slots.items():
            if rank != 0:
                self._expected[rank].append(slot)
        if 0 in calls:
            self._own.append((calls[0], slots.get(0)))
        where = next(iter(calls.values())).where
        return lambda: self._collect(slots, where)

    def close(self) -> None:
        """Let the other ranks leave `serve` (driver), and wait until everything is sent."""
        if self.rank == 0:
            self._run_own()
            for rank in range(1, self._world_size):
                self._send(pickle.dumps(None), rank)
        self._outbox.put(None)
        with waiting("the other ranks to take their last messages"):
            self._poster.join()

    def meet(self, what: str) -> None:
        """Wait until all ranks of the job, of all pools, have come here; `what` they still have to do, for messages."""
        with waiting(f"ranks of all pools {what}") if self.rank == 0 else contextlib.nullcontext():
            self._group.barrier().wait()

    def _collect(self, slots: "dict[int, _Slot]", where: str) -> dict[int, Any]:
        self._run_own()
        return {rank: self._await(rank, slot, where) for rank, slot in slots.items()}

    def _run_own(self) -> None:
        """Everything that is queued, in the order of submission, which is the order in which the other ranks run theirs."""
        while self._own:
            call, slot = self._own.popleft()
            result = self._execute(call)
            if slot:
                slot.fill(result)

    def _execute(self, call: Call) -> Any:
        self._where = call.where
        try:
            return self._executor.execute(call)
        except Exception as error:
            end_rank(self.rank, call.where, error)

    def _await(self, rank: int, slot: "_Slot", what: str) -> Any:
        """Replies of a rank arrive in the order of its calls."""
        while not slot.filled:
            self._where = what
            with waiting(f"{what} on rank {rank}"):
                self._expected[rank].popleft().fill(self._receive(rank))
        return slot.value

    def _send(self, payload: bytes, rank: int) -> None:
        self._outbox.put((payload, rank))

    def _post(self) -> None:
        """Sends in a thread of its own: a gloo send ends when its receiver takes it, and the driver may be sending the next
        call to the very rank whose reply it has not taken yet."""
        while (message := self._outbox.get()) is not None:
            payload, rank = message
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            try:
                self._group.send([torch.tensor([len(data)])], rank, 0).wait()
                self._group.send([data], rank, 0).wait()
            except RuntimeError as error:
                self._lost(rank, error)

    def _lost(self, rank: int, error: RuntimeError) -> None:
        """A connection broke (gloo raises nothing else): the peer's own message says why, this process just ends."""
        end_rank(self.rank, f"{self._where}, talking to rank {rank}", error)

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            self._group.recv([size], rank, 0).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            self._group.recv([data], rank, 0).wait()
        except RuntimeError as error:
            self._lost(rank, error)
        return pickle.loads(data.numpy().tobytes())


def quiet() -> None:
    """Silence what every rank would say at every start and nobody can change: torch looking for Triton, and itself."""
    for name in ("torch._library.triton", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def faults_end_rank(rank: int, where: Callable[[], str]) -> Iterator[None]:
    """An exception within ends this rank, and with it the job; `where()` says what it was at."""
    try:
        yield
    except Exception as error:
        end_rank(rank, where(), error)


def end_rank(rank: int, where: str, error: Exception) -> NoReturn:
    """Report the fault and leave at once: peers may hang in a collective with this rank, and so would an orderly shutdown."""
    faults.report(faults.describe(rank, where, error))
    faults.say_last_words()
    sys.stdout.flush()
    os._exit(1)


class _Slot:
    """A reply that is still to come."""

    def __init__(self):
        self.filled, self.value = False, None

    def fill(self, value: Any) -> None:
        self.filled, self.value = True, value
