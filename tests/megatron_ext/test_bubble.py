"""The bubble meter on pipelines whose steps take known times, under Megatron's real schedules over gloo."""

import itertools
import time
from unittest import mock

import pytest
import torch

from hybridflow.planner.schedule import Schedule, Task, simulate
from megatron_ext.intervals import Interval, bubble
from megatron_ext.layout import Layout
from tests.virtual_time import VirtualTime

ROUNDING = 1e-5  # seconds, of differences of the wall clock's
SLEPT = 0.08  # seconds of the host's clock that a unit of time is, where stages really sleep
CASES = {
    "1f1b": Schedule(4, 6),
    "1f1b-forward-only": Schedule(4, 6, forward_only=True),
    "1f1b-fewer-micro-batches-than-stages": Schedule(4, 2),
    "interleaved": Schedule(4, 4, 4),
    "interleaved-overlapped": Schedule(4, 8, 2, overlap=True),
    "interleaved-forward-only": Schedule(4, 4, 2, forward_only=True),
}
ASLEEP = ("1f1b", "interleaved")


def equal(task: Task) -> float:
    return 1.0 if task.kind == "forward" else 1.5


def unlike(task: Task) -> float:
    """A slow last stage and a slow micro-batch."""
    return equal(task) * (1 + 0.5 * (task.stage == 3) + 0.75 * (task.micro_batch == 1))


TIMES = (equal, unlike)


class Naps:
    """In place of the module `time`: what was really slept."""

    def __init__(self):
        self.taken: list[tuple[float, float]] = []

    def sleep(self, seconds: float) -> None:
        started = time.perf_counter()
        time.sleep(seconds * SLEPT)
        self.taken.append((started, time.perf_counter()))


def in_virtual_time(cases: dict) -> dict:
    """By case and times: this rank's intervals, and what the last stage made of the micro-batches."""
    from benchmarks import sleeping_stages
    from megatron_ext import bubble

    kept = {}
    for name, schedule in cases.items():
        for seconds in TIMES:
            with VirtualTime().passes_in(sleeping_stages, bubble):
                kept[name, seconds.__name__] = _one_pass(name, schedule, seconds)
    return kept


def asleep(cases: dict) -> dict:
    """By case: this rank's intervals, and its naps."""
    from benchmarks import sleeping_stages

    kept = {}
    for name, schedule in cases.items():
        with mock.patch.object(sleeping_stages, "time", Naps()) as naps:
            intervals, _ = _one_pass(name, schedule, unlike)
        kept[name] = intervals, naps.taken
    return kept


def _one_pass(name: str, schedule: Schedule, seconds) -> tuple[list[Interval], list[float]]:
    from benchmarks.sleeping_stages import SleepingStage
    from megatron_ext.bubble import BubbleMeter
    from megatron_ext.parallel import ParallelState

    state = ParallelState(name, Layout(schedule.stages, pp=schedule.stages, vpp=schedule.chunks), seed=1)
    meter = BubbleMeter(state.coordinates.pp)
    with state.current():
        torch.distributed.barrier()
        with meter.watch():
            outputs = SleepingStage(schedule, state.coordinates.pp, seconds).run()
    (intervals,) = meter.take()
    assert meter.take() == []
    return intervals, outputs


@pytest.fixture(scope="module")
def exact(worlds) -> list:
    return worlds(4).run(in_virtual_time, CASES)


@pytest.mark.parametrize("seconds", TIMES)
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_there_when_it_took_place(exact: list, case: str, seconds):
    schedule = CASES[case]
    measured = [rank[case, seconds.__name__] for rank in exact]
    assert [intervals for intervals, _ in measured] == simulate(schedule, seconds)
    for rank, (_, outputs) in enumerate(measured):
        assert sorted(outputs) == list(range(schedule.micro_batches)) * (rank == 3)
    if seconds is equal:
        assert bubble([[intervals for intervals, _ in measured]]).mean == pytest.approx(schedule.bubble_of_step)


def test_every_nap_lies_in_an_interval_of_its_own(worlds):
    """By the host's clock, whatever else the machine does: an interval is no shorter than its nap, and what lies between two
    intervals no longer than what lies between their naps."""
    started = time.time()
    ranks = worlds(4).run(asleep, {name: CASES[name] for name in ASLEEP})
    for case in ASLEEP:
        for intervals, naps in (rank[case] for rank in ranks):
            assert started < intervals[0].start_s and intervals[-1].end_s < time.time()
            for one, (begun, ended) in zip(intervals, naps, strict=True):
                assert one.end_s - one.start_s > ended - begun - ROUNDING
            steps, slept = itertools.pairwise(intervals), itertools.pairwise(naps)
            for (one, after), ((_, ended), (begun, _)) in zip(steps, slept, strict=True):
                assert after.start_s - one.end_s < begun - ended + ROUNDING


def test_without_a_watch_the_schedules_are_upstreams_own():
    from megatron.core.pipeline_parallel import schedules

    from megatron_ext.bubble import BubbleMeter

    own = schedules.forward_step, schedules.backward_step
    with pytest.raises(RuntimeError, match="inside"), BubbleMeter(0).watch():
        assert schedules.forward_step is not own[0]
        raise RuntimeError("inside")
    assert (schedules.forward_step, schedules.backward_step) == own


@pytest.mark.gpu
def test_events_on_a_gpu_are_on_the_hosts_clock():
    """A kernel that takes a known number of cycles, in a step of a schedule without stages."""
    from megatron_ext.bubble import BubbleMeter

    def step(*_, **__):
        torch.cuda._sleep(200_000_000)
        return torch.zeros(()), 0

    meter, started = BubbleMeter(0), time.time()
    with meter.watch():
        meter._forward(step, current_microbatch=0)
        submitted = time.time() - started
    ((interval,),) = meter.take()
    assert started - 1e-3 < interval.start_s < interval.end_s < time.time()
    assert interval.end_s - interval.start_s > 2 * submitted


def test_the_same_pass_as_intervals():
    assert Interval.of("backward", 1, 2, 3, 4.0, 5.0) == ("B3.2", 4.0, 5.0, 1, 2, 3, "backward")
