"""`hybridflow plan`: what it prints, writes and refuses."""

import json
import re
import string
import subprocess
import sys

import pytest

from hybridflow import cli
from hybridflow.config.load import load
from hybridflow.config.preflight import check_shapes
from hybridflow.data.tokenizer import character_tokenizer
from hybridflow.planner import command, hardware
from tests.config.folders import write_config
from tests.planner.models import ROOT, RUNS


@pytest.fixture
def path(tmp_path):
    """GRPO of a 7.6B model with a reference on four GPUs; of the model there are its config.json and a tokenizer."""
    model = tmp_path / "qwen2_7b"
    model.mkdir()
    (model / "config.json").write_text((ROOT / "configs" / "models" / "qwen2_7b.json").read_text())
    character_tokenizer(string.printable).save_pretrained(model)
    path = write_config(
        tmp_path,
        model,
        cluster={"ranks_per_node": 4},
        roles={
            "actor": {"tp": 2, "sequence_parallel": True},
            "rollout": {"tp": 2, "gpu_memory_utilization": 0.3},
            "reference": {"tp": 2, "sequence_parallel": True, "offload": ["params"]},
        },
        sampling={"max_prompt_tokens": 512, "max_response_tokens": 1024},
    )
    path.write_text(path.read_text().replace("dtype: float32", "dtype: bfloat16"))
    return path


