"""A job killed outright and resumed ends as one that was left alone: metrics, samples and weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hybridflow.data.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
TIMEOUT = 500
# PPO with an adapted KL penalty: three models, two optimizers, and a state of the driver's own.
CONFIG = """
model: {{path: {model}, dtype: float32}}
cluster: {{ranks_per_node: 1, device: cpu}}
roles:
  actor: {{micro_batch_tokens: 2048, optimizer: {{lr: 1.0e-3, warmup_steps: 3}}}}
  rollout: {{gpu_memory_utilization: 0.1, engine_args: {{max_num_seqs: 64}}}}
algorithm: {{name: ppo, kl_coefficient: 0.05, kl_target: 0.1, kl_in: reward}}
batch: {{prompts: 4, samples_per_prompt: 4, mini_batches: 2}}
sampling: {{max_prompt_tokens: 16, max_response_tokens: 6}}
data:
  task: chain_sum
  options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  prompt_template: "{{expression}}="
reward: {{kind: last_integer, concurrency: 1}}
warm_start: {{steps: 10, batch_size: 16, optimizer: {{lr: 3.0e-3}}}}
evaluation: {{problems: 4, every: 2}}
run: {{dir: {run}, steps: 6, seed: 1, save_every: 2}}
"""
MEASURED = ("time/", "perf/", "memory/", "straggler/")  # never twice the same
OF_THE_PROCESS = ("reshard/verified", "reshard/wire_bound_fraction")  # checked after every start


def start(folder: Path, run: str, *overrides: str) -> subprocess.Popen:
    config = folder / f"{run}.yaml"
    config.write_text(CONFIG.format(model=folder / "tiny", run=folder / run))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    return subprocess.Popen(
        [sys.executable, "-m", "hybridflow.cli", "train", "--config", str(config), *overrides],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.terminate()
    assert process.returncode == 0, output[-6000:]
    return output


def kill_all(process: subprocess.Popen) -> str:
    """`hybridflow train`, torchrun and the ranks, at once; what they had said."""
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        member.send_signal(signal.SIGKILL)
    return process.communicate(timeout=60)[0]


def rows(path: Path, *without: str) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith((*MEASURED, *without))} for line in lines]


def assert_same_run(found: Path, expected: Path) -> None:
    for one, other in zip(*(rows(run / "metrics.jsonl", *OF_THE_PROCESS) for run in (found, expected)), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == (None if value is None else pytest.approx(value, rel=1e-6, abs=1e-6)), name
    for name in ("samples.jsonl", "evaluation.jsonl", "warm_start.jsonl"):
        assert rows(found / name, "seconds") == rows(expected / name, "seconds")
    weights = [load_file(run / "hf" / "model.safetensors") for run in (found, expected)]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


@pytest.mark.timeout(3 * TIMEOUT)
def test_a_killed_job_goes_on_as_if_nothing_had_been(tmp_path):
    make_tiny_model(tmp_path / "tiny")
    whole, killed = start(tmp_path, "whole"), start(tmp_path, "killed")
    metrics = tmp_path / "killed" / "metrics.jsonl"
    try:
        while not (metrics.exists() and metrics.read_text().count("\n") >= 5):  # past the second checkpoint
            assert killed.poll() is None
            time.sleep(0.05)
        kill_all(killed)
    finally:
        killed.kill()
    finish(whole)
    checkpoints = tmp_path / "killed" / "checkpoints"
    newest = checkpoints / "step-4" / "critic" / "__0_0.distcp"
    os.truncate(newest, newest.stat().st_size // 2)  # and a disk that lost its end
    output = finish(start(tmp_path, "killed"))
    assert f"skipped: {checkpoints}/step-4: critic/__0_0.distcp has " in output
    assert f"resumes after step 2 from {checkpoints}/step-2" in output
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
