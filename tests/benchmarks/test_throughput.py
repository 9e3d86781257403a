"""benchmarks/throughput.py on CPU ranks: all parts, and figures that add up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.metrics.throughput import training_flops
from hybridflow.planner.calibration import Calibration
from hybridflow.planner.records import calibrate, read_runs
from megatron_ext.hf_config import HFConfig
from tests import processes

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs" / "models" / "tiny.json"


def run(*options: str, ranks: int, timeout: float) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "benchmarks/throughput.py"]
    command += ["--model", str(MODEL), *options]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}  # plain vLLM starts sooner so
    return processes.run(command, timeout, cwd=ROOT, env=environment)


@pytest.mark.timeout(300)
def test_every_part(tmp_path):
    out = tmp_path / "throughput.json"
    sizes = [
        "--tokens",
        "64",
        "--longest",
        "16",
        "--note",
        "a note",
        "--micro-batches",
        "4",
        "--prompts",
        "4",
        "--prompt-tokens",
        "8",
        "--response-tokens",
        "8",
    ]
    layout = ["roles.actor.pp=2", "roles.rollout.gpu_memory_utilization=0.05"]
    done = run(*sizes, "--steps", "2", "--warmup", "1", "--out", str(out), *layout, ranks=2, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    results = json.loads(out.read_text())["results"]
    assert list(results) == ["rollout", "log_probs", "update", "runs"]
    runs = read_runs(out)
    names = ["update PP2 4 x 64, a note", "forward PP2 4 x 64, a note", "rollout TP1 4 x 8"]
    assert [run.name for run in runs] == names
    fitted = calibrate(Calibration(), runs)
    assert all(0 < run.predict(fitted) < 1000 * run.seconds for run in runs)
    hf, lengths = HFConfig.from_dict(json.loads(MODEL.read_text())), [16, 8, 8] * 8
    for name, share in (("update", 1), ("log_probs", 1 / 3)):
        found = results[name]
        seconds = found["seconds"]["median"]
        assert found["layout"] == "PP2" and len(found["seconds"]["all"]) == 2
        assert found["tokens_per_second_per_gpu"] * seconds * 2 == pytest.approx(256)
        assert found["flops_per_second_per_gpu"] * seconds * 2 == pytest.approx(share * training_flops(hf, lengths))
        assert found["mfu"] is None and found["peak_allocated_bytes"] > 0
    rollout = results["rollout"]
    for side in (rollout, rollout["plain"]):
        assert side["tokens_per_second_per_gpu"] * side["seconds"]["median"] == pytest.approx(4 * 8)
    assert rollout["ratio"] == pytest.approx(rollout["plain"]["seconds"]["median"] / rollout["seconds"]["median"])
    assert done.stdout.count("tokens/s/GPU") == 3


@pytest.mark.timeout(200)
def test_rows_share_their_processes(tmp_path):
    out = tmp_path / "rows.json"
    words = ["--parts", "update", "--tokens", "64", "--steps", "2", "--warmup", "1", "--out", str(out)]
    rows = [
        "--note first --micro-batches 2 roles.actor.pp=2",
        "--note 'another model' --layers 6 --micro-batches 4 --tokens 32 roles.actor.tp=2 roles.actor.pp=1",
        "--note last --micro-batches 1",
    ]
    done = run(*words, *(word for row in rows for word in ("--row", row)), ranks=2, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    results = json.loads(out.read_text())["results"]
    assert [row["update"]["layout"] for row in results["rows"]] == ["PP2", "TP2", "DP2"]
    assert all(list(row) == ["update"] for row in results["rows"])
    names = ["update PP2 2 x 64, first", "update TP2 4 x 32, another model", "update DP2 1 x 64, last"]
    assert [run.name for run in read_runs(out)] == names
    assert [row["model"]["num_hidden_layers"] for row in results["runs"]] == [4, 6, 4]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "30"], "--tokens=30 must be a multiple of 4"),
        (["roles.actor.pp=3"], "are fewer than roles.actor.tp=1 x pp=3 x cp=1 = 3"),
        (["--tokens", "64", "--longest", "24"], "--longest=24 must be even, and --tokens=64 a multiple of twice that"),
        (["--tokens", "1024", "roles.actor.micro_batch_tokens=2048"], "roles.actor.micro_batch_tokens=2048 is --tokens=1024"),
        (["nonsense"], "unknown arguments ['nonsense']"),
        (["roles.actor.ppp=2"], "did you mean roles.actor.pp?"),
        (["--parts", "update", "--row", "--tokens 30"], "--tokens=30 must be a multiple of 4"),
        (["--row", "--note one"], "--row goes with --parts update and log_probs"),
    ],
)
def test_bad_input(options, message, capsys, monkeypatch):
    from benchmarks import throughput

    monkeypatch.setattr(sys, "argv", ["throughput.py", "--model", str(MODEL), *options])
    assert throughput.main() == 2
    assert message in capsys.readouterr().err
