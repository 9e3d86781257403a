"""Which ranks form an engine: those that have most of what the engine's ranks need already, or simply neighbours.

An engine's rank that gets the shard in which its own training shard lies receives least. HybridFlow (EuroSys 2025, section 5.3)
derives such groups for even layouts (training TP4 and engines of two: ranks 0 and 2, 1 and 3); here they follow from the tile
maps of both sides, whatever the layouts. Pure: neither vLLM nor torch.distributed is used.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridflow.resharding.cover import find_cover
from hybridflow.resharding.grouping import best_grouping
from hybridflow.rollout.tiles import tile_map
from megatron_ext import weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Coordinates, Layout


@dataclass(frozen=True)
class EngineLayout(Layout):
    """Engines of `tp` ranks; each is a data-parallel coordinate.

    `order` lists all ranks, engine after engine, each engine's in the order of their tensor-parallel ranks; by default they are
    neighbours, in the order of their numbers.
    """

    order: tuple[int, ...] = ()

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.order)}

    def coordinates(self, rank: int) -> Coordinates:
        return super().coordinates(self._places.get(rank, rank))

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        place = super().rank(tp, cp, dp, pp)
        return self.order[place] if self.order else place


class Choice(NamedTuple):
    """A layout, and the elements that all ranks together receive with it and with neighbours."""

    layout: EngineLayout
    received: int
    received_by_neighbours: int

    def describe(self, itemsize: int, ranks_per_node: int) -> str:
        """One line for the log: the first node's engines and what they save; empty when engines are neighbours."""
        order, tp = self.layout.order, self.layout.tp
        if not order:
            return ""
        engines = " | ".join(", ".join(map(str, order[at : at + tp])) for at in range(0, ranks_per_node, tp))
        best, neighbours = (n * itemsize / 1e9 for n in (self.received, self.received_by_neighbours))
        where = " of the first node" if len(order) > ranks_per_node else ""
        return (
            f"rollout engines{where}: ranks {engines}: a resharding receives {best:.3f} GB,"
            f" where engines of neighbours would receive {neighbours:.3f}"
        )


def choose_engines(hf: HFConfig, training: Layout, tp: int, ranks_per_node: int, expert_parallel: bool = False) -> Choice:
    """The engines on each node's ranks that receive the fewest elements from `training`; neighbours where that is as good."""
    ranks = range(training.world_size)
    sources = [weights.tile_map(hf, training, rank) for rank in ranks]
    cover = find_cover(sources, [tile_map(hf, tp, rank % tp, expert_parallel) for rank in ranks])
    best = best_grouping(cover, ranks_per_node)
    order = _engines([place % tp for place in best.takes], tp, ranks_per_node)
    of, wanted = cover.sources.of, cover.destinations.of
    neighbours = sum(cover.missing(of[rank], wanted[rank]) for rank in ranks)
    layout = EngineLayout(training.world_size, tp, order=() if order == tuple(ranks) else order)
    return Choice(layout, sum(best.received), neighbours)


def _engines(tp_ranks: Sequence[int], tp: int, ranks_per_node: int) -> tuple[int, ...]:
    """All ranks, engine after engine: a node's k-th engine has the k-th rank of each tensor-parallel rank."""
    order: list[int] = []
    for first in range(0, len(tp_ranks), ranks_per_node):
        by_tp_rank = defaultdict(list)
        for rank in range(first, min(first + ranks_per_node, len(tp_ranks))):
            by_tp_rank[tp_ranks[rank]].append(rank)
        order += [rank for engine in zip(*(by_tp_rank[t] for t in range(tp)), strict=True) for rank in engine]
    return tuple(order)
