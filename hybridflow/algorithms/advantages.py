"""Advantages of sampled responses, computed on the driver from rewards."""

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


def _group_sums(values: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    return torch.zeros_like(sizes).index_add_(0, group, values)
