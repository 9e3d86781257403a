"""Megatron's distributed optimizer with fp32 master weights, and the learning-rate schedule.

AdamW as PyTorch and HF define it: decoupled weight decay on matrices, none on biases and norms. The kernels are Transformer
Engine's, apex's or torch's, in the order in which Megatron finds them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext import compat

SCHEDULES = ("constant", "linear", "cosine")
ADAM_STATES = ("exp_avg", "exp_avg_sq")


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


def wrap(
    chunks: Sequence[GPTModel], config: TransformerConfig, overlap_grad_reduce: bool = False
) -> list[DistributedDataParallel]:
    """Gives the chunks contiguous parameter buffers and fp32 gradient buffers, reduced over data-parallel ranks.

    Parameters move into the buffers here: take references to them afterwards. Once per model. With `overlap_grad_reduce` a
    bucket of gradients is reduced as soon as the last micro-batch's backward has passed its parameters, which needs all of them
    to have a gradient there: experts that no token goes to have none.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap_grad_reduce,
        average_in_collective=False,  # gloo has no average, and per-token losses want the sum
        check_for_nan_in_grad=False,  # Optimizer.step skips a bad update instead of ending the run
    )
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=settings, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap_grad_reduce:  # all micro-batches but the last only add up
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


class Share(NamedTuple):
    """What a rank's optimizer keeps of one parameter: of the elements [start, stop) of the flattened local tensor.

    Attributes:
        tensors: flat fp32 by name: `exp_avg` and `exp_avg_sq` after the first update, `master` of a 16-bit parameter.
        group: the ranks that share the parameter's elements among each other.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    tensors: dict[str, Tensor]
    group: dist.ProcessGroup


class Optimizer:
    """The optimizer of one role. A new one over the same chunks starts with fresh moments and lets go of the old one's."""

    def __init__(
        self,
        wrapped: Sequence[DistributedDataParallel],
        settings: OptimizerSettings,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ):
        """Masters are copies of the parameters as they are now; after writing parameters from outside call `reload`.

        Collective over `group`, the role's ranks (`ParallelState.group`).
        """
        self.settings, self.wrapped = settings, list(wrapped)
        self.updates = 0
        self._masters_checked = False
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
        for parameter in (parameter for chunk in wrapped for parameter in chunk.parameters()):
            if hasattr(parameter, "main_param"):
                parameter.main_param = None  # through it the masters of the optimizer before this one would stay
        _empty_cache_for_states()
        with compat.gathering_over(group):
            self.megatron = get_megatron_optimizer(config, self.wrapped, config_overrides=no_decay)

    def zero_grad(self) -> None:
        """Before each forward_backward."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def reload(self) -> None:
        """Take the masters from the parameters again, after a load into a model whose optimizer exists."""
        self.megatron.reload_model_params()
        self._masters_checked = False

    def states(self) -> list[Tensor]:
        """The tensors that this rank's share of the parameters is trained with: fp32 masters and, after the first update,
        moments. Parameters in fp32 are their own masters and not among them."""
        masters = [master for master, _ in self._masters()]
        moments = [value for o in self._inner() for state in o.state.values() for value in state.values()]
        return masters + [value for value in moments if isinstance(value, Tensor) and value.dim()]  # not Adam's step

    def state_bytes(self) -> int:
        """What `states` takes once all are there: two moments beside each master, or each parameter in fp32."""
        trained = sum(p.numel() for optimizer in self._inner() for group in optimizer.param_groups for p in group["params"])
        return 4 * (2 * trained + sum(master.numel() for master, _ in self._masters()))

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Set 16-bit parameters to their masters, rounded, as after every update: each data-parallel rank its share, which
        the others gather. Collective. Afterwards the parameters are bit for bit what the last update made of them."""
        for optimizer in self.megatron.chained_optimizers:
            optimizer._copy_main_params_to_model_params()
        for chunk in self.wrapped:
            chunk.start_param_sync()

    @torch.no_grad()
    def check_masters(self) -> None:
        """Once after the masters were taken from the parameters: are the parameters their masters, rounded?

        Raises:
            RuntimeError: they aren't.
        """
        if self._masters_checked:
            return
        same = [torch.equal(master.to(parameter.dtype), parameter) for master, parameter in self._masters()]
        if not all(same):
            raise RuntimeError(
                f"{same.count(False)} of {len(same)} parameters are not what the optimizer's masters say: after writing"
                " parameters from outside call Optimizer.reload()"
            )
        self._masters_checked = True

    def shares(self) -> Iterator[Share]:
        """What this rank keeps, parameter by parameter; the tensors are the optimizer's own."""
        for optimizer in self.megatron.chained_optimizers:
            if optimizer.is_stub_optimizer:
                continue
            parameters = optimizer.model_float16_groups + optimizer.model_fp32_groups
            mains = optimizer.shard_fp32_from_float16_groups + optimizer.shard_fp32_groups
            for groups in zip(parameters, mains, strict=True):
                for parameter, main in zip(*groups, strict=True):
                    held = optimizer._get_model_param_range_map(parameter)["param"]
                    state = optimizer.optimizer.state.get(main, {})
                    tensors = {name: state[name] for name in ADAM_STATES if name in state}
                    if parameter.dtype != torch.float32:  # fp32 parameters are their own masters
                        tensors["master"] = main
                    yield Share(parameter, held.start, held.end, tensors, optimizer.data_parallel_group)

    @torch.no_grad()
    def prime(self, updates: int) -> None:
        """Give a fresh optimizer the states of one after `updates` updates, its moments still zero, for a checkpoint's to be
        read into. torch's AdamW counts its steps by parameter, each in a tensor of its own; Transformer Engine's and apex's by
        group."""
        self.updates = updates
        _empty_cache_for_states()
        for optimizer in self._inner() if updates else ():
            by_parameter = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] |= {name: torch.zeros_like(parameter) for name in ADAM_STATES}
                    if by_parameter:
                        optimizer.state[parameter]["step"] = torch.tensor(float(updates))
                if not by_parameter and group["params"]:
                    group["step"] = updates

    def adam_steps(self) -> set[int]:
        """The numbers of updates that Adam's bias correction counts with: a single one, `updates`, unless something is wrong;
        none before the first update."""
        states = {int(state["step"]) for o in self._inner() for state in o.state.values() if "step" in state}
        return states | {int(group["step"]) for o in self._inner() for group in o.param_groups if "step" in group}

    def _masters(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's fp32 masters, each with the part of a 16-bit parameter that it stands for."""
        return [
            pair
            for optimizer in self.megatron.chained_optimizers
            if not optimizer.is_stub_optimizer
            for groups in zip(optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups, strict=True)
            for pair in zip(*groups, strict=True)
        ]

    def _inner(self) -> list[torch.optim.Optimizer]:
        """Transformer Engine's, apex's or torch's own optimizers; none on a rank that trains nothing."""
        return [o.optimizer for o in self.megatron.chained_optimizers if not o.is_stub_optimizer]

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
        if not self.updates:
            _empty_cache_for_states()  # the moments are about to be made
        self.megatron.step_with_ready_grads()
        self.updates += 1
        return {"grad_norm": grad_norm, "lr": lr, "skipped": False}


def _empty_cache_for_states() -> None:
    """Before states are allocated, which stay for as long as training does: in the large blocks that torch keeps of activations
    (logits of several GB) they would hold on to each as a whole, and what is left of it is no use to an engine."""
    torch.cuda.empty_cache()
