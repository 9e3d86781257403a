"""Megatron's distributed optimizer with fp32 master weights, and the learning-rate schedule.

AdamW as PyTorch and HF define it: decoupled weight decay on matrices, none on biases and norms. The kernels are Transformer
Engine's, apex's or torch's, in the order in which Megatron finds them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer import TransformerConfig

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule. `grad_clip` 0 means no clipping; after warm-up the rate decays to `min_lr` over `decay_steps`."""

    lr: float
    grad_clip: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    warmup_steps: int = 0
    schedule: str = "constant"
    decay_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optimizer.schedule={self.schedule!r} is unknown: use one of {', '.join(SCHEDULES)}")
        if self.schedule != "constant" and self.decay_steps <= 0:
            raise ValueError(f"optimizer.schedule={self.schedule} needs optimizer.decay_steps > 0, not {self.decay_steps}")

    def lr_at(self, step: int) -> float:
        """The learning rate of the update number `step`, from 0. Warm-up ends with the first update at the full rate."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        left = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * left


def wrap(chunks: Sequence[GPTModel], config: TransformerConfig) -> list[DistributedDataParallel]:
    """Gives the chunks contiguous parameter buffers and fp32 gradient buffers, reduced over data-parallel ranks.

    Parameters move into the buffers here: take references to them afterwards. Once per model.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        average_in_collective=False,  # gloo has no average, and per-token losses want the sum
        check_for_nan_in_grad=False,  # Optimizer.step skips a bad update instead of ending the run
    )
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=settings, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


class Optimizer:
    """The optimizer of one role. A new one over the same chunks starts with fresh moments and lets go of the old one's."""

    def __init__(self, wrapped: Sequence[DistributedDataParallel], settings: OptimizerSettings, dtype: torch.dtype):
        """Masters are copies of the parameters as they are now; after writing parameters from outside call `reload`."""
        self.settings, self.wrapped = settings, list(wrapped)
        self.updates = 0
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        no_decay = get_standard_config_overrides(config)  # biases and norms; the default in 0.16, to be asked for in 0.19
        self.megatron = get_megatron_optimizer(config, self.wrapped, config_overrides=no_decay)

    def zero_grad(self) -> None:
        """Before each forward_backward."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def reload(self) -> None:
        """Take the masters from the parameters again, after a load into a model whose optimizer exists."""
        self.megatron.reload_model_params()

    @torch.no_grad()
    def step(self) -> dict[str, float | bool]:
        """Clip, update, and gather the parameters.

        Returns:
            grad_norm (before clipping, over all parameters), lr, and skipped: True when the norm isn't finite and nothing
            was changed. A skipped update does not move the schedule.
        """
        lr = self.settings.lr_at(self.updates)
        for group in self.megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            return {"grad_norm": grad_norm, "lr": lr, "skipped": True}
        for optimizer in self.megatron.chained_optimizers if self.settings.grad_clip > 0 else ():
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self.settings.grad_clip, total_norm=grad_norm)
        self.megatron.step_with_ready_grads()
        self.updates += 1
        return {"grad_norm": grad_norm, "lr": lr, "skipped": False}
