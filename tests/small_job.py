"""The small job of many tests: `hybridflow train` of a tiny model on sums of two digits, in a process of its own on a CPU."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from hybridflow.controller import faults
from hybridflow.data.tokenizer import character_tokenizer
from tests.processes import PYTHON_PATH

ROOT = Path(__file__).parents[1]
TIMEOUT = 500
RECIPE = """
model: {dtype: float32}
cluster: {ranks_per_node: 1, device: cpu}
roles:
  actor: {micro_batch_tokens: 2048, optimizer: {lr: 1.0e-3}}
  rollout: {gpu_memory_utilization: 0.1, engine_args: {max_num_seqs: 64}}
batch: {prompts: 4, samples_per_prompt: 8, mini_batches: 2}
sampling: {max_prompt_tokens: 16, max_response_tokens: 6}
data:
  task: chain_sum
  options: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  prompt_template: "{expression}="
reward: {kind: last_integer, concurrency: 1}
evaluation: {problems: 0}
run: {steps: 2, seed: 1}
"""
CLASSIFIERS_TOKENS = "()*+-/0123456789=?"  # others than the policy's, under other numbers
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def write_recipe(path: Path, model: Path, run: Path, *changes: str) -> Path:
    """The recipe as a YAML file; `changes` are YAML texts laid over it, the later over the earlier."""
    places = {"model": {"path": str(model)}, "run": {"dir": str(run)}}
    merged = OmegaConf.merge(*map(OmegaConf.create, (RECIPE, *changes, places)))
    path.write_text(yaml.safe_dump(OmegaConf.to_container(merged)))
    return path


def start(config: Path | str, *overrides: str, **environment: str) -> subprocess.Popen:
    """`hybridflow train` in a process of its own, its output and errors in one pipe."""
    outer = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    return subprocess.Popen(
        [sys.executable, "-m", "hybridflow.cli", "train", "--config", str(config), *overrides],
        cwd=ROOT,
        env=outer | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"} | environment,  # a second thread only spins
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = TIMEOUT, status: int = 0) -> str:
    """Wait until it has ended, with this status; what it said."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.terminate()
    assert process.returncode == status, output[-6000:]
    return output


def notes_of(process: subprocess.Popen, timeout: float = 900) -> Path:
    """Where the processes of a job on this machine note what they are at; waits until there are any."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for member in psutil.Process(process.pid).children(recursive=True):
            try:
                return Path(member.environ()[faults.FOLDER])
            except (psutil.Error, KeyError):
                continue
        time.sleep(0.1)
    raise TimeoutError(f"the job started no rank within {timeout} s")


def ranks_of(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """The processes of a job's ranks by their numbers; on Ray, whose processes do not show them, in any order."""
    found: dict[int, psutil.Process] = {}
    for member in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if member.name().startswith("ray::RankActor"):
                found[len(found)] = member
            elif "hybridflow.train" in member.cmdline() and "RANK" in member.environ():  # and not what a rank has started
                found[int(member.environ()["RANK"])] = member
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_classifier(folder: Path) -> Path:
    """A tiny random reward model whose tokens have other numbers than the policy's."""
    tokenizer = character_tokenizer(CLASSIFIERS_TOKENS)
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
