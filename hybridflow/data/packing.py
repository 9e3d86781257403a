"""Which sequences go into which micro-batch: balanced groups within a token budget. Pure arithmetic."""

import heapq
from collections.abc import Sequence


def partition(lengths: Sequence[int], budget: int, multiple: int = 1, count: int | None = None) -> list[list[int]]:
    """Groups of indices into `lengths`, one per micro-batch, with sums of tokens as equal as a greedy rule makes them.

    Args:
        lengths: tokens of each sequence.
        budget: most tokens of a micro-batch after padding to `multiple` (the role's `micro_batch_tokens`).
        multiple: a micro-batch's tokens are padded to a multiple of this (tp x cp).
        count: the number of groups, where all data-parallel ranks must have the same one; groups that have no sequence to
            hold come last and are empty. By default the fewest that fit.

    Returns:
        Every index exactly once; indices ascend within a group. The same input gives the same groups on every rank.

    Raises:
        ValueError: one sequence alone is longer than the budget allows, or `count` groups cannot hold all.
    """
    capacity = budget // multiple * multiple
    if lengths and max(lengths) > capacity:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens does not fit micro_batch_tokens={budget}"
            f" (padded to a multiple of {multiple}): raise micro_batch_tokens or lower the sampling limits"
        )
    if not lengths:
        return [[] for _ in range(count or 0)]
    fitting = _first_fit(lengths, capacity)
    least = -(-sum(lengths) // capacity)
    for size in range(least, len(fitting) + 1) if count is None else [count]:
        groups = spread(lengths, size)
        if max(sum(lengths[i] for i in group) for group in groups) <= capacity:
            return groups
    if count is None:
        return fitting
    if count < len(fitting):
        raise ValueError(
            f"{sum(lengths)} tokens in {len(lengths)} sequences do not fit {count} micro-batches"
            f" of micro_batch_tokens={budget}: {len(fitting)} are needed"
        )
    return fitting + [[] for _ in range(count - len(fitting))]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def spread(lengths: Sequence[int], count: int) -> list[list[int]]:
    """`count` groups of indices with about equal sums: longest first, each to the group with the fewest tokens so far, and
    among equals with the fewest indices (at most 4/3 of the best possible maximum)."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, 0, group) for group in range(count)]
    for index in _longest_first(lengths):
        load, size, group = heapq.heappop(loads)
        groups[group].append(index)
        heapq.heappush(loads, (load + lengths[index], size + 1, group))
    return [sorted(group) for group in groups]


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, each to the first group with room: few groups (at most 11/9 of the fewest), not balanced."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        group = next((g for g, left in enumerate(room) if left >= lengths[index]), len(groups))
        if group == len(groups):
            groups.append([])
            room.append(capacity)
        groups[group].append(index)
        room[group] -= lengths[index]
    return [sorted(group) for group in groups]
