"""The driver's side: role handles whose methods run on the role's ranks and return futures."""

import functools
from collections.abc import Callable, Mapping, Sequence
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

    def __init__(
        self,
        name: str,
        role: type[Role],
        layout: Layout,
        transport: Transport,
        placed: Mapping[str, Sequence[int]] | None = None,
    ):
        """`placed`: the global ranks of all roles; without it this one has the ranks 0, 1, 2, ..."""
        self.name, self.layout = name, layout
        self._role, self._transport, self._placed = role, transport, placed or {}
        self._ranks = self._placed.get(name, range(layout.world_size))

    def __getattr__(self, method: str) -> Callable[..., Future]:
        declared = getattr(self._role, method, None)
        protocol = getattr(declared, "protocol", None)
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
                self._ranks[at]: share(self.layout.coordinates(at).dp if parts else 0, at in collecting)
                for at in range(self.layout.world_size)
            }
            if declared.giver:
                calls |= self._givers(declared.giver, args, kwargs)
            wait = self._transport.submit(calls)
            if parts:  # in the order of the shards, which an engine's ranks need not be in
                collecting = sorted(collecting, key=lambda at: self.layout.coordinates(at).dp)
            return Future(wait, lambda replies: _merge(parts, [replies[self._ranks[at]] for at in collecting]))

        return call

    def _givers(self, method: str, args: tuple, kwargs: dict[str, Any]) -> dict[int, Call]:
        """The calls of the ranks that have only the role that gives, the first argument: `method` with the taker's name."""
        giver, *others = args
        call = Call(giver, method, (self.name, *others), kwargs, reply=False, phase=self._transport.phase())
        return {rank: call for rank in self._placed.get(giver, ()) if rank not in self._ranks}


def _merge(parts: Split | None, results: list) -> Any:
    return parts.merge(results) if parts and isinstance(results[0], Batch) else results
