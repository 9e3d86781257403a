"""Transfer protocols: how a call's first argument is split over a role's ranks, and whose results come back.

A protocol is one row of a small table (HybridFlow, EuroSys 2025, table 3), `PROTOCOLS`. A role's method declares its own, which
may be a row that `register` has added:

    EVERY_STAGE = register(Protocol("every_stage", None, lambda layout, rank: layout.coordinates(rank)[:3] == (0, 0, 0)))

    class MyActor(Actor):
        @remote(EVERY_STAGE)
        def norms(self) -> float: ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridflow.batch import Batch
from hybridflow.data.packing import spread
from megatron_ext.layout import Layout

Cut = Callable[[Batch, int], list[list[int]]]


def balanced(batch: Batch, count: int) -> list[list[int]]:
    """Shares with about equal tokens, so that ranks get equal work; without tokens, about equal rows."""
    return spread(batch.lengths("tokens").tolist(), count) if "tokens" in batch else contiguous(batch, count)


def contiguous(batch: Batch, count: int) -> list[list[int]]:
    """Shares of about equal rows in which neighbours stay together."""
    bounds = [len(batch) * share // count for share in range(count + 1)]
    return [list(range(start, stop)) for start, stop in zip(bounds, bounds[1:], strict=False)]


@dataclass(frozen=True)
class Protocol:
    """What to split over, and whom to collect from.

    Attributes:
        share: the number of the share that a rank of the layout gets, counted from 0; None: every rank gets the whole.
        collect: whether a rank's result comes back to the caller. Where shares' results are batches that are to become one
            again, this must be true for one rank of each share.
        cut: which rows of a batch go into each share (a share may stay empty, see `split`); None: the caller gives a sequence
            with one argument for each share.
    """

    name: str
    share: Callable[[Layout, int], int] | None
    collect: Callable[[Layout, int], bool]
    cut: Cut | None = None

    def shares(self, layout: Layout) -> list[int]:
        """The share of every rank of the layout; all 0 where nothing is split."""
        return [self.share(layout, rank) if self.share else 0 for rank in range(layout.world_size)]

    def collecting_ranks(self, layout: Layout) -> list[int]:
        """In the order of their shares, which an engine's ranks need not be in."""
        shares = self.shares(layout)
        return sorted((r for r in range(layout.world_size) if self.collect(layout, r)), key=lambda rank: shares[rank])


PROTOCOLS: dict[str, Protocol] = {}


def register(protocol: Protocol) -> Protocol:
    """Add a row to the table, under a name that is still free; returns it, for `@remote`.

    Raises:
        ValueError: another protocol has the name.
    """
    if PROTOCOLS.setdefault(protocol.name, protocol) is not protocol:
        raise ValueError(f"there is a transfer protocol {protocol.name!r} already: choose another name")
    return protocol


def _dp(layout: Layout, rank: int) -> int:
    return layout.coordinates(rank).dp


def _each(layout: Layout, rank: int) -> int:
    return rank


def _every_rank(layout: Layout, rank: int) -> bool:
    return True


def _holds_output(layout: Layout, rank: int) -> bool:
    """The last stage has a replica's outputs; ranks of one replica have the same."""
    at = layout.coordinates(rank)
    return at.tp == 0 and at.cp == 0 and at.pp == layout.pp - 1


def _first_of_its_stage(layout: Layout, rank: int) -> bool:
    return layout.coordinates(rank)[:3] == (0, 0, 0)  # tp, cp, dp


# Rollout engines are the data-parallel coordinates of their layout: the paper's micro-DP groups. Samples of one prompt are
# neighbours and share an engine's prefix cache, so that their order is kept.
# fmt: off
#                              name               split over  collect from         rows of the shares
ONE_TO_ALL = register(Protocol("one_to_all",      None,       _every_rank))
THREE_D    = register(Protocol("3d",              _dp,        _holds_output,       balanced))
MICRO_DP   = register(Protocol("3d_all_micro_dp", _dp,        _holds_output,       contiguous))
PP_ONLY    = register(Protocol("3d_pp_only",      None,       _first_of_its_stage))
DP         = register(Protocol("dp",              _each,      _every_rank,         balanced))
ALL_TO_ALL = register(Protocol("all_to_all",      _each,      _every_rank))
# fmt: on


def remote(protocol: Protocol, giver: str = "") -> Callable:
    """Declares that a role's method can be called from the driver, and how its first argument and its results travel.

    `giver`: the method's first argument names another role, whose ranks take part: where they don't have this role, they run
    that role's method of this name, with this role's name for the first argument.
    """

    def declare(method: Callable) -> Callable:
        method.protocol, method.giver = protocol, giver
        return method

    return declare


@dataclass(frozen=True)
class Split:
    """A batch in shares. `origins[s][i]` is the caller's index of row i of share s; rows beyond it only fill up."""

    shares: list[Batch]
    origins: list[list[int]]

    def merge(self, results: Sequence[Batch]) -> Batch:
        """The shares' results as one batch in the caller's order, without the fill-up rows.

        Raises:
            ValueError: there is not one result for each share, or one lacks rows.
        """
        if len(results) != len(self.origins):
            raise ValueError(f"{len(results)} results of {len(self.origins)} shares: a protocol collects from one rank of each")
        for share, (result, origin) in enumerate(zip(results, self.origins, strict=True)):
            if len(result) < len(origin):
                raise ValueError(f"share {share} of {len(results)} has {len(origin)} rows, but its result {len(result)}")
        kept = [result.select(range(len(origin))) for result, origin in zip(results, self.origins, strict=True) if origin]
        order = [index for origin in self.origins for index in origin]
        position = {index: row for row, index in enumerate(order)}
        return Batch.concat(kept).select(position[index] for index in range(len(order)))


def split(batch: Batch, count: int, cut: Cut) -> Split:
    """Split into `count` shares. A share without rows gets a copy of row 0 whose loss is masked: every rank takes part
    in the collectives of a call.

    Raises:
        ValueError: the batch has no row.
    """
    if not len(batch):
        raise ValueError("a batch without rows cannot be split over ranks")
    origins = cut(batch, count)
    return Split([batch.select(origin) if origin else _filler(batch) for origin in origins], origins)


def _filler(batch: Batch) -> Batch:
    row = batch.select([0])
    return row.with_fields(loss_mask=[torch.zeros_like(row.rows("loss_mask")[0])]) if "loss_mask" in row else row
