"""What Megatron's pipeline schedules do with given times of every step: who computes what when, and how long the stages idle.

`simulate` runs the order of steps, sends and waits of megatron-core's own code (pipeline_parallel/schedules.py, 0.16 .. 0.19),
in which a transfer ends when both sides have come to it, so that what it says can be held against a measured pipeline.
Closed forms beside it are the textbook's, for steps of equal length and transfers that take no time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ext.intervals import Interval


class Task(NamedTuple):
    """The forward or backward of one micro-batch through one chunk of a stage."""

    kind: str  # forward | backward
    stage: int
    chunk: int
    micro_batch: int


class _Compute(NamedTuple):
    task: Task


class _Post(NamedTuple):
    """This side is ready for these transfers, each named by the task that receives it."""

    transfers: tuple[Task, ...]


class _Wait(NamedTuple):
    transfers: tuple[Task, ...]


@dataclass(frozen=True)
class Schedule:
    """1F1B, or with `chunks` > 1 interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473), of one pipeline.

    `overlap`: the interleaved schedule's steady state goes on while transfers are under way (mcore's `overlap_p2p_comm`).

    Raises:
        ValueError: the schedule does not take this number of micro-batches.
    """

    stages: int
    micro_batches: int
    chunks: int = 1
    forward_only: bool = False
    overlap: bool = False

    def __post_init__(self):
        if min(self.stages, self.micro_batches, self.chunks) < 1:
            raise ValueError(f"{self}: at least one of each is needed")
        if self.chunks > 1 and (self.stages == 1 or self.micro_batches % self.stages):
            raise ValueError(
                f"{self.micro_batches} micro-batches over pp={self.stages} x vpp={self.chunks}: the interleaved schedule takes"
                " a multiple of pp, and pp > 1"
            )

    @property
    def bubble_of_ideal_time(self) -> float:
        """Idle time over the time that is worked, (p - 1) / (v m): what Megatron's papers call the bubble fraction."""
        return (self.stages - 1) / (self.chunks * self.micro_batches)

    @property
    def bubble_of_step(self) -> float:
        """Idle time over the whole step, (p - 1) / (v m + p - 1): what a meter of idle time shows."""
        return (self.stages - 1) / (self.chunks * self.micro_batches + self.stages - 1)

    def warm_up(self, stage: int) -> int:
        """Forward steps of a stage before its first backward step's own forward."""
        total = self.chunks * self.micro_batches
        if self.forward_only:
            return total
        ahead = self.stages - stage - 1
        return min(total, ahead if self.chunks == 1 else 2 * ahead + (self.chunks - 1) * self.stages)

    def tasks(self, kind: str, stage: int) -> list[Task]:
        """A stage's steps of one kind in order: groups of as many micro-batches as stages, each through all chunks."""
        size = self.stages if self.chunks > 1 else self.micro_batches
        chunks = range(self.chunks) if kind == "forward" else reversed(range(self.chunks))
        order = list(chunks)
        return [
            Task(kind, stage, chunk, micro_batch)
            for first in range(0, self.micro_batches, size)
            for chunk in order
            for micro_batch in range(first, first + size)
        ]

    def source(self, task: Task) -> Task | None:
        """The task of another stage whose output is this one's input."""
        step = -1 if task.kind == "forward" else 1
        stage, chunk = task.stage + step, task.chunk
        if not 0 <= stage < self.stages:
            stage, chunk = stage % self.stages, chunk + step
        return task._replace(stage=stage, chunk=chunk) if 0 <= chunk < self.chunks and stage != task.stage else None

    def target(self, task: Task) -> Task | None:
        """The task of another stage whose input is this one's output."""
        backwards = self.source(task._replace(kind="backward" if task.kind == "forward" else "forward"))
        return backwards and backwards._replace(kind=task.kind)


def simulate(schedule: Schedule, seconds: Callable[[Task], float], transfer_s: float = 0.0) -> list[list[Interval]]:
    """The intervals of every stage from time 0, for `intervals.bubble`.

    Args:
        seconds: how long a step takes.
        transfer_s: from the moment when both sides of a transfer are ready until it is done.
    """
    programs = [list(_program(schedule, stage)) for stage in range(schedule.stages)]
    place, now = [0] * schedule.stages, [0.0] * schedule.stages
    posts: dict[Task, list[float]] = {}
    done: list[list[Interval]] = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while place[stage] < len(program):
                match program[place[stage]]:
                    case _Compute(task):
                        end = now[stage] + seconds(task)
                        done[stage].append(Interval.of(task.kind, stage, task.chunk, task.micro_batch, now[stage], end))
                        now[stage] = end
                    case _Post(transfers):
                        for transfer in transfers:
                            posts.setdefault(transfer, []).append(now[stage])
                    case _Wait(transfers):
                        if any(len(posts.get(transfer, ())) < 2 for transfer in transfers):
                            break
                        now[stage] = max([now[stage], *(max(posts[transfer]) + transfer_s for transfer in transfers)])
                place[stage] += 1
                moved = True
    stuck = [stage for stage, program in enumerate(programs) if place[stage] < len(program)]
    if stuck:
        raise RuntimeError(f"{schedule}: stages {stuck} wait for one another")
    return done


