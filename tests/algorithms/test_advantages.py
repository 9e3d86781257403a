"""Advantages against loops in numpy."""

import numpy as np
import pytest
import torch

from hybridflow.algorithms.advantages import baseline_advantages, group_advantages


def reference(rewards, groups, normalize, epsilon):
    out = np.zeros(len(rewards))
    for g in set(groups):
        members = [i for i in range(len(groups)) if groups[i] == g]
        values = np.array([rewards[i] for i in members], dtype=np.float64)
        scale = np.std(values, ddof=1) + epsilon if normalize and len(values) > 1 else 1.0
        for i, value in zip(members, values, strict=True):
            out[i] = (value - values.mean()) / scale
    return out


@pytest.mark.parametrize("normalize", [True, False])
def test_equals_numpy_for_unsorted_groups_of_unequal_size(normalize):
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=23).astype(np.float32)
    groups = rng.integers(5, 11, size=23) * 7  # ids with gaps, any order
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), normalize, epsilon=1e-3)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), reference(rewards, groups.tolist(), normalize, 1e-3), rtol=1e-5, atol=1e-6)


def test_known_values():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    groups = torch.zeros(4, dtype=torch.int64)
    assert group_advantages(rewards, groups, False).tolist() == [0.75, -0.25, -0.25, -0.25]
    # the standard deviation of (1, 0, 0, 0) with n - 1 is 0.5
    torch.testing.assert_close(
        group_advantages(rewards, groups, True), torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_and_single_samples_give_exact_zeros(normalize):
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, -1e6, -1e6, -1e6, -1e6, -1e6, -1e6, -1e6])
    groups = torch.tensor([3, 3, 3, 1, 0, 0, 0, 0, 0, 0, 0])
    assert group_advantages(rewards, groups, normalize).tolist() == [0.0] * 11


def test_refuses_a_matrix_of_rewards():
    with pytest.raises(ValueError, match=r"rewards \[2, 2\] and groups \[4\]"):
        group_advantages(torch.zeros(2, 2), torch.zeros(4, dtype=torch.int64), True)


def test_each_reward_less_that_of_the_greedy_answer():
    generator = np.random.default_rng(0)
    rewards, baseline = generator.random(12).astype(np.float32), generator.random(4).astype(np.float32)
    prompts = generator.integers(0, 4, 12)
    expected = [reward - baseline[prompt] for reward, prompt in zip(rewards, prompts, strict=True)]
    found = baseline_advantages(*(torch.tensor(values) for values in (rewards, baseline, prompts)))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_rewards_and_prompts_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"rewards \[3\] and prompt_index \[2\]"):
        baseline_advantages(torch.zeros(3), torch.zeros(2), torch.zeros(2, dtype=torch.int64))
