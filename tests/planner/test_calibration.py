"""Calibration: it finds the coefficients that made a run, what it says of H200 runs that it has not seen, and its files."""

import dataclasses
import json

import pytest

from hybridflow.config.schema import ConfigError
from hybridflow.planner.calibration import Calibration
from hybridflow.planner.records import calibrate, read_runs
from tests.planner.models import ROOT, RUNS

MODEL = json.loads((ROOT / "configs" / "models" / "qwen2_7b.json").read_text())


@pytest.fixture(scope="module")
def h200_runs():
    return read_runs(RUNS)


def write(tmp_path, runs) -> str:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"results": {"runs": runs}}))
    return path


def check_unseen(runs, calibration):
    for run in runs:
        assert run.predict(calibration) == pytest.approx(run.seconds, rel=0.25), run.name
        if run.memory:
            assert run.memory(calibration) == pytest.approx(run.peak_bytes, rel=0.1), run.name


def test_calibrated_on_tp2_it_foretells_pp2(h200_runs):
    """1F1B and interleaved, 4 to 16 micro-batches, with an MLP that is computed again; and no default helps it."""
    start = dataclasses.replace(Calibration(), matrix=0.6, layer_seconds=1.5e-3, optimizer=0.4)
    seen = [run for run in h200_runs if "TP2" in run.name]
    unseen = [run for run in h200_runs if "PP2" in run.name]
    assert len(seen) == 3 and len(unseen) == 6
    assert max(abs(run.predict(start) / run.seconds - 1) for run in unseen) > 0.25
    check_unseen(unseen, calibrate(start, seen))


def test_the_defaults_foretell_all_runs(h200_runs):
    check_unseen(h200_runs, Calibration())


def test_its_first_choice_is_the_best_measured(h200_runs):
    whole = [run for run in h200_runs if "without" not in run.name]
    tokens = {
        run.name: int(run.name.split()[-3]) * float(run.name.split()[-1]) for run in whole if "recomputed" not in run.name
    }
    measured = {run.name: tokens[run.name] / run.seconds for run in whole if run.name in tokens}
    chosen = max(tokens, key=lambda name: tokens[name] / next(r for r in whole if r.name == name).predict(Calibration()))
    assert measured[chosen] > 0.95 * max(measured.values())


def synthetic(truth: Calibration, tmp_path) -> list:
    """Runs of every phase as a machine with these coefficients would take them."""
    rows = []
    for phase in ("update", "forward"):
        for layout in ({"ranks": 2, "tp": 2, "sequence_parallel": True}, {"ranks": 2, "pp": 2}, {"ranks": 2}):
            for tokens in (1024, 4096, 16384):
                row = {"phase": phase, "gpu": "H200", "model": MODEL, "layout": layout, "micro_batches": 8}
                rows.append(row | {"lengths": [tokens // 4] * 4, "seconds": 1.0})
    rows += [row | {"optimizer": False} for row in rows if row["phase"] == "update"]
    for samples, response in ((8, 64), (64, 512), (256, 1024)):
        row = {"phase": "rollout", "gpu": "H200", "model": MODEL, "tp": 1, "samples": samples, "prompts": samples // 4}
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
        ('{"matrx": 1}', "unknown key matrx: use matrix, "),
        ('{"matrix": 0}', "matrix=0 is not a number above 0"),
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
