"""Which sequences go into which micro-batch: groups that take about the same time, within a token budget. Pure arithmetic.

All micro-batches of a call are padded to the length of the fullest, so a group takes max(tokens) + c x (sum of its squared
lengths), attention being quadratic (`HFConfig.attention_cost`); a pipeline goes at the pace of the slowest group.
"""

import heapq
import itertools
from collections.abc import Sequence

_WORTH_IT = 1e-3  # of the pace


def partition(
    lengths: Sequence[int], budget: int, multiple: int = 1, count: int | None = None, attention: float = 0.0
) -> list[list[int]]:
    """Groups of indices into `lengths`, one per micro-batch, of about equal time: sums of tokens as equal as a greedy rule
    makes them, then exchanges that lower the slowest group's time.

    Args:
        lengths: tokens of each sequence.
        budget: most tokens of a micro-batch after padding to `multiple` (the role's `micro_batch_tokens`).
        multiple: a micro-batch's tokens are padded to a multiple of this (tp x cp).
        count: the number of groups, where all data-parallel ranks must have the same one; groups that have no sequence to
            hold come last and are empty. By default the fewest that fit.
        attention: the time of a squared token of a sequence, in units of a token's own time.

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
            return _even_out(groups, lengths, capacity, attention)
    if count is None:
        return _even_out(fitting, lengths, capacity, attention)
    if count < len(fitting):
        raise ValueError(
            f"{sum(lengths)} tokens in {len(lengths)} sequences do not fit {count} micro-batches"
            f" of micro_batch_tokens={budget}: {len(fitting)} are needed"
        )
    return _even_out(fitting, lengths, capacity, attention) + [[] for _ in range(count - len(fitting))]


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


def pace(groups: Sequence[Sequence[int]], lengths: Sequence[int], attention: float) -> float:
    """The slowest group's time, in units of a token's: all groups have as many tokens as the fullest, padding included."""
    tokens = max(sum(lengths[i] for i in group) for group in groups)
    return tokens + attention * max(sum(lengths[i] ** 2 for i in group) for group in groups)


def _even_out(groups: list[list[int]], lengths: Sequence[int], capacity: int, attention: float) -> list[list[int]]:
    """Exchange sequences of the group with the most attention for others' shorter ones while that lowers the pace."""
    if attention == 0.0 or len(groups) < 2:
        return groups
    groups = [list(group) for group in groups]
    for _ in groups:
        squares = [sum(lengths[i] ** 2 for i in group) for group in groups]
        slow = max(range(len(groups)), key=squares.__getitem__)
        best, exchange = pace(groups, lengths, attention), None
        for other in range(len(groups)):
            found = _best_exchange(groups, lengths, capacity, attention, slow, other) if other != slow else None
            if found and found[0] < best * (1 - _WORTH_IT):
                best, exchange = found[0], (other, *found[1:])
        if exchange is None:
            break
        other, mine, theirs = exchange
        groups[slow][groups[slow].index(mine)], groups[other][groups[other].index(theirs)] = theirs, mine
    return [sorted(group) for group in groups]


def _best_exchange(
    groups: list[list[int]], lengths: Sequence[int], capacity: int, attention: float, slow: int, other: int
) -> tuple[float, int, int] | None:
    """The pace after the best exchange of one sequence each between two groups, and the two sequences."""
    rest = [group for number, group in enumerate(groups) if number not in (slow, other)]
    most_tokens = max((sum(lengths[i] for i in group) for group in rest), default=0)
    most_squares = max((sum(lengths[i] ** 2 for i in group) for group in rest), default=0)
    (tokens, squares), (others_tokens, others_squares) = (
        (sum(lengths[i] for i in groups[g]), sum(lengths[i] ** 2 for i in groups[g])) for g in (slow, other)
    )
    best = None
    for mine, theirs in itertools.product(
        _one_of_each_length(groups[slow], lengths), _one_of_each_length(groups[other], lengths)
    ):
        less, less_squares = lengths[mine] - lengths[theirs], lengths[mine] ** 2 - lengths[theirs] ** 2
        fullest = max(most_tokens, tokens - less, others_tokens + less)
        if less <= 0 or fullest > capacity:
            continue
        time = fullest + attention * max(most_squares, squares - less_squares, others_squares + less_squares)
        if best is None or time < best[0]:
            best = time, mine, theirs
    return best


def _one_of_each_length(group: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return list({lengths[i]: i for i in reversed(group)}.values())
