"""Transfer protocols: how a call's batches are split over a role's ranks, and whose results come back.

A protocol is one row of a small table (HybridFlow, EuroSys 2025, table 3). A role's method declares its own:

    class Actor(Role):
        @remote(THREE_D)
        def log_probs(self, batch: Batch) -> Batch: ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridflow.batch import Batch
from megatron_ext.layout import Layout


@dataclass(frozen=True)
class Protocol:
    """Attributes:
    split: every rank gets the shard of its data-parallel coordinate; False: the whole batch.
    collect: whether this rank's result is returned to the caller.
    balance: shards with about equal tokens; False: contiguous shards (neighbours stay together).
    """

    name: str
    split: bool
    collect: Callable[[Layout, int], bool]
    balance: bool = False

    def collecting_ranks(self, layout: Layout) -> list[int]:
        return [rank for rank in range(layout.world_size) if self.collect(layout, rank)]


def _holds_output(layout: Layout, rank: int) -> bool:
    at = layout.coordinates(rank)
    return at.tp == 0 and at.cp == 0 and at.pp == layout.pp - 1


ONE_TO_ALL = Protocol("one_to_all", split=False, collect=lambda layout, rank: True)
THREE_D = Protocol("3d", split=True, collect=_holds_output, balance=True)
# Samples of one prompt are neighbours and share an engine's prefix cache: their order is kept.
MICRO_DP = Protocol("3d_all_micro_dp", split=True, collect=_holds_output)


def remote(protocol: Protocol, giver: str = "") -> Callable:
    """Declares that a role's method can be called from the driver, and how its batches travel.

    `giver`: the method's first argument names another role, whose ranks take part: where they don't have this role, they run
    that role's method of this name, with this role's name for the first argument.
    """

    def declare(method: Callable) -> Callable:
        method.protocol, method.giver = protocol, giver
        return method

    return declare


@dataclass(frozen=True)
class Split:
    """A batch in shards. `origins[s][i]` is the caller's index of row i of shard s; rows beyond it only fill up."""

    shards: list[Batch]
    origins: list[list[int]]

    def merge(self, results: Sequence[Batch]) -> Batch:
        """The shards' results as one batch in the caller's order, without the fill-up rows."""
        kept = [result.select(range(len(origin))) for result, origin in zip(results, self.origins, strict=True) if origin]
        order = [index for origin in self.origins for index in origin]
        position = {index: row for row, index in enumerate(order)}
        return Batch.concat(kept).select(position[index] for index in range(len(order)))


def split(batch: Batch, count: int, balance: bool) -> Split:
    """Split into `count` shards. A shard without rows gets a copy of row 0 whose loss is masked: every rank takes part
    in the collectives of a call."""
    origins = _balanced(batch, count) if balance else _contiguous(len(batch), count)
    return Split([batch.select(origin) if origin else _filler(batch) for origin in origins], origins)


def _filler(batch: Batch) -> Batch:
    row = batch.select([0])
    return row.with_fields(loss_mask=[torch.zeros_like(row.rows("loss_mask")[0])]) if "loss_mask" in row else row


def _contiguous(size: int, count: int) -> list[list[int]]:
    bounds = [size * shard // count for shard in range(count + 1)]
    return [list(range(start, stop)) for start, stop in zip(bounds, bounds[1:], strict=False)]


def _balanced(batch: Batch, count: int) -> list[list[int]]:
    """Longest first, each to the shard with the fewest tokens that still has room; shard sizes differ by one at most."""
    if "tokens" not in batch:
        return _contiguous(len(batch), count)
    lengths = batch.lengths("tokens").tolist()
    room = [len(part) for part in _contiguous(len(batch), count)]
    shards: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        shard = min((s for s in range(count) if len(shards[s]) < room[s]), key=lambda s: tokens[s])
        shards[shard].append(index)
        tokens[shard] += lengths[index]
    return [sorted(shard) for shard in shards]
