"""Who copies which rectangle from where: a pure function of all ranks' tile maps, so that every rank computes its own part.

A destination rank takes what it can from itself, the rest from ranks of its node, the rest from other nodes. Where several
ranks hold the same rectangle (data-parallel replicas, tied embeddings under PP), the one that has the least to send so far is
asked. Rectangles that adjoin on both sides are merged. Knows tiles only: neither Megatron nor vLLM.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridflow.resharding.grouping import best_grouping
from hybridflow.resharding.rectangles import subtract, volume
from megatron_ext.tiles import Slices, Tile, TileMap, intersect, to_local


class Piece(NamedTuple):
    """A rectangle of a rank's parameter."""

    name: str
    slices: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.slices)


class Copy(NamedTuple):
    source: Piece
    destination: Piece

    @property
    def numel(self) -> int:
        return volume(self.source.slices)


class IncompleteSource(ValueError):
    """No rank holds a rectangle that a destination needs."""


@dataclass(frozen=True)
class Plan:
    """One rank's part, and the sizes that all ranks share (per-rank tuples are in rank order).

    The pieces sent to a peer and those that the peer receives are in the same order and of the same shapes.
    """

    rank: int
    itemsize: int
    local: tuple[Copy, ...]
    sends: dict[int, tuple[Piece, ...]]
    receives: dict[int, tuple[Piece, ...]]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    local_bytes: tuple[int, ...]
    least_received_bytes: tuple[int, ...]  # with the ranks of each node grouped into engines so that least moves
    max_peers: int  # messages that a rank has in flight at a time, at most (sent and received)
    max_message_bytes: int  # between two ranks, over all pairs
    max_message_pieces: int  # rectangles in one message before merging, over all pairs

    def bound_seconds(self, wire_bandwidth: float, memory_bandwidth: float) -> float:
        """The least possible time at these bandwidths (bytes/s; memory: read plus written), under the best grouping.

        The slowest rank's longer of: receiving, and reading and writing every element that it copies or unpacks.
        """
        written = zip(self.received_bytes, self.local_bytes, strict=True)
        in_memory = max(2 * (received + local) / memory_bandwidth for received, local in written)
        return max(max(self.least_received_bytes) / wire_bandwidth, in_memory)

    def describe(self) -> str:
        """One line for the log, over all ranks."""
        received, least = sum(self.received_bytes), sum(self.least_received_bytes)
        return (
            f"resharding: {received / 1e9:.3f} GB received (at most {max(self.received_bytes) / 1e9:.3f} by a rank, "
            f"{max(self.sent_bytes) / 1e9:.3f} sent by one), {sum(self.local_bytes) / 1e9:.3f} GB copied locally; "
            f"least possible over groupings {least / 1e9:.3f} GB received"
        )


def make_plan(
    rank: int, sources: Sequence[TileMap], destinations: Sequence[TileMap], itemsize: int, ranks_per_node: int
) -> Plan:
    """The part of `rank` in moving the tiles of `sources` to those of `destinations` (a map per rank each; may be empty).

    Args:
        itemsize: bytes of a destination element; sources are cast before they are sent.

    Raises:
        IncompleteSource: a destination's tile is on no rank.
    """
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} source maps and {len(destinations)} destination maps: there is one of each per rank")
    ranks = range(len(sources))
    pairs = _by_pair(sources, destinations, ranks_per_node)
    sizes = {pair: itemsize * sum(copy.numel for copy in copies) for pair, copies in pairs.items()}
    wire = {(source, destination): size for (source, destination), size in sizes.items() if source != destination}
    sent, received = _totals(wire, len(ranks))
    messages = [sum(counts) for counts in zip(*_totals(dict.fromkeys(wire, 1), len(ranks)), strict=True)]
    mine = {pair: merge(copies) for pair, copies in pairs.items() if rank in pair}
    return Plan(
        rank=rank,
        itemsize=itemsize,
        local=tuple(mine.get((rank, rank), ())),
        sends={r: tuple(copy.source for copy in mine[rank, r]) for r in ranks if r != rank and (rank, r) in mine},
        receives={r: tuple(copy.destination for copy in mine[r, rank]) for r in ranks if r != rank and (r, rank) in mine},
        sent_bytes=sent,
        received_bytes=received,
        local_bytes=tuple(sizes.get((r, r), 0) for r in ranks),
        least_received_bytes=tuple(n * itemsize for n in best_grouping(sources, destinations, ranks_per_node).received),
        max_peers=max(messages),
        max_message_bytes=max(wire.values(), default=0),
        max_message_pieces=max((len(pairs[pair]) for pair in wire), default=0),
    )


