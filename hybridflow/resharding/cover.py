"""Which kinds of ranks hold what each kind of destination needs: the destinations' tiles cut along the sources' boundaries.

Both sides are sorted into kinds first, and HF tensors that the same kinds hold in the same rectangles are cut once: 48 layers
of 128 experts on 1,024 ranks come down to some dozens of tile maps and about as many ways to hold a tensor.
"""

import functools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridflow.resharding.kinds import Kinds, find_kinds
from hybridflow.resharding.rectangles import subtract, volume
from megatron_ext.tiles import Slices, Tile, TileMap, intersect

Holders = frozenset[int]  # kinds of sources


class IncompleteSource(ValueError):
    """No rank holds a rectangle that a destination needs."""


class Part(NamedTuple):
    """A rectangle of an HF tensor, inside one tile of the destination's parameter `name` and inside one tile of each holder."""

    name: str
    tile: Tile
    slices: Slices


@dataclass
class Bundle:
    """All that one kind of destination needs of the same holders, in the destination's order; `ends` counts elements up to
    and with each part."""

    parts: list[Part] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.ends[-1]

    def add(self, part: Part) -> None:
        self.ends.append((self.ends[-1] if self.ends else 0) + volume(part.slices))
        self.parts.append(part)

    def row_start(self, element: int) -> int:
        """The start of the row that is nearest to `element`: bundles are only cut there."""
        if element >= self.size:
            return self.size
        index = bisect_right(self.ends, element)
        part, first = self.parts[index], self._start(index)
        row = volume(part.slices) // _rows(part.slices)
        return first + round((element - first) / row) * row

    def count(self, start: int, stop: int) -> int:
        """How many rectangles `between` yields."""
        return bisect_left(self.ends, stop) - bisect_right(self.ends, start) + 1

    def between(self, start: int, stop: int) -> Iterator[Part]:
        """The parts that make up the elements from `start` to `stop`, both of them starts of rows."""
        first = bisect_right(self.ends, start)
        for index in range(first, first + self.count(start, stop)):
            part, at = self.parts[index], self._start(index)
            if start <= at and self.ends[index] <= stop:
                yield part
                continue
            dim, row = _cut_dim(part.slices), volume(part.slices) // _rows(part.slices)
            begin = part.slices[dim][0]
            rows = (begin + (max(start, at) - at) // row, begin + (min(stop, self.ends[index]) - at) // row)
            yield part._replace(slices=(*part.slices[:dim], rows, *part.slices[dim + 1 :]))

    def _start(self, index: int) -> int:
        return self.ends[index - 1] if index else 0


def _cut_dim(slices: Slices) -> int:
    return next((dim for dim, (start, stop) in enumerate(slices) if stop - start > 1), 0)


def _rows(slices: Slices) -> int:
    start, stop = slices[_cut_dim(slices)]
    return stop - start


@dataclass(frozen=True)
class Cover:
    """`bundles[kind]`: what that kind of destination needs, by holders; together every element once."""

    sources: Kinds
    destinations: Kinds
    bundles: tuple[dict[Holders, Bundle], ...]

    def missing(self, source: int, destination: int) -> int:
        """Elements that a rank with this kind of source has to receive for this kind of destination."""
        return sum(bundle.size for holders, bundle in self.bundles[destination].items() if source not in holders)


def find_cover(sources: Sequence[TileMap], destinations: Sequence[TileMap]) -> Cover:
    """Cover the destinations of all ranks by the sources of all ranks (a map per rank each; may be empty).

    Raises:
        IncompleteSource: a destination's tile is on no rank.
    """
    have, need = find_kinds(sources), find_kinds(destinations)
    tensors = _tensors(have.maps)
    bundles = []
    for tile_map, ranks in zip(need.maps, need.ranks, strict=True):
        by_holders: dict[Holders, Bundle] = defaultdict(Bundle)
        for name, tiles in tile_map.items():
            for tile in tiles:
                found = tensors[tile.hf_name].cut(tile.hf_slices)
                if found.uncovered:
                    where = f"{tile.hf_name}{list(found.uncovered[0])}"
                    raise IncompleteSource(f"{where} is needed by rank {ranks[0]}, but no rank has it")
                for slices, holders in found.pieces:
                    by_holders[holders].add(Part(name, tile, slices))
        bundles.append(dict(by_holders))
    return Cover(have, need, tuple(bundles))


class _Cut(NamedTuple):
    pieces: list[tuple[Slices, Holders]]
    uncovered: list[Slices]


class _HeldTensor:
    """How HF tensors are held: disjoint rectangles with the kinds that hold each in full."""

    def __init__(self, regions: Iterable[tuple[Slices, Holders]]):
        self._atoms = disjoint(regions)
        self._known: dict[Slices, _Cut] = {}

    def cut(self, slices: Slices) -> _Cut:
        if slices not in self._known:
            pieces, uncovered = [], [slices] if volume(slices) else []
            for atom, holders in self._atoms:
                shared = intersect(atom, slices)
                if shared:
                    pieces.append((shared, holders))
                    uncovered = list(_without(uncovered, shared))
            self._known[slices] = _Cut(pieces, uncovered)
        return self._known[slices]


def _tensors(maps: Sequence[TileMap]) -> dict[str, _HeldTensor]:
    """By HF tensor; those that are held alike share one object."""
    regions: dict[str, dict[Slices, set[int]]] = defaultdict(lambda: defaultdict(set))
    for kind, tile_map in enumerate(maps):
        for tiles in tile_map.values():
            for tile in tiles:
                regions[tile.hf_name][tile.hf_slices].add(kind)
    held = functools.cache(_HeldTensor)
    tensors: dict[str, _HeldTensor] = defaultdict(lambda: held(()))
    for name, by_slices in regions.items():
        tensors[name] = held(tuple((slices, frozenset(kinds)) for slices, kinds in by_slices.items()))
    return tensors


def disjoint(regions: Iterable[tuple[Slices, Holders]]) -> list[tuple[Slices, Holders]]:
    """Disjoint rectangles with all that hold each. These are the regions themselves, unless some overlap."""
    atoms: list[tuple[Slices, Holders]] = []
    for slices, holders in regions:
        fresh, before, atoms = [slices], atoms, []
        for atom, theirs in before:
            shared = intersect(atom, slices)
            if shared:
                atoms.append((shared, theirs | holders))
                atoms += [(rest, theirs) for rest in subtract(atom, shared)]
                fresh = list(_without(fresh, shared))
            else:
                atoms.append((atom, theirs))
        atoms += [(rest, holders) for rest in fresh]
    return atoms


def _without(rectangles: Iterable[Slices], hole: Slices) -> Iterator[Slices]:
    for rectangle in rectangles:
        shared = intersect(rectangle, hole)
        yield from subtract(rectangle, shared) if shared else (rectangle,)
