"""Losses as actor and critic apply them: they travel with the call to its ranks and read a packed micro-batch's fields."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.losses import Loss, PolicyLoss, ValueLoss, estimate_kl, likelihood_loss
from hybridflow.config.schema import AlgorithmConfig
from megatron_ext.step import MicroBatch


@dataclass(frozen=True)
class PolicyObjective:
    """`PolicyLoss` over the fields advantages, loss_mask, rollout_log_probs, and where present log_probs (of the old
    policy) and reference_log_probs.

    Without log_probs the policy is its own old one: right for the first update on fresh samples, and a forward pass
    saved. The mismatch to the rollout engine is measured on the very log-probs that the update uses; it says something
    in a step's first update only, where the policy is still the one that sampled.
    """

    loss: PolicyLoss

    def __call__(self, log_probs: Tensor, entropy: Tensor, micro_batch: MicroBatch) -> Loss:
        fields = micro_batch.fields
        own = log_probs.detach()
        mask = fields["loss_mask"].bool()
        total, count, sums = self.loss(
            log_probs,
            fields.get("log_probs", own),
            fields["advantages"],
            mask,
            micro_batch.segments,
            entropy,
            fields.get("reference_log_probs"),
        )
        return total, count, sums | mismatch_sums(own, fields["rollout_log_probs"], mask)


def policy_objective(settings: AlgorithmConfig, kl_coefficient: float) -> PolicyObjective:
    """As the config says, with the coefficient as it is now; a KL penalty that is in the reward is not in the loss as well."""
    return PolicyObjective(
        PolicyLoss(
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            level=settings.loss_level,
            kl_coefficient=kl_coefficient if settings.kl_in == "loss" else 0.0,
            kl_estimator=settings.kl_estimator,
        )
    )


@dataclass(frozen=True)
class ValueObjective:
    """`ValueLoss` over the fields values (before the step's updates), returns and loss_mask."""

    clip: float

    def __call__(self, values: Tensor, micro_batch: MicroBatch) -> Loss:
        fields = micro_batch.fields
        return ValueLoss(self.clip)(values, fields["values"], fields["returns"], fields["loss_mask"])


@dataclass(frozen=True)
class LikelihoodObjective:
    """Supervised fine-tuning on the tokens of loss_mask."""

    def __call__(self, log_probs: Tensor, entropy: Tensor, micro_batch: MicroBatch) -> Loss:
        return likelihood_loss(log_probs, micro_batch.fields["loss_mask"], entropy)


def mismatch_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the rollout engine's log-probs are from the trainer's, summed over the sampled tokens: absolute difference,
    its maximum, and KL(rollout || trainer) by the k3 estimator."""
    ours, theirs = log_probs[mask], rollout_log_probs[mask]
    difference = (ours - theirs).abs()
    return {
        "mismatch_abs": difference.sum(),
        "mismatch_abs_max": difference.max() if len(difference) else torch.zeros_like(log_probs.sum()),
        "mismatch_kl": estimate_kl(theirs, ours, "k3").sum(),
    }
