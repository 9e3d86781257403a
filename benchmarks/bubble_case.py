"""One row of the bubble benchmark: a layout and a number of micro-batches, run, metered and held against theory."""

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bandwidth import most
from benchmarks.random_weights import fill_model
from benchmarks.sleeping_stages import SleepingStage
from hybridflow.data.packing import partition
from hybridflow.planner.schedule import Schedule, Task, simulate
from megatron_ext import device, step, weights
from megatron_ext.bubble import BubbleMeter
from megatron_ext.hf_config import HFConfig
from megatron_ext.intervals import Interval, Pass, bubble
from megatron_ext.layers import default_spec
from megatron_ext.layout import Layout
from megatron_ext.model import build_model, transformer_config
from megatron_ext.optimizer import wrap
from megatron_ext.parallel import ParallelState

WARM_UP = 2  # passes


class Row(NamedTuple):
    layout: Layout
    micro_batches: int

    @property
    def name(self) -> str:
        return f"{self.layout.describe()}, {self.micro_batches} micro-batches"

    def schedule(self, forward_only: bool, overlap: bool) -> Schedule:
        """Raises ValueError: it does not take this number of micro-batches."""
        layout = self.layout
        return Schedule(layout.pp, self.micro_batches, layout.vpp, forward_only, overlap and layout.vpp > 1)


@dataclass(frozen=True)
class Work:
    """What every row does: the same sequences, whatever its layout.

    Attributes:
        lengths: tokens of each sequence of the global batch.
        sleep: instead of a model, stages that sleep: seconds of all forward steps of a stage; 0: the model.
        cost: rounds in which passes with the meter and without it take turns; 0: none.
    """

    hf: HFConfig
    dtype: torch.dtype
    lengths: tuple[int, ...]
    repeat: int
    forward_only: bool = False
    seed: int = 1
    recompute: str = "none"
    overrides: Mapping[str, Any] | None = None
    sleep: float = 0.0
    cost: int = 0


class _Pipeline(Protocol):
    overlap: bool

    def run(self) -> float | None:
        """One pass; the loss, on all ranks."""


