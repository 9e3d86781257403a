"""What every rank was at in a step, as a Chrome trace: `run.profile=true` writes `timeline/step-N.json` for ui.perfetto.dev.

One row has the driver's phases, and one for each rank, grouped by host, the calls that the rank ran. A call is a slice with the
role's name, and inside it one with the method's: Perfetto colours slices by name, so that a role has one colour everywhere.
Below are the pipelines of the Megatron roles: when each rank worked on which micro-batch (`megatron_ext.intervals`).
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hybridflow.writing import writing
from megatron_ext.intervals import Pass, chrome_events

ROUNDS = 5  # exchanges of clocks: each narrows the bounds


class Span(NamedTuple):
    """A call on a rank, `role.method`, from `start` to `end` in seconds since the epoch by the clock of the rank's host."""

    name: str
    start: float
    end: float


class Pending(Protocol):
    def result(self) -> Any: ...


class Ranks(Protocol):
    """The ranks as the driver calls them (`controller.worker.Worker`); every answer is a list with one item per rank."""

    record_calls: Callable[[], Pending]
    calls: Callable[[], Pending]
    clock: Callable[[], Pending]


class PhaseLike(Protocol):
    """`metrics.recorder.Phase`"""

    name: str
    start: float
    end: float


class Timeline:
    """Has the ranks note their calls from now on, and writes those of each step."""

    def __init__(self, run: Path, ranks: Ranks):
        self._folder, self._ranks = run / "timeline", ranks
        self._folder.mkdir(exist_ok=True)
        ranks.record_calls().result()
        self._hosts, self._ahead = read_clocks(ranks)
        self._calls: list[list[Span]] = []

    def begin_step(self) -> None:
        """What the ranks did before is no part of the step."""
        self._ranks.calls().result()

    def end_step(self) -> None:
        """Nor is what they do from now on."""
        self._calls = [
            [Span(name, start - ahead, end - ahead) for name, start, end in spans]
            for spans, ahead in zip(self._ranks.calls().result(), self._ahead, strict=True)
        ]

    def write(self, step: int, phases: Sequence[PhaseLike], pipelines: Mapping[str, tuple[Sequence[int], list[Pass]]]) -> None:
        """The step that has ended. `pipelines`: by role its ranks, and the passes of its schedule."""
        worked = {role: self._worked(ranks, passes) for role, (ranks, passes) in pipelines.items() if passes}
        path = self._folder / f"step-{step}.json"
        with writing(path):
            path.write_text(json.dumps(trace(phases, self._calls, self._hosts, worked)))

    def _worked(self, ranks: Sequence[int], passes: list[Pass]) -> Pass:
        """All passes as one, by the driver's clock."""
        found = []
        for place, rank in enumerate(ranks):
            ahead = self._ahead[rank]
            intervals = [interval for one in passes for interval in one[place]]
            found.append([i._replace(start_s=i.start_s - ahead, end_s=i.end_s - ahead) for i in intervals])
        return found


def read_clocks(ranks: Ranks) -> tuple[list[str], list[float]]:
    """Every rank's host, and the seconds that its clock is ahead of the driver's.

    A rank reads its clock after it was asked and before its answer is there, which bounds the difference from both sides; taken
    is 0 where the bounds allow it (they always do on the driver's host), else their middle.
    """
    low, high, hosts = [], [], []
    for number in range(ROUNDS):
        asked = time.time()
        readings = ranks.clock().result()
        answered = time.time()
        if number == 0:
            hosts, low, high = [host for host, _ in readings], [-math.inf] * len(readings), [math.inf] * len(readings)
        low = [max(bound, at - answered) for bound, (_, at) in zip(low, readings, strict=True)]
        high = [min(bound, at - asked) for bound, (_, at) in zip(high, readings, strict=True)]
    return hosts, [0.0 if below <= 0 <= above else (below + above) / 2 for below, above in zip(low, high, strict=True)]


def trace(
    phases: Sequence[PhaseLike], calls: Sequence[Sequence[Span]], hosts: Sequence[str], pipelines: Mapping[str, Pass]
) -> dict[str, Any]:
    """The trace as an object for JSON, all by the driver's clock; times begin with the first phase. `calls`: of every rank."""
    origin = min([phase.start for phase in phases] + [span.start for spans in calls for span in spans], default=0.0)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts), start=1)}
    events = [_named("process", 0, 0, "driver"), _named("thread", 0, 0, "phases")]
    events += [_named("process", number, 0, host) for host, number in numbers.items()]
    events += [_slice(0, 0, phase.name, "phase", phase.start - origin, phase.end - origin) for phase in phases]
    for rank, (host, spans) in enumerate(zip(hosts, calls, strict=True)):
        events.append(_named("thread", numbers[host], rank, f"rank {rank}"))
        for span in spans:
            role, _, method = span.name.partition(".")
            for name in (role, method):
                events.append(_slice(numbers[host], rank, name, role, span.start - origin, span.end - origin))
    for number, (role, worked) in enumerate(pipelines.items(), start=len(numbers) + 1):
        events += chrome_events(worked, f"pipeline of {role}", number, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, category: str, start: float, end: float) -> dict[str, Any]:
    """Whole microseconds, both ends rounded alike: slices that follow each other or lie within each other still do."""
    first, last = round(start * 1e6), round(end * 1e6)
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "ts": first, "dur": last - first}
