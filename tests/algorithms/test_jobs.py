"""Every algorithm improves its objective in a small job on one CPU rank."""

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
JOBS = {"remax": ["algorithm.name=remax", "batch.samples_per_prompt=4", "batch.prompts=64", "batch.mini_batches=1"]}


@pytest.mark.timeout(TIMEOUT + 20)
@pytest.mark.parametrize("name", JOBS)
def test_the_reward_rises(tmp_path, name):
    model, run = make_tiny_model(tmp_path / "tiny"), tmp_path / "run"
    command = [sys.executable, "-m", "hybridflow.cli", "train", "--config", "configs/quickstart.yaml", f"model.path={model}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    done = subprocess.run(
        [*command, f"run.dir={run}", *SMALL, *JOBS[name]],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert all(step["reshard/verified"] in (True, None) for step in steps)
    if name == "remax":
        assert all(0 <= step["reward/baseline_mean"] <= 1 for step in steps)
        # sampled and greedy answers come from one rollout: the engine takes the weights once a step
        assert max(step["mismatch/log_prob_abs_max"] for step in steps) < 1e-3
