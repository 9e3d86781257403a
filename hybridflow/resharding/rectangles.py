"""Arithmetic of rectangles in a tensor's index space: a rectangle is one (start, stop) per dimension."""

from collections.abc import Iterator, Sequence

from megatron_ext.tiles import Slices


def volume(slices: Slices) -> int:
    n = 1
    for start, stop in slices:
        n *= stop - start
    return n


def extent(rectangles: Sequence[Slices]) -> Slices:
    """The smallest rectangle around all of them."""
    return tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in zip(*rectangles, strict=True))


def subtract(whole: Slices, hole: Slices) -> Iterator[Slices]:
    """Disjoint rectangles that make up `whole` without `hole`, which lies inside it."""
    for dim, ((start, stop), (hole_start, hole_stop)) in enumerate(zip(whole, hole, strict=True)):
        before, after = whole[:dim], whole[dim + 1 :]
        if start < hole_start:
            yield (*before, (start, hole_start), *after)
        if hole_stop < stop:
            yield (*before, (hole_stop, stop), *after)
        whole = (*before, (hole_start, hole_stop), *after)


def split(shape: Sequence[int], room: int, capacity: int) -> Iterator[tuple[Slices, bool]]:
    """Cut a rectangle from the front into blocks that fit into `capacity` elements each, the first into `room`.

    Blocks are whole rows (of the first dimension that is cut) where a row fits. Yields (block, whether it starts a new
    bucket). In row-major order the blocks hold the rectangle's elements one after the other.
    """
    queue = [tuple((0, size) for size in shape)]
    fresh = False
    while queue:
        block = queue.pop()
        if volume(block) <= room:
            yield block, fresh
            room, fresh = room - volume(block), False
            continue
        dim = next((d for d, (start, stop) in enumerate(block) if stop - start > 1), 0)
        start, stop = block[dim]
        row = volume(block) // (stop - start)
        if row > room and room < capacity:
            queue.append(block)
            room, fresh = capacity, True
            continue
        cut = start + max(1, room // row)
        queue.append((*block[:dim], (cut, stop), *block[dim + 1 :]))
        queue.append((*block[:dim], (start, cut), *block[dim + 1 :]))
