"""Proves that a resharding was bit-exact, without gathering a tensor: position-aware checksums on every holder.

The checksum of a rectangle is the sum over its elements of hash(index in the HF tensor, bits) modulo 2^64, so that it does
not depend on how the tensor is cut, and a wrong element, swapped tiles or a wrong offset change it. Every rank sums each of
its tiles on both sides; the sums (8 bytes a tile) are all-gathered and compared by every rank, for each kind of rank at once.
"""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.resharding.kinds import Kinds, find_kinds
from hybridflow.resharding.rectangles import extent, volume
from megatron_ext.tiles import Slices, TileMap, as_index, intersect

SIDES = ("training", "rollout")
_SHOWN = 5  # mismatches in an error message
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# Odd multipliers: of the index and of the bits, then those of splitmix64's finalizer (Steele, Lea, Flood 2014)
_INDEX, _BITS = _signed(0x9E3779B97F4A7C15), _signed(0xD6E8FEB86659FD93)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


class ReshardingMismatch(RuntimeError):
    """The sides, or replicas on one of them, differ; the message names tensors, ranks, parameters and both layouts."""


@dataclass(frozen=True)
class Report:
    """What was compared: HF tensors, their elements, and tiles summed over all ranks and both sides."""

    tensors: int
    elements: int
    tiles: int


