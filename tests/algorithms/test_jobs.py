"""Every algorithm improves its objective in a small job on one CPU rank; PPO's roles in layouts of their own on four."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from hybridflow.data.tiny_model import make_tiny_model
from hybridflow.data.tokenizer import character_tokenizer
from hybridflow.rewards.scorers import last_integer

ROOT = Path(__file__).parents[2]
TIMEOUT = 400
# The quickstart with everything on one rank; the algorithm starts where the warm start has just taught it to write sums.
SMALL = [
    *("cluster.ranks_per_node=1", "roles.actor.tp=1", "roles.actor.pp=1", "roles.rollout.tp=1", "warm_start.steps=150"),
    *("warm_start.optimizer.decay_steps=140", "run.steps=30", "roles.actor.sequence_parallel=false"),
]
FOUR_EACH = ["batch.samples_per_prompt=4", "batch.prompts=64", "batch.mini_batches=1"]
CRITIC = "micro_batch_tokens: 2048, forward_micro_batch_tokens: 4096, optimizer: {lr: 3.0e-4}"
JOBS = {
    "remax": ["algorithm.name=remax", *FOUR_EACH],
    "ppo": ["algorithm.name=ppo", f"roles.critic={{{CRITIC}}}", *FOUR_EACH],
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
    *("warm_start.steps=80", "warm_start.optimizer.decay_steps=78", "sampling.temperature=1.0", "evaluation.problems=0"),
    "run.steps=20",
]
# Actor TP2 x PP2 beside a critic PP2 x DP2 and a reward model TP2 x DP2 whose tokens have other numbers; 6
# prompts that do not divide evenly into 4 mini-batches of 2 data-parallel ranks
ON_FOUR = [
    *("algorithm={name: ppo, epochs: 2, kl_coefficient: 0.05, kl_in: reward, kl_estimator: k1, kl_target: 0.5}",),
    *(
        f"roles.critic={{pp: 2, {CRITIC}}}",
        "roles.reference={tp: 2}",
        "batch={prompts: 6, samples_per_prompt: 3, mini_batches: 4}",
        "reward={kind: last_integer, model_weight: 0.5, cache_size: 1000}",
        "roles.reward={tp: 2, forward_micro_batch_tokens: 4096, model: {path: REWARD_MODEL}}",
    ),
    *("warm_start.steps=100", "run.steps=3", "evaluation.problems=4"),
]


@pytest.mark.timeout(TIMEOUT + 20)
@pytest.mark.parametrize("name", JOBS)
def test_the_reward_rises(tmp_path, name):
    steps = train(tmp_path, *SMALL, *JOBS[name])
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
        assert sum(explained[-10:]) / 10 > 0.03, explained
        assert sum(step["critic/loss"] for step in steps[-10:]) / 10 < steps[0]["critic/loss"]


@pytest.mark.timeout(TIMEOUT + 20)
def test_a_critic_in_a_layout_of_its_own(tmp_path):
    classifier = write_classifier(tmp_path / "classifier")
    steps = train(tmp_path, *(text.replace("REWARD_MODEL", str(classifier)) for text in ON_FOUR))
    assert [step["reshard/verified"] for step in steps] == [True, None, None]
    measured = {
        *("time/values", "time/update", "time/update_critic", "time/reference", "critic/loss", "critic/explained_variance"),
        *("critic/clip_fraction", "critic/value", "critic/grad_norm", "critic/lr", "actor/kl_response", "actor/kl_coefficient"),
        *("memory/peak_bytes/values", "memory/peak_bytes/update_critic", "memory/peak_bytes/reward"),
        *("reward/last_integer", "reward/model", "reward/cache_hit_rate", "time/reward"),
    }
    for step in steps:
        assert measured <= step.keys()
        assert not step["critic/skipped"] and step["critic/grad_norm"] > 0 and step["critic/lr"] == 3e-4
        assert step["reward/mean"] == pytest.approx(step["reward/last_integer"] + 0.5 * step["reward/model"])
        assert step["reward/failed"] == 0 and 0 <= step["reward/cache_hit_rate"] < 1
    check_scores(classifier, tmp_path / "run")
    # the policy starts as the reference: nothing to penalise, and the coefficient comes down by its largest step
    assert abs(steps[0]["actor/kl_response"]) < 1e-3
    assert [step["actor/kl_coefficient"] for step in steps[:2]] == [0.05, pytest.approx(0.05 * 0.98)]


@pytest.mark.timeout(TIMEOUT + 20)
def test_the_reward_rises_while_the_cost_comes_under_its_limit(tmp_path):
    (tmp_path / "scores.py").write_text(SCORES)
    sections = (f"{name}={{kind: function, function: '{tmp_path}/scores.py:{function}', concurrency: 1, cache_size: 100000}}"
                for name, function in (("reward", "digits"), ("cost", "plus")))  # fmt: skip
    steps = train(tmp_path, *SMALL, *FOUR_EACH, *SAFE, *sections)
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


def write_classifier(folder: Path) -> Path:
    """A tiny random classifier whose tokens have other numbers than the policy's."""
    tokenizer = character_tokenizer("()*+-/0123456789=?")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(config).float()
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def check_scores(classifier: Path, run: Path) -> None:
    """The samples' rewards are what transformers' own classifier says of their text, beside whether the answer is right."""
    model = Qwen2ForSequenceClassification.from_pretrained(classifier, dtype=torch.float32).eval()
    tokenizer = character_tokenizer("()*+-/0123456789=?")
    policy = character_tokenizer()
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    assert len(rows) == 3 * 18
    for row in rows:
        text = policy.decode(row["prompt_tokens"]) + row["response"]
        ends = [tokenizer.eos_token_id] if row["tokens"][-1] == policy.eos_token_id else []
        with torch.no_grad():
            score = model(torch.tensor([tokenizer(text)["input_ids"] + ends])).logits[0, 0].item()
        right = last_integer("", row["response"], row["answer"], {})
        assert row["reward"] == pytest.approx(right + 0.5 * score, abs=1e-4), row


def train(tmp_path: Path, *overrides: str) -> list[dict]:
    """The metrics of all steps of a job from the command line."""
    model, run = make_tiny_model(tmp_path / "tiny"), tmp_path / "run"
    command = [sys.executable, "-m", "hybridflow.cli", "train", "--config", "configs/quickstart.yaml", f"model.path={model}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    done = subprocess.run(
        [*command, f"run.dir={run}", *overrides],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
