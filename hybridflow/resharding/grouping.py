"""Which grouping of ranks into engines receives least: an assignment problem within every node."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from hybridflow.resharding.cover import Cover


class Grouping(NamedTuple):
    """`takes[r]`: the rank whose destination tiles rank r would have; `received[r]`: elements it would receive then."""

    takes: tuple[int, ...]
    received: tuple[int, ...]


def best_grouping(cover: Cover, ranks_per_node: int) -> Grouping:
    """Permute the destinations among the ranks of each node so that the fewest elements are received in all.

    A node whose ranks receive no more as they are stays as it is, and ranks without destination tiles stay without.
    """
    have, need = cover.sources.of, cover.destinations.of
    takes, received = list(range(len(have))), [0] * len(have)
    missing = functools.cache(cover.missing)

    @functools.cache  # nodes of the same kinds of ranks
    def arrange(sources: tuple[int, ...], destinations: tuple[int, ...]) -> list[int]:
        cost = [[missing(source, destination) for destination in destinations] for source in sources]
        columns = _assign(cost)
        as_they_are = sum(cost[i][i] for i in range(len(cost)))
        return columns if sum(cost[i][c] for i, c in enumerate(columns)) < as_they_are else list(range(len(cost)))

    for first in range(0, len(have), ranks_per_node):
        ranks = [r for r in range(first, min(first + ranks_per_node, len(have))) if cover.destinations.maps[need[r]]]
        for rank, column in zip(ranks, arrange(tuple(have[r] for r in ranks), tuple(need[r] for r in ranks)), strict=True):
            takes[rank] = ranks[column]
            received[rank] = missing(have[rank], need[ranks[column]])
    return Grouping(tuple(takes), tuple(received))


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
