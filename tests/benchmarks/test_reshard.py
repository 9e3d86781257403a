"""The resharding benchmark over four gloo ranks: ours and the field's way leave the same weights, and the figures add up."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks import reshard
from benchmarks.bandwidth import Bandwidths, bandwidths
from benchmarks.gathered import GatheredCopy, GatheredStream
from benchmarks.reshard_case import Case, Engines, Pair, Settings
from hybridflow.resharding.execute import Resharder
from hybridflow.resharding.plan import make_plan
from megatron_ext import weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout
from megatron_ext.tiles import as_index
from tests import hf_models

FIELDS = {
    "qwen2 tied": hf_models.config("qwen2", True),
    "llama untied": hf_models.config("llama", False, 300),
    "qwen3 replicated": hf_models.config("qwen3", True, 300, num_key_value_heads=2),
    "qwen3_moe": hf_models.config("qwen3_moe", False, 300),
    "mixtral": hf_models.config("mixtral", False, 300),
}
PAIRS = [
    Pair(Layout(4, tp=2, pp=2), 1),
    Pair(Layout(4, tp=2, pp=2), 4),
    Pair(Layout(4, tp=4), 2),
    Pair(Layout(4, pp=2, vpp=2), 2),
    Pair(Layout(4, pp=4), 2),
    Pair(Layout(4), 4),
]
EXPERT_PAIRS = [
    Pair(Layout(4, tp=2, ep=2), 4),
    Pair(Layout(4, ep=4), 2, True),
    Pair(Layout(4, ep=2, etp=2), 2),
    Pair(Layout(4, pp=2, etp=2), 2, True),
    Pair(Layout(4, tp=4), 1),
]


def pairs_of(fields: dict) -> list[Pair]:
    return EXPERT_PAIRS if HFConfig.from_dict(fields).is_moe else PAIRS


pytestmark = pytest.mark.timeout(240)


def describe(pair: Pair) -> str:
    return f"{pair.training.describe()} -> {pair.rollout}"


def settings(fields: dict, dtype: torch.dtype = torch.float32, repeat: int = 2) -> Settings:
    known = Bandwidths(1e9, 10e9, "made up")
    return Settings(HFConfig.from_dict(fields), dtype, 1 << 16, repeat, ranks_per_node=4, bandwidths=known)


def scenario_same_weights(fields: dict) -> list[str]:
    """Where ours, the field's way and the HF tensors differ on this rank."""
    problems = []
    for pair in pairs_of(fields):
        case = Case(settings(fields), pair)
        rank, hf = dist.get_rank(), case.settings.hf
        Resharder(make_plan(rank, case.source_tiles, case.destination_tiles, 4, 4), case.source, case.destination).run()
        ours = {name: tensor.clone() for name, tensor in case.destination.items()}
        for tensor in case.destination.values():
            tensor.zero_()
        stream = GatheredStream(hf, pair.training, case.source, torch.float32)
        GatheredCopy(stream, case.destination_tiles[rank], case.destination).run()
        where = describe(pair)
        problems += [f"{where}: {name}" for name in ours if not torch.equal(ours[name], case.destination[name])]
        whole = dict(stream)
        if {name: tuple(tensor.shape) for name, tensor in whole.items()} != weights.hf_shapes(hf):
            problems.append(f"{where}: the stream's tensors are not the model's")
        for name, held in case.destination_tiles[rank].items():
            parts = [(tile, whole[tile.hf_name][as_index(tile.hf_slices)]) for tile in held]
            if not all(torch.equal(ours[name][as_index(tile.local_slices)], part) for tile, part in parts):
                problems.append(f"{where}: {name} is not what the HF tensors say")
    return problems


@pytest.mark.parametrize("model", FIELDS)
def test_ours_and_the_fields_way_leave_the_same_weights(worlds, model):
    assert worlds(4).run(scenario_same_weights, FIELDS[model]) == [[]] * 4


def scenario_measure(fields: dict, pair: Pair) -> dict:
    return Case(settings(fields, torch.bfloat16), pair).measure()


@pytest.mark.parametrize(
    ("model", "pair"),
    [("llama untied", pair) for pair in PAIRS] + [("qwen3_moe", pair) for pair in EXPERT_PAIRS],
    ids=[describe(pair).replace(" ", "") for pair in PAIRS + EXPERT_PAIRS],
)
def test_figures_add_up(worlds, model, pair):
    rows = worlds(4).run(scenario_measure, FIELDS[model], pair)
    assert all(row == rows[0] for row in rows)  # every rank knows the slowest, not only its own
    row = rows[0]
    assert row["verified"] and row["baselines"]["gathered"]["verified"]
    assert row["bytes_received_all_ranks"] + row["bytes_local_all_ranks"] == row["bytes_rollout_all_ranks"]
    assert row["least_bytes_received"] == row["bytes_received"] <= row["bytes_received_all_ranks"]
    assert row["extra_peak_bytes"] <= 1 << 16 and len(row["seconds"]["all"]) == 2
    assert row["wire_bound_fraction"] == pytest.approx(row["bound_seconds"] / row["seconds"]["median"])
    gathered = row["baselines"]["gathered"]
    assert gathered["ratio"] == pytest.approx(gathered["seconds"]["median"] / row["seconds"]["median"])
    assert row["seconds"]["best"] <= row["seconds"]["median"] <= max(row["seconds"]["all"])


