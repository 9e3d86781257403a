"""A rank's side of the controller: it holds the roles that live on the rank and runs the calls that reach it."""

import gc
import socket
import time
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.controller.kept import KeptRows, Partial
from hybridflow.controller.protocols import ONE_TO_ALL, remote
from hybridflow.controller.role import Role
from hybridflow.metrics.nvml import GpuUse, GpuWatch, Place, find_gpu
from megatron_ext import device


@dataclass(frozen=True)
class Call:
    """One call as a rank sees it. `reply`: the rank's result goes back to the driver."""

    role: str
    method: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reply: bool = True
    phase: str = ""  # what the driver is at, for messages: "step 3, rollout"

    @property
    def where(self) -> str:
        return f"{self.role}.{self.method}{self.phase and f' ({self.phase})'}"


@dataclass(frozen=True)
class Reply:
    """What a call gave on a rank, and the seconds that the rank was at it: its wait behind other calls is not among them."""

    result: Any
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What a rank measured since it was last asked, of its calls by `role.method`.

    Attributes:
        memory: the highest bytes in use on the device after such a call.
        seconds: that the rank was at such calls.
        gpus: the use of the GPUs that it watches.
    """

    memory: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    gpus: list[GpuUse] = field(default_factory=list)


class Worker:
    """Runs calls on the roles of this rank, and measures them (`measured()`)."""

    def __init__(self, rank: int, roles: dict[str, Role]):
        self.rank = rank
        self.roles = roles
        self._kept = KeptRows()
        self._measured = Measured()
        self._gpus: GpuWatch | None = None
        self._calls: list[tuple[str, float, float]] | None = None  # None: they are not noted
        for role in roles.values():
            role.peers = roles
        # vLLM collects garbage at every sleep, and Python now and then: what is built by now stays for good, so that
        # nobody walks its millions of objects again (0.6 s a step on a GPU machine)
        gc.collect()
        gc.freeze()

    def execute(self, call: Call) -> Reply:
        start, began = time.monotonic(), time.time()
        if call.role == "worker":
            result = getattr(self, call.method)(*call.args, **call.kwargs)
            return Reply(result, time.monotonic() - start)
        role, args = self.roles[call.role], call.args
        if args and isinstance(args[0], Partial):
            args = self._kept.complete(args[0]), *args[1:]
        with role.context():
            result = getattr(role, call.method)(*args, **call.kwargs)
            name = f"{call.role}.{call.method}"
            self._measured.memory[name] = max(self._measured.memory.get(name, 0), device.memory_in_use())
        seconds = time.monotonic() - start
        self._measured.seconds[name] = self._measured.seconds.get(name, 0.0) + seconds
        if self._calls is not None:
            self._calls.append((name, began, began + seconds))
        return Reply(result, seconds)

    @remote(ONE_TO_ALL)
    def measured(self) -> Measured:
        found, self._measured = self._measured, Measured()
        return replace(found, gpus=self._gpus.take()) if self._gpus else found

    @remote(ONE_TO_ALL)
    def place(self) -> Place:
        host = socket.gethostname()
        return find_gpu(host, device.current().index) if device.current().type == "cuda" else Place(host)

    @remote(ONE_TO_ALL)
    def watch_gpus(self, watchers: dict[int, list[str]]) -> None:
        """From now on watch the GPUs that `watchers` has for this rank (`metrics.nvml.watchers`), where it has some."""
        if self.rank in watchers:
            self._gpus = GpuWatch(watchers[self.rank])
            self._gpus.start()

    @remote(ONE_TO_ALL)
    def forget_rows(self) -> None:
        """Let go of the rows that the driver's `Courier` counts on; it forgets them at the same time."""
        self._kept.forget()

    @remote(ONE_TO_ALL)
    def record_calls(self) -> None:
        """From now on note when each call on a role begins and ends (`calls()`)."""
        self._calls = []

    @remote(ONE_TO_ALL)
    def calls(self) -> list[tuple[str, float, float]]:
        """The calls since this was last asked: `role.method`, begin and end in seconds since the epoch by this host's clock."""
        calls, self._calls = self._calls, []
        return calls

    @remote(ONE_TO_ALL)
    def clock(self) -> tuple[str, float]:
        """This host's name and its clock, in seconds since the epoch."""
        return socket.gethostname(), time.time()

    def close(self) -> None:
        if self._gpus:
            self._gpus.close()
        for role in self.roles.values():
            role.close()
