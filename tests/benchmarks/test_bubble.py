"""The bubble benchmark over four gloo ranks: every layout comes to the same loss, and the figures add up."""

import json

import pytest
import torch

from benchmarks import bubble
from benchmarks.bubble_case import Row, Work, figures, measure, meter_cost
from benchmarks.bubble_picture import draw
from hybridflow.planner.hardware import named
from hybridflow.planner.records import read_runs
from hybridflow.planner.schedule import Schedule, Task, simulate
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split
from tests import hf_models

pytestmark = pytest.mark.timeout(240)
ROWS = ["PP2 M4", "PP2 VPP2 M4", "TP2 PP2 M2", "PP4 M4"]
SPLIT = Split()


def scenario(rows: list[str]) -> list[dict]:
    hf = HFConfig.from_dict(hf_models.config("qwen2", True))
    work = Work(hf, torch.float32, lengths=(9, 7, 12, 5) * 4, repeat=2)
    return [measure(bubble.read_row(row, 4, SPLIT), work) for row in rows]


def test_all_layouts_come_to_the_same_loss_and_the_parts_add_up(worlds, tmp_path):
    results = worlds(4).run(scenario, ROWS)[0]
    assert bubble.same_loss(results, torch.float32)
    assert [row["schedule"] for row in results] == ["1F1B", "interleaved, transfers overlapped", "1F1B", "1F1B"]
    for row in results:
        assert 0 < row["measured"]["mean"] <= row["measured"]["max"] < 1
        assert row["measured"]["mean"] - row["closed_form_of_step"] == pytest.approx(sum(row["parts"].values()))
        assert len(row["measured"]["all_means"]) == 2
        assert len(row["drawn"]) == row["stages"]
        assert all(len(stage) == 2 * row["micro_batches"] * row["chunks"] for stage in row["drawn"])
    draw(results, tmp_path / "picture.png", "tiny")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    results[1]["loss"] += 1e-3
    assert not bubble.same_loss(results, torch.float32)


def test_figures_of_a_pass_that_ran_as_simulated_but_for_its_transfers():
    schedule = Schedule(2, 4, 2)

    def seconds(task: Task) -> float:
        return 1.0 + (task.stage == 1) + (task.micro_batch == 3) * (task.chunk == 1)

    ideal, slowed = (simulate(schedule, seconds, transfer_s) for transfer_s in (0.0, 0.25))
    found = figures(schedule, [ideal])
    assert found["residual"] == pytest.approx(0.0)
    assert found["measured"]["mean"] == pytest.approx(found["simulated"]["mean"])
    assert found["parts"]["imbalance"] > 0.05
    assert found["stage_seconds"]["forward stage 1 chunk 1"] == 2.25
    assert figures(schedule, [slowed])["residual"] > 0.01
    assert figures(schedule, [ideal, slowed, slowed])["residual"] > 0.01  # the median pass


def test_rows_are_runs_for_the_planner(tmp_path):
    fields = hf_models.config("qwen2", True)
    work = Work(HFConfig.from_dict(fields), torch.bfloat16, lengths=(12,) * 16, repeat=1)
    result = {"seconds": {"median": 0.5}, "peak_allocated_bytes": 1e9}
    rows = [bubble.read_row(text, 4, SPLIT) for text in ("TP2 PP2 VPP2 M4", "PP2 DP2 M4", "PP4 M3")]
    runs = [run for row in rows for run in bubble.run_of(row, work, fields, named("H200"), result)]
    assert len(runs) == 1  # neither that with replicas, nor that whose micro-batches differ
    assert runs[0]["layout"] == {"ranks": 4, "tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True, "stages": [1, 1, 1, 1]}
    assert runs[0]["lengths"] == [12] * 4 and runs[0]["optimizer"] is False
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"results": {"rows": [], "runs": runs}}))
    assert read_runs(file)[0].name == "update TP2 x PP2 x VPP2 4 x 48 without optimizer"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layout_files(ranks: int):
    lines = (bubble.ROOT / "benchmarks" / "layouts" / f"bubble_{ranks}.txt").read_text().splitlines()
    rows = [bubble.read_row(line, ranks, SPLIT) for line in lines if not line.startswith("#")]
    assert {row.layout.vpp for row in rows} >= {1, 2}
    for row in rows:
        row.schedule(forward_only=False, overlap=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row", "PP2 8"], "'PP2 8' is not of the form"),
        (["--row", "PP2 VPP2 DP2 M8"], "TP1 x PP2 x DP2 does not make up 2 ranks"),
        (["--row", "PP2 VPP2 M7"], "7 micro-batches over pp=2 x vpp=2"),
        (["--row", "PP2 VPP4 M8"], "num_hidden_layers=4 is too few for the 8 chunks"),
        (
            ["--row", "PP2 M16", "--sequences", "8"],
            "--sequences=8 do not fill the micro-batches of 1 data-parallel ranks: give 16",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, arguments: list, message: str):
    model = bubble.ROOT / "configs" / "models" / "tiny.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["bubble.py", "--model", str(model), *arguments])
    assert bubble.main() == 2
    assert message in capsys.readouterr().err


def test_the_table_and_the_record(monkeypatch, capsys, tmp_path):
    out = tmp_path / "b.json"
    monkeypatch.setattr("sys.argv", ["bubble.py", "--sleep", "1", "--out", str(out)])
    arguments = bubble.parser().parse_args()
    results = []
    for vpp in (1, 2):
        row = Row(Layout(2, pp=2, vpp=vpp), 4)
        schedule = row.schedule(False, False)
        ran = {
            "layout": row.layout.describe(),
            "stages": 2,
            "chunks": vpp,
            "micro_batches": 4,
            "schedule": "1F1B",
            "loss": None,
            "meter": meter_cost([1.01, 1.02], [1.0, 1.0]) if vpp == 2 else None,
        }
        measured = figures(schedule, [simulate(schedule, lambda task: 0.1)])
        results.append(ran | {"seconds": {"median": 1.0}} | measured)
        bubble.report(arguments, {}, Work(None, torch.float32, (1,), 1, sleep=1.0), results, runs=[])
    assert results[1]["of_1f1b"] == pytest.approx((1 / 9) / (1 / 5))
    table = capsys.readouterr().out.splitlines()
    assert "25.0     20.0 |      20.0      20.0" in table[2]
    assert "55.6" in table[3]
    assert table[4].strip() == "the meter: 1.0150 s with it, 1.0000 without: +1.50% of a pass"
    saved = json.loads(out.read_text())
    assert len(saved["results"]["rows"]) == 2 and "drawn" not in saved["results"]["rows"][0]
    assert out.with_suffix(".png").is_file()