_Program = Iterator[_Compute | _Post | _Wait]


def _program(schedule: Schedule, stage: int) -> _Program:
    if schedule.stages > 1 and schedule.chunks > 1:
        return _interleaved(schedule, stage)
    return _one_forward_one_backward(schedule, stage)


class _Ports:
    """The transfers of one stage."""

    def __init__(self, schedule: Schedule, stage: int):
        self._schedule = schedule
        self.forward = schedule.tasks("forward", stage)
        self.backward = [] if schedule.forward_only else schedule.tasks("backward", stage)

    def out(self, task: Task) -> tuple[Task, ...]:
        target = self._schedule.target(task)
        return (target,) if target else ()

    def into(self, tasks: list[Task], index: int) -> tuple[Task, ...]:
        """The input of a stage's step number `index`, which may be one too many."""
        return (tasks[index],) if index < len(tasks) and self._schedule.source(tasks[index]) else ()


def _exchange(*transfers: Task) -> _Program:
    """Both directions at once, and no step until all is done."""
    if transfers:
        yield _Post(transfers)
        yield _Wait(transfers)


def _one_forward_one_backward(schedule: Schedule, stage: int) -> _Program:
    ports = _Ports(schedule, stage)
    forward, backward, warm_up = ports.forward, ports.backward, schedule.warm_up(stage)
    for index in range(warm_up):
        yield from _exchange(*ports.into(forward, index))
        yield _Compute(forward[index])
        yield from _exchange(*ports.out(forward[index]))
    if schedule.forward_only:
        return
    yield from _exchange(*ports.into(forward, warm_up))
    steady = len(forward) - warm_up
    for index in range(steady):
        yield _Compute(forward[warm_up + index])
        yield from _exchange(*ports.out(forward[warm_up + index]), *ports.into(backward, index))
        yield _Compute(backward[index])
        yield from _exchange(*ports.out(backward[index]), *ports.into(forward, warm_up + index + 1))
    for index in range(steady, len(backward)):
        yield from _exchange(*ports.into(backward, index))
        yield _Compute(backward[index])
        yield from _exchange(*ports.out(backward[index]))


def _interleaved(schedule: Schedule, stage: int) -> _Program:
    ports = _Ports(schedule, stage)
    forward, backward, warm_up = ports.forward, ports.backward, schedule.warm_up(stage)
    steady = len(forward) - warm_up
    overlap = schedule.overlap and steady > 0
    first_gradient = ports.into(backward, 0)
    yield from _exchange(*ports.into(forward, 0))
    for index in range(warm_up):
        yield _Compute(forward[index])
        along = first_gradient if index == warm_up - 1 and steady and not overlap else ()
        yield from _exchange(*ports.out(forward[index]), *ports.into(forward, index + 1), *along)
    if overlap:
        yield _Post(first_gradient)
        yield from _steady_overlapped(ports, warm_up, steady)
    for index in range(0 if overlap else steady):
        yield _Compute(forward[warm_up + index])
        yield _Compute(backward[index])
        outputs = *ports.out(forward[warm_up + index]), *ports.out(backward[index])
        yield from _exchange(*outputs, *ports.into(forward, warm_up + index + 1), *ports.into(backward, index + 1))
    if not schedule.forward_only and not steady:
        yield from _exchange(*first_gradient)
    for index in range(steady, len(backward)):
        yield _Compute(backward[index])
        yield from _exchange(*ports.out(backward[index]), *ports.into(backward, index + 1))


def _steady_overlapped(ports: _Ports, warm_up: int, steady: int) -> _Program:
    """A transfer is waited for when its tensor is needed, a send when the next one has been started."""
    sent: dict[str, tuple[Task, ...]] = {"forward": (), "backward": ()}
    for index in range(steady):
        for tasks, number in ((ports.forward, warm_up + index), (ports.backward, index)):
            task = tasks[number]
            if number > warm_up or task.kind == "backward":  # the first forward's input came with the warm-up
                yield _Wait(ports.into(tasks, number))
            yield _Compute(task)
            yield _Post((*ports.out(task), *ports.into(tasks, number + 1)))
            yield _Wait(sent[task.kind])
            sent[task.kind] = ports.out(task)
    yield _Wait(ports.into(ports.backward, steady))
