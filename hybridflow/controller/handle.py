"""The driver's side: role handles whose methods run on the role's ranks and return futures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hybridflow.batch import Batch
from hybridflow.controller.kept import Courier
from hybridflow.controller.protocols import Protocol as TransferProtocol
from hybridflow.controller.protocols import Split, split
from hybridflow.controller.role import Role
from hybridflow.controller.worker import Call, Reply
from megatron_ext.layout import Layout


class Transport(Protocol):
    """What a launcher offers the driver. `phase()` says what the driver is at, for messages."""

    phase: Callable[[], str]

    def submit(self, calls: dict[int, Call]) -> "Callable[[], dict[int, Reply]]":
        """Start one call per rank; the returned function waits for the results of those that reply."""


class Future:
    """The result of a call that may still be running.

    Attributes:
        seconds: once the result is there, how long the slowest of the replying ranks was at the call, from when it was free
            for it until it was done.
    """

    def __init__(self, wait: Callable[[], dict[int, Reply]], merge: Callable[[dict[int, Any]], Any]):
        self._wait, self._merge = wait, merge
        self._done, self._result = False, None
        self.seconds = 0.0

    def result(self) -> Any:
        """Wait for the call. Batches come back as one batch in the caller's order, anything else as a list with one
        result per collecting rank."""
        if not self._done:
            replies = self._wait()
            self._result = self._merge({rank: reply.result for rank, reply in replies.items()})
            self.seconds = max(reply.seconds for reply in replies.values())
            self._done = True
        return self._result


class RoleHandle:
    """`handle.method(...)` calls a method that the role class declares with `@remote`, on all ranks of the role.

    Attributes:
        ranks: the role's global ranks, in the order of its layout.
        courier: what takes batches to the ranks, and knows what they have.
    """

    def __init__(
        self,
        name: str,
        role: type[Role],
        layout: Layout,
        transport: Transport,
        placed: Mapping[str, Sequence[int]] | None = None,
        courier: Courier | None = None,
    ):
        """`placed`: the global ranks of all roles; without it this one has the ranks 0, 1, 2, ... `courier`: the one of all
        roles that share ranks; without it this one has its own ranks for itself."""
        self.name, self.layout, self.courier = name, layout, courier or Courier()
        self._role, self._transport, self._placed = role, transport, placed or {}
        self.ranks = self._placed.get(name, range(layout.world_size))

    def __getattr__(self, method: str) -> Callable[..., Future]:
        declared = getattr(self._role, method, None)
        protocol = getattr(declared, "protocol", None)
        if protocol is None:
            raise AttributeError(f"{self._role.__name__} has no remote method {method!r}")

        def call(*args: Any, **kwargs: Any) -> Future:
            shares, collecting = protocol.shares(self.layout), protocol.collecting_ranks(self.layout)
            parts, share_args = _distribute(f"{self.name}.{method}", protocol, max(shares) + 1, args)

            replying, phase = {self.ranks[at] for at in collecting}, self._transport.phase()
            calls: dict[int, Call] = {}
            for number, own in enumerate(share_args):
                ranks = [self.ranks[at] for at, share in enumerate(shares) if share == number]
                for sent, alike in self.courier.pack(own, ranks):
                    # ranks that are sent the same get the same object, which is serialised once
                    made = [Call(self.name, method, sent, kwargs, reply, phase) for reply in (False, True)]
                    calls |= {rank: made[rank in replying] for rank in alike}
            if declared.giver:
                calls |= self._givers(declared.giver, args, kwargs)
            wait = self._transport.submit(calls)
            return Future(wait, lambda replies: _merge(parts, [replies[self.ranks[at]] for at in collecting]))

        return call

    def _givers(self, method: str, args: tuple, kwargs: dict[str, Any]) -> dict[int, Call]:
        """The calls of the ranks that have only the role that gives, the first argument: `method` with the taker's name."""
        giver, *others = args
        call = Call(giver, method, (self.name, *others), kwargs, reply=False, phase=self._transport.phase())
        return {rank: call for rank in self._placed.get(giver, ()) if rank not in self.ranks}


def _distribute(what: str, protocol: TransferProtocol, count: int, args: tuple) -> tuple[Split | None, list[tuple]]:
    """The arguments of each of `count` shares, and the split of the first one where it is a batch that was cut.

    Raises:
        ValueError: not one argument, or not one list of rows, for each share.
    """
    if protocol.share is None:
        return None, [args]
    parts = split(args[0], count, protocol.cut) if protocol.cut else None
    firsts = parts.shares if parts else args[0]
    if len(firsts) != count:
        raise ValueError(f"{what} by protocol {protocol.name}: {len(firsts)} shares for {count}: one is needed for each")
    return parts, [(first, *args[1:]) for first in firsts]


def _merge(parts: Split | None, results: list) -> Any:
    return parts.merge(results) if parts and isinstance(results[0], Batch) else results
