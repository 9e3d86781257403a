"""The bubble meter on pipelines whose steps take known times, under Megatron's real schedules over gloo."""

import time

import pytest
import torch

from hybridflow.planner.schedule import Schedule, Task, simulate
from megatron_ext.intervals import Interval, bubble
from megatron_ext.layout import Layout

POINTS = 0.02  # of the span
FORWARD, BACKWARD = 0.08, 0.12  # seconds: a transfer between two of four ranks on two cores takes about one hundredth of them
# what else the machine does only ever makes a pass longer: the shortest of so many counts, fewer when one is as short as can be
MOST_PASSES = 10
CASES = {
    "1f1b": Schedule(4, 6),
    "1f1b-forward-only": Schedule(4, 6, forward_only=True),
    "1f1b-fewer-micro-batches-than-stages": Schedule(4, 2),
    "interleaved": Schedule(4, 4, 4),
    "interleaved-overlapped": Schedule(4, 8, 2, overlap=True),
    "interleaved-forward-only": Schedule(4, 4, 2, forward_only=True),
}


def equal(task: Task) -> float:
    return FORWARD if task.kind == "forward" else BACKWARD


def unlike(task: Task) -> float:
    """A slow last stage and a slow micro-batch."""
    return equal(task) * (1 + 0.5 * (task.stage == 3) + 0.7 * (task.micro_batch == 1))


# where steps of unlike length are measured too
RUNS = [(case, equal) for case in CASES] + [(case, unlike) for case in ("1f1b", "interleaved-overlapped")]


def measure(cases: dict) -> dict:
    """By run: this rank's intervals, and what the last stage made of the micro-batches."""
    from benchmarks.sleeping_stages import SleepingStage
    from megatron_ext.bubble import BubbleMeter
    from megatron_ext.parallel import ParallelState

    found = {}
    for name, schedule in cases.items():
        state = ParallelState(name, Layout(schedule.stages, pp=schedule.stages, vpp=schedule.chunks), seed=1)
        meter = BubbleMeter(state.coordinates.pp)
        with state.current():
            SleepingStage(schedule, state.coordinates.pp, lambda task: 0.0).run()  # gloo connects at the first transfer
            for seconds in (run[1] for run in RUNS if run[0] == name):
                stage = SleepingStage(schedule, state.coordinates.pp, seconds)
                least = bubble([simulate(schedule, seconds)]).span_s
                elapsed, passes = torch.tensor(torch.inf), 0
                while elapsed > 1.015 * least and passes < MOST_PASSES:
                    torch.distributed.barrier()
                    started = time.perf_counter()
                    with meter.watch():
                        outputs = stage.run()
                    elapsed, passes = torch.tensor(time.perf_counter() - started), passes + 1
                    torch.distributed.all_reduce(elapsed, op=torch.distributed.ReduceOp.MAX)
                found[name, seconds.__name__] = meter.take(), outputs
    assert meter.take() == []
    return found


@pytest.fixture(scope="module")
def measured(worlds) -> list:
    started = time.time()
    ranks = worlds(4).run(measure, CASES, timeout=500)
    every = (interval for rank in ranks for passes, _ in rank.values() for one in passes for interval in one)
    assert all(started < interval.start_s <= interval.end_s < time.time() for interval in every)
    return ranks


@pytest.mark.timeout(540)
@pytest.mark.parametrize(("case", "seconds"), RUNS)
def test_within_two_points_of_the_exact_value(measured: list, case: str, seconds):
    schedule = CASES[case]
    passes = zip(*(rank[case, seconds.__name__][0] for rank in measured), strict=True)
    found = min((bubble([one]) for one in passes), key=lambda one: one.span_s)
    exact = bubble([simulate(schedule, seconds)])
    assert found.stages == pytest.approx(exact.stages, abs=POINTS)
    if seconds is equal:
        assert found.mean == pytest.approx(schedule.bubble_of_step, abs=POINTS)


@pytest.mark.timeout(540)
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_there_once_and_in_the_schedules_order(measured: list, case: str):
    schedule = CASES[case]
    for rank, simulated in zip(measured, simulate(schedule, equal), strict=True):
        passes, outputs = rank[case, "equal"]
        assert 1 <= len(passes) <= MOST_PASSES
        for intervals in passes:
            assert [(i.name, *i[3:]) for i in intervals] == [(i.name, *i[3:]) for i in simulated]
        assert sorted(outputs) == list(range(schedule.micro_batches)) * (rank is measured[-1])


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
