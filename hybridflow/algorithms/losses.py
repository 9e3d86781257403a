"""Losses over the packed tokens of one micro-batch, as sums plus an integer count.

A loss is `(loss_sum, count, sums)`: Megatron divides the sum over all micro-batches and data-parallel ranks by the sum
of the counts, so the mean is right however the sequences are spread. `sums` are metrics that add up in the same way;
`means` turns their totals into the numbers of a step. All vectors are [T]; positions outside `mask` (prompt, padding)
may hold anything, also infinities.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Loss = tuple[Tensor, Tensor, dict[str, Tensor]]
KLEstimator = Literal["k1", "k2", "k3"]

_MAX_EXPONENT = 20.0  # exp(20) = 5e8: a policy that ran away gives a huge finite loss instead of inf * 0 = nan


def estimate_kl(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) per token, estimated at tokens that the policy sampled (Schulman 2020).

    With d = log_probs - reference_log_probs: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, its gradient is
    that of the KL), k3 = exp(-d) - 1 + d (unbiased, never negative). As a loss k1 has the expected gradient 0.
    """
    difference = log_probs - reference_log_probs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference**2 / 2
        case "k3":
            return torch.exp((-difference).clamp(max=_MAX_EXPONENT)) - 1 + difference
    raise ValueError(f"algorithm.kl_estimator={estimator!r} is unknown: use k1, k2 or k3")


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped surrogate of PPO with separate bounds, and a KL term against a reference where a coefficient is set.

    Per token, with r = exp(log_probs - old_log_probs) and advantage A:
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coefficient * KL. `level` says what is averaged: "token" over
    all tokens of the mini-batch, so long answers weigh more; "sequence" over the sequences' own means (GRPO's paper).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    level: Literal["token", "sequence"] = "token"
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"

    def __post_init__(self):
        if self.level not in ("token", "sequence"):
            raise ValueError(f"algorithm.loss_level={self.level!r} is unknown: use token or sequence")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ValueError(
                f"algorithm.clip_low={self.clip_low}, clip_high={self.clip_high}: want 0 <= clip_low < 1 and clip_high >= 0"
            )

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        segments: Tensor,
        entropy: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
    ) -> Loss:
        """The loss of one micro-batch.

        Args:
            log_probs: float [T] with gradient, the policy's log-probs of the tokens.
            old_log_probs, advantages, entropy, reference_log_probs: float [T] without gradient.
            mask: bool or 0/1 [T], where the policy sampled the token.
            segments: int64 [T] >= 0, which sequence of the micro-batch a token belongs to.

        Returns:
            The sum (0 with a gradient of 0 when the mask is empty), the number of tokens or sequences, and the metrics
            `loss`, `loss_count`, `tokens`, `clip_fraction`, `kl_old` (KL(old || new), k3), and where given `entropy`
            and `kl_reference`.
        """
        mask = mask.bool()
        log_probs, old_log_probs = _inside(log_probs, mask), _inside(old_log_probs, mask)
        advantages = _inside(advantages, mask)
        ratio = torch.exp((log_probs - old_log_probs).clamp(-_MAX_EXPONENT, _MAX_EXPONENT))
        plain = ratio * advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        token_losses = -torch.minimum(plain, clipped)
        sums = {
            "tokens": mask.sum(),
            "clip_fraction": (clipped < plain).sum(),
            "kl_old": estimate_kl(old_log_probs, log_probs.detach(), "k3").sum(),
        }
        if entropy is not None:
            sums["entropy"] = _inside(entropy, mask).sum()
        if reference_log_probs is not None:
            kl = estimate_kl(log_probs, _inside(reference_log_probs, mask), self.kl_estimator)
            sums["kl_reference"] = kl.detach().sum()
            if self.kl_coefficient:
                token_losses = token_losses + self.kl_coefficient * kl
        elif self.kl_coefficient:
            raise ValueError(f"algorithm.kl_coefficient={self.kl_coefficient} needs reference_log_probs: add roles.reference")
        return _reduce(token_losses, mask, segments, self.level, sums)


@dataclass(frozen=True)
class ValueLoss:
    """The squared error of the critic, clipped as the policy is (PPO's own code, 2017; Engstrom et al. 2020, section 3).

    Per token, with value V, the value V_old that the advantages were computed with, and return R:
    1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), averaged over tokens. `clip` 0: 1/2 (V - R)^2.
    """

    clip: float = 0.2

    def __post_init__(self):
        if self.clip < 0:
            raise ValueError(f"algorithm.value_clip={self.clip} is too small: use at least 0, which clips nothing")

    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> Loss:
        """The loss of one micro-batch.

        Args:
            values: float [T] with gradient: what is expected before a token is chosen.
            old_values, returns: float [T] without gradient.
            mask: bool or 0/1 [T], where the policy sampled the token.

        Returns:
            The sum (0 with a gradient of 0 when the mask is empty), the number of tokens, and the metrics `loss`, `loss_count`,
            `tokens`, `value` and `clip_fraction`.
        """
        mask = mask.bool()
        values, old_values, returns = (_inside(x, mask) for x in (values, old_values, returns))
        errors = (values - returns) ** 2
        sums = {"tokens": mask.sum(), "value": values.detach().sum()}
        if self.clip:
            # between the bounds the very values: as V_old + (V - V_old) they would be rounded, and count as clipped
            clipped = (values.clamp(old_values - self.clip, old_values + self.clip) - returns) ** 2
            sums["clip_fraction"] = (clipped > errors).sum()
            errors = torch.maximum(errors, clipped)
        return _reduce(errors / 2, mask, None, "token", sums)


def likelihood_loss(log_probs: Tensor, mask: Tensor, entropy: Tensor | None = None) -> Loss:
    """Supervised fine-tuning: minus the log-probs of the tokens in `mask`, averaged over tokens."""
    mask = mask.bool()
    sums = {"tokens": mask.sum()}
    if entropy is not None:
        sums["entropy"] = _inside(entropy, mask).sum()
    return _reduce(-_inside(log_probs, mask), mask, None, "token", sums)


def token_kl(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
    """`estimate_kl` of the tokens in `mask`, 0 elsewhere; [T]."""
    mask = mask.bool()
    return estimate_kl(_inside(log_probs, mask), _inside(reference_log_probs, mask), estimator)


def means(sums: dict[str, float]) -> dict[str, float]:
    """Metric sums over micro-batches and ranks as means: `loss` per counted item, the rest per token."""
    tokens, count = max(sums["tokens"], 1), max(sums["loss_count"], 1)
    per_token = {name: value / tokens for name, value in sums.items() if name not in ("tokens", "loss", "loss_count")}
    return {"loss": sums["loss"] / count, **per_token}


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    # where() instead of a product: 0 * inf is nan, and its gradient too
    return torch.where(mask, values, 0.0)


def _reduce(token_losses: Tensor, mask: Tensor, segments: Tensor | None, level: str, sums: dict[str, Tensor]) -> Loss:
    if level == "token":
        loss, count = token_losses.sum(), mask.sum()
    else:
        lengths = torch.zeros(int(segments.max()) + 1, dtype=token_losses.dtype, device=token_losses.device)
        lengths = lengths.index_add_(0, segments, mask.to(token_losses.dtype))
        loss, count = (token_losses / lengths[segments].clamp(min=1)).sum(), (lengths > 0).sum()
    sums |= {"loss": loss.detach(), "loss_count": count}
    return loss, count.to(torch.int), sums
