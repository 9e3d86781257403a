"""The actor: the policy that is trained."""

from typing import Any, Protocol

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.schema import ActorConfig, Config
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, remote
from hybridflow.roles.megatron import MegatronRole
from megatron_ext import step, weights
from megatron_ext.optimizer import Optimizer, OptimizerSettings, wrap


class Loss(Protocol):
    """A loss that travels from the algorithm to the actor's ranks (picklable)."""

    def __call__(
        self, log_probs: Tensor, entropy: Tensor, micro_batch: step.MicroBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of the loss and count to divide by (over all micro-batches and ranks), and sums for the metrics."""


class Actor(MegatronRole):
    """Trained by Megatron's distributed optimizer with fp32 master weights."""

    role: ActorConfig

    def __init__(self, name: str, config: Config):
        super().__init__(name, config)
        with self.context():
            self.wrapped = wrap(self.chunks, self.transformer_config)
        self.optimizer: Optimizer | None = None

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
    def export(self, destination: str) -> None:
        """Write the weights as an HF folder."""
        tiles = [self.tile_map(rank) for rank in range(self.layout.world_size)]
        weights.export_hf(self.parameters(), tiles, self.model_path, destination)
