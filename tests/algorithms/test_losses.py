"""Losses, gradients and metrics against a loop in numpy with hand-derived gradients."""

import math

import numpy as np
import pytest
import torch

from hybridflow.algorithms.losses import PolicyLoss, ValueLoss, estimate_kl, likelihood_loss, means, token_kl

LENGTHS = [5, 3, 1, 6]  # tokens of the sequences; the last one is padding
MASKS = [[0, 0, 1, 1, 0], [0, 1, 0], [0], [0, 0, 0, 0, 0, 0]]


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    total = sum(LENGTHS)
    log_probs = rng.normal(-1.5, 0.6, total)
    return {
        "log_probs": log_probs,
        "old_log_probs": log_probs + rng.normal(0, 0.5, total),
        "reference_log_probs": log_probs + rng.normal(0, 0.7, total),
        "advantages": rng.normal(size=total),
        "entropy": rng.uniform(0, 2, total),
        "mask": np.concatenate(MASKS).astype(bool),
        "segments": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
    }


def numpy_kl(d, estimator):
    """Value and derivative by the policy's log-prob."""
    return {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[estimator]


def numpy_policy_loss(x, low, high, level, coefficient=0.0, estimator="k3"):
    """Loss sum, count, gradient by log_probs, and metric sums, token by token."""
    weights = np.zeros(len(x["mask"]))
    for segment in set(x["segments"]):
        tokens = [t for t in range(len(weights)) if x["segments"][t] == segment and x["mask"][t]]
        weights[tokens] = 1.0 if level == "token" else 1.0 / max(len(tokens), 1)
    kept = [t for t in range(len(weights)) if x["mask"][t]]
    count = len(kept) if level == "token" else len({x["segments"][t] for t in kept})
    loss, gradient, clipped, kl_old, kl_reference = 0.0, np.zeros(len(weights)), 0, 0.0, 0.0
    for t in kept:
        d, a = x["log_probs"][t] - x["old_log_probs"][t], x["advantages"][t]
        r = math.exp(d)
        bounded = min(max(r, 1 - low), 1 + high)
        is_clipped = bounded * a < r * a
        value, slope = -(bounded * a if is_clipped else r * a), 0.0 if is_clipped else -r * a
        kl, kl_slope = numpy_kl(x["log_probs"][t] - x["reference_log_probs"][t], estimator)
        loss += weights[t] * (value + coefficient * kl)
        gradient[t] = weights[t] * (slope + coefficient * kl_slope)
        clipped, kl_old, kl_reference = clipped + is_clipped, kl_old + r - 1 - d, kl_reference + kl
    entropy = sum(x["entropy"][t] for t in kept)
    sums = {"tokens": len(kept), "clip_fraction": clipped, "kl_old": kl_old, "kl_reference": kl_reference, "entropy": entropy}
    return loss, count, gradient, sums | {"loss": loss, "loss_count": count}


def tensors(x):
    x = {name: torch.tensor(value) for name, value in x.items()}
    x["log_probs"].requires_grad_()
    return x


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("coefficient,estimator", [(0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")])
@pytest.mark.parametrize("low,high", [(0.2, 0.2), (0.1, 0.4)])
def test_policy_loss_equals_numpy(level, coefficient, estimator, low, high):
    x = inputs()
    expected, count, gradient, sums = numpy_policy_loss(x, low, high, level, coefficient, estimator)
    assert 0 < sums["clip_fraction"] < sums["tokens"]
    x = tensors(x)
    loss, got_count, got_sums = PolicyLoss(low, high, level, coefficient, estimator)(**x)
    loss.backward()
    assert not got_count.is_floating_point() and got_count.item() == count == (3 if level == "token" else 2)
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)
    np.testing.assert_allclose(x["log_probs"].grad.numpy(), gradient, rtol=1e-12, atol=1e-15)
    assert {name: pytest.approx(value.item()) for name, value in got_sums.items()} == sums


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_equals_finite_differences(level):
    x = inputs(seed=3)
    loss_of = PolicyLoss(0.2, 0.28, level, 0.1, "k3")
    analytic = tensors(x)
    loss_of(**analytic)[0].backward()
    for t in range(len(x["mask"])):
        shifted = []
        for step in (1e-6, -1e-6):
            moved = dict(x, log_probs=x["log_probs"] + step * (np.arange(len(x["mask"])) == t))
            shifted.append(loss_of(**tensors(moved))[0].item())
        assert analytic["log_probs"].grad[t].item() == pytest.approx((shifted[0] - shifted[1]) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sums_over_micro_batches_equal_the_whole(level):
    x = tensors(inputs())
    loss_of = PolicyLoss(level=level)
    whole, whole_count, _ = loss_of(**x)
    parts = [loss_of(**{name: value[half] for name, value in x.items()}) for half in (slice(0, 5), slice(5, None))]
    torch.testing.assert_close(whole, parts[0][0] + parts[1][0])
    assert whole_count == parts[0][1] + parts[1][1]


def test_sequences_weigh_alike_at_sequence_level_and_by_tokens_at_token_level():
    x = {
        "log_probs": torch.zeros(5),
        "old_log_probs": torch.zeros(5),
        "advantages": torch.tensor([1.0, 1.0, 1.0, 1.0, -3.0]),
        "mask": torch.ones(5),
        "segments": torch.tensor([0, 0, 0, 0, 1]),
    }
    assert PolicyLoss(level="token")(**x)[:2] == (-1.0, 5)
    assert PolicyLoss(level="sequence")(**x)[:2] == (2.0, 2)


def test_what_lies_outside_the_mask_does_not_matter():
    x, y = tensors(inputs()), tensors(inputs())
    outside = ~y["mask"]
    with torch.no_grad():
        for name in ("log_probs", "old_log_probs", "advantages", "reference_log_probs", "entropy"):
            y[name][outside] = float("-inf")
    loss_of = PolicyLoss(kl_coefficient=0.1)
    (a, _, sums_a), (b, _, sums_b) = loss_of(**x), loss_of(**y)
    a.backward()
    b.backward()
    assert a == b and sums_a == sums_b
    assert torch.equal(x["log_probs"].grad, y["log_probs"].grad)


def test_an_empty_mask_gives_zero_and_a_zero_gradient():
    for level in ("token", "sequence"):
        x = tensors(inputs())
        loss, count, _ = PolicyLoss(level=level)(**(x | {"mask": torch.zeros_like(x["mask"])}))
        loss.backward()
        assert (loss.item(), count.item(), x["log_probs"].grad.abs().max().item()) == (0, 0, 0)


def test_a_policy_that_ran_away_stays_finite():
    x = tensors(inputs())
    loss, _, sums = PolicyLoss(kl_coefficient=0.1)(**(x | {"old_log_probs": x["old_log_probs"] - 1e4}))
    loss.backward()
    assert loss.isfinite() and x["log_probs"].grad.isfinite().all() and all(v.isfinite() for v in sums.values())


def test_kl_estimators_agree_with_the_exact_kl_in_expectation():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 8, generator=generator, dtype=torch.float64).mul(0.3).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * estimate_kl(p, q, estimator)).sum(), exact)
    assert (p.exp() * estimate_kl(p, q, "k2")).sum() == pytest.approx(exact.item(), rel=0.2)
    assert (estimate_kl(p, q, "k3") >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_the_sampled_tokens(estimator):
    x = inputs()
    differences = x["log_probs"] - x["reference_log_probs"]
    expected = [numpy_kl(d, estimator)[0] if sampled else 0.0 for d, sampled in zip(differences, x["mask"], strict=True)]
    x["reference_log_probs"][~x["mask"]] = -np.inf
    tensor = {name: torch.tensor(x[name]) for name in ("log_probs", "reference_log_probs", "mask")}
    np.testing.assert_allclose(token_kl(**tensor, estimator=estimator).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_value_loss_equals_numpy(clip):
    rng = np.random.default_rng(4)
    mask = np.concatenate(MASKS).astype(bool)
    old, returns = rng.normal(size=(2, 200))
    mask = np.resize(mask, 200)
    values = old + rng.normal(0, 0.5, 200)
    loss, gradient, clipped = 0.0, np.zeros(200), 0
    for t in np.flatnonzero(mask):
        plain, slope = (values[t] - returns[t]) ** 2, values[t] - returns[t]
        near = min(max(values[t], old[t] - clip), old[t] + clip)
        if clip and (near - returns[t]) ** 2 > plain:
            plain, slope, clipped = (near - returns[t]) ** 2, 0.0, clipped + 1
        loss, gradient[t] = loss + plain / 2, slope
    assert (0 < clipped < mask.sum()) == bool(clip)
    values[~mask] = old[~mask] = np.nan  # what lies outside the mask does not matter
    x = torch.tensor(values, requires_grad=True)
    total, count, sums = ValueLoss(clip)(x, *(torch.tensor(y) for y in (old, returns, mask)))
    total.backward()
    np.testing.assert_allclose(total.item(), loss, rtol=1e-12)
    np.testing.assert_allclose(x.grad.numpy(), gradient, rtol=1e-12, atol=1e-15)
    assert not count.is_floating_point() and count == mask.sum() == sums["tokens"] == sums["loss_count"]
    assert sums["value"].item() == pytest.approx(values[mask].sum()) and sums["loss"] == total
    assert sums["clip_fraction"] == clipped if clip else "clip_fraction" not in sums


def test_values_that_moved_less_than_the_clip_are_not_counted():
    values, old = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    old, near = old / 20, values / 1000
    _, _, sums = ValueLoss(0.2)(near, old, values, torch.ones(1000))
    assert ((old + (near - old).clamp(-0.2, 0.2)) != near).any()  # what a rounded sum would say
    assert sums["clip_fraction"] == 0


def test_a_value_loss_without_tokens_is_zero():
    values = torch.randn(3, requires_grad=True)
    loss, count, _ = ValueLoss(0.2)(values, torch.zeros(3), torch.ones(3), torch.zeros(3))
    loss.backward()
    assert (loss.item(), count.item(), values.grad.tolist()) == (0.0, 0, [0.0] * 3)


def test_likelihood_loss():
    log_probs = torch.tensor([-1.0, -2.0, -4.0, float("-inf")], requires_grad=True)
    mask = torch.tensor([False, True, True, False])
    loss, count, sums = likelihood_loss(log_probs, mask, entropy=torch.tensor([9.0, 1.0, 2.0, float("nan")]))
    loss.backward()
    assert (loss.item(), count.item(), sums["entropy"].item()) == (6.0, 2, 3.0)
    assert log_probs.grad.tolist() == [0.0, -1.0, -1.0, 0.0]


def test_means():
    sums = {"tokens": 4, "loss": 6.0, "loss_count": 2, "clip_fraction": 1, "kl_old": 0.4}
    assert means(sums) == {"loss": 3.0, "clip_fraction": 0.25, "kl_old": 0.1}
    assert means({"tokens": 0, "loss": 0.0, "loss_count": 0, "kl_old": 0.0}) == {"loss": 0.0, "kl_old": 0.0}


def test_bad_settings_name_the_key():
    with pytest.raises(ValueError, match="algorithm.loss_level='word'"):
        PolicyLoss(level="word")
    with pytest.raises(ValueError, match="algorithm.clip_low=1.5"):
        PolicyLoss(clip_low=1.5)
    with pytest.raises(ValueError, match="algorithm.value_clip=-1"):
        ValueLoss(-1)
    with pytest.raises(ValueError, match="algorithm.kl_estimator='k4'"):
        estimate_kl(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="kl_coefficient=0.1 needs reference_log_probs"):
        x = tensors(inputs())
        del x["reference_log_probs"]
        PolicyLoss(kl_coefficient=0.1)(**x)
