"""Calibration: it finds the coefficients that made a run, what it says of H200 runs that it has not seen, and its files."""

import dataclasses
import json

import pytest

from benchmarks import forecast
from hybridflow.config.schema import ConfigError
from hybridflow.planner.calibration import Calibration
from hybridflow.planner.records import Run, calibrate, read_runs
from tests.planner.models import ROOT, RUNS

RESULTS = ROOT / "benchmarks" / "results"
MODEL = json.loads((ROOT / "configs" / "models" / "qwen2_7b.json").read_text())


def write(tmp_path, runs) -> str:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"results": {"runs": runs}}))
    return path


def check(runs, calibration):
    for run in runs:
        assert run.predict(calibration) == pytest.approx(run.seconds, rel=0.25), run.name
        # passes for log-probs were measured with 1 to 3 GiB of placeholders that updates of these and earlier rows had left
        if run.memory and run.phase == "update":
            assert run.memory(calibration) == pytest.approx(run.peak_bytes, rel=0.1), run.name


def h200(*names: str) -> list[Run]:
    return [run for name in names for run in read_runs(RESULTS / "h200x2" / f"{name}.json")]


def test_calibrated_on_tp2_it_foretells_all_else():
    """Other layouts, schedules, lengths and another model; no default helps it, and its first choices are near the best."""
    start = dataclasses.replace(Calibration(), matrix=0.6, layer_seconds=1.5e-3, optimizer=0.4)
    seen, unseen = h200("update_tp2"), h200("update_others", "unseen", "bubble_llama")
    assert (len(seen), len(unseen)) == (4, 20)
    assert all(run.name.split()[1] == "TP2" for run in seen)
    assert max(abs(run.predict(start) / run.seconds - 1) for run in unseen) > 0.25
    found = calibrate(start, seen)
    check(unseen, found)
    choices = forecast.choices(forecast.compare([*seen, *unseen], found))
    assert [choice.among for choice in choices] == [6, 6, 2, 2, 6]
    assert max(choice.excess for choice in choices) < 0.05


def test_calibrated_on_two_gpus_it_foretells_one():
    """Seven sizes of micro-batches, models and kinds of recomputation, each with its passes for log-probs."""
    runs = read_runs(RESULTS / "h200" / "update.json")
    found = calibrate(Calibration(), h200("update_tp2"))
    assert len(runs) == 14
    for run in runs:
        assert run.predict(found) == pytest.approx(run.seconds, rel=0.25), run.name
        assert run.memory(found) == pytest.approx(run.peak_bytes, rel=0.1), run.name


@pytest.fixture(scope="module")
def untuned() -> list[Run]:
    """Of a program without our layers' fusions and schedules' balance, one with an MLP that is computed again."""
    return read_runs(RUNS)


def test_calibrated_on_tp2_of_an_untuned_program_it_foretells_its_pp2(untuned):
    start = dataclasses.replace(Calibration(), matrix=0.6, layer_seconds=1.5e-3, optimizer=0.4)
    seen = [run for run in untuned if "TP2" in run.name]
    unseen = [run for run in untuned if "PP2" in run.name]
    assert len(seen) == 3 and len(unseen) == 6
    assert max(abs(run.predict(start) / run.seconds - 1) for run in unseen) > 0.25
    check(unseen, calibrate(start, seen))


def test_its_first_choice_is_the_best_measured(untuned):
    whole = [run for run in untuned if "without" not in run.name]
    tokens = {
        run.name: int(run.name.split()[-3]) * float(run.name.split()[-1]) for run in whole if "recomputed" not in run.name
    }
    measured = {run.name: tokens[run.name] / run.seconds for run in whole if run.name in tokens}
    chosen = max(tokens, key=lambda name: tokens[name] / next(r for r in whole if r.name == name).predict(Calibration()))
    assert measured[chosen] > 0.95 * max(measured.values())


@pytest.mark.parametrize(
    "runs", [read_runs(RUNS), h200("update_tp2", "update_others", "unseen", "bubble_llama", "rollout_one_gpu")]
)
def test_the_defaults_foretell_all_runs(runs):
    check(runs, Calibration())


