"""Tiles: which rectangle of which HF tensor each rectangle of a local tensor holds.

A tile map is `dict[parameter name, list[Tile]]` of one rank. It is a pure function of (HF config, layout, implementation,
rank), for Megatron and for vLLM alike, and the one truth that HF load, HF export, resharding and verification share.
"""

from collections.abc import Sequence
from typing import NamedTuple

Slices = tuple[tuple[int, int], ...]  # one (start, stop) per dimension


class Tile(NamedTuple):
    """`local[local_slices]` holds `hf[hf_slices]`; both rectangles have the same shape."""

    hf_name: str
    hf_slices: Slices
    local_slices: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.hf_slices)

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


TileMap = dict[str, list[Tile]]


def intersect(a: Slices, b: Slices) -> Slices | None:
    """The rectangle that two rectangles of one tensor share, or None."""
    shared = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def to_local(tile: Tile, hf_slices: Slices) -> Slices:
    """Where the rectangle `hf_slices`, a part of the tile, lies in the local tensor."""
    return tuple(
        (start - hf_start + local_start, stop - hf_start + local_start)
        for (start, stop), (hf_start, _), (local_start, _) in zip(hf_slices, tile.hf_slices, tile.local_slices, strict=True)
    )


def as_index(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in slices)


def local_extent(tiles: Sequence[Tile]) -> tuple[int, ...]:
    """The shape of the local tensor that these tiles fill; without the padding behind them."""
    return tuple(max(stop for _, stop in dim) for dim in zip(*(tile.local_slices for tile in tiles), strict=True))
