"""The actor: the policy that is trained."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.schema import ActorConfig, Config
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, remote
from hybridflow.planner.memory import memory_plan
from hybridflow.roles.megatron import MegatronRole
from megatron_ext import device, step
from megatron_ext.export import export_hf
from megatron_ext.hf_config import HFConfig
from megatron_ext.memory import TrainingMemory
from megatron_ext.optimizer import Optimizer, OptimizerSettings, wrap


class Loss(Protocol):
    """A loss that travels from the algorithm to the actor's ranks (picklable)."""

    def __call__(
        self, log_probs: Tensor, entropy: Tensor, micro_batch: step.MicroBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of the loss and count to divide by (over all micro-batches and ranks), and sums for the metrics."""


class Actor(MegatronRole):
    """Trained by Megatron's distributed optimizer with fp32 master weights.

    Around a rollout: make_room -> (the engine takes the weights) -> release_weights -> (it generates) -> restore. What goes is
    what the config says (`offload`, `release_weights`); nothing where everything fits.
    """

    role: ActorConfig

    def __init__(self, name: str, config: Config):
        super().__init__(name, config)
        with self.context():
            self.wrapped = wrap(self.chunks, self.transformer_config)
        self.optimizer: Optimizer | None = None
        self._memory = TrainingMemory(self.wrapped)
        models = {role: HFConfig.from_folder(config.model_path(role)) for role in config.megatron_roles()}
        self._plan = memory_plan(config, models, _smallest_device())
        self._hands_over = bool(self.role.offload) or self._plan.release_gradients

    @remote(ONE_TO_ALL)
    def start_training(self, settings: OptimizerSettings) -> None:
        """Begin a phase of training: a fresh optimizer and learning-rate schedule over the weights as they are."""
        self.optimizer = None  # frees the old states before the new ones are made
        self.optimizer = Optimizer(self.wrapped, settings, self.dtype)

    @remote(THREE_D)
    def log_probs(self, batch: Batch) -> Batch | None:
        return self.forward(batch)

    @remote(THREE_D)
    def update(self, batch: Batch, loss: Loss, temperature: float) -> dict[str, Any]:
        """One optimizer step over `batch`; the loss sees log_softmax(logits / temperature).

        Returns this data-parallel rank's metric sums (names ending in `_max`: maxima), and grad_norm, lr, skipped.
        """
        micro_batches, _ = self.micro_batches(batch, self.role.micro_batch_tokens)
        self.optimizer.zero_grad()
        sums = step.forward_backward(self.wrapped, micro_batches, loss, temperature)
        stepped = self.optimizer.step()
        return {name: value.item() for name, value in (sums or {}).items()} | stepped

    @remote(ONE_TO_ALL)
    def make_room(self) -> None:
        """Before the engine wakes: gradients go, and the optimizer's states to the host, as the config says."""
        if self._plan.release_gradients:
            self._memory.release_gradients()
        if "optimizer" in self.role.offload and self.optimizer:
            self._memory.offload_optimizer(self.optimizer)
        if self._hands_over:
            self._memory.hand_over()

    @remote(ONE_TO_ALL)
    def release_weights(self) -> None:
        """After the engine has the weights: ours go, as the config says. Before the first `start_training` there are no masters
        to rebuild them from: they stay, and the optimizer's states, which are larger, are not there yet."""
        if "params" in self.role.offload:
            self._memory.offload_weights()
        elif self._plan.release_weights and self.optimizer:
            self._memory.drop_weights(self.optimizer)
        if self._hands_over:
            self._memory.hand_over()

    @remote(ONE_TO_ALL)
    def restore(self) -> None:
        """Once the engine sleeps: everything is as it was before `make_room`."""
        self._memory.restore()
        device.synchronize()

    @remote(ONE_TO_ALL)
    def export(self, destination: str) -> None:
        """Write the weights as an HF folder."""
        self.require_weights()
        tiles = [self.tile_map(rank) for rank in range(self.layout.world_size)]
        export_hf(self.parameters(), tiles, self.model_path, destination)


def _smallest_device() -> int | None:
    """Bytes of the smallest GPU of all ranks, which therefore decide alike; None on a CPU. Collective."""
    if not torch.cuda.is_available():
        return None
    total = torch.tensor(torch.cuda.mem_get_info()[1], device=device.current())
    dist.all_reduce(total, op=dist.ReduceOp.MIN)
    return int(total)
