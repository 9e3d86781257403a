"""Seconds of passes and rollouts: the span of a schedule against a simulated one, and how costs follow from sizes."""

import dataclasses
import statistics
from itertools import product

import pytest

from hybridflow.planner.calibration import GIB, Calibration
from hybridflow.planner.counts import chunk_layers
from hybridflow.planner.generation import EngineTask, reshard_seconds, rollout
from hybridflow.planner.hardware import Cluster, named
from hybridflow.planner.passes import Machine, Micro, Task, forward_pass, span, update_pass
from hybridflow.planner.schedule import Schedule, simulate
from hybridflow.planner.schedule import Task as ScheduledTask
from megatron_ext.intervals import bubble
from megatron_ext.layout import Layout, Split
from tests.planner.models import h200s, shape

HF = shape("qwen2_7b")
MACHINE = Machine(h200s(8))


def simulated_1f1b(forward: list[float], backward: list[float], micro_batches: int) -> float:
    """Seconds until the last backward: every stage in 1F1B order, each piece of work as soon as its inputs are there."""
    stages = len(forward)
    order = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        work = [("f", n) for n in range(warm_up)]
        for n in range(micro_batches - warm_up):
            work += [("f", warm_up + n), ("b", n)]
        order.append(work + [("b", n) for n in range(micro_batches - warm_up, micro_batches)])
    done: dict[tuple, float] = {}
    clock, at = [0.0] * stages, [0] * stages
    while any(at[stage] < len(order[stage]) for stage in range(stages)):
        for stage in range(stages):
            if at[stage] == len(order[stage]):
                continue
            kind, n = order[stage][at[stage]]
            before = stage - 1 if kind == "f" else stage + 1
            if 0 <= before < stages and (kind, n, before) not in done:
                continue
            start = max(clock[stage], done.get((kind, n, before), 0.0))
            clock[stage] = done[kind, n, stage] = start + (forward if kind == "f" else backward)[stage]
            at[stage] += 1
    return max(clock)


@pytest.mark.parametrize("micro_batches", [4, 8, 32])
@pytest.mark.parametrize("forward", [[1.0, 1.0], [1.0, 1.2], [1.2, 1.0], [1.0] * 4, [1.0, 1.1, 1.0, 1.3]])
def test_span_of_1f1b_is_that_of_a_simulated_one(forward, micro_batches):
    simulated = simulated_1f1b(forward, [2 * seconds for seconds in forward], micro_batches)
    found = span([3 * seconds for seconds in forward], micro_batches)
    assert simulated * (1 - 1e-9) <= found <= simulated * (1 + 0.2 / micro_batches)  # exact where stages are even
    if len(set(forward)) == 1:
        assert found == pytest.approx(simulated)


def test_span_of_uneven_stages_is_near_the_simulated_schedule():
    """28, 32 and 64 layers beside an output layer that takes as long as about two, split evenly and with it counted."""
    errors = []
    for layers, pp, vpp, loss in product((28, 32, 64), (2, 4, 8), (1, 2, 4), (0, 2)):
        if layers < pp * vpp + loss:
            continue
        chunks = chunk_layers(layers, pp, vpp, Split(loss=loss))

        def seconds(task: ScheduledTask, chunks=chunks, pp=pp, vpp=vpp) -> float:
            last = task.stage == pp - 1 and task.chunk == vpp - 1
            return (chunks[task.stage][task.chunk] + 2.2 * last) * (2 if task.kind == "backward" else 1)

        stages = [3 * sum(stage) for stage in chunks]
        stages[-1] += 3 * 2.2
        for micro_batches in (pp, 2 * pp):
            simulated = bubble([simulate(Schedule(pp, micro_batches, vpp), seconds)]).span_s
            errors.append(span(stages, micro_batches, vpp) / simulated - 1)
    assert len(errors) > 80 and max(map(abs, errors)) < 0.08
    assert statistics.fmean(map(abs, errors)) < 0.0125


