"""Advantages against loops in numpy."""

import numpy as np
import pytest
import torch

from hybridflow.algorithms.advantages import (
    baseline_advantages,
    explained_variance,
    generalized_advantages,
    group_advantages,
    token_rewards,
    whiten,
)

# Sampled tokens of five sequences: with a prompt; with tokens of somebody else in between; none; all; a single one.
MASKS = [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1], [0, 0], [1, 1, 1, 1], [0, 1]]


def packed():
    mask = np.concatenate(MASKS).astype(bool)
    return mask, np.repeat(np.arange(len(MASKS)), [len(row) for row in MASKS])


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


def gae_reference(rewards, values, mask, segments, gamma, decay):
    """The sum of the paper, term by term, over the sampled tokens of each sequence."""
    advantages = np.zeros(len(mask))
    for segment in set(segments):
        steps = [t for t in range(len(mask)) if mask[t] and segments[t] == segment]
        for i, t in enumerate(steps):
            for power, j in enumerate(range(i, len(steps))):
                following = values[steps[j + 1]] if j + 1 < len(steps) else 0.0
                delta = rewards[steps[j]] + gamma * following - values[steps[j]]
                advantages[t] += (gamma * decay) ** power * delta
    return advantages


@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0), (0.0, 0.7)])
def test_generalized_advantages_equal_the_sum_in_the_paper(gamma, decay):
    rng = np.random.default_rng(1)
    mask, segments = packed()
    rewards, values = rng.normal(size=(2, len(mask))).astype(np.float32)  # also where nothing was sampled: passed over
    expected = gae_reference(rewards, values, mask, segments, gamma, decay)
    tensors = [torch.tensor(x) for x in (rewards, values, mask, segments)]
    advantages, returns = generalized_advantages(*tensors, gamma, decay)
    assert advantages.dtype == returns.dtype == torch.float32
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns.numpy(), np.where(mask, expected + values, 0), rtol=1e-5, atol=1e-6)


def test_with_decay_1_returns_are_the_rewards_to_come_whatever_the_values():
    mask, segments = (torch.tensor(x) for x in packed())
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), mask, segments)
    _, returns = generalized_advantages(rewards, torch.randn(len(mask)), mask, segments, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.where(mask, segments + 1.0, 0.0), rtol=0, atol=1e-6)


def test_without_a_sampled_token_there_is_no_advantage():
    nothing = torch.zeros(3)
    found = generalized_advantages(nothing, nothing, nothing.bool(), torch.tensor([0, 0, 1]), 1.0, 0.9)
    assert [x.tolist() for x in found] == [[0.0] * 3] * 2


def test_a_response_is_rewarded_at_its_last_sampled_token():
    mask, segments = (torch.tensor(x) for x in packed())
    found = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), mask, segments)
    expected = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0], [0, 0, 0, 4], [0, 5]]  # nobody sampled what would earn the 3
    assert found.tolist() == [float(x) for row in expected for x in row]


def test_whitened_over_the_sampled_tokens():
    mask, _ = packed()
    values = np.random.default_rng(2).normal(3, 5, len(mask)).astype(np.float32)
    found = whiten(torch.tensor(values), torch.tensor(mask)).numpy()
    inside = values[mask].astype(np.float64)
    np.testing.assert_allclose(found[mask], (inside - inside.mean()) / inside.std(ddof=1), rtol=1e-5)
    assert not found[~mask].any()
    assert not whiten(torch.full((3,), 0.1), torch.ones(3)).any()  # equal values, and no division by 0


def test_explained_variance():
    mask, _ = packed()
    rng = np.random.default_rng(3)
    returns = rng.normal(size=len(mask)).astype(np.float32)
    values = (0.5 * returns + rng.normal(size=len(mask))).astype(np.float32)
    errors = (returns - values)[mask].astype(np.float64)
    found = explained_variance(torch.tensor(values), torch.tensor(returns), torch.tensor(mask))
    assert found == pytest.approx(1 - errors.var() / returns[mask].astype(np.float64).var())
    everywhere = torch.ones(4)
    assert explained_variance(torch.full((4,), 7.0), torch.tensor([0.0, 1.0, 2.0, 3.0]), everywhere) == 0
    assert explained_variance(torch.randn(4), everywhere, everywhere) is None