@torch.no_grad()
def verify(
    source_tiles: Sequence[TileMap],
    source: Mapping[str, Tensor],
    destination_tiles: Sequence[TileMap],
    destination: Mapping[str, Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    layouts: tuple[str, str] = SIDES,
    numbers: Sequence[int] | None = None,
) -> Report:
    """Check that both sides hold the same HF tensors, bit by bit, on every rank. Collective over `group`.

    Args:
        source_tiles, destination_tiles: of all ranks of the group, in order.
        source, destination: this rank's parameters; the source is compared after casting to the destination's dtype.
        dtype: of the destination; needed only on a rank without one.
        shapes: of the HF tensors, to find one that lacks an edge on both sides.
        layouts: what the two sides are called in an error message, such as "training TP2 x PP2".
        numbers: of the group's ranks in an error message; by default 0, 1, 2, ...

    Raises:
        ReshardingMismatch: on every rank.
    """
    kinds = find_kinds(source_tiles), find_kinds(destination_tiles)
    extents = _extents(kinds, shapes, layouts)
    parameters = [*destination.values(), *source.values()]
    device = parameters[0].device if parameters else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if dtype is None:
        dtype = next(iter(destination.values())).dtype
    sides = tuple(
        _Side(side, _checksums(side, tensors, extents, dtype, device, group), numbers or range(len(side.of)))
        for side, tensors in zip(kinds, (source, destination), strict=True)
    )
    problems = [text for side, layout in zip(sides, layouts, strict=True) for text in _replicas_differ(side, layout)]
    problems += _sides_differ(*sides, layouts)
    if problems:
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise ReshardingMismatch("; ".join(problems[:_SHOWN]) + more)
    tiles = sum(_tiles(m) * len(ranks) for side in kinds for m, ranks in zip(side.maps, side.ranks, strict=True))
    return Report(len(extents), sum(torch.Size(shape).numel() for shape in extents.values()), tiles)


def _tiles(tile_map: TileMap) -> int:
    return sum(len(held) for held in tile_map.values())


# ------------------------------------------------------------------------------------------------------------- checksums


@torch.no_grad()
def checksum(local: Tensor, hf_slices: Slices, hf_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The sum of hash(index, bits) over `local`, the rectangle `hf_slices` of a tensor of `hf_shape`, cast to `dtype`.

    An int64 scalar on the tensor's device (arithmetic wraps around); nothing waits for the device.
    """
    stride, positions = 1, torch.zeros((), dtype=torch.int64, device=local.device)
    for dim in reversed(range(local.dim())):
        start, stop = hf_slices[dim]
        along = torch.arange(start, stop, device=local.device).mul_(_signed(stride * _INDEX % (1 << 64)))
        stride *= hf_shape[dim]
        if dim == 0:
            rows = along.view(-1, *[1] * (local.dim() - 1))
        else:
            positions = positions + along.view(-1, *[1] * (local.dim() - 1 - dim))
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    chunk = 1 << 24 if local.is_cuda else 1 << 16  # elements: bounds the memory on a GPU, stays in the cache on a CPU
    step = max(1, chunk * len(local) // local.numel())
    for start in range(0, len(local), step):
        bits = local[start : start + step].to(dtype).view(_INTEGERS[dtype.itemsize])
        hashed = bits.to(torch.int64, copy=True).mul_(_BITS).add_(positions).add_(rows[start : start + step])
        for multiplier in _MIX:
            hashed.bitwise_xor_(hashed >> 31).mul_(multiplier)
        total += hashed.bitwise_xor_(hashed >> 32).sum()
    return total


def _checksums(
    kinds: Kinds,
    parameters: Mapping[str, Tensor],
    extents: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """[ranks, tiles] int64 on the host: the checksum of each tile, in the order of the rank's tile map; zeros behind."""
    # a group may reach beyond this process's world, where dist.get_rank would look for it in vain
    rank = group.rank() if group is not None else dist.get_rank() if dist.is_initialized() else 0
    own = [
        checksum(parameters[name][as_index(tile.local_slices)], tile.hf_slices, extents[tile.hf_name], dtype)
        for name, held in kinds.maps[kinds.of[rank]].items()
        for tile in held
    ]
    sums = torch.zeros(max(map(_tiles, kinds.maps)), dtype=torch.int64, device=device)
    if own:
        sums[: len(own)] = torch.stack(own)
    if not dist.is_initialized():
        return sums[None].cpu()
    gathered = torch.empty(len(kinds.of), len(sums), dtype=torch.int64, device=device)
    dist.all_gather(list(gathered), sums, group=group)
    return gathered.cpu()


# ------------------------------------------------------------------------------------------------------------ comparison


class _Place(NamedTuple):
    """Where a kind of rank holds a rectangle: in which parameter, and as which of its tiles."""

    kind: int
    name: str
    tile: int


class _Holder(NamedTuple):
    rank: int
    name: str
    checksum: int


class _Side:
    """One side's checksums. `regions`: by HF tensor and distinct rectangle, where it is held.

    The first rank of a kind speaks for all of it, but in `uneven`: (kind, tile) where a rank of that kind has another sum.
    """

    def __init__(self, kinds: Kinds, sums: Tensor, numbers: Sequence[int]):
        self._kinds, self._sums, self._numbers = kinds, sums, numbers
        self._first = [sums[ranks[0]].tolist() for ranks in kinds.ranks]
        self.uneven: set[tuple[int, int]] = set()
        self.regions: dict[str, dict[Slices, list[_Place]]] = defaultdict(lambda: defaultdict(list))
        for kind, (tile_map, ranks) in enumerate(zip(kinds.maps, kinds.ranks, strict=True)):
            differs = (sums[list(ranks)] != sums[ranks[0]]).any(0)
            self.uneven |= {(kind, tile) for tile in differs.nonzero().flatten().tolist()}
            flat = ((name, tile) for name, held in tile_map.items() for tile in held)
            for number, (name, tile) in enumerate(flat):
                self.regions[tile.hf_name][tile.hf_slices].append(_Place(kind, name, number))

    def checksum(self, place: _Place) -> int:
        return self._first[place.kind][place.tile]

    def agree(self, places: Sequence[_Place]) -> bool:
        """Whether all ranks that hold this rectangle have the same checksum of it."""
        return len({self.checksum(p) for p in places}) == 1 and not any((p.kind, p.tile) in self.uneven for p in places)

    def holders(self, places: Sequence[_Place]) -> list[_Holder]:
        """Every rank that holds these, ascending."""
        found = (
            _Holder(self._numbers[rank], place.name, int(self._sums[rank, place.tile]))
            for place in places
            for rank in self._kinds.ranks[place.kind]
        )
        return sorted(found)


def _extents(
    kinds: tuple[Kinds, Kinds], shapes: Mapping[str, tuple[int, ...]] | None, layouts: tuple[str, str]
) -> dict[str, tuple[int, ...]]:
    """The shape of every HF tensor, after checking that both sides' distinct rectangles cover exactly that."""
    sides = [_rectangles(side.maps) for side in kinds]
    if shapes is None:
        names = sides[0].keys() | sides[1].keys()
        boxes = {name: extent([r for side in sides for r in side.get(name, ())]) for name in sorted(names)}
        shapes = {name: tuple(stop for _, stop in box) for name, box in boxes.items()}
    find_problem = functools.cache(_cover_problem)  # most tensors are cut like another one of the same shape
    for side, layout in zip(sides, layouts, strict=True):
        unknown = side.keys() - shapes.keys()
        if unknown:
            raise ReshardingMismatch(f"{layout} has {sorted(unknown)[0]}, which the model does not have")
        for name, shape in shapes.items():
            problem = find_problem(tuple(side.get(name, ())), tuple(shape))
            if problem:
                raise ReshardingMismatch(f"{name} of shape {tuple(shape)}: the tiles of {layout} {problem}")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _rectangles(maps: Sequence[TileMap]) -> dict[str, dict[Slices, None]]:
    found: dict[str, dict[Slices, None]] = defaultdict(dict)
    for tile_map in maps:
        for held in tile_map.values():
            for tile in held:
                found[tile.hf_name][tile.hf_slices] = None
    return found


def _cover_problem(rectangles: Sequence[Slices], shape: Sequence[int]) -> str | None:
    for number, first in enumerate(rectangles):
        for second in rectangles[:number]:
            if intersect(first, second):
                return f"overlap: {list(second)} and {list(first)}"
        if any(stop > size for (_, stop), size in zip(first, shape, strict=True)):
            return f"reach beyond it: {list(first)}"
    covered, whole = sum(map(volume, rectangles)), torch.Size(shape).numel()
    return None if covered == whole else f"cover {covered} of {whole} elements"


def _replicas_differ(side: _Side, layout: str) -> list[str]:
    """Rectangles that several ranks hold with different contents; the larger camp is named first."""
    problems = []
    for hf_name, by_slices in side.regions.items():
        for slices, places in by_slices.items():
            if side.agree(places):
                continue
            camps: dict[int, list[_Holder]] = defaultdict(list)
            for holder in side.holders(places):
                camps[holder.checksum].append(holder)
            parties = " against ".join(_name(camp) for camp in sorted(camps.values(), key=len, reverse=True))
            problems.append(f"{hf_name}{list(slices)}: replicas of {layout} differ: {parties}")
    return problems


def _sides_differ(source: _Side, destination: _Side, layouts: tuple[str, str]) -> list[str]:
    problems = []
    find_components = functools.cache(_components)
    for hf_name, theirs in source.regions.items():
        ours = destination.regions[hf_name]
        for left, right in find_components(tuple(theirs), tuple(ours)):
            parts = (source, [theirs[slices] for slices in left]), (destination, [ours[slices] for slices in right])
            sums = [sum(side.checksum(places[0]) for places in regions) for side, regions in parts]
            if (sums[0] - sums[1]) % (1 << 64):
                holders = (
                    f"{layout} ({_name([holder for places in regions for holder in side.holders(places)])})"
                    for layout, (side, regions) in zip(layouts, parts, strict=True)
                )
                problems.append(f"{hf_name}{list(extent(left))}: {' and '.join(holders)} hold different values")
    return problems


def _components(left: Sequence[Slices], right: Sequence[Slices]) -> list[tuple[list[Slices], list[Slices]]]:
    """Smallest sets of rectangles of both sides that cover the same elements: a mismatch is narrowed down to one."""
    groups: list[tuple[list[Slices], list[Slices]]] = [([rectangle], []) for rectangle in left]
    for rectangle in right:
        touching = [group for group in groups if any(intersect(rectangle, other) for other in group[0])]
        joined = ([r for group in touching for r in group[0]], [r for group in touching for r in group[1]] + [rectangle])
        groups = [group for group in groups if not any(group is other for other in touching)] + [joined]
    return groups


def _name(holders: Sequence[_Holder]) -> str:
    ranks, names = sorted({h.rank for h in holders}), sorted({h.name for h in holders})
    return f"{', '.join(names)} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
