"""A pipeline whose steps take known times: stages that sleep, under Megatron's real schedules and transfers.

Sleeping takes no processor, so that a few cores hold many stages, and what each step should take is known exactly.
"""

import time
from collections.abc import Callable

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from hybridflow.planner.schedule import Schedule, Task

HIDDEN, TOKENS = 8, 4
Seconds = Callable[[Task], float]


class _Sleep(torch.autograd.Function):
    """Hands its input through, slowly in both directions."""

    @staticmethod
    def forward(ctx, value: Tensor, seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class SleepingChunk(torch.nn.Module):
    """One chunk of a stage, as Megatron's schedules want it."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, stage: int, chunk: int, first: bool, seconds: Seconds):
        super().__init__()
        self.config, self.stage, self.vp_stage = config, stage, chunk
        self._first, self._seconds, self._input = first, seconds, None
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))

    def set_input_tensor(self, tensors: list[Tensor]) -> None:
        self._input = tensors[0]

    def forward(self, micro_batch: int) -> Tensor:
        value = torch.full((TOKENS, 1, HIDDEN), float(micro_batch)) if self._first else self._input
        forward, backward = (
            self._seconds(Task(kind, self.stage, self.vp_stage, micro_batch)) for kind in ("forward", "backward")
        )
        return _Sleep.apply(value * self.weight, forward, backward)


class SleepingStage:
    """This rank's chunks of a pipeline over all ranks; make and run it inside `ParallelState.current()`."""

    def __init__(self, schedule: Schedule, stage: int, seconds: Seconds):
        self._schedule = schedule
        config = TransformerConfig(
            num_layers=schedule.stages * schedule.chunks,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            pipeline_model_parallel_size=schedule.stages,
            virtual_pipeline_model_parallel_size=schedule.chunks if schedule.chunks > 1 else None,
            pipeline_dtype=torch.float32,
            calculate_per_token_loss=True,
            batch_p2p_comm=False,
            overlap_p2p_comm=schedule.overlap,
        )
        chunks = range(schedule.chunks)
        self._chunks = [SleepingChunk(config, stage, chunk, stage == chunk == 0, seconds) for chunk in chunks]

    def run(self) -> list[float]:
        """One pass; the last stage returns what it made of every micro-batch: its number."""
        iterators = [iter(range(self._schedule.micro_batches)) for _ in self._chunks]
        single = len(self._chunks) == 1
        return get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self._chunks[0] if single else self._chunks,
            num_microbatches=self._schedule.micro_batches,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=self._schedule.forward_only,
        )


def _forward_step(iterator, model: SleepingChunk):
    output = model(next(iterator))

    def loss(last: Tensor) -> tuple[Tensor, Tensor, float]:
        return last.mean(), torch.ones((), dtype=torch.int), last.mean().item()

    return output, loss
