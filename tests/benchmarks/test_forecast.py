"""benchmarks/forecast.py: its arithmetic, and what it says of the H200 runs that are kept."""

import dataclasses
import json

import pytest

from benchmarks import forecast
from benchmarks.runs import rollout_run, training_run
from hybridflow.planner.calibration import Calibration
from hybridflow.planner.hardware import GPU, named
from hybridflow.planner.records import read_runs
from megatron_ext.layout import Layout
from tests.planner.models import ROOT, RUNS

FIELDS = json.loads((ROOT / "configs" / "models" / "qwen2_7b.json").read_text())
LIMITS = forecast.parser().parse_args(["--compare", "x"])


def row(name: str, measured: float, foretold: float, work: tuple = (), memory: tuple = (0.0, 0.0)) -> forecast.Row:
    return forecast.Row(name, measured, foretold, *memory, work)


def test_errors_are_forecast_over_measured():
    found = row("a", 2.0, 1.5, memory=(80.0, 84.0))
    assert found.seconds_error == pytest.approx(-0.25) and found.memory_error == pytest.approx(0.05)
    assert row("b", 2.0, 1.5).memory_error is None


def test_the_first_choice_of_those_that_do_the_same_work():
    rows = [row("a", 2.0, 1.0, ("w",)), row("b", 1.9, 1.1, ("w",)), row("c", 1.0, 9.0, ("w",)), row("alone", 1, 1, ("v",))]
    (choice,) = forecast.choices([*rows, row("rollout", 1, 1), row("rollout", 2, 2)])
    assert (choice.first.name, choice.best.name, choice.among) == ("a", "c", 3)
    assert choice.excess == pytest.approx(1.0)
    assert forecast.choice_line(choice).endswith("a, 2 s, 100.0% over the best, c with 1 s")
    assert forecast.verdicts(rows, [choice], LIMITS) == [
        "seconds within 25%: 1 of 4",
        "first choice within 5% of the best: 0 of 1",
    ]
    (right,) = forecast.choices([row("a", 1.0, 1.0, ("w",)), row("b", 1.02, 1.1, ("w",))])
    assert right.excess == 0 and forecast.choice_line(right).endswith("a, 1 s, the best measured")


def test_of_the_runs_on_two_h200s(tmp_path, monkeypatch, capsys):
    """Calibrated on TP2, it foretells PP2, and TP2 competes with it."""
    runs = json.loads(RUNS.read_text())["results"]["runs"]
    for name in ("tp", "pp"):
        own = [run for run in runs if name in run["layout"]]
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": {"runs": own}}))
    files = ["--calibrate", f"{tmp_path}/tp.json", "--compare", f"{tmp_path}/pp.json", "--out", f"{tmp_path}/out.json"]
    monkeypatch.setattr("sys.argv", ["forecast.py", *files, "--save", f"{tmp_path}/calibration.json"])
    assert forecast.main() == 0
    out = capsys.readouterr().out
    assert "calibrated on 3 runs\n" in out and "forecast of 6 other runs\n" in out
    assert "first choice among 4 that do the same work: update PP2 x VPP2 8 x 4096, 1.64 s, the best measured\n" in out
    assert out.endswith("seconds within 25%: 6 of 6\nmemory within 10%: 6 of 6\nfirst choice within 5% of the best: 2 of 2\n")
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(results["calibrated_on"]) == 3 and len(results["rows"]) == 6
    assert results["choices"][0] == {
        "first": "update PP2 x VPP2 8 x 4096",
        "best": "update PP2 x VPP2 8 x 4096",
        "among": 4,
        "excess": 0,
    }
    assert Calibration(**results["calibration"]) == Calibration.read(tmp_path / "calibration.json") != Calibration()


def test_what_benchmarks_write_is_read_again(tmp_path):
    """Of a GPU that the planner knows and of one that it does not; without an optimizer there are no states of it."""
    mine = GPU("a slow one", 1e12, 1e10, 1e9, 1 << 34, 5e11)
    layout = Layout(4, tp=2, pp=2, sequence_parallel=True)
    rows = [
        training_run("update", gpu, FIELDS, layout, 8, [64, 32, 32], 2.0, dtype="bfloat16", optimizer=optimizer, peak_bytes=9e9)
        for gpu in (named("H200"), mine)
        for optimizer in (True, False)
    ]
    rows.append(training_run("forward", mine, FIELDS, layout, 8, [64, 32, 32], 1.0, dtype="float32"))
    rows.append(rollout_run(mine, FIELDS, 2, 16, 8, 32, seconds=1.0, memory_bytes=2e10, dtype="bfloat16", eager=True))
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"results": {"runs": rows}}))
    known, bare, slow, _, forward, rollout = read_runs(path)
    assert rows[0]["layout"]["stages"] == [14, 14] and rows[0]["gpu"] == "H200" and rows[2]["gpu"] == dataclasses.asdict(mine)
    calibration = Calibration()
    assert slow.predict(calibration) > known.predict(calibration) > bare.predict(calibration)
    parameters = 7.6156e9 / 4
    assert known.memory(calibration) - bare.memory(calibration) == pytest.approx(12 * parameters, rel=0.1)
    assert known.work != slow.work != forward.work and not rollout.work
    assert forward.memory is None and rollout.name == "rollout TP2 16 x 32"
    path.write_text(json.dumps({"results": {"runs": [rows[2] | {"gpu": {"name": "half of one"}}]}}))
    with pytest.raises(ValueError, match="run 0: .*missing"):
        read_runs(path)


def test_a_missing_file_is_status_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["forecast.py", "--compare", "nothing.json"])
    assert forecast.main() == 2
    assert capsys.readouterr().err.endswith("nothing.json: no such file\n")
