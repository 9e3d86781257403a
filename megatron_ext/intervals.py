"""Busy and idle time of a pipeline's stages, from the intervals in which each rank worked. Pure arithmetic: no torch."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

_COLOURS = {"forward": "thread_state_running", "backward": "rail_response"}  # names that Chrome's trace viewer has


class Interval(NamedTuple):
    """One micro-batch's way through one chunk of a stage. Seconds of the host's wall clock (`time.time`)."""

    name: str  # F3.1: forward of micro-batch 3 through chunk 1; B3.1: backward
    start_s: float
    end_s: float
    stage: int
    chunk: int
    micro_batch: int
    kind: str  # forward | backward

    @classmethod
    def of(cls, kind: str, stage: int, chunk: int, micro_batch: int, start_s: float, end_s: float) -> "Interval":
        return cls(f"{kind[0].upper()}{micro_batch}.{chunk}", start_s, end_s, stage, chunk, micro_batch, kind)


Pass = Sequence[Sequence[Interval]]  # one pass of the schedule: the intervals of every rank


@dataclass(frozen=True)
class Bubble:
    """Idle time of a pipeline over one or several passes, as shares of `span_s`: 0 is always busy, 1 is never."""

    span_s: float
    stages: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.stages)

    @property
    def max(self) -> float:
        return max(self.stages)


def bubble(passes: Iterable[Pass]) -> Bubble:
    """1 - busy / T of every stage, the mean of its ranks: busy is the union of a rank's intervals, T the slowest rank's span.

    Several passes are added up, the time between them left out. All that happens inside an interval is busy, tensor-parallel
    and expert-parallel communication included; a data-parallel replica that ends early is idle until the slowest one's end.

    Raises:
        ValueError: there is no interval.
    """
    total, busy = 0.0, {}
    for ranks in passes:
        working = [rank for rank in ranks if rank]
        total += span(working) if working else 0.0
        for number, rank in enumerate(ranks):
            if rank:
                stage = rank[0].stage, number
                busy[stage] = busy.get(stage, 0.0) + union(rank)
    if not busy:
        raise ValueError("no forward or backward was recorded: was the meter on while the schedule ran?")
    by_stage = groupby(sorted(busy), key=lambda key: key[0])
    return Bubble(total, tuple(1 - statistics.fmean(busy[key] for key in keys) / total for _, keys in by_stage))


def span(ranks: Pass) -> float:
    """Seconds of the slowest rank, which may be on another host with another clock: with a backward pass the first stage both
    begins and ends, so each rank's own span is enough. Forward only, it is from the first start to the last end of all."""
    own = [(min(i.start_s for i in rank), max(i.end_s for i in rank)) for rank in ranks]
    if any(interval.kind == "backward" for rank in ranks for interval in rank):
        return max(end - start for start, end in own)
    return max(end for _, end in own) - min(start for start, _ in own)


def union(intervals: Iterable[Interval]) -> float:
    """Seconds in at least one of the intervals."""
    total, until = 0.0, float("-inf")
    for interval in sorted(intervals, key=lambda i: i.start_s):
        total += max(0.0, interval.end_s - max(interval.start_s, until))
        until = max(until, interval.end_s)
    return total


def chrome_events(ranks: Pass, process: str = "pipeline", pid: int = 0, origin_s: float = 0.0) -> list[dict[str, Any]]:
    """The intervals as events of Chrome's trace format (opens in Perfetto): a row per rank, named by its stage.

    Timestamps are whole microseconds since `origin_s` of the wall clock, so that they stand beside other events which use it.
    """
    events = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}]
    for number, rank in enumerate(ranks):
        if not rank:
            continue
        row = {"pid": pid, "tid": number}
        events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": f"stage {rank[0].stage}, rank {number}"}})
        events.append({"ph": "M", "name": "thread_sort_index", **row, "args": {"sort_index": rank[0].stage}})
        events += [_event(interval, row, origin_s) for interval in rank]
    return events


def _event(interval: Interval, row: dict[str, int], origin_s: float) -> dict[str, Any]:
    start, end = (round((at - origin_s) * 1e6) for at in (interval.start_s, interval.end_s))
    return {
        "ph": "X",
        "name": interval.name,
        "cat": interval.kind,
        "cname": _COLOURS[interval.kind],
        "ts": start,
        "dur": end - start,
        **row,
        "args": {"micro_batch": interval.micro_batch, "chunk": interval.chunk, "stage": interval.stage},
    }
