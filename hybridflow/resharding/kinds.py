"""Ranks that hold the same are of one kind: what follows from a tile map alone is worked out once per kind, not per rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.tiles import TileMap


@dataclass(frozen=True)
class Kinds:
    """Attributes:
    maps: the distinct tile maps, in the order of the first rank that has each.
    of: by rank, which of them it has.
    ranks: by kind, the ranks that have it, ascending.
    """

    maps: tuple[TileMap, ...]
    of: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


def find_kinds(maps: Sequence[TileMap]) -> Kinds:
    """Sort the ranks' tile maps into kinds. Maps that are one object are compared by that, the others by what they hold."""
    by_identity: dict[int, int] = {}
    by_content: dict[tuple, int] = {}
    distinct: list[TileMap] = []
    ranks: list[list[int]] = []
    for rank, tile_map in enumerate(maps):
        if id(tile_map) not in by_identity:
            content = tuple((name, *tiles) for name, tiles in tile_map.items())
            kind = by_identity[id(tile_map)] = by_content.setdefault(content, len(distinct))
            if kind == len(distinct):
                distinct.append(tile_map)
                ranks.append([])
        ranks[by_identity[id(tile_map)]].append(rank)
    return Kinds(tuple(distinct), tuple(by_identity[id(tile_map)] for tile_map in maps), tuple(map(tuple, ranks)))