def test_the_fields_way_receives_the_model_but_what_a_rank_has(worlds):
    """PP: all stages but the own; TP: every sharded tensor but the own share (131 rows are padded to 256 then)."""
    hf = HFConfig.from_dict(FIELDS["llama untied"])
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in weights.hf_shapes(hf).items()}
    layers = {stage: sum(s for n, s in sizes.items() if f"layers.{stage}." in n) for stage in range(4)}
    padding = 2 * 2 * hf.hidden_size * (320 - 300)  # the embedding and the output layer, to 64 rows
    lightest = min(layers[1], layers[2])  # stages without embedding and output layer receive most
    row = worlds(4).run(scenario_measure, FIELDS["llama untied"], Pair(Layout(4, pp=4), 1))[0]
    assert row["baselines"]["gathered"]["bytes_received"] == sum(sizes.values()) + padding - lightest
    row = worlds(4).run(scenario_measure, FIELDS["llama untied"], Pair(Layout(4, tp=4), 1))[0]
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    padding = 2 * 2 * hf.hidden_size * (512 - 300)  # to 64 rows on each of 4 ranks
    assert row["baselines"]["gathered"]["bytes_received"] == (sum(sizes.values()) + padding - norms) * 3 // 4


def test_the_fields_way_receives_all_experts_but_those_a_rank_has(worlds):
    """EP2: half of the experts, the rest is there; EP2 x ETP2: three quarters of them."""
    experts = 4 * 8 * 3 * hf_models.EXPERT_INTERMEDIATE * hf_models.HIDDEN * 2  # layers, experts, matrices; bf16
    for layout, share in ((Layout(4, ep=2), 1 / 2), (Layout(4, ep=2, etp=2), 3 / 4)):
        row = worlds(4).run(scenario_measure, FIELDS["qwen3_moe"], Pair(layout, 2, True))[0]
        assert row["baselines"]["gathered"]["bytes_received"] == experts * share


def scenario_bandwidths() -> tuple:
    return tuple(bandwidths())


def test_bandwidths_are_measured_where_no_gpu_is_known(worlds):
    measured = worlds(4).run(scenario_bandwidths)
    assert all(m == measured[0] for m in measured)
    assert 1e6 < measured[0][0] < 1e12 and 1e6 < measured[0][1] < 1e13


def test_report_writes_json_and_a_picture(worlds, tmp_path, capsys):
    rows = [worlds(4).run(scenario_measure, FIELDS["qwen2 tied"], pair)[0] for pair in PAIRS[:2]]
    out = tmp_path / "results" / "tiny.json"
    arguments = reshard.parser().parse_args(["--model", "tiny.json", "--out", str(out)])
    reshard.report(arguments, FIELDS["qwen2 tied"], Bandwidths(1e9, 1e10, "made up"), rows)
    record = json.loads(out.read_text())
    assert record.keys() == {"config", "hardware", "versions", "commit", "results"}
    assert record["results"]["rows"] == json.loads(json.dumps(rows)) and record["config"]["repeat"] == 10
    assert out.with_suffix(".png").stat().st_size > 1000
    rows[0]["verified"] = False
    reshard.report(arguments, FIELDS["qwen2 tied"], Bandwidths(1e9, 1e10, "made up"), rows[:1])
    assert "TP2 x PP2 -> TP1" in capsys.readouterr().out.splitlines()[-1]


def test_sweep_files(tmp_path):
    file = tmp_path / "layouts.txt"
    file.write_text("# a comment\n\nTP2 PP2 -> TP1   # another\nPP2 VPP2 DP2 -> TP4\nDP4 -> TP1\nEP2 ETP2 -> TP2 EP\n")
    expected = [Pair(Layout(4, tp=2, pp=2), 1), Pair(Layout(4, pp=2, vpp=2), 4), Pair(Layout(4), 1)]
    expected += [Pair(Layout(4, ep=2, etp=2), 2, True)]
    assert reshard.read_sweep(file, 4) == expected
    with pytest.raises(ValueError, match=r"layouts.txt:3: TP2 x PP2 x DP1 does not make up 2 ranks"):
        reshard.read_sweep(file, 2)
    file.write_text("TP2 = TP1\n")
    with pytest.raises(ValueError, match=r"layouts.txt:1: 'TP2 = TP1' is not of the form `TP2 PP2"):
        reshard.read_sweep(file, 2)


def inputs(*options: str, ranks: int = 4) -> tuple:
    return reshard.read_inputs(reshard.parser().parse_args(options), ranks)