def test_interleaving_divides_the_bubble():
    assert span([3.0, 3.0], 8) - 24 == 2 * (span([3.0, 3.0], 8, vpp=2) - 24) == 3.0


def test_an_update_is_three_forward_passes_of_matrix_products():
    task = Task(HF, Layout(8), Micro(4096, 4096 * 1024), 4)
    forward, update = forward_pass(MACHINE, task), update_pass(MACHINE, task)
    assert update.causes["matrix products"] == pytest.approx(3 * forward.causes["matrix products"])
    again = update_pass(MACHINE, dataclasses.replace(task, recompute="full"))
    layers = sum(forward.causes[name] for name in ("attention", "element-wise", "launches"))
    assert again.causes["recomputation"] > layers
    assert again.seconds < update.seconds + forward.seconds
    assert again.activations[0] < 0.3 * update.activations[0]


def test_fill_ups_of_the_interleaved_schedule_are_counted():
    task = Task(HF, Layout(4, pp=4, vpp=2), Micro(4096, 4096 * 1024), 5)
    assert task.runs == 8
    full = dataclasses.replace(task, micro_batches=8)
    assert update_pass(MACHINE, task).seconds == update_pass(MACHINE, full).seconds


def test_groups_over_several_nodes_go_over_the_network():
    inside, outside = (Machine(Cluster(named("H200"), 2, size)) for size in (16, 8))
    received = 10e9
    # eight adapters of a node bring in as much as its wire, one of them far less
    assert inside.collective(received, 16, 1) == outside.collective(received, 16, 1) < outside.collective(received, 2, 8)
    assert outside.collective(received, 8, 1) == inside.collective(received, 8, 1)
    assert outside.collective(received, 1, 1) == 0


def engine(**changes) -> EngineTask:
    weights = 2 * 7.6e9 / changes.get("tp", 1)
    task = EngineTask(HF, 1, 64, 16, 100, 1000, memory=84 * GIB, weights=weights)
    return dataclasses.replace(task, **changes)


def test_decoding_reads_weights_and_cache_in_every_step():
    gpu = named("H200")
    ideal = Machine(Cluster(gpu, 1, 8), Calibration(decode_memory=1.0, matrix=1.0))
    causes = rollout(ideal, engine())
    assert causes["weights"] == pytest.approx(1000 * 2 * 7.6e9 / gpu.memory_bytes_per_second)
    tokens = 64 * (100 + 1000 / 2)  # a sequence is half grown on average
    assert causes["KV cache"] == pytest.approx(1000 * tokens * 2 * 2 * 28 * 4 * 128 / gpu.memory_bytes_per_second)
    assert "TP transfers" not in causes and "matrix products" not in causes
    many = rollout(ideal, engine(samples=1000, memory=10_000 * GIB))
    assert "matrix products" in many and "weights" not in many  # enough rows to be bound by arithmetic
    assert rollout(ideal, engine(tp=2))["weights"] == pytest.approx(causes["weights"] / 2)


def test_what_the_cache_does_not_hold_waits():
    roomy = engine()
    assert roomy.concurrency == 64
    tight = engine(memory=roomy.weights + 32 * roomy.sequence_bytes)
    assert tight.concurrency == 32
    assert engine(max_sequences=16).concurrency == 16
    assert engine(memory=roomy.weights).concurrency == 0
    assert sum(rollout(MACHINE, tight).values()) > sum(rollout(MACHINE, roomy).values())


def test_resharding_seconds_are_near_the_measured_ones():
    """Two H200s, 7.6B parameters in bf16: benchmarks/results/reshard_h200x2_engine_*.json."""
    machine = Machine(h200s(2))
    tp2 = Layout(2, tp=2, sequence_parallel=True)
    measured = [(tp2, 1, 0.0305), (Layout(2, pp=2), 1, 0.0339), (tp2, 2, 0.0042), (Layout(2, pp=2), 2, 0.0183)]
    for layout, tp, seconds in measured:
        assert reshard_seconds(machine, HF, layout, tp, 2, False) == pytest.approx(seconds, rel=0.35)