class _Model:
    """The model with random weights, its micro-batches, and a loss like a policy gradient's."""

    def __init__(self, row: Row, work: Work, state: ParallelState):
        self._work, self._state, layout = work, state, row.layout
        spec, rank = default_spec(work.dtype), dist.get_rank()
        config = transformer_config(work.hf, layout, work.dtype, work.recompute, work.overrides)
        self.overlap = config.overlap_p2p_comm
        self._chunks = build_model(work.hf, layout, config, spec)
        parameters = {name: p.detach() for name, p in weights.named_parameters(self._chunks).items()}
        fill_model(parameters, weights.tile_map(work.hf, layout, rank, spec), weights.hf_shapes(work.hf))
        self._wrapped = wrap(self._chunks, config)
        self._micro_batches = self._pack(row)

    def _pack(self, row: Row) -> list[step.MicroBatch]:
        generator = torch.Generator().manual_seed(self._work.seed)
        sequences = [
            {
                "tokens": torch.randint(self._work.hf.vocab_size, (n,), generator=generator),
                "weight": torch.rand(n, generator=generator),
            }
            for n in self._work.lengths
        ]
        mine = sequences[self._state.coordinates.dp :: row.layout.dp]
        lengths = [len(sequence["tokens"]) for sequence in mine]
        budget = sum(lengths) + row.layout.tp  # as many as there are: the number of micro-batches is given
        parts = partition(lengths, budget, row.layout.tp, row.micro_batches, self._work.hf.attention_cost)
        longest = torch.tensor(max(sum(lengths[i] for i in part) for part in parts), device=device.current())
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        length = -(-int(longest) // row.layout.tp) * row.layout.tp
        return [step.pack([mine[i] for i in part], length) for part in parts]

    def run(self) -> float:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        if self._work.forward_only:
            rows = step.forward(self._chunks, self._micro_batches)
            sums = rows and {
                "loss": -sum(row["log_probs"].sum() for row in rows),
                "count": sum(len(r["log_probs"]) for r in rows),
            }
        else:
            sums = step.forward_backward(self._wrapped, self._micro_batches, _policy_loss)
        return _mean_loss(sums if self._state.coordinates.tp == 0 else None)


class _Sleep:
    """Stages that sleep for known times, the same work in every layout; backward takes twice as long."""

    overlap = False

    def __init__(self, row: Row, work: Work, state: ParallelState):
        forward = work.sleep / (row.micro_batches * row.layout.vpp)
        schedule = row.schedule(work.forward_only, self.overlap)
        self._expected = list(range(row.micro_batches)) if state.is_last_stage else []
        self._stage = SleepingStage(
            schedule, state.coordinates.pp, lambda task: forward * (2 if task.kind == "backward" else 1)
        )

    def run(self) -> None:
        if sorted(self._stage.run()) != self._expected:
            raise RuntimeError("micro-batches were lost or mixed up on their way through the stages")


def measure(row: Row, work: Work) -> dict[str, Any]:
    """All figures of a row, the same on every rank. Collective."""
    state = ParallelState(row.name, row.layout, work.seed)
    meter = BubbleMeter(state.coordinates.pp)
    with state.current():
        pipeline: _Pipeline = (_Sleep if work.sleep else _Model)(row, work, state)
        for _ in range(WARM_UP):
            pipeline.run()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        timed = [_timed(pipeline, meter.watch) for _ in range(work.repeat)]
        peak = most(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, meter.take())
        cost = _cost_of(meter, pipeline, work.cost) if work.cost else None
    passes = list(zip(*ranks, strict=True))
    schedule = row.schedule(work.forward_only, pipeline.overlap)
    del pipeline
    gc.collect()
    seconds, losses = zip(*timed, strict=True)
    return {
        "layout": row.layout.describe(),
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "micro_batches": schedule.micro_batches,
        "schedule": "1F1B"
        if schedule.chunks == 1
        else "interleaved, transfers overlapped"
        if schedule.overlap
        else "interleaved",
        "loss": losses[-1],
        "seconds": {"median": statistics.median(seconds), "best": min(seconds), "all": seconds},
        "tokens_per_second": sum(work.lengths) / statistics.median(seconds),
        "peak_allocated_bytes": peak,
        "meter": cost,
        **figures(schedule, passes),
    }


def _cost_of(meter: BubbleMeter, pipeline: _Pipeline, rounds: int) -> dict[str, Any]:
    """What the meter costs while it is on: a pass with it and one without in every round, the first of them in turn."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(rounds):
        for name in ("on", "off") if number % 2 else ("off", "on"):
            around = meter.watch if name == "on" else contextlib.nullcontext
            seconds[name].append(_timed(pipeline, around)[0])
    meter.take()
    return meter_cost(seconds["on"], seconds["off"])


def meter_cost(on: Sequence[float], off: Sequence[float]) -> dict[str, Any]:
    """Medians, and by how much a pass is longer with the meter: the median over the rounds, as a share of a pass without it."""
    shares = [slow / fast - 1 for slow, fast in zip(on, off, strict=True)]
    medians = {"on": statistics.median(on), "off": statistics.median(off)}
    return {"seconds": medians, "cost": statistics.median(shares), "all_on": list(on), "all_off": list(off)}


def figures(schedule: Schedule, passes: Sequence[Pass]) -> dict[str, Any]:
    """Measured bubbles beside the closed forms and the simulated schedule: shares of the step, of the median pass.

    The parts add up to measured - closed form: `imbalance` of stages and chunks (their mean times, simulated, against equal
    ones), `unevenness` of micro-batches and jitter (every step's own time, simulated, against the mean times), and
    `communication` (measured against simulated: transfers that nothing hides, and the host's time between two steps).
    """
    measured = [bubble([one]) for one in passes]
    typical = sorted(range(len(passes)), key=lambda i: measured[i].mean)[(len(passes) - 1) // 2]
    own = step_seconds(passes[typical])
    simulated = bubble([simulate(schedule, own.__getitem__)])
    even = bubble([simulate(schedule, functools.partial(_mean_over_micro_batches, own))])
    found = measured[typical]
    return {
        "closed_form_of_ideal_time": schedule.bubble_of_ideal_time,
        "closed_form_of_step": schedule.bubble_of_step,
        "simulated": {"mean": simulated.mean, "max": simulated.max, "span_seconds": simulated.span_s},
        "measured": {
            "mean": found.mean,
            "max": found.max,
            "stages": found.stages,
            "span_seconds": found.span_s,
            "all_means": [one.mean for one in measured],
        },
        "residual": found.mean - simulated.mean,
        "parts": {
            "imbalance": even.mean - schedule.bubble_of_step,
            "unevenness": simulated.mean - even.mean,
            "communication": found.mean - simulated.mean,
        },
        "stage_seconds": {
            f"{kind} stage {stage} chunk {chunk}": statistics.fmean(times)
            for (kind, stage, chunk), times in _by_chunk(own).items()
        },
        "drawn": [[list(interval) for interval in rank] for rank in _one_replica(passes[typical])],
    }


def step_seconds(ranks: Pass) -> dict[Task, float]:
    """How long each step took: the mean of the ranks of a stage."""
    times: dict[Task, list[float]] = {}
    for interval in (interval for rank in ranks for interval in rank):
        task = Task(interval.kind, interval.stage, interval.chunk, interval.micro_batch)
        times.setdefault(task, []).append(interval.end_s - interval.start_s)
    return {task: statistics.fmean(values) for task, values in times.items()}


def _by_chunk(own: Mapping[Task, float]) -> dict[tuple[str, int, int], list[float]]:
    times: dict[tuple[str, int, int], list[float]] = {}
    for task, value in own.items():
        times.setdefault(task[:3], []).append(value)
    return times


def _mean_over_micro_batches(own: Mapping[Task, float], task: Task) -> float:
    return statistics.fmean(value for other, value in own.items() if other[:3] == task[:3])


def _one_replica(ranks: Pass) -> list[Sequence[Interval]]:
    """The first rank of every stage, from time 0."""
    first: dict[int, Sequence[Interval]] = {}
    for rank in ranks:
        first.setdefault(rank[0].stage, rank)
    begin = min(rank[0].start_s for rank in first.values())
    return [[i._replace(start_s=i.start_s - begin, end_s=i.end_s - begin) for i in first[stage]] for stage in sorted(first)]


def _timed(pipeline: _Pipeline, around: Callable[[], contextlib.AbstractContextManager]) -> tuple[float, float | None]:
    """Seconds of the slowest rank, from a barrier until the device is done, the reduction of gradients included."""
    device.synchronize()
    dist.barrier()
    started = time.perf_counter()
    with around():
        loss = pipeline.run()
    device.synchronize()
    seconds = torch.tensor(time.perf_counter() - started, device=device.current())
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item(), loss


def _policy_loss(log_probs: Tensor, entropy: Tensor, micro_batch: step.MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = -(log_probs * micro_batch.fields["weight"]).sum()  # 0 where a token has no next one, and in padding
    count = torch.tensor(sum(micro_batch.lengths), dtype=torch.int, device=log_probs.device)
    return total, count, {"loss": total.detach(), "count": count}


def _mean_loss(sums: Mapping[str, Tensor] | None) -> float:
    own = [0.0, 0.0] if sums is None else [float(sums["loss"]), float(sums["count"])]
    total = torch.tensor(own, dtype=torch.float64, device=device.current())
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
