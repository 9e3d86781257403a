"""What the roles share that are trained: the optimizer, updates, and memory that leaves the device around a rollout."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.schema import Config, TrainedConfig
from hybridflow.controller.protocols import ONE_TO_ALL, remote
from hybridflow.planner.memory import awake_engine, engine_weights, memory_plan
from hybridflow.roles.megatron import MegatronRole
from megatron_ext import compat, device, step
from megatron_ext.export import export_hf
from megatron_ext.memory import TrainingMemory
from megatron_ext.optimizer import Optimizer, OptimizerSettings, wrap


class TrainedRole(MegatronRole):
    """Trained by Megatron's distributed optimizer with fp32 master weights.

    Around a rollout: make_room -> (the engine takes the actor's weights) -> release_weights -> (it generates) -> restore. What
    goes is what the config says (`offload`, `release_weights`); nothing where everything fits.
    """

    role: TrainedConfig

    def __init__(self, name: str, config: Config):
        super().__init__(name, config)
        with self.context():
            self.wrapped = wrap(self.chunks, self.transformer_config, self.role.overlap_grad_reduce)
        self._memory = TrainingMemory(self.wrapped)
        models = {role: config.read_model(role) for role in config.megatron_roles()}
        total = _smallest_device(self.state.group)
        self._release = memory_plan(config, models, total).releases[name]
        self._hands_over = bool(self.role.offload) or self._release.gradients
        # what the engine takes on this rank, and what of it comes after the weights
        self._engine = self._kv_cache = 0
        if config.ranks(name)[self.state.rank] in config.ranks("rollout"):
            self._engine = awake_engine(config, models["actor"], total)
            self._kv_cache = self._engine - engine_weights(config, models["actor"])

    @remote(ONE_TO_ALL)
    def start_training(self, settings: OptimizerSettings) -> None:
        """Begin a phase of training: a fresh optimizer and learning-rate schedule over the weights as they are."""
        self.optimizer = None  # frees the old states before the new ones are made
        self.optimizer = Optimizer(self.wrapped, settings, self.dtype, self.state.group)

    def optimize(
        self, batch: Batch, forward_backward: Callable[[list[step.MicroBatch]], dict[str, Tensor] | None]
    ) -> dict[str, Any]:
        """One optimizer step over `batch`, whose gradients `forward_backward` computes.

        Returns this data-parallel rank's metric sums (names ending in `_max`: maxima), and grad_norm, lr, skipped.
        """
        micro_batches, _ = self.micro_batches(batch, self.role.micro_batch_tokens)
        self.optimizer.zero_grad()
        with self.metered():
            sums = forward_backward(micro_batches)
        stepped = self.optimizer.step()
        compat.drop_placeholders()
        return {name: value.item() for name, value in (sums or {}).items()} | stepped

    @remote(ONE_TO_ALL)
    def make_room(self) -> None:
        """Before the engine wakes: gradients go, and the optimizer's states to the host, as the config says."""
        if self._release.gradients:
            self._memory.release_gradients()
        if "optimizer" in self.role.offload and self.optimizer:
            self._memory.offload_optimizer(self.optimizer)
        self._leave_room(self._engine)

    @remote(ONE_TO_ALL)
    def release_weights(self) -> None:
        """Weights that nobody reads until `restore` go, as the config says: the actor's once the engine has them. Before the
        first `start_training` there are no masters to rebuild them from: they stay, and the optimizer's states, which are
        larger, are not there yet."""
        if "params" in self.role.offload:
            self._memory.offload_weights()
        elif self._release.weights and self.optimizer:
            self._memory.drop_weights(self.optimizer)
        self._leave_room(self._kv_cache)

    def _leave_room(self, nbytes: int) -> None:
        """For what the engine is about to allocate. Without the need torch keeps its cache, which it would have to fill anew in
        every step."""
        if self._hands_over:
            self._memory.hand_over()
        else:
            self._memory.make_free(nbytes)

    @remote(ONE_TO_ALL)
    def restore(self) -> None:
        """Once the engine sleeps: everything is as it was before `make_room`."""
        self._memory.restore()
        device.synchronize()

    @remote(ONE_TO_ALL)
    def export(self, destination: str) -> None:
        """Write the weights as an HF folder, a value head among them."""
        self.require_weights()
        tiles = [self.tile_map(rank) for rank in range(self.layout.world_size)]
        export_hf(self.parameters(), tiles, self.model_path, destination, head=self.hf.head, group=self.state.group)


def _smallest_device(group: dist.ProcessGroup | None) -> int | None:
    """Bytes of the smallest GPU of the role's ranks, which therefore decide alike; None on a CPU. Collective."""
    if not torch.cuda.is_available():
        return None
    total = torch.tensor(torch.cuda.mem_get_info()[1], device=device.current())
    dist.all_reduce(total, op=dist.ReduceOp.MIN, group=group)
    return int(total)
