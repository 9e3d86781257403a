"""The bubble meter: when each stage works on which micro-batch, without synchronising inside the step.

    meter = BubbleMeter(stage)
    with meter.watch():
        step.forward_backward(...)      # or forward, or several of them: one `watch` each
    passes = meter.take()               # of this rank; `intervals.bubble` takes those of all ranks

On CUDA an event before and one after each forward and backward, recorded in the compute stream; on a CPU the clock. Waiting
for another stage lies between the two steps that it separates, hence outside of every interval: `wait` holds back the stream
(or the host) before a step's first event. While no `watch` is open, nothing of this runs.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from megatron_ext import compat
from megatron_ext.intervals import Interval

_Mark = Any  # a torch.cuda.Event, or seconds of the process's clock


class _Step(NamedTuple):
    kind: str
    chunk: int
    micro_batch: int
    start: _Mark
    end: _Mark


class BubbleMeter:
    """The forward and backward steps of this rank, which is part of pipeline stage `stage`. NVTX ranges have the same names."""

    def __init__(self, stage: int):
        self._stage = stage
        self._passes: list[list[_Step]] = []
        self._made: dict[int, tuple[int, int]] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Around one pass of a schedule."""
        self._passes.append([])
        with compat.around_steps(self._forward, self._backward):
            yield
        self._made.clear()

    def take(self) -> list[list[Interval]]:
        """The intervals of every pass since the last call, oldest pass first. Waits for the device."""
        anchor = _mark()
        if torch.cuda.is_available():
            anchor.synchronize()
        now = time.time()
        passes, self._passes = self._passes, []
        return [[self._interval(step, anchor, now) for step in steps] for steps in passes]

    def _interval(self, step: _Step, anchor: _Mark, now: float) -> Interval:
        start, end = now - _seconds(step.start, anchor), now - _seconds(step.end, anchor)
        return Interval.of(step.kind, self._stage, step.chunk, step.micro_batch, start, end)

    def _forward(self, step: Callable, *args, current_microbatch: int, vp_stage: int | None = None, **kwargs) -> Any:
        chunk = vp_stage or 0
        if vp_stage is not None:  # schedules without chunks don't name one
            kwargs["vp_stage"] = vp_stage
        with self._timed("forward", chunk, current_microbatch):
            result = step(*args, current_microbatch=current_microbatch, **kwargs)
        self._made[id(_tensor(result[0]))] = current_microbatch, chunk
        return result

    def _backward(self, step: Callable, input_tensor: Any, output_tensor: Any, *args) -> Any:
        # the schedules keep the very object that the forward step returned, and tell the backward step nothing else
        micro_batch, chunk = self._made.pop(id(_tensor(output_tensor)))
        with self._timed("backward", chunk, micro_batch):
            return step(input_tensor, output_tensor, *args)

    @contextlib.contextmanager
    def _timed(self, kind: str, chunk: int, micro_batch: int) -> Iterator[None]:
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(f"{kind} {micro_batch} chunk {chunk}")
        start = _mark()
        yield
        self._passes[-1].append(_Step(kind, chunk, micro_batch, start, _mark()))
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()


def _mark() -> _Mark:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: _Mark, end: _Mark) -> float:
    return start.elapsed_time(end) / 1e3 if torch.cuda.is_available() else end - start


def _tensor(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, list) else output
