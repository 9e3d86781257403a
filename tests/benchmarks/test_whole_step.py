"""benchmarks/whole_step.py without its jobs, which test_memory.py has one of: models, forecasts beside figures, choices."""

import json
from pathlib import Path

import pytest

from benchmarks import whole_step
from benchmarks.random_job import medians, random_model
from hybridflow.config.model_folder import check_model_folder
from hybridflow.planner.forecast import Forecast, Phase
from megatron_ext.hf_config import HFConfig

MODELS = Path(__file__).parents[2] / "configs" / "models"


def test_a_model_of_shapes_passes_for_whole_and_takes_no_room(tmp_path):
    folder = tmp_path / "model"
    random_model(json.loads((MODELS / "qwen2_7b.json").read_text()), folder)
    check_model_folder(folder, HFConfig.from_folder(str(folder)))
    found = (folder / "model.safetensors").stat()
    assert found.st_size == pytest.approx(2 * 7.6156e9, rel=0.001) and 512 * found.st_blocks < 1 << 20


def test_medians_by_the_rest_of_the_name():
    steps = [{"time/step": 3.0, "perf/x": 1}, {"time/step": 1.0, "perf/x": 1}, {"time/step": 2.0, "perf/x": 1}]
    assert medians(steps, "time/") == {"step": 2.0}


def test_a_forecast_beside_the_figures():
    """What the engine's waking and sleeping takes is one phase to the planner."""
    phases = [
        Phase("reshard", "rollout", "rollout", 2, {"wake": 0.2, "reshard": 0.1}),
        Phase("rollout", "rollout", "rollout", 2, {"weights": 2.0}),
        Phase("update", "update", "actor", 2, {"matrix products": 4.0}),
        Phase("reference", "experience", "reference", 2, {"matrix products": 1.0}),
    ]
    seconds = {"wake": 0.1, "reshard": 0.1, "sleep": 0.2, "rollout": 1.0, "update": 5.0, "step": 7.0}
    found = whole_step.beside(Forecast(tuple(phases), 1 << 30, 1, 1, 1.0, 2), seconds, {"update": 1e9})
    assert {name: row["measured"] for name, row in found.items()} == pytest.approx(
        {"reshard": 0.4, "rollout": 1.0, "update": 5.0, "step": 7.0}
    )
    assert found["step"]["forecast"] == pytest.approx(7.3) and found["update"]["measured_bytes"] == 1e9


def result(name: str, step: float, foretold: float) -> dict:
    rows = {"step": {"measured": step, "forecast": foretold}}
    seconds = {"step": step, "update": 0.75 * step, "rollout": 0.2 * step}
    perf = {"step_tokens_per_second_per_gpu": 1234.5}
    return {"name": name, "layout": "TP2 -> TP1", "seconds": seconds, "steps": [step], "perf": perf, "forecast": rows}


def test_the_table_and_the_choices():
    results = [result("planner", 2.0, 1.5), result("mine", 1.6, 1.4), {"name": "other", "failed": "exit status 1 of train"}]
    lines = whole_step.table(results[0])
    assert lines[0] == "planner (TP2 -> TP1): 2.000 s a step (2.000 to 2.000), 1,234 tokens/s per GPU"
    assert lines[1] == "  update 1.500 s 75%, rollout 0.400 s 20%"
    assert lines[2].split() == ["step", "2.000", "s,", "forecast", "1.500", "(-25%)"]
    assert whole_step.table(results[2]) == ["other: FAILED, exit status 1 of train"]
    assert whole_step.choices(results) == [
        "the planner's layout: planner, +25.0% to the best, mine",
        "the shortest forecast: mine, +0.0% to the best, mine",
    ]
    assert whole_step.choices(results[1:]) == []


def test_earlier_results_are_compared_without_running_anything(tmp_path, monkeypatch, capsys):
    files = []
    for number, found in enumerate([result("planner", 2.0, 1.5), result("mine", 1.6, 1.4)]):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"results": {"layouts": [found]}}))
    monkeypatch.setattr("sys.argv", ["whole_step.py", "--with", *map(str, files)])
    assert whole_step.main() == 0
    out = capsys.readouterr().out
    assert "mine (TP2 -> TP1): 1.600 s a step" in out
    assert "the planner's layout: planner, +25.0% to the best, mine\n" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model FILE, --ranks N and at least one --layout are needed"),
        (["--layout", "planner"], "--layout planner: this machine has no GPU that the planner knows"),
        (["--layout", "odd: roles.actor.tp=3"], "2 processes are fewer than roles.actor.tp=3"),
        (["--layout", "a: roles.actor.pp=2", "--prompt-tokens", "10"], "--prompt-tokens=10 must be a multiple of 3"),
        (["--layout", "a: roles.actor.pp=2", "--steps", "2"], "--warmup=2 leaves none of --steps=2"),
        (["--layout", "a: roles.actor.pp=2", "nonsense"], "unknown arguments ['nonsense']"),
    ],
)
def test_bad_input_is_status_2(monkeypatch, capsys, options, message):
    monkeypatch.setattr(whole_step, "gpu_here", lambda: None)
    model = str(MODELS / "tiny.json")
    monkeypatch.setattr("sys.argv", ["whole_step.py", "--model", model, "--ranks", "2", *options])
    assert whole_step.main() == 2
    assert message in capsys.readouterr().err
