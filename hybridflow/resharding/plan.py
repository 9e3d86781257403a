"""Who copies which rectangle from where: a pure function of all ranks' tile maps, so that every rank computes its own part.

A destination rank takes what it can from itself, the rest from ranks of its node, the rest from other nodes; where several
ranks hold the same (data-parallel replicas, tied embeddings under PP), they share the sending. The steps: `kinds` (equal maps
once), `cover` (which holders have what is needed), `senders` (who sends it), and here the rectangles of one rank's part, where
those that adjoin on both sides are merged. Knows tiles only: neither Megatron nor vLLM.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybridflow.resharding.cover import Bundle, Cover, Holders, find_cover
from hybridflow.resharding.grouping import best_grouping
from hybridflow.resharding.kinds import Kinds
from hybridflow.resharding.rectangles import volume
from hybridflow.resharding.senders import Request, choose_senders
from megatron_ext.tiles import Slices, Tile, TileMap, intersect, local_extent, to_local

UNPACKED_FROM = 4 << 20  # bytes: smaller messages are slower on the wire than packing them is


class Piece(NamedTuple):
    """A rectangle of a rank's parameter."""

    name: str
    slices: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.slices)

    @property
    def numel(self) -> int:
        return volume(self.slices)


class Copy(NamedTuple):
    source: Piece
    destination: Piece

    @property
    def numel(self) -> int:
        return self.source.numel


@dataclass(frozen=True)
class Plan:
    """One rank's part, and the sizes that all ranks share (per-rank tuples are in rank order).

    The pieces sent to a peer and those that the peer receives are in the same order and of the same shapes.
    `unpacked[source, destination]`: which of them, by index, are large and contiguous on both sides, so that they can go from
    parameter to parameter as they are.
    """

    rank: int
    itemsize: int
    local: tuple[Copy, ...]
    sends: dict[int, tuple[Piece, ...]]
    receives: dict[int, tuple[Piece, ...]]
    unpacked: dict[tuple[int, int], frozenset[int]]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    local_bytes: tuple[int, ...]
    least_received_bytes: tuple[int, ...]  # with the ranks of each node grouped into engines so that least moves
    max_peers: int  # messages that a rank has in flight at a time, at most (sent and received)
    max_message_bytes: int  # between two ranks, over all pairs

    def bound_seconds(self, wire_bandwidth: float, memory_bandwidth: float) -> float:
        """The least possible time at these bandwidths (bytes/s; memory: read plus written), under the best grouping.

        The slowest rank's longer of: receiving, and reading and writing every element that it copies or unpacks.
        """
        written = zip(self.received_bytes, self.local_bytes, strict=True)
        in_memory = max(2 * (received + local) / memory_bandwidth for received, local in written)
        return max(max(self.least_received_bytes) / wire_bandwidth, in_memory)

    def within(self, ranks: Sequence[int]) -> "Plan":
        """The same plan with the ranks numbered by their places in `ranks`, as in a group of these; the others have no part in
        it."""
        at = {rank: place for place, rank in enumerate(ranks)}
        return replace(
            self,
            rank=at[self.rank],
            sends={at[rank]: pieces for rank, pieces in self.sends.items()},
            receives={at[rank]: pieces for rank, pieces in self.receives.items()},
            unpacked={(at[source], at[destination]): which for (source, destination), which in self.unpacked.items()},
            **{
                name: tuple(getattr(self, name)[rank] for rank in ranks)
                for name in ("sent_bytes", "received_bytes", "local_bytes", "least_received_bytes")
            },
        )

    def describe(self) -> str:
        """One line for the log, over all ranks."""
        received, least = sum(self.received_bytes), sum(self.least_received_bytes)
        return (
            f"resharding: {received / 1e9:.3f} GB received (at most {max(self.received_bytes) / 1e9:.3f} by a rank, "
            f"{max(self.sent_bytes) / 1e9:.3f} sent by one), {sum(self.local_bytes) / 1e9:.3f} GB copied locally; "
            f"least possible over groupings {least / 1e9:.3f} GB received"
        )


def make_plan(
    rank: int,
    sources: Sequence[TileMap],
    destinations: Sequence[TileMap],
    itemsize: int,
    ranks_per_node: int,
    unpacked_from: int | None = UNPACKED_FROM,
) -> Plan:
    """The part of `rank` in moving the tiles of `sources` to those of `destinations` (a map per rank each; may be empty).

    Only this rank's part is expanded into rectangles. Fastest where ranks with equal maps share one object.

    Args:
        itemsize: bytes of a destination element; sources are cast before they are sent.
        unpacked_from: pieces of at least so many bytes are sent without packing where both sides are contiguous; None: none,
            as when sources have another dtype than destinations.

    Raises:
        IncompleteSource: a destination's tile is on no rank.
    """
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} source maps and {len(destinations)} destination maps: there is one of each per rank")
    ranks = range(len(sources))
    cover = find_cover(sources, destinations)
    pairs = _by_pair(cover, ranks_per_node)
    sizes = {pair: itemsize * sum(span.stop - span.start for span in spans) for pair, spans in pairs.items()}
    wire = {(source, destination): size for (source, destination), size in sizes.items() if source != destination}
    sent, received = _totals(wire, len(ranks))
    messages = [sum(counts) for counts in zip(*_totals(dict.fromkeys(wire, 1), len(ranks)), strict=True)]
    expand = _Expansion(cover.sources)
    mine = {pair: merge(expand(pair[0], spans)) for pair, spans in pairs.items() if rank in pair}
    return Plan(
        rank=rank,
        itemsize=itemsize,
        local=tuple(mine.get((rank, rank), ())),
        sends={r: tuple(copy.source for copy in mine[rank, r]) for r in ranks if r != rank and (rank, r) in mine},
        receives={r: tuple(copy.destination for copy in mine[r, rank]) for r in ranks if r != rank and (r, rank) in mine},
        unpacked={
            (a, b): _unpacked(copies, sources[a], destinations[b], unpacked_from, itemsize)
            for (a, b), copies in mine.items()
            if a != b and unpacked_from is not None
        },
        sent_bytes=sent,
        received_bytes=received,
        local_bytes=tuple(sizes.get((r, r), 0) for r in ranks),
        least_received_bytes=tuple(n * itemsize for n in best_grouping(cover, ranks_per_node).received),
        max_peers=max(messages),
        max_message_bytes=max(wire.values(), default=0),
    )


