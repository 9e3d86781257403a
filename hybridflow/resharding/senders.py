"""Who sends what where several ranks could: whole bundles in few messages, and no rank with more to send than its share.

Requests with equal candidates form a group. Group by group, what is asked for is poured over its candidates like water over
vessels, up to one level, again and again until no level changes: that ends where the sum of the squared loads is least, and
there the highest load is least as well, since any set of ranks at the highest level sends nothing that a lower one could. Then
bundles are given out whole; if that makes the busiest sender much busier than it need be, by these shares instead.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

SLACK = 1.05  # what a sender may have more than its share, for the sake of whole bundles
SETTLED = 0.002  # change of any load in a sweep, relative to the highest, below which the levels count as settled
SWEEPS = 200


class Request(NamedTuple):
    """`size` elements of one bundle that `destination` needs from any of `candidates` (ranks, ascending; at least one)."""

    destination: int
    size: int
    candidates: tuple[int, ...]


Shares = list[tuple[int, int]]  # who sends how many of a request's elements, one after the other


def choose_senders(requests: Sequence[Request], ranks: int) -> list[Shares]:
    """Senders of each request, such that the highest load is at most about SLACK times the least possible."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        groups[request.candidates].append(index)
    shares, level = _pour({group: sum(requests[i].size for i in members) for group, members in groups.items()}, ranks)
    senders, highest = _keep_whole(requests, ranks, level)
    if highest <= SLACK * level:
        return [[(sender, request.size)] for sender, request in zip(senders, requests, strict=True)]
    divided: list[Shares] = [[] for _ in requests]
    for group, members in groups.items():
        _divide(requests, members, shares[group], divided)
    return divided


def _pour(sizes: dict[tuple[int, ...], int], ranks: int) -> tuple[dict[tuple[int, ...], dict[int, float]], float]:
    """By group, what each candidate sends when all loads are as equal as they can be; and the highest load then."""
    load = [0.0] * ranks
    shares = {group: dict.fromkeys(group, 0.0) for group in sizes}
    for _ in range(SWEEPS):
        before = list(load)
        for group, size in sizes.items():
            others = [load[rank] - shares[group][rank] for rank in group]
            level = _level(others, size)
            for rank, base in zip(group, others, strict=True):
                shares[group][rank] = max(0.0, level - base)
                load[rank] = base + shares[group][rank]
        if max(abs(a - b) for a, b in zip(load, before, strict=True)) <= SETTLED * max(load):
            break
    return shares, max(load)


def _level(loads: Sequence[float], size: float) -> float:
    """How high `size` reaches when it is poured onto these loads."""
    total, level = float(size), float("inf")
    for count, load in enumerate(sorted(loads), start=1):
        if load >= level:
            break
        total += load
        level = total / count
    return level


def _keep_whole(requests: Sequence[Request], ranks: int, level: float) -> tuple[list[int], int]:
    """A sender for each request, large ones first, and the highest load. A request goes to a rank that sends to the same
    destination already (one message less) as long as that stays within `level`, else to the candidate with the least."""
    load, senders = [0] * ranks, [0] * len(requests)
    heaps = {request.candidates: [(0, rank) for rank in request.candidates] for request in requests}  # (load, rank)
    members = {candidates: frozenset(candidates) for candidates in heaps}
    partners: dict[int, set[int]] = defaultdict(set)
    for index in sorted(range(len(requests)), key=lambda i: -requests[i].size):
        destination, size, candidates = requests[index]
        heap = heaps[candidates]
        while heap[0][0] < load[heap[0][1]]:  # it has got something to send from another group since
            heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        common = members[candidates] & partners[destination]
        sender = min(common, key=lambda rank: (load[rank], rank), default=heap[0][1])
        if load[sender] + size > level:
            sender = heap[0][1]
        partners[destination].add(sender)
        senders[index] = sender
        load[sender] += size
    return senders, max(load)


def _divide(requests: Sequence[Request], members: Sequence[int], share: dict[int, float], divided: list[Shares]) -> None:
    """Deal one group's requests to its candidates, each up to its share and a little more; what fits nowhere is divided over
    as few as hold it."""
    room = [(-int(SLACK * part) - 1, rank) for rank, part in share.items()]  # a heap: most room first
    heapq.heapify(room)
    for index in sorted(members, key=lambda i: -requests[i].size):
        taken, size = [], requests[index].size
        while sum(free for free, _ in taken) < size:
            free, rank = heapq.heappop(room)
            taken.append((-free, rank))
        available, held, given = sum(free for free, _ in taken), 0, 0
        for free, rank in taken:
            held += free
            part = size * held // available - given
            divided[index].append((rank, part))
            given += part
            if free > part:
                heapq.heappush(room, (part - free, rank))
