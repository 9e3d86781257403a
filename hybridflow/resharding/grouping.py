"""Which grouping of ranks into engines receives least: an assignment problem within every node."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hybridflow.resharding.rectangles import volume
from megatron_ext.tiles import TileMap, intersect


class Grouping(NamedTuple):
    """`takes[r]`: the rank whose destination tiles rank r would have; `received[r]`: elements it would receive then."""

    takes: tuple[int, ...]
    received: tuple[int, ...]


def best_grouping(sources: Sequence[TileMap], destinations: Sequence[TileMap], ranks_per_node: int) -> Grouping:
    """Permute the destinations among the ranks of each node so that the fewest elements are received in all.

    Ranks without destination tiles stay without.
    """
    takes, received = list(range(len(sources))), [0] * len(sources)
    costs = _Costs(sources, destinations)
    for first in range(0, len(sources), ranks_per_node):
        ranks = [r for r in range(first, min(first + ranks_per_node, len(sources))) if destinations[r]]
        cost = [[costs(r, d) for d in ranks] for r in ranks]
        for row, column in enumerate(_assign(cost)):
            takes[ranks[row]], received[ranks[row]] = ranks[column], cost[row][column]
    return Grouping(tuple(takes), tuple(received))


class _Costs:
    """Elements of one rank's destination map that another rank's source map lacks; equal maps are worked out once."""

    def __init__(self, sources: Sequence[TileMap], destinations: Sequence[TileMap]):
        self._sources, self._destinations = sources, destinations
        self._source_kinds, self._destination_kinds = _kinds(sources), _kinds(destinations)
        self._known: dict[tuple[int, int], int] = {}

    def __call__(self, source: int, destination: int) -> int:
        key = self._source_kinds[source], self._destination_kinds[destination]
        if key not in self._known:
            self._known[key] = _missing(self._sources[source], self._destinations[destination])
        return self._known[key]


def _kinds(maps: Sequence[TileMap]) -> list[int]:
    """A number per map, the same for equal maps."""
    numbers: dict[tuple, int] = {}
    return [numbers.setdefault(tuple((name, *tiles) for name, tiles in m.items()), len(numbers)) for m in maps]


def _missing(source: TileMap, destination: TileMap) -> int:
    held = defaultdict(set)
    for tiles in source.values():
        for tile in tiles:
            held[tile.hf_name].add(tile.hf_slices)
    missing = 0
    for tiles in destination.values():
        for tile in tiles:
            shared = (intersect(tile.hf_slices, slices) for slices in held[tile.hf_name])
            missing += tile.numel - min(tile.numel, sum(volume(part) for part in shared if part))
    return missing


def _assign(cost: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row in a cheapest one-to-one assignment (Hungarian method with potentials, O(n^3)).

    Kuhn 1955, Munkres 1957, in the shortest-augmenting-path form of Jonker and Volgenant 1987. Row and column 0 are sentinels.
    """
    n = len(cost)
    row_potential, column_potential = [0] * (n + 1), [0] * (n + 1)
    row_of, infinity = [0] * (n + 1), float("inf")
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        slack, previous, visited = [infinity] * (n + 1), [0] * (n + 1), [False] * (n + 1)
        while row_of[column]:
            visited[column] = True
            current, step, nearest = row_of[column], infinity, 0
            for c in range(1, n + 1):
                if visited[c]:
                    continue
                reduced = cost[current - 1][c - 1] - row_potential[current] - column_potential[c]
                if reduced < slack[c]:
                    slack[c], previous[c] = reduced, column
                if slack[c] < step:
                    step, nearest = slack[c], c
            for c in range(n + 1):
                if visited[c]:
                    row_potential[row_of[c]] += step
                    column_potential[c] -= step
                else:
                    slack[c] -= step
            column = nearest
        while column:
            row_of[column], column = row_of[previous[column]], previous[column]
    columns = [0] * n
    for c in range(1, n + 1):
        columns[row_of[c] - 1] = c - 1
    return columns