def _totals(values: Mapping[tuple[int, int], int], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sums by source rank and by destination rank."""
    by_source, by_destination = [0] * ranks, [0] * ranks
    for (source, destination), value in values.items():
        by_source[source] += value
        by_destination[destination] += value
    return tuple(by_source), tuple(by_destination)


# ----------------------------------------------------------------------------------------------------------- who sends what


class _Span(NamedTuple):
    """The elements of a bundle from `start` to `stop`."""

    bundle: Bundle
    start: int
    stop: int


def _by_pair(cover: Cover, ranks_per_node: int) -> dict[tuple[int, int], list[_Span]]:
    """What goes from each (source rank, destination rank), in an order that is the same on both."""
    pairs: dict[tuple[int, int], list[_Span]] = defaultdict(list)
    requests, bundles = [], []
    nearest = _nearest(cover.sources, ranks_per_node)
    for rank, (source, destination) in enumerate(zip(cover.sources.of, cover.destinations.of, strict=True)):
        for holders, bundle in cover.bundles[destination].items():
            if source in holders:
                pairs[rank, rank].append(_Span(bundle, 0, bundle.size))
            else:
                requests.append(Request(rank, bundle.size, nearest(holders, rank // ranks_per_node)))
                bundles.append(bundle)
    for request, bundle, shares in zip(requests, bundles, choose_senders(requests, len(cover.sources.of)), strict=True):
        start = given = 0
        for sender, elements in shares:
            given += elements
            stop = bundle.row_start(given)
            if start < stop:
                pairs[sender, request.destination].append(_Span(bundle, start, stop))
            start = stop
    return dict(pairs)


def _nearest(sources: Kinds, ranks_per_node: int) -> Callable[[Holders, int], tuple[int, ...]]:
    """The ranks of these kinds on a node, or all of them where it has none."""

    @functools.cache
    def anywhere(holders: Holders) -> tuple[int, ...]:
        return tuple(sorted(rank for kind in holders for rank in sources.ranks[kind]))

    @functools.cache
    def nearest(holders: Holders, node: int) -> tuple[int, ...]:
        of_node = enumerate(sources.of[node * ranks_per_node : (node + 1) * ranks_per_node], start=node * ranks_per_node)
        return tuple(rank for rank, kind in of_node if kind in holders) or anywhere(holders)

    return nearest


class _Expansion:
    """Turns spans into copies of rectangles between the two ranks' parameters."""

    def __init__(self, sources: Kinds):
        self._sources = sources
        self._held: dict[int, dict[str, list[tuple[str, Tile]]]] = {}  # by kind and HF tensor

    def __call__(self, source: int, spans: Iterable[_Span]) -> Iterator[Copy]:
        held = self._tiles(self._sources.of[source])
        for bundle, start, stop in spans:
            for name, tile, slices in bundle.between(start, stop):
                theirs, around = next(h for h in held[tile.hf_name] if intersect(h[1].hf_slices, slices) == slices)
                yield Copy(Piece(theirs, to_local(around, slices)), Piece(name, to_local(tile, slices)))

    def _tiles(self, kind: int) -> dict[str, list[tuple[str, Tile]]]:
        if kind not in self._held:
            by_tensor: dict[str, list[tuple[str, Tile]]] = defaultdict(list)
            for name, tiles in self._sources.maps[kind].items():
                for tile in tiles:
                    by_tensor[tile.hf_name].append((name, tile))
            self._held[kind] = by_tensor
        return self._held[kind]


def _unpacked(copies: Sequence[Copy], source: TileMap, destination: TileMap, least: int, itemsize: int) -> frozenset[int]:
    ends = _whole_rows(source), _whole_rows(destination)
    return frozenset(
        index
        for index, copy in enumerate(copies)
        if copy.numel * itemsize >= least and all(whole(piece) for whole, piece in zip(ends, copy, strict=True))
    )


def _whole_rows(tiles: TileMap) -> Callable[[Piece], bool]:
    """Whether a piece is whole rows of its parameter. (Only rows are ever padded, so that tiles show how long a row is.)"""

    @functools.cache
    def row(name: str) -> tuple[int, ...]:
        return local_extent(tiles[name])[1:]

    return lambda piece: piece.shape[1:] == row(piece.name)


# ------------------------------------------------------------------------------------------------------------------- merge


def merge(copies: Iterable[Copy]) -> list[Copy]:
    """Join copies between the same two parameters whose rectangles adjoin on both sides; the order of parameters stays."""
    by_parameters: dict[tuple[str, str], list[Copy]] = defaultdict(list)
    for copy in copies:
        by_parameters[copy.source.name, copy.destination.name].append(copy)
    merged: list[Copy] = []
    for group in by_parameters.values():
        before = 0 if len(group) > 1 else 1
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
