"""Every algorithm improves its objective in a small job on one CPU rank."""

import json
import math
from pathlib import Path

import pytest

from hybridflow.config.load import load
from hybridflow.config.preflight import check
from hybridflow.data.tiny_model import make_tiny_model
from tests.roles import jobs

TIMEOUT = 400
# The quickstart with everything on one rank.
SMALL = [
    "cluster={ranks_per_node: 1, device: cpu}",
    "roles.actor={tp: 1, pp: 1, sequence_parallel: false}",
    "roles.rollout.tp=1",
]
# Sums of two digits instead of three, which are learnt sooner. A short warm start on them, and a step: two algorithms start
# where a model has just been taught to write sums.
TWO_DIGITS = "data.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
TEACH = [
    TWO_DIGITS,
    "warm_start.steps=100",
    "warm_start.batch_size=64",
    "warm_start.optimizer.decay_steps=90",
    "batch.prompts=2",
    "run.steps=1",
    "evaluation.problems=0",
]
FOUR_EACH = ["batch.samples_per_prompt=4", "batch.prompts=32", "batch.mini_batches=1", "evaluation.problems=0"]
LEARN = [*FOUR_EACH, TWO_DIGITS, "warm_start.steps=0", "run.steps=20"]
CRITIC = "micro_batch_tokens: 2048, forward_micro_batch_tokens: 4096, optimizer: {lr: 1.0e-3}"
JOBS = {
    "remax": ["algorithm.name=remax"],
    "ppo": ["algorithm.name=ppo", f"roles.critic={{{CRITIC}}}"],
}
# More digits are better, but no more than one response in ten may have a plus; after the warm start six in ten do, and those
# have more digits than the others.
SCORES = """
def digits(prompt, response, answer, metadata):
    return sum(character.isdigit() for character in response) / 6


def plus(prompt, response, answer, metadata):
    return float("+" in response)
"""
LIMIT = 0.1
SAFE = [
    f"algorithm={{name: safe_rlhf, cost_limit: {LIMIT}, lambda_init: 0.5, lambda_lr: 0.2}}",
    "roles.actor.optimizer={lr: 4.0e-4, warmup_steps: 2, schedule: constant}",
    "roles.critic={micro_batch_tokens: 2048, forward_micro_batch_tokens: 4096, optimizer: {lr: 1.0e-3}}",
    *("warm_start.steps=60", "warm_start.batch_size=64", "warm_start.optimizer.decay_steps=58"),
    *("sampling.temperature=1.0", "run.steps=16"),
]


@pytest.fixture(scope="module")
def taught(worlds, tmp_path_factory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("taught")
    train(worlds, make_tiny_model(folder / "tiny"), folder / "run", *TEACH)
    return folder / "run" / "hf"


@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("name", JOBS)
def test_the_reward_rises(worlds, taught, tmp_path, name):
    steps = train(worlds, taught, tmp_path / "run", *LEARN, *JOBS[name])
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert all(step["reshard/verified"] in (True, None) for step in steps)
    # what is sampled for different ends comes from one rollout: the engine takes the weights once a step
    assert max(step["mismatch/log_prob_abs_max"] for step in steps) < 1e-3
    if name == "remax":
        assert all(0 <= step["reward/baseline_mean"] <= 1 for step in steps)
    if name == "ppo":
        explained = [step["critic/explained_variance"] for step in steps]
        assert explained[0] == 0  # a new head says the same of every token
        assert sum(explained[-10:]) / 10 > 0.06, explained
        assert sum(step["critic/loss"] for step in steps[-10:]) / 10 < steps[0]["critic/loss"]


@pytest.mark.timeout(2 * TIMEOUT)
def test_the_reward_rises_while_the_cost_comes_under_its_limit(worlds, tmp_path):
    (tmp_path / "scores.py").write_text(SCORES)
    sections = (f"{name}={{kind: function, function: '{tmp_path}/scores.py:{function}', concurrency: 1, cache_size: 100000}}"
                for name, function in (("reward", "digits"), ("cost", "plus")))  # fmt: skip
    steps = train(worlds, make_tiny_model(tmp_path / "tiny"), tmp_path / "run", *FOUR_EACH, *SAFE, *sections)
    rewards, costs = ([step[f"{name}/mean"] for step in steps] for name in ("reward", "cost"))
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.1, rewards
    assert sum(costs[:3]) / 3 > 0.4 and sum(costs[-5:]) / 5 < LIMIT, costs
    multipliers = [step["cost/lambda"] for step in steps]
    assert multipliers[0] == 0.5
    for before, cost, after in zip(multipliers, costs, multipliers[1:], strict=False):
        assert after == pytest.approx(before * math.exp(0.2 * before * (cost - LIMIT)), rel=1e-4)
    assert all(step["cost/failed"] == 0 and not step["cost_critic/skipped"] for step in steps)
    assert {"time/cost", "time/update_cost_critic", "cost_critic/loss", "cost_critic/explained_variance"} <= steps[0].keys()
    assert steps[-1]["cost/cache_hit_rate"] > 0.2  # the cost of "12" is that of every other "12" for the same sum
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert all(row["cost"] == float("+" in row["response"]) for row in rows)


def train(worlds, model: Path, run: Path, *overrides: str) -> list[dict]:
    """The metrics of all steps of a job that `hybridflow train` would start."""
    overrides = [f"model.path={model}", f"run.dir={run}", *SMALL, *overrides]
    check(load("configs/quickstart.yaml", overrides))
    return worlds(1, "jobs").run(jobs.train, "configs/quickstart.yaml", overrides, timeout=TIMEOUT)[0]["steps"]
