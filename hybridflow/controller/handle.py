"""The driver's side: role handles whose methods run on the role's ranks and return futures."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from hybridflow.batch import Batch
from hybridflow.controller.protocols import Split, split
from hybridflow.controller.role import Role
from hybridflow.controller.worker import Call
from megatron_ext.layout import Layout


class Transport(Protocol):
    """What a launcher offers the driver. `phase()` says what the driver is at, for messages."""

    phase: Callable[[], str]

    def submit(self, calls: dict[int, Call]) -> "Callable[[], dict[int, Any]]":
        """Start one call per rank; the returned function waits for the results of those that reply."""


class Future:
    """The result of a call that may still be running."""

    def __init__(self, wait: Callable[[], dict[int, Any]], merge: Callable[[dict[int, Any]], Any]):
        self._wait, self._merge = wait, merge
        self._done, self._result = False, None

    def result(self) -> Any:
        """Wait for the call. Batches come back as one batch in the caller's order, anything else as a list with one
        result per collecting rank."""
        if not self._done:
            replies = self._wait()
            self._result = self._merge(replies)
            self._done = True
        return self._result


class RoleHandle:
    """`handle.method(...)` calls a method that the role class declares with `@remote`, on all ranks of the role."""

    def __init__(self, name: str, role: type[Role], layout: Layout, transport: Transport):
        self.name, self.layout = name, layout
        self._role, self._transport = role, transport

    def __getattr__(self, method: str) -> Callable[..., Future]:
        protocol = getattr(getattr(self._role, method, None), "protocol", None)
        if protocol is None:
            raise AttributeError(f"{self._role.__name__} has no remote method {method!r}")

        def call(*args: Any, **kwargs: Any) -> Future:
            collecting = protocol.collecting_ranks(self.layout)
            parts = split(args[0], self.layout.dp, protocol.balance) if protocol.split else None

            @functools.cache  # ranks with the same share get the same object, which is serialised once
            def share(dp: int, reply: bool) -> Call:
                shared_args = args if parts is None else (parts.shards[dp], *args[1:])
                return Call(self.name, method, shared_args, kwargs, reply, self._transport.phase())

            calls = {
                rank: share(self.layout.coordinates(rank).dp if parts else 0, rank in collecting)
                for rank in range(self.layout.world_size)
            }
            wait = self._transport.submit(calls)
            if parts:  # in the order of the shards, which an engine's ranks need not be in
                collecting = sorted(collecting, key=lambda rank: self.layout.coordinates(rank).dp)
            return Future(wait, lambda replies: _merge(parts, [replies[rank] for rank in collecting]))

        return call


def _merge(parts: Split | None, results: list) -> Any:
    return parts.merge(results) if parts and isinstance(results[0], Batch) else results
