"""The actor: the policy that is trained."""

import functools
from typing import Any, Protocol

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.controller.protocols import THREE_D, remote
from hybridflow.roles.trained import TrainedRole
from megatron_ext import step


class Loss(Protocol):
    """A loss that travels from the algorithm to the actor's ranks (picklable)."""

    def __call__(
        self, log_probs: Tensor, entropy: Tensor, micro_batch: step.MicroBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of the loss and count to divide by (over all micro-batches and ranks), and sums for the metrics."""


class Actor(TrainedRole):
    """The policy, whose weights the rollout runs on."""

    @remote(THREE_D)
    def log_probs(self, batch: Batch) -> Batch | None:
        return self.forward(batch)

    @remote(THREE_D)
    def update(self, batch: Batch, loss: Loss, temperature: float) -> dict[str, Any]:
        """One optimizer step over `batch` (`optimize`); the loss sees log_softmax(logits / temperature)."""
        run = functools.partial(step.forward_backward, self.wrapped, loss_function=loss, temperature=temperature)
        return self.optimize(batch, run)