def test_a_forecast_a_search_and_a_config_that_can_run(path, tmp_path, capsys):
    written = tmp_path / "best.yaml"
    lengths = ["--prompt-tokens", "200", "--response-tokens", "600"]
    assert (
        cli.main(["plan", "--config", str(path), "--gpu", "H200", *lengths, "batch.prompts=64", "--write", str(written)]) == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("4 H200 of 140.4 GiB; a step of 256 samples, 200 + 600 tokens each on average\n")
    configured, searched, best = (out.index(text) for text in ("as configured: ", "4 placements of 2 roles", "the best: "))
    assert configured < searched < best
    assert re.search(r"\n  update +actor +4 +[\d.]+ +[\d.]+ +matrix products \d+%, ", out)
    assert "update, GiB: actor weights 7.1 + actor gradients 14.2 + actor optimizer 21.3 + actor activations" in out
    assert " while others wait: " in out
    assert not (tmp_path / "run").exists()
    chosen = load(written)
    check_shapes(chosen)
    seconds = float(re.search(r"the best: ([\d.]+) s", out)[1])
    assert cli.main(["plan", "--config", str(written), "--gpu", "H200", *lengths, "--no-search"]) == 0
    again = capsys.readouterr().out
    if "this version cannot run it" not in out:
        assert float(re.search(r"as configured: ([\d.]+) s", again)[1]) == pytest.approx(seconds, rel=0.05)
    assert "the best" not in again


def test_another_cluster(path, capsys):
    arguments = ["--gpu", "H100", "--gpu-memory", "94", "--nodes", "2", "--gpus-per-node", "8", "--network", "25", "--top", "1"]
    assert cli.main(["plan", "--config", str(path), *arguments, "roles.reference=null"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("16 H100 of 94.0 GiB; ")
    assert "\n  1  " in out and "\n  2  " not in out
    assert "cluster: {nodes: 2, ranks_per_node: 8}" in out


def test_a_layout_for_another_cluster_is_searched_anew(path, tmp_path, capsys):
    """TP2 on a node of a single GPU, and on three: what is wrong is said, and a layout found."""
    written = tmp_path / "best.yaml"
    keys = ["roles.actor.recompute=full", "roles.reference.offload=[params]", "roles.actor.offload=[optimizer]"]
    for gpus in ("1", "3"):
        asked = ["plan", "--config", str(path), "--gpu", "H200", "--gpu-memory", "280", "--gpus-per-node", gpus, *keys]
        assert cli.main([*asked, "--write", str(written)]) == 2
        out, err = capsys.readouterr()
        assert f"the job as configured cannot run: {err.removeprefix('hybridflow: error: ').strip()}" in out
        assert "as configured: " not in out and "the best: " in out
        chosen = load(written)
        assert chosen.world_size == int(gpus) and {chosen.roles.actor.tp, chosen.roles.rollout.tp} == {1}
        assert cli.main([*asked, "--no-search"]) == 2
        assert "the best: " not in capsys.readouterr().out
    assert cli.main(["plan", "--config", str(path), "--gpu", "H200", "--gpus-per-node", "1", "batch.prompts=0"]) == 2
    out, err = capsys.readouterr()
    assert "batch.prompts=0" in err and "the best: " not in out


def test_what_cannot_fit_ends_with_status_2_and_what_would_fit(path, capsys):
    arguments = ["plan", "--config", str(path), "--gpu", "H100", "roles.rollout.gpu_memory_utilization=0.95"]
    assert cli.main([*arguments, "--no-search"]) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(r"hybridflow: error: rollout needs \d+\.\d GiB on a GPU of 79.6 GiB: vLLM 75.7 \+ [^\n]+\n", err)
    assert "as configured: " in out
    assert cli.main(arguments) == 2
    out, second = capsys.readouterr()
    assert second == err
    assert "the job as configured cannot run: rollout needs" in out and "the best: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "B1"], "--gpu B1 is unknown: use one of H200, H100, A100"),
        ([], "this machine has no GPU that the planner knows: say which one to plan for, such as --gpu H200"),
        (["--gpu", "H200", "--gpus-per-node", "3"], "3 processes are not a multiple of"),
        (["--gpu", "H200", "--response-tokens", "5000"], "--response-tokens=5000.0 is not above 0 and at most"),
        (["--gpu", "H200", "--gpu-memory", "0"], "--gpu-memory=0.0 is not above 0 and at most 100000 GiB"),
        (["--gpu", "H200", "--gpu-memory", "inf"], "--gpu-memory=inf is not above 0 and at most 100000 GiB"),
        (["--gpu", "H200", "--network", "-1"], "--network=-1.0 is not a number of GB/s above 0"),
        (["--gpu", "H200", "--network", "inf"], "--network=inf is not a number of GB/s above 0"),
        (["--gpu", "H200", "--nodes", "1000000"], "ranks are more than 65536: lower one of them"),
        (["--gpu", "H200", "--top", "0"], "--top 0 shows nothing: use at least 1"),
        (["--gpu", "H200", "--write", "x.yaml"], "--write x.yaml has nothing to write: leave out --no-search"),
        (["--gpu", "H200", "--calibrate", "x.json", "--save", "/"], "--save / is no file in a folder that is there: choose"),
        (["--gpu", "H200", "--calibrate", "x.json", "--save", "/no/x"], "--save /no/x is no file in a folder that is there"),
        (["--gpu", "H200", "--save", "x.json"], "--save x.json has nothing to write: give --calibrate RESULTS.json"),
        (["--gpu", "H200", "--calibration", "x.json"], "--calibration x.json: no such file"),
        (["--gpu", "H200", "--calibrate", "x.json"], "--calibrate x.json: no such file"),
        (
            ["--gpu", "A100", "--gpu-memory", "12"],
            "roles.rollout.gpu_memory_utilization=0.3 of 12.0 GiB: 3.6 GiB are too",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(hardware, "gpu_names", list)
    assert cli.main(["plan", "--config", str(path), "--no-search", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("hybridflow: error: ") and err.count("\n") == 1 and message in err


def test_calibration_is_fitted_shown_saved_and_read(path, tmp_path, capsys):
    saved = tmp_path / "calibration.json"
    arguments = ["plan", "--config", str(path), "--gpu", "H200", "--no-search"]
    assert cli.main([*arguments, "--calibrate", str(RUNS), "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "calibrated on 9 runs" in out and "update PP2 x VPP2 8 x 4096" in out and "  matrix: 0.887 -> 0." in out
    assert json.loads(saved.read_text())["matrix"] != 0.88
    forecast = out[out.index("as configured: ") :].replace(f"wrote {saved}\n", "")
    assert cli.main([*arguments, "--calibration", str(saved)]) == 0
    assert capsys.readouterr().out.endswith(forecast)


def test_a_dry_run_shows_the_same_forecast(path, monkeypatch, capsys):
    monkeypatch.setattr("hybridflow.config.preflight.check_model_folder", lambda folder, hf: None)  # there are no weights
    monkeypatch.setattr("hybridflow.planner.memory.gpu_total", lambda: hardware.named("H200").memory_bytes)
    monkeypatch.setattr(command, "gpu_here", lambda: hardware.named("H200"))
    overrides = ["--config", str(path), "roles.reference.offload=[]"]
    assert cli.main(["plan", "--no-search", *overrides]) == 0
    planned = capsys.readouterr().out.partition("\n")[2]
    assert cli.main(["train", "--dry-run", *overrides]) == 0
    assert planned in capsys.readouterr().out
    overrides += ["roles.actor.micro_batch_tokens=1000000", "batch.prompts=2000"]
    assert cli.main(["train", "--dry-run", *overrides]) == 2
    assert "update needs" in capsys.readouterr().err


def test_help_comes_without_torch():
    code = "import sys; from hybridflow import cli\ntry: cli.main(['plan', '--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.endswith("[]\n") and "--calibrate" in found.stdout
