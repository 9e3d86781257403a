"""Which ranks are slower than their peers: a GPU that throttles, a host that others use, a link that lost lanes.

Ranks that wait for each other inside a call (an engine's, a pipeline's, a tensor-parallel group's) come out of it at the same
time, whichever of them was slow. So what is compared with its peers are *units*, groups of ranks that do not wait for others:

  rollout, log-probs, values, scores   by the seconds that every rank was at the call. A unit is an engine, or one data-parallel
                                       replica with all its stages. Always on: an addition per call
  the same and updates                 under run.profile by the passes that every rank worked on, waiting for other stages left
                                       out (`megatron_ext.intervals`). A unit is the tensor-parallel group of one stage in one
                                       replica, and its peers are the groups of that stage in other replicas

A unit's time is that of its rank which took least: one that came late, from a call before, waited for nobody. A straggler is
named as exactly as that allows: one rank where tp (and pp) are 1, else the ranks of its unit.

Not seen are: updates without run.profile, whose gradient reduction evens out all ranks; anything at dp=1 (or with one engine),
where there are no peers; roles with ep > 1, whose replicas wait for each other in every layer; copies and resharding, where the
rank that waits looks slow and the one that is waited for does not. A rollout's or replica's work differs from step to step with
the lengths of its sequences, which is why only a long row of steps makes a warning.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron_ext.intervals import Pass, union
from megatron_ext.layout import Layout

Unit = tuple[int, ...]  # global ranks that wait for each other

EXCESS = 0.2  # over the median of its peers, from which a unit is slow ...
SHARE = 0.01  # ... if what it is slower by is this much of the step
IN_A_ROW = 8  # steps after which the same unit's being slow is no accident


class Slowest(NamedTuple):
    """`excess`: how far the unit's time is over the median of its peers', 0: not at all. `seconds`: the same in seconds."""

    unit: Unit
    excess: float
    seconds: float


def slowest(times: Mapping[Unit, float]) -> Slowest | None:
    """None without peers, or where nothing was done."""
    if len(times) < 2:
        return None
    unit = max(times, key=times.get)
    usual = statistics.median(time for other, time in times.items() if other != unit)
    return Slowest(unit, times[unit] / usual - 1, times[unit] - usual) if usual > 0 else None


def by_calls(layout: Layout, ranks: Sequence[int], seconds: Mapping[int, float]) -> dict[Unit, float]:
    """The time of every engine, or replica, of a role at a call. `ranks`: the role's, `seconds`: that each was at it."""
    if layout.ep > 1:
        return {}
    groups, found = _groups(layout), {}
    for replica in range(layout.dp):
        stages = [members for (dp, _), members in groups.items() if dp == replica]
        unit = tuple(sorted(ranks[place] for members in stages for place in members))
        found[unit] = max(min(seconds[ranks[place]] for place in members) for members in stages)
    return found


def by_passes(layout: Layout, ranks: Sequence[int], passes: Sequence[Pass]) -> list[dict[Unit, float]]:
    """For every stage of a role the time that each replica's group was at work in these passes."""
    if layout.ep > 1:
        return []
    stages: list[dict[Unit, float]] = [{} for _ in range(layout.pp)]
    for (_, stage), members in _groups(layout).items():
        busy = [sum(union(one[place]) for one in passes) for place in members]
        stages[stage][tuple(ranks[place] for place in members)] = min(busy)
    return stages


def _groups(layout: Layout) -> dict[tuple[int, int], list[int]]:
    """By replica and stage the ranks of the layout that share it: a tensor- and context-parallel group each."""
    found: dict[tuple[int, int], list[int]] = {}
    for place in range(layout.world_size):  # an engine's need not be neighbours
        at = layout.coordinates(place)
        found.setdefault((at.dp, at.pp), []).append(place)
    return found


class Stragglers:
    """Looks at every step, and says once of each phase's unit that it stays behind.

    Args:
        hosts: of all ranks. line: shows a line to the user.
    """

    def __init__(self, hosts: Sequence[str], line: Callable[[str], None]):
        self._hosts, self._line = hosts, line
        self._in_a_row: dict[str, tuple[Unit, int]] = {}
        self._told: set[tuple[str, Unit]] = set()

    def look(self, phases: Mapping[str, Sequence[Mapping[Unit, float]]], step_seconds: float) -> dict[str, float]:
        """straggler/PHASE_rank, the first of the slowest unit, and straggler/PHASE_excess. `phases`: the times of units, each
        mapping those of peers."""
        metrics = {}
        for phase, peers in phases.items():
            found = [one for one in map(slowest, peers) if one]
            if not found:
                continue
            worst = max(found, key=lambda one: one.excess)
            metrics |= {f"straggler/{phase}_rank": worst.unit[0], f"straggler/{phase}_excess": worst.excess}
            self._watch(phase, worst, step_seconds)
        return metrics

    def _watch(self, phase: str, worst: Slowest, step_seconds: float) -> None:
        unit, count = self._in_a_row.get(phase, (worst.unit, 0))
        slow = worst.excess > EXCESS and worst.seconds > SHARE * step_seconds
        self._in_a_row[phase] = worst.unit, (count if unit == worst.unit else 0) + 1 if slow else 0
        if self._in_a_row[phase][1] < IN_A_ROW or (phase, worst.unit) in self._told:
            return
        self._told.add((phase, worst.unit))
        hosts = ", ".join(dict.fromkeys(self._hosts[rank] for rank in worst.unit))
        self._line(
            f"warning: {_name(worst.unit)} on {hosts} was the slowest in {phase} for {IN_A_ROW} steps in a row, now"
            f" {worst.excess:.0%} over the median of its peers"
        )


def _name(unit: Unit) -> str:
    if len(unit) == 1:
        return f"rank {unit[0]}"
    return f"one of the ranks {', '.join(map(str, unit))} (they wait for each other)"


def often_slow(steps: Sequence[Mapping[str, float]]) -> str:
    """A line for the summary: who was slow in more than half of at least `IN_A_ROW` steps, by phase; empty: nobody."""
    found = []
    for metric in dict.fromkeys(name for step in steps for name in step if name.startswith("straggler/")):
        phase = metric.removeprefix("straggler/").removesuffix("_rank")
        if not metric.endswith("_rank"):
            continue
        slow = [step[metric] for step in steps if step.get(f"straggler/{phase}_excess", 0.0) > EXCESS]
        rank = statistics.mode(slow) if slow else None
        measured = sum(metric in step for step in steps)
        if slow.count(rank) >= max(IN_A_ROW, measured / 2):
            excess = statistics.median(step[f"straggler/{phase}_excess"] for step in steps if step.get(metric) == rank)
            found.append(f"rank {rank:.0f} in {phase} ({slow.count(rank)} of {measured} steps, {excess:.0%} over its peers)")
    return ", ".join(found)