def synthetic(truth: Calibration, tmp_path) -> list:
    """Runs of every phase as a machine with these coefficients would take them."""
    rows = []
    for phase in ("update", "forward"):
        for layout in ({"ranks": 2, "tp": 2, "sequence_parallel": True}, {"ranks": 2, "pp": 2}, {"ranks": 2}):
            for tokens in (1024, 4096, 16384):
                row = {"phase": phase, "gpu": "H200", "model": MODEL, "layout": layout, "micro_batches": 8}
                rows.append(row | {"lengths": [tokens // 4] * 4, "seconds": 1.0})
    rows += [row | {"optimizer": False} for row in rows if row["phase"] == "update"]
    # a model of two layers waits for Python, the whole one hides it
    for model, samples, response in ((MODEL | {"num_hidden_layers": 2}, 8, 64), (MODEL, 64, 512), (MODEL, 256, 1024)):
        row = {"phase": "rollout", "gpu": "H200", "model": model, "tp": 1, "samples": samples, "prompts": samples // 4}
        rows.append(row | {"prompt_tokens": 200, "response_tokens": response, "memory_bytes": 9e10, "seconds": 1.0})
    for row, run in zip(rows, read_runs(write(tmp_path, rows)), strict=True):
        row["seconds"] = run.predict(truth)
    return read_runs(write(tmp_path, rows))


def test_it_recovers_the_coefficients_that_made_the_runs(tmp_path):
    truth = Calibration(matrix=0.6, layer_seconds=1.3e-3, optimizer=0.35, decode_memory=0.5, decode_seconds=7e-3)
    found = calibrate(Calibration(), synthetic(truth, tmp_path))
    for field in dataclasses.fields(Calibration):
        assert getattr(found, field.name) == pytest.approx(getattr(truth, field.name), rel=0.05), field.name


def test_it_reads_the_resharding_benchmark():
    runs = read_runs(ROOT / "benchmarks" / "results" / "reshard_h200x2_engine_tp1_qwen2_7b.json")
    found = calibrate(Calibration(reshard=0.3), runs)
    assert 0.55 < found.reshard < 0.75
    assert dataclasses.replace(found, reshard=0.3) == Calibration(reshard=0.3)


def test_what_was_written_is_read_again(tmp_path):
    calibration = Calibration(matrix=0.5, fixed_bytes=1e9)
    calibration.write(tmp_path / "c.json")
    assert Calibration.read(tmp_path / "c.json") == calibration
    (tmp_path / "part.json").write_text('{"wire": 0.5}')
    assert Calibration.read(tmp_path / "part.json") == Calibration(wire=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "is not valid JSON"),
        ("[1]", "holds a list: give an object with matrix, "),
        ('{"matrx": 1}', "unknown key matrx, of another version perhaps, .*: use matrix, "),
        ('{"matrix": 0}', "matrix=0 is not a number above 0"),
        (f'{{"matrix": {"9" * 400}}}', "is not a number above 0 and below 1e"),
        ('{"matrix": 1e308}', "matrix=1e.308 is not a number above 0 and below 1e"),
        ('{"matrix": true}', "matrix=True is not a number above 0"),
    ],
)
def test_wrong_calibrations(tmp_path, text, message):
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Calibration.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is not a benchmark's JSON"),
        ({"results": {}}, "has neither results.runs nor"),
        ({"results": {"runs": [{"phase": "lunch"}]}}, "run 0 has phase='lunch': use one of update, forward"),
        ({"results": {"runs": [{"phase": "update", "model": MODEL}]}}, "run 0 lacks the field layout"),
        ({"results": {"runs": 5}}, "holds a int of runs: give a list"),
        ({"results": {"runs": [5]}}, "run 0 is 5: give an object with the fields"),
        ({"results": {"runs": [{"phase": ["update"]}]}}, r"run 0 has phase=.'update'.: use one of"),
        (
            {"results": {"rows": [{"training": "a", "rollout": "b", "seconds": {"median": 0}, "bound_seconds": 1}]}},
            "run 0: ValueError: measured 0 s, predicted ",
        ),
        (
            {"results": {"rows": [{"training": "a", "rollout": "b", "seconds": {"median": "x"}, "bound_seconds": 1}]}},
            "run 0: TypeError: must be real number, not str",
        ),
        ({"results": {"runs": [{"phase": "update", "model": {}}]}}, "run 0: .*architecture"),
    ],
)
def test_wrong_results(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_runs(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_runs(tmp_path / "nothing.json")
