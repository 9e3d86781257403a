"""The torchrun launcher: the driver lives in rank 0 beside that rank's own share; all other ranks wait for calls.

Calls travel pickled over a gloo group of their own: inside the job only, between processes that torchrun started.
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
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hybridflow.controller import faults
from hybridflow.controller.waiting import waiting
from hybridflow.controller.worker import Call, Worker
from megatron_ext import device

# Ranks wait for calls as long as the driver computes alone (rewards, a debugger); dead peers are noticed at once.
_CONTROL_TIMEOUT = datetime.timedelta(days=30)


def init_world(timeout_minutes: float = 10) -> None:
    """Join the default process group that torchrun's environment describes: NCCL on CUDA, gloo on CPU."""
    device.install()
    if device.backend() == "nccl":
        # srun may show each rank its own GPU only, which is number 0 then
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    with waiting(f"the other ranks of the world of {os.environ['WORLD_SIZE']} to join"):
        dist.init_process_group(
            device.backend(), timeout=datetime.timedelta(minutes=timeout_minutes), **device.world_arguments()
        )


class TorchrunTransport:
    """Built on every rank. Rank 0 submits; the others `serve` until rank 0 closes."""

    def __init__(self):
        self._group = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
        self.rank = dist.get_rank()
        self.phase: Callable[[], str] = lambda: ""
        self._worker: Worker | None = None
        self._where = "the wait for calls"
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._poster = threading.Thread(target=self._post, daemon=True)
        self._poster.start()
        self._expected: dict[int, collections.deque] = collections.defaultdict(collections.deque)

    def attach(self, worker: Worker) -> None:
        self._worker = worker

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
        """Send every rank its call, run rank 0's own share, and return the wait for the replies."""
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
            result = self._execute(calls[0])
            if 0 in slots:
                slots[0].fill(result)
        where = next(iter(calls.values())).where
        return lambda: {rank: self._await(rank, slot, where) for rank, slot in slots.items()}

    def close(self) -> None:
        """Let the other ranks leave `serve` (driver), and wait until everything is sent."""
        if self.rank == 0:
            for rank in range(1, dist.get_world_size()):
                self._send(pickle.dumps(None), rank)
        self._outbox.put(None)
        with waiting("the other ranks to take their last messages"):
            self._poster.join()

    def _execute(self, call: Call) -> Any:
        self._where = call.where
        try:
            return self._worker.execute(call)
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
                dist.send(torch.tensor([len(data)]), rank, group=self._group)
                dist.send(data, rank, group=self._group)
            except RuntimeError as error:
                self._lost(rank, error)

    def _lost(self, rank: int, error: RuntimeError) -> None:
        """A connection broke (gloo raises nothing else): the peer's own message says why, this process just ends."""
        end_rank(self.rank, f"{self._where}, talking to rank {rank}", error)

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(size, rank, group=self._group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, rank, group=self._group)
        except RuntimeError as error:
            self._lost(rank, error)
        return pickle.loads(data.numpy().tobytes())


def quiet() -> None:
    """Silence what every rank would say at every start and nobody can change: torch looking for Triton, and itself."""
    for name in ("torch._library.triton", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def faults_end_rank(where: Callable[[], str]) -> Iterator[None]:
    """An exception within ends this rank, and with it the job; `where()` says what it was at."""
    try:
        yield
    except Exception as error:
        end_rank(int(os.environ["RANK"]), where(), error)


def end_rank(rank: int, where: str, error: Exception) -> NoReturn:
    """Report the fault and leave at once: peers may hang in a collective with this rank, and so would an orderly shutdown."""
    faults.report(rank, where, error)
    sys.stdout.flush()
    os._exit(1)


class _Slot:
    """A reply that is still to come."""

    def __init__(self):
        self.filled, self.value = False, None

    def fill(self, value: Any) -> None:
        self.filled, self.value = True, value


def leave_world() -> None:
    """After the last call, on every rank."""
    dist.barrier()
    dist.destroy_process_group()
