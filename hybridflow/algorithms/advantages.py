"""Advantages of sampled responses, computed on the driver from rewards.

What goes token by token is a vector [T] of all tokens of N sequences, one after the other; `segments` [T] says which sequence
a token belongs to, `mask` [T] where the policy sampled it. Other tokens are passed over, and are 0 in the results.
"""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Tensor, normalize: bool, epsilon: float = 1e-6) -> Tensor:
    """GRPO's advantages (Shao et al. 2024, eq. 3): each reward against the other answers to its prompt.

    Args:
        rewards: float [N].
        groups: int64 [N], equal where samples answer the same prompt; any ids in any order.
        normalize: divide by the group's standard deviation (n - 1 in its denominator) plus `epsilon`; without it the
            advantage is the plain difference to the group's mean, which doesn't favour very easy and very hard prompts
            (Liu et al. 2025).

    Returns:
        float32 [N]; exactly 0 where a group's rewards are all equal, or it has one sample only.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {list(rewards.shape)} and groups {list(groups.shape)} must be two vectors of one length")
    values = rewards.double()  # the mean of equal float32 numbers is exact then, so their advantage is exactly 0
    _, group = torch.unique(groups, return_inverse=True)
    sizes = torch.bincount(group).double()
    deviations = values - _group_sums(values, group, sizes)[group] / sizes[group]
    if normalize:
        variances = _group_sums(deviations**2, group, sizes) / (sizes - 1).clamp(min=1)
        deviations = deviations / (variances.sqrt()[group] + epsilon)
    return deviations.float()


def baseline_advantages(rewards: Tensor, baseline: Tensor, prompt_index: Tensor) -> Tensor:
    """ReMax's advantages (Li et al. 2023, eq. 5): each reward less that of the greedy answer to the same prompt.

    Args:
        rewards: float [N].
        baseline: float [P], of the greedy answers.
        prompt_index: int64 [N]: the prompt that each sample answers.

    Returns:
        float32 [N].
    """
    if rewards.shape != prompt_index.shape or baseline.dim() != 1:
        raise ValueError(
            f"rewards {list(rewards.shape)} and prompt_index {list(prompt_index.shape)} must be of one length, baseline"
            f" {list(baseline.shape)} a vector"
        )
    return (rewards - baseline[prompt_index]).float()


def token_rewards(rewards: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """Rewards [N] of whole responses as rewards of tokens, float32 [T]: each at the last token that was sampled."""
    sampled = mask.bool().nonzero().squeeze(1)
    owners = segments[sampled]
    last = torch.ones_like(owners, dtype=torch.bool)
    last[:-1] = owners[1:] != owners[:-1]
    spread = torch.zeros(len(mask), dtype=torch.float32)
    spread[sampled[last]] = rewards[owners[last]].float()
    return spread


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, segments: Tensor, discount: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): A_t = sum over l of (discount decay)^l delta_{t+l}, with
    delta_t = r_t + discount V_{t+1} - V_t, over the sampled tokens of each sequence. After the last one V is 0.

    Args:
        rewards, values: float [T]; V_t is what is expected before token t is chosen.
        discount, decay: gamma and lambda.

    Returns:
        Advantages and returns (advantage plus value, what the critic learns), float32 [T].
    """
    sampled = mask.bool().nonzero().squeeze(1)
    lengths = torch.bincount(segments[sampled])
    rows = segments[sampled]
    columns = torch.arange(len(sampled)) - (lengths.cumsum(0) - lengths)[rows]
    # [sequences, longest + 1] in float64, zeros behind a sequence's end: they leave the sum alone
    table = torch.zeros(2, len(lengths), int(lengths.max()) + 1 if len(lengths) else 1, dtype=torch.float64)
    table[:, rows, columns] = torch.stack([rewards[sampled], values[sampled]]).double()
    r, v = table
    advantages = torch.zeros_like(r)
    for t in reversed(range(r.shape[1] - 1)):
        delta = r[:, t] + discount * v[:, t + 1] - v[:, t]
        advantages[:, t] = delta + discount * decay * advantages[:, t + 1]
    found = torch.zeros(2, len(mask))
    found[:, sampled] = torch.stack([advantages[rows, columns], (advantages + v)[rows, columns]]).float()
    return found[0], found[1]


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`values` [T] with mean 0 and standard deviation 1 over the sampled tokens (n - 1 in the variance's denominator)."""
    mask = mask.bool()
    inside = values[mask].double()
    deviations = inside - inside.mean()
    scale = (deviations**2).sum() / max(len(inside) - 1, 1)
    whitened = torch.zeros(len(values))
    whitened[mask] = (deviations / (scale + epsilon).sqrt()).float()
    return whitened


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) over the sampled tokens: 1 for a perfect critic, 0 for one that says the same
    everywhere; None where the returns don't vary."""
    inside = mask.bool()
    values, returns = values[inside].double(), returns[inside].double()
    variance = returns.var(correction=0).item() if len(returns) else 0.0
    return 1 - (returns - values).var(correction=0).item() / variance if variance else None


def _group_sums(values: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    return torch.zeros_like(sizes).index_add_(0, group, values)