def _totals(values: Mapping[tuple[int, int], int], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sums by source rank and by destination rank."""
    by_source, by_destination = [0] * ranks, [0] * ranks
    for (source, destination), value in values.items():
        by_source[source] += value
        by_destination[destination] += value
    return tuple(by_source), tuple(by_destination)


# ----------------------------------------------------------------------------------------------------------- who sends what


class _Holder(NamedTuple):
    rank: int
    name: str
    tile: Tile


class _Unit(NamedTuple):
    """Parts of one destination parameter that the same ranks hold in full: they go together, so that they can be merged."""

    destination: int
    name: str
    parts: list[tuple[Slices, Tile, dict[int, _Holder]]]  # rectangle of the HF tensor, destination tile, holders by rank


def _by_pair(
    sources: Sequence[TileMap], destinations: Sequence[TileMap], ranks_per_node: int
) -> dict[tuple[int, int], list[Copy]]:
    """All copies by (source rank, destination rank), in the order of the destination's parameters."""
    units = _units(sources, destinations, ranks_per_node)
    chosen = _choose(units, len(sources), ranks_per_node)
    pairs: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for unit, source in zip(units, chosen, strict=True):
        for rectangle, tile, holders in unit.parts:
            held = holders[source]
            copy = Copy(Piece(held.name, to_local(held.tile, rectangle)), Piece(unit.name, to_local(tile, rectangle)))
            pairs[source, unit.destination].append(copy)
    return dict(pairs)


def _units(sources: Sequence[TileMap], destinations: Sequence[TileMap], ranks_per_node: int) -> list[_Unit]:
    regions = _regions(sources)
    units: list[_Unit] = []
    for rank, tiles in enumerate(destinations):
        for name, held in tiles.items():
            parts: dict[tuple, _Unit] = {}
            for tile in held:
                for rectangle, holders in _cover(tile, regions.get(tile.hf_name, {}), rank, ranks_per_node):
                    key = tuple((holder.rank, holder.name) for holder in holders.values())
                    parts.setdefault(key, _Unit(rank, name, [])).parts.append((rectangle, tile, holders))
            units += parts.values()
    return units


def _regions(sources: Sequence[TileMap]) -> dict[str, dict[Slices, dict[int, _Holder]]]:
    """By HF tensor and distinct rectangle of it: who holds it."""
    regions: dict[str, dict[Slices, dict[int, _Holder]]] = defaultdict(lambda: defaultdict(dict))
    for rank, tiles in enumerate(sources):
        for name, held in tiles.items():
            for tile in held:
                regions[tile.hf_name][tile.hf_slices].setdefault(rank, _Holder(rank, name, tile))
    return regions


def _cover(
    tile: Tile, regions: Mapping[Slices, dict[int, _Holder]], rank: int, ranks_per_node: int
) -> Iterable[tuple[Slices, dict[int, _Holder]]]:
    """Cut a destination tile into rectangles that lie in one source region each: the nearest regions are used first."""

    def distance(item: tuple[Slices, dict[int, _Holder]]) -> tuple[int, Slices]:
        slices, holders = item
        return (0 if rank in holders else 1 if any(_same_node(rank, r, ranks_per_node) for r in holders) else 2), slices

    remaining = [tile.hf_slices]
    for slices, holders in sorted(regions.items(), key=distance):
        left = []
        for rectangle in remaining:
            shared = intersect(rectangle, slices)
            if shared:
                yield shared, holders
                left += subtract(rectangle, shared)
            else:
                left.append(rectangle)
        remaining = left
    if remaining:
        raise IncompleteSource(f"{tile.hf_name}{list(remaining[0])} is needed by rank {rank}, but no rank has it")


def _choose(units: Sequence[_Unit], ranks: int, ranks_per_node: int) -> list[int]:
    """The rank that sends each unit: itself, else the least loaded of the nearest. Large units are given out first."""
    sizes = [sum(volume(rectangle) for rectangle, _, _ in unit.parts) for unit in units]
    load, chosen = [0] * ranks, [0] * len(units)
    for index in sorted(range(len(units)), key=lambda i: -sizes[i]):
        unit = units[index]
        holders = unit.parts[0][2]
        if unit.destination in holders:
            chosen[index] = unit.destination
            continue
        near = [r for r in holders if _same_node(unit.destination, r, ranks_per_node)]
        # among equals the next one after the destination, so that all destinations don't begin with the same sender
        chosen[index] = min(near or holders, key=lambda r, d=unit.destination: (load[r], (r - d) % ranks))
        load[chosen[index]] += sizes[index]
    return chosen


def _same_node(a: int, b: int, ranks_per_node: int) -> bool:
    return a // ranks_per_node == b // ranks_per_node


# ------------------------------------------------------------------------------------------------------------------- merge


def merge(copies: Iterable[Copy]) -> list[Copy]:
    """Join copies between the same two parameters whose rectangles adjoin on both sides; the order of parameters stays."""
    by_parameters: dict[tuple[str, str], list[Copy]] = defaultdict(list)
    for copy in copies:
        by_parameters[copy.source.name, copy.destination.name].append(copy)
    merged: list[Copy] = []
    for group in by_parameters.values():
        before = 0
        while len(group) != before:
            before = len(group)
            for dim in range(len(group[0].source.slices)):
                group = _merge_along(group, dim)
        merged += group
    return merged


def _merge_along(copies: list[Copy], dim: int) -> list[Copy]:
    def others_first(copy: Copy) -> tuple:
        slices = copy.destination.slices
        return slices[:dim] + slices[dim + 1 :], slices[dim]

    merged: list[Copy] = []
    for copy in sorted(copies, key=others_first):
        joined = _join(merged[-1], copy, dim) if merged else None
        if joined:
            merged[-1] = joined
        else:
            merged.append(copy)
    return merged


def _join(first: Copy, second: Copy, dim: int) -> Copy | None:
    pieces = []
    for a, b in zip(first, second, strict=True):
        same = a.slices[:dim] == b.slices[:dim] and a.slices[dim + 1 :] == b.slices[dim + 1 :]
        if not same or a.slices[dim][1] != b.slices[dim][0]:
            return None
        joined = (*a.slices[:dim], (a.slices[dim][0], b.slices[dim][1]), *a.slices[dim + 1 :])
        pieces.append(Piece(a.name, joined))
    return Copy(*pieces)
