"""Simulated schedules against the textbook's closed forms, and cases worked out by hand."""

import itertools

import pytest

from hybridflow.planner.schedule import Schedule, Task, simulate
from megatron_ext.intervals import bubble

SIZES = [(p, m, v) for p, v in itertools.product((2, 3, 4, 8), (1, 2, 4)) for m in (p, 2 * p, 5 * p)] + [(4, 2, 1), (4, 7, 1)]


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_steps_of_equal_length_idle_as_the_closed_forms_say(stages: int, micro_batches: int, chunks: int, backward: float):
    for forward_only, overlap in itertools.product((False, True), (False, True) if chunks > 1 else (False,)):
        schedule = Schedule(stages, micro_batches, chunks, forward_only, overlap)
        found = bubble([simulate(schedule, lambda task: 1.0 if task.kind == "forward" else backward)])
        work = micro_batches * chunks * (1.0 if forward_only else 1.0 + backward)
        assert found.stages == pytest.approx([schedule.bubble_of_step] * stages)
        assert (found.span_s - work) / work == pytest.approx(schedule.bubble_of_ideal_time)


def test_no_step_starts_before_its_input_is_there_and_none_is_left_out():
    schedule = Schedule(4, 8, 2)
    done = simulate(schedule, lambda task: 1.0 + (7 * task.stage + 5 * task.micro_batch + task.chunk) % 3)
    at = {Task(i.kind, i.stage, i.chunk, i.micro_batch): i for stage in done for i in stage}
    assert len(at) == 2 * 4 * 8 * 2
    for task, interval in at.items():
        source = schedule.source(task)
        assert source is None or at[source].end_s <= interval.start_s
        if task.kind == "backward":
            assert at[task._replace(kind="forward")].end_s <= interval.start_s
    for stage in done:
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(stage))


def test_a_slow_stage_sets_the_pace():
    """Once the pipeline is full the slowest stage never waits: its work, and the way of one micro-batch to it and back."""
    schedule = Schedule(4, 16)
    found = simulate(schedule, lambda task: 3.0 if task.stage == 2 else 1.0)
    assert bubble([found]).span_s == 16 * (3 + 3) + 2 * (1 + 1)


def test_a_transfer_delays_the_stages_behind_it():
    """Two stages, one micro-batch: forward, transfer, forward and backward, transfer, backward."""
    assert bubble([simulate(Schedule(2, 1), lambda task: 1.0, transfer_s=0.25)]).span_s == 4.5


def test_overlapped_transfers_are_hidden_in_the_steady_state():
    blocking, overlapped = (
        bubble([simulate(Schedule(4, 32, 2, overlap=overlap), lambda task: 1.0, transfer_s=0.5)]) for overlap in (False, True)
    )
    assert overlapped.mean < blocking.mean / 2


def test_one_stage_never_idles():
    found = bubble([simulate(Schedule(1, 3), lambda task: 2.0)])
    assert (found.span_s, found.stages) == (12.0, (0.0,))


@pytest.mark.parametrize(
    ("sizes", "message"), [((4, 6, 2), "6 micro-batches over pp=4 x vpp=2"), ((1, 4, 2), "pp > 1"), ((2, 0, 1), "at least")]
)
def test_what_the_schedule_does_not_take_is_refused(sizes: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        Schedule(*sizes)
