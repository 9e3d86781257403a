"""A job killed outright, resumed, asked to leave and resumed again ends as one left alone: metrics, samples and weights."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hybridflow.convert import convert
from hybridflow.data.tiny_model import make_tiny_model
from tests import small_job
from tests.small_job import TIMEOUT, finish, write_recipe

# PPO with an adapted KL penalty: three models, two optimizers, and a state of the driver's own.
PPO = """
roles: {actor: {optimizer: {warmup_steps: 3}}}
algorithm: {name: ppo, kl_coefficient: 0.05, kl_target: 0.1, kl_in: reward}
batch: {samples_per_prompt: 4}
warm_start: {steps: 10, batch_size: 16, optimizer: {lr: 3.0e-3}}
evaluation: {problems: 4, every: 2}
run: {steps: 6, save_every: 2}
"""
MEASURED = ("time/", "perf/", "memory/", "straggler/")  # never twice the same
OF_THE_PROCESS = ("reshard/verified", "reshard/wire_bound_fraction")  # checked after every start


def start(folder: Path, run: str, *overrides: str, **more_environment: str) -> subprocess.Popen:
    config = write_recipe(folder / f"{run}.yaml", folder / "tiny", folder / run, PPO)
    return small_job.start(config, *overrides, **more_environment)


def kill_all(process: subprocess.Popen) -> str:
    """`hybridflow train`, torchrun and the ranks, at once; what they had said."""
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        member.send_signal(signal.SIGKILL)
    return process.communicate(timeout=60)[0]


def rows(path: Path, *without: str) -> list[dict]:
    return [
        {name: value for name, value in row.items() if not name.startswith((*MEASURED, *without))}
        for row in small_job.rows(path)
    ]


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
    leaving = "roles.actor.implementation=tests.checkpoints.leaving:LeavingActor"
    output = finish(start(tmp_path, "killed", leaving, "run.save_every=3"), status=99)
    assert f"skipped: {checkpoints}/step-4: critic/__0_0.distcp has " in output
    assert f"resumes after step 2 from {checkpoints}/step-2" in output
    assert "SIGTERM: ending after step 4 of 6; run.resume=auto goes on from there" in output
    assert f"resumes after step 4 from {checkpoints}/step-4" in finish(start(tmp_path, "killed"))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.gpu(2)
@pytest.mark.timeout(TIMEOUT)
def test_what_two_gpus_wrote_in_the_background_is_the_model(tmp_path):
    """By forked writers, while training went on; and another layout goes on from it."""
    make_tiny_model(tmp_path / "tiny")
    two = ["cluster={ranks_per_node: 2, device: cuda}", "model.dtype=bfloat16", "roles.rollout.gpu_memory_utilization=0.2"]
    finish(start(tmp_path, "run", *two, "run.steps=4"))
    convert(str(tmp_path / "run" / "checkpoints" / "step-4"), str(tmp_path / "converted"))
    converted, exported = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "converted", tmp_path / "run" / "hf")
    )
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in exported.items())
    output = finish(start(tmp_path, "run", *two, "roles.actor.pp=2", "run.steps=6"))
    assert f"resumes after step 4 from {tmp_path}/run/checkpoints/step-4" in output
    assert [row["step"] for row in small_job.rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
