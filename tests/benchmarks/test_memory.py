"""benchmarks/memory.py on one CPU rank: a whole job of a random model."""

import json
import sys
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_weights_that_are_released(tmp_path):
    out = tmp_path / "memory.json"
    command = [sys.executable, "benchmarks/memory.py", "--model", "configs/models/tiny.json", "--variants", "released", "--out"]
    options = ["run.steps=3", "batch.prompts=4", "roles.rollout.gpu_memory_utilization=0.05"]
    done = run([*command, str(out), *options], timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["results"]
    assert list(results) == ["released"]
    memory, seconds = results["released"]["memory_bytes"], results["released"]["seconds"]
    assert {"wake_weights", "reshard", "release", "wake", "rollout", "sleep", "restore", "update"} <= memory.keys()
    assert all(len(sizes) == 3 and min(sizes) > 0 for sizes in memory.values())
    assert {"release", "restore", "update", "step"} <= seconds.keys()
    assert "released:" in done.stdout
