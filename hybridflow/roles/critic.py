"""The critic: what reward the policy is expected to get, said at each of its tokens."""

import functools
from typing import Any, Protocol

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, remote
from hybridflow.roles.trained import TrainedRole
from hybridflow.roles.transfer import WeightTransfer
from megatron_ext import step


class ValueLoss(Protocol):
    """A loss that travels from the algorithm to the critic's ranks (picklable)."""

    def __call__(self, values: Tensor, micro_batch: step.MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of the loss and count to divide by (over all micro-batches and ranks), and sums for the metrics."""


class Critic(TrainedRole):
    """A decoder with a value head in place of its output layer, in a layout of its own."""

    def outputs(self, micro_batches: list[step.MicroBatch]) -> list[dict[str, Tensor]] | None:
        return step.forward_values(self.chunks, micro_batches)

    @remote(ONE_TO_ALL, giver="copy_to")
    def copy_from(self, source: str) -> None:
        """Take the weights that another Megatron role holds now; the head stays. Call it before `start_training`, whose masters
        are copies of the weights."""
        WeightTransfer(self.config, source, self.name, self.peers).run(verify=True)

    @remote(THREE_D)
    def values(self, batch: Batch) -> Batch | None:
        """`values` of every token, ragged fp32: what is expected before the token is chosen."""
        return self.forward(batch)

    @remote(THREE_D)
    def update(self, batch: Batch, loss: ValueLoss) -> dict[str, Any]:
        """One optimizer step over `batch` (`optimize`)."""
        return self.optimize(batch, functools.partial(step.forward_backward_values, self.wrapped, loss_function=loss))