@pytest.mark.parametrize(
    "file", sorted((reshard.ROOT / "benchmarks" / "layouts").glob("[0-9]*.txt")), ids=lambda file: file.stem
)
def test_shipped_sweeps_fit_their_models(file):
    models = {"8_gpu": ("tiny_wide", "qwen2_7b", "qwen2_32b"), "8_gpu_wide": ("tiny_wide", "qwen2_32b")}.get(
        file.stem, ("qwen3_30b_a3b", "tiny_moe") if "moe" in file.stem else ("tiny", "qwen2_180m", "qwen2_7b", "qwen2_32b")
    )
    for model in models:
        path = reshard.ROOT / "configs" / "models" / f"{model}.json"
        assert inputs("--model", str(path), "--sweep", str(file), ranks=int(file.stem.split("_")[0]))[2]


def test_the_lines_of_one_rollout(monkeypatch):
    model, file = (str(reshard.ROOT / path) for path in ("configs/models/tiny.json", "benchmarks/layouts/2.txt"))
    sweep = ["--model", model, "--sweep", file]
    assert {pair.rollout for pair in inputs(*sweep, ranks=2)[2]} == {"TP1", "TP2"}
    found = inputs(*sweep, "--only", "TP2", ranks=2)[2]
    assert [pair.training.describe() for pair in found] == ["TP2", "PP2", "DP2"]
    with pytest.raises(ValueError, match=r"--only 'TP8': no line of .*2.txt has this rollout"):
        inputs(*sweep, "--only", "TP8", ranks=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert inputs(*sweep, "--only", "TP1", "--engine", ranks=2)
    with pytest.raises(ValueError, match=r"2 unlike engines \(for TP1, TP2\), but vLLM's sleep mode allows one"):
        inputs(*sweep, "--engine", ranks=2)


def test_options(tmp_path, monkeypatch, capsys):
    model = tmp_path / "model.json"
    model.write_text(json.dumps(FIELDS["qwen3_moe"]))
    options = ["--model", str(model), "--layers", "2", "--ep", "2", "--etp", "2", "--rollout-tp", "4", "--rollout-ep"]
    fields, hf, pairs = inputs(*options)
    assert hf.num_layers == fields["num_hidden_layers"] == 2
    assert pairs == [Pair(Layout(4, ep=2, etp=2), 4, True)]
    with pytest.raises(ValueError, match="ep=3 x etp=1 = 3 does not divide the 4 ranks of a pipeline stage"):
        inputs("--model", str(model), "--ep", "3")
    seven_b = str(reshard.ROOT / "configs" / "models" / "qwen2_7b.json")
    with pytest.raises(ValueError, match="TP8 does not divide the model's num_attention_heads=28"):
        inputs("--model", seven_b, "--tp", "8", ranks=8)
    monkeypatch.setattr("sys.argv", ["reshard.py", "--model", str(model), "--rollout-tp", "3"])
    assert reshard.main() == 2
    assert capsys.readouterr().err.startswith("error: roles.rollout.tp=3 cannot split this model")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("smollm2_135m", 0.1345), ("qwen2_7b", 7.616), ("qwen2_32b", 32.76), ("qwen2_180m", 0.178), ("llama3_8b", 8.030)],
)
def test_model_shapes_have_the_size_that_their_name_says(name, billions):
    path = reshard.ROOT / "configs" / "models" / f"{name}.json"
    shapes = weights.hf_shapes(HFConfig.from_dict(json.loads(path.read_text()), str(path)))
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9 == pytest.approx(billions, rel=0.01)


def scenario_engine(fields: dict, pair: Pair) -> dict:
    """Into a real engine, with sleep and wake in between."""
    known = replace(settings(fields, torch.bfloat16, repeat=1), cycles=2)
    engines = Engines(fields, known.hf, torch.bfloat16)
    row = Case(known, pair, engines.get(pair.engines(known.hf, known.ranks_per_node), pair.rollout_ep)).measure()
    engines.close()
    return row


def test_with_an_engine_its_own_loader_is_a_baseline_too(worlds):
    fields = json.loads((reshard.ROOT / "configs" / "models" / "tiny.json").read_text())
    row = worlds(2, "benchmark").run(scenario_engine, fields, Pair(Layout(2, pp=2), 2))[0]
    assert row["verified"] and row["baselines"].keys() == {"gathered", "reload_weights"}
    assert all(baseline["verified"] and baseline["ratio"] > 0 for baseline in row["baselines"].values())
    assert all(len(values) == 2 for values in row["cycles"].values())
    assert reshard.cycle_line(row["cycles"]).strip().startswith("2 cycles: wake weights + reshard + wake KV cache")


def test_with_an_engine_of_experts(worlds):
    """Its own loader is left out: on CPU it forgets to pack the experts again."""
    fields = FIELDS["qwen3_moe"] | {"head_dim": 32}  # one that vLLM has on CPU
    row = worlds(2, "benchmark").run(scenario_engine, fields, Pair(Layout(2, ep=2), 2, True))[0]
    assert row["verified"] and row["rollout"] == "TP2 EP" and row["training"] == "EP2 x DP2"
    assert row["baselines"].keys() == {"gathered"} and row["baselines"]["gathered"]["verified"]
