"""Safe RLHF: the multiplier and the combined loss against numpy; what a step asks of its roles."""

import math

import numpy as np
import pytest
import torch

from hybridflow.algorithms.loop import make_algorithm
from hybridflow.algorithms.losses import PolicyLoss
from hybridflow.algorithms.safe_rlhf import CostMultiplier
from tests.algorithms.fakes import fake_run, problems
from tests.algorithms.test_losses import inputs, numpy_policy_loss, tensors

SETTINGS = "cost_limit: 3.5, lambda_init: 0.5, lambda_lr: 0.2, gae_lambda: 1.0, normalize_advantages: false"


def test_the_multiplier_equals_numpy():
    costs, limit, lr = [0.9, 0.7, 0.2, 0.1, 0.4, -1.0], 0.3, 0.7
    multiplier = CostMultiplier(1.5, limit, lr, 10.0)
    log = np.log(1.5)
    for cost in costs:
        multiplier.adapt(cost)
        log += lr * np.exp(log) * (cost - limit)  # the gradient of lambda (cost - limit) by ln lambda
        assert multiplier.value == pytest.approx(np.exp(log), rel=1e-12)


def test_the_multiplier_goes_no_higher_than_it_may_and_comes_down_again():
    multiplier = CostMultiplier(1.0, 0.0, 1.0, 3.0)
    for _ in range(50):
        multiplier.adapt(1.0)
    assert multiplier.value == pytest.approx(3.0)
    multiplier.adapt(-0.1)
    assert multiplier.value == pytest.approx(3.0 * math.exp(-0.3))


@pytest.mark.parametrize("multiplier", [0.2, 1.0, 7.0])
def test_the_loss_on_the_combined_advantages_equals_numpy(multiplier):
    """And where nothing is clipped it is the paper's (L_R + lambda L_C) / (1 + lambda), eq. 30."""
    x = inputs()
    costs = np.random.default_rng(9).normal(size=len(x["advantages"]))
    combined = CostMultiplier(multiplier, 0.0, 0.1, 10.0).weigh(torch.tensor(x["advantages"]), torch.tensor(costs))
    expected = (x["advantages"] - multiplier * costs) / (1 + multiplier)
    np.testing.assert_allclose(combined.numpy(), expected, rtol=1e-12)
    loss, _, gradient, sums = numpy_policy_loss(x | {"advantages": expected}, 0.2, 0.2, "token")
    assert sums["clip_fraction"] > 0
    ours = tensors(x | {"advantages": expected})
    total = PolicyLoss()(**ours)[0]
    total.backward()
    np.testing.assert_allclose(total.item(), loss, rtol=1e-12)
    np.testing.assert_allclose(ours["log_probs"].grad.numpy(), gradient, rtol=1e-12, atol=1e-15)
    unclipped = PolicyLoss(0.99, 1e9)
    rewarded, cost = (unclipped(**tensors(x | {"advantages": a}))[0].item() for a in (x["advantages"], -costs))
    assert unclipped(**ours)[0].item() == pytest.approx((rewarded + multiplier * cost) / (1 + multiplier))


def test_a_step_asks_both_critics(tmp_path):
    run, calls = fake_run(
        tmp_path, f"algorithm={{name: safe_rlhf, {SETTINGS}}}", "cost.kind=last_integer", "batch.mini_batches=1"
    )
    algorithm = make_algorithm(run)
    algorithm.prepare()
    expected = "actor.start_training critic.copy_from critic.start_training cost_critic.copy_from cost_critic.start_training"
    assert [name for name, _ in calls] == expected.split()
    del calls[:]
    run.begin_step()
    algorithm.step(problems(2))
    expected = """actor.make_room critic.make_room cost_critic.make_room critic.release_weights cost_critic.release_weights
        rollout.wake_weights rollout.receive actor.release_weights rollout.wake_kv_cache rollout.generate rollout.sleep
        actor.restore critic.restore cost_critic.restore critic.values cost_critic.values critic.update cost_critic.update
        actor.update"""
    assert [name for name, _ in calls if not name.startswith("worker.")] == expected.split()
    assert run.metrics["cost/mean"] == run.metrics["reward/mean"] == 4.5  # eight samples, scored 1 to 8
    assert run.metrics["cost/lambda"] == 0.5
    assert algorithm.multiplier.value == pytest.approx(0.5 * math.exp(0.2 * 0.5 * (4.5 - 3.5)))
    run.finish_step()
    step = run.recorder.history.steps[0]
    assert {"cost_critic/loss", "cost_critic/explained_variance", "time/update_cost_critic", "time/cost"} <= step.keys()


def test_the_batches_hold_both_estimates(tmp_path):
    settings = f"{{name: safe_rlhf, {SETTINGS}, kl_coefficient: 0.1, kl_in: reward, kl_estimator: k1}}"
    sizes = "batch={prompts: 2, samples_per_prompt: 1, mini_batches: 1}"
    run, calls = fake_run(tmp_path, f"algorithm={settings}", "cost.kind=last_integer", sizes)
    make_algorithm(run).step(problems(2))
    updates = {name: args[0] for name, args in calls if name.endswith(".update")}
    penalty = 0.1 * (-1.5 + 2.0)
    for row, (prompt, score) in enumerate([(1, 1.0), (2, 2.0)]):  # the same number is reward and cost
        mask = updates["actor.update"].rows("loss_mask")[row]
        returns, costs = (
            torch.tensor([0.0] * prompt + [score + sign * left * penalty for left in (3, 2, 1)]) for sign in (-1, 1)
        )
        torch.testing.assert_close(updates["critic.update"].rows("returns")[row], returns)
        torch.testing.assert_close(updates["cost_critic.update"].rows("returns")[row], costs)
        assert updates["critic.update"].rows("values")[row].unique() == 0.5
        assert updates["cost_critic.update"].rows("values")[row].unique() == 0.25
        combined = ((returns - 0.5) - 0.5 * (costs - 0.25)) / 1.5
        torch.testing.assert_close(updates["actor.update"].rows("advantages")[row], torch.where(mask, combined, 0.0))
        # whatever lambda is, the penalty counts once
        plain = (score - 0.5 - 0.5 * (score - 0.25)) / 1.5
        torch.testing.assert_close(updates["actor.update"].rows("advantages")[row][-1], torch.tensor(plain - penalty))
