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

from hybridflow.config.schema import Config
from hybridflow.controller.placement import Ranks
from hybridflow.resharding.cover import find_cover
from hybridflow.resharding.grouping import best_grouping
from hybridflow.rollout.tiles import tile_map
from megatron_ext import weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Coordinates, Layout
from megatron_ext.tiles import TileMap


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
    """A layout of the rollout's ranks, which are these of the job, and the elements that all of them together receive with it
    and with neighbours."""

    layout: EngineLayout
    ranks: Ranks
    received: int
    received_by_neighbours: int

    def describe(self, itemsize: int, ranks_per_node: int) -> str:
        """One line for the log: the first node's engines and what they save; empty when engines are neighbours."""
        order, tp = self.layout.order, self.layout.tp
        if not order:
            return ""
        of_node = [rank for rank in self.ranks if rank // ranks_per_node == self.ranks[0] // ranks_per_node]
        numbers = [str(self.ranks[place]) for place in order[: len(of_node)]]
        engines = " | ".join(", ".join(numbers[at : at + tp]) for at in range(0, len(numbers), tp))
        best, neighbours = (n * itemsize / 1e9 for n in (self.received, self.received_by_neighbours))
        where = " of the first node" if len(order) > len(of_node) else ""
        return (
            f"rollout engines{where}: ranks {engines}: a resharding receives {best:.3f} GB,"
            f" where engines of neighbours would receive {neighbours:.3f}"
        )


def choose_layout(config: Config) -> Choice:
    """Which of the rollout's ranks form an engine (`roles.rollout.grouping`): the same on every rank and for the driver."""
    role, ranks = config.roles.rollout, config.ranks("rollout")
    if role.grouping == "contiguous":
        return Choice(EngineLayout(len(ranks), role.tp), ranks, 0, 0)
    hf, per_node = HFConfig.from_folder(config.model_path("rollout")), config.cluster.ranks_per_node
    return choose_engines(hf, config.layout("actor"), role.tp, per_node, role.expert_parallel, (config.ranks("actor"), ranks))


@functools.cache
def choose_engines(
    hf: HFConfig,
    training: Layout,
    tp: int,
    ranks_per_node: int,
    expert_parallel: bool = False,
    placed: tuple[Ranks, Ranks] | None = None,
) -> Choice:
    """The engines on each node's ranks that receive the fewest elements from `training`; neighbours where that is as good.

    `placed`: the ranks of the job on which training and rollout live; by default both on 0, 1, 2, ...
    """
    trained, rolled = placed or (tuple(range(training.world_size)),) * 2
    places = {rank: place for place, rank in enumerate(rolled)}
    sources: list[TileMap] = [{}] * (1 + max(*trained, *rolled))
    destinations = list(sources)
    for place, rank in enumerate(trained):
        sources[rank] = weights.tile_map(hf, training, place)
    for place, rank in enumerate(rolled):
        destinations[rank] = tile_map(hf, tp, place % tp, expert_parallel)
    cover = find_cover(sources, destinations)
    best = best_grouping(cover, ranks_per_node)
    order = _engines([(rank // ranks_per_node, places[best.takes[rank]] % tp) for rank in rolled], tp)
    of, wanted = cover.sources.of, cover.destinations.of
    neighbours = sum(cover.missing(of[rank], wanted[rank]) for rank in rolled)
    layout = EngineLayout(len(rolled), tp, order=() if order == tuple(range(len(rolled))) else order)
    return Choice(layout, rolled, sum(best.received), neighbours)


def _engines(places: Sequence[tuple[int, int]], tp: int) -> tuple[int, ...]:
    """All places, engine after engine: a node's k-th engine has the k-th place of each tensor-parallel rank.

    `places`: by place, its node and its tensor-parallel rank.
    """
    by_node: dict[int, list[list[int]]] = defaultdict(lambda: [[] for _ in range(tp)])
    for place, (node, tp_rank) in enumerate(places):
        by_node[node][tp_rank].append(place)
    return tuple(place for of_node in by_node.values() for engine in zip(*of_node, strict=True) for place in engine)
