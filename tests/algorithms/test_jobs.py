"""Every algorithm improves its objective in a small job on one CPU rank; PPO's roles in layouts of their own on four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.data.tiny_model import make_tiny_model

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
# Actor TP2 x PP2 beside a critic PP2 x DP2; 6 prompts that do not divide evenly into 4 mini-batches of 2 data-parallel ranks
ON_FOUR = [
    *("algorithm={name: ppo, epochs: 2, kl_coefficient: 0.05, kl_in: reward, kl_estimator: k1, kl_target: 0.5}",),
    *(
        f"roles.critic={{pp: 2, {CRITIC}}}",
        "roles.reference={tp: 2}",
        "batch={prompts: 6, samples_per_prompt: 3, mini_batches: 4}",
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
    steps = train(tmp_path, *ON_FOUR)
    assert [step["reshard/verified"] for step in steps] == [True, None, None]
    measured = {
        *("time/values", "time/update", "time/update_critic", "time/reference", "critic/loss", "critic/explained_variance"),
        *("critic/clip_fraction", "critic/value", "critic/grad_norm", "critic/lr", "actor/kl_response", "actor/kl_coefficient"),
        *("memory/peak_bytes/values", "memory/peak_bytes/update_critic"),
    }
    for step in steps:
        assert measured <= step.keys()
        assert not step["critic/skipped"] and step["critic/grad_norm"] > 0 and step["critic/lr"] == 3e-4
    # the policy starts as the reference: nothing to penalise, and the coefficient comes down by its largest step
    assert abs(steps[0]["actor/kl_response"]) < 1e-3
    assert [step["actor/kl_coefficient"] for step in steps[:2]] == [0.05, pytest.approx(0.05 * 0.98)]


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
