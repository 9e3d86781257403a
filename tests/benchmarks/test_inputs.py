"""What is wrong with a benchmark's options is said in one line, with status 2, before anything is measured."""

import json
import sys

import pytest

from benchmarks import bubble, forecast, reshard, throughput, whole_step
from tests.planner.models import ROOT

TINY = ["--model", str(ROOT / "configs" / "models" / "tiny.json")]
ROW = ["--row", "PP1 M2"]
RUNS = ["--compare", str(ROOT / "benchmarks" / "results" / "h200" / "update.json")]
STEP = ["--ranks", "1", "--layout", "planner", "--gpu", "H200"]


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (bubble, TINY, "error: --rows benchmarks/layouts/bubble_1.txt: no such file: give the layouts of 1 ranks by --row"),
        (bubble, ["--model", "/nope.json", *ROW], "error: --model /nope.json: No such file or directory"),
        (bubble, [*TINY, *ROW, "--out", "{folder}"], "error: --out {folder} is no file in a folder that is there"),
        (bubble, [*TINY, *ROW, "--out", "/proc/x/x.json"], "error: --out /proc/x/x.json: "),
        (bubble, [*TINY, *ROW, "--repeat", "0"], "argument --repeat: 0 is less than 1"),
        (bubble, [*TINY, *ROW, "--cost", "-1"], "argument --cost: -1 is less than 0"),
        (bubble, [*TINY, *ROW, "--length", "0"], "argument --length: 0 is less than 1"),
        (reshard, [*TINY, "--repeat", "0"], "argument --repeat: 0 is less than 1"),
        (reshard, ["--model", "/nope.json"], "error: --model /nope.json: No such file or directory"),
        (throughput, [*TINY, "--parts", "update", "--row", "", "--row", "--steps 0"], "argument --steps: 0 is less than 1"),
        (throughput, [*TINY, "--parts", "update", "--out", "{folder}"], "error: --out {folder} is no file"),
        (whole_step, ["--model", "/nope.json", *STEP], "error: --model /nope.json: No such file or directory"),
        (whole_step, ["--with", "/nope.json"], "error: --with /nope.json: No such file or directory"),
        (whole_step, ["--with", RUNS[1]], f"error: --with {RUNS[1]} is not a result of whole_step.py"),
        (
            whole_step,
            [*TINY, *STEP, "--calibration", "{old}"],
            "error: --calibration {old}: unknown key release_seconds",
        ),
        (forecast, [*RUNS, "--out", "{folder}"], "error: --out {folder} is no file in a folder that is there"),
        (forecast, [*RUNS, "--save", "/proc/x"], "error: --save /proc/x cannot be written (/proc: "),
        (forecast, ["--compare", "/nope.json"], "error: --compare /nope.json: no such file"),
        (forecast, [*RUNS, "--seconds", "nan"], "argument --seconds: nan is not a share"),
        (forecast, [*RUNS, "--seconds", "-1"], "argument --seconds: -1 is not a share"),
    ],
)
def test_wrong_options(tmp_path, monkeypatch, capsys, module, options, message):
    (tmp_path / "old.json").write_text(json.dumps({"release_seconds": 0.08}))
    places = {"{folder}": str(tmp_path), "{old}": str(tmp_path / "old.json")}
    for name, place in places.items():
        options, message = [option.replace(name, place) for option in options], message.replace(name, place)
    monkeypatch.setattr(sys, "argv", ["benchmark", *options])
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    try:
        status = module.main()
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2
    assert capsys.readouterr().err.splitlines()[-1].partition("error: ")[2].startswith(message.removeprefix("error: "))
