"""Tile maps, HF load and HF export against Megatron's sharding written out by hand. CPU only, no Megatron model."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext.export import export_hf
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split
from megatron_ext.weights import WeightsError, hf_shapes, load_hf, local_shapes, tile_map
from tests import hf_models
from tests.full_disk import no_file_grows_beyond

DENSE, MOE = ["llama", "qwen2", "qwen3"], ["qwen3_moe", "mixtral"]
FAMILIES = DENSE + MOE
LAYOUTS = {
    "dp4": Layout(4),
    "tp4": Layout(4, tp=4),
    "pp4": Layout(4, pp=4),
    "tp2pp2": Layout(4, tp=2, pp=2),
    "pp2vpp2dp2": Layout(4, pp=2, vpp=2),
    "pp3": Layout(3, pp=3),
    "pp4bare": Layout(4, pp=4, split=Split((0, 3, 1, 0))),  # the ends have the embedding and the output layer alone
    "tp8": Layout(8, tp=8),  # more ranks than KV heads: a rank has a part of a query group
    "cp2tp2": Layout(4, tp=2, cp=2),
    # experts
    "tp2ep2": Layout(4, tp=2, ep=2),
    "ep4": Layout(4, ep=4),
    "ep2etp2": Layout(4, ep=2, etp=2),
    "pp2ep2": Layout(4, pp=2, ep=2),
    "dp4ep2": Layout(4, ep=2),
    "tp2pp2vpp2ep2etp2": Layout(16, tp=2, pp=2, vpp=2, ep=2, etp=2),
    "cp2tp2ep4": Layout(8, tp=2, cp=2, ep=4),
}
# (etp rank, ep rank) of every rank of a stage, written out
EXPERTS = {
    "tp2ep2": [(0, 0), (0, 1)] * 2,
    "ep4": [(0, 0), (0, 1), (0, 2), (0, 3)],
    "ep2etp2": [(0, 0), (1, 0), (0, 1), (1, 1)],
    "pp2ep2": [(0, 0), (0, 1)],
    "dp4ep2": [(0, 0), (0, 1)] * 2,
    "tp2pp2vpp2ep2etp2": [(0, 0), (1, 0), (0, 1), (1, 1)] * 2,
    "cp2tp2ep4": [(0, 0), (0, 1), (0, 2), (0, 3)] * 2,
}
# Global layers of each pipeline stage, written out: 4 layers
STAGES = {
    "pp2vpp2dp2": [[0, 2], [1, 3]],
    "tp2pp2": [[0, 1], [2, 3]],
    "pp4": [[0], [1], [2], [3]],
    "pp3": [[0], [1, 2], [3]],
    "pp4bare": [[], [0, 1, 2], [3], []],
    "pp2ep2": [[0, 1], [2, 3]],
    "tp2pp2vpp2ep2etp2": [[0, 2], [1, 3]],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`folders(family, tied, vocab)`: a model folder, made when first asked for."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str, tied: bool, vocab: int = 131) -> Path:
        path = root / f"{family}-{tied}-{vocab}"
        return path if path.exists() else hf_models.make(path, family, tied, vocab)

    return folder


def reference(folder: Path, name: str, rank: int, te: bool = False) -> dict[str, torch.Tensor]:
    layout = LAYOUTS[name]
    stages = STAGES.get(name, [[0, 1, 2, 3]])
    stage = rank // (layout.world_size // layout.pp)
    fields = json.loads((folder / "config.json").read_text())
    etp_rank, ep_rank = EXPERTS[name][rank % (layout.world_size // layout.pp)] if name in EXPERTS else (0, 0)
    return hf_models.megatron_shard(
        hf_models.state(folder),
        fields,
        layout.tp,
        rank % layout.tp,
        stages[stage],
        stage == 0,
        stage == len(stages) - 1,
        te,
        etp=(layout.etp, etp_rank),
        ep=(layout.ep, ep_rank),
    )


def empty(shard: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, float("nan")) for name, tensor in shard.items()}


@pytest.mark.parametrize(
    ("family", "tied", "name"),
    [
        (f, t, n)
        for n in LAYOUTS
        for f in (MOE if n in EXPERTS else FAMILIES)
        for t in ((True, False) if f in DENSE else (False,))
    ],
)
def test_load_equals_hand_sharding(folders, family, tied, name):
    folder = folders(family, tied)
    hf, layout = HFConfig.from_folder(folder), LAYOUTS[name]
    for rank in range(layout.world_size):
        for spec in ("local", "te"):
            expected = reference(folder, name, rank, te=spec == "te")
            loaded = empty(expected)
            load_hf(loaded, tile_map(hf, layout, rank, spec), folder)
            for parameter, tensor in expected.items():
                assert torch.equal(loaded[parameter], tensor), (rank, spec, parameter)
            assert local_shapes(hf, layout, rank, spec) == {n: tuple(tensor.shape) for n, tensor in expected.items()}


def test_shapes_are_those_of_transformers(folders):
    for family in FAMILIES:
        for tied in (True, False):
            folder = folders(family, tied)
            stored = {name: tuple(tensor.shape) for name, tensor in hf_models.state(folder).items()}
            assert hf_shapes(HFConfig.from_folder(folder)) == stored


def test_ranks_that_hold_the_same_share_one_map(folders):
    hf = HFConfig.from_folder(folders("qwen3_moe", False))
    layout = Layout(64, tp=2, pp=2, cp=2, ep=4, etp=2)  # stages of 32 ranks
    maps = [tile_map(hf, layout, rank) for rank in range(64)]
    held = {id(m): m for m in maps}
    assert len(held) == 2 * 8  # stages x (ep x etp), which decide tp here
    assert all(maps[rank] is maps[rank + 8] for rank in range(24))
    again = tile_map(HFConfig.from_folder(folders("qwen3_moe", False)), Layout(64, tp=2, pp=2, cp=4, ep=4, etp=2), 1)
    assert again is maps[1]
    assert tile_map(hf, layout, 0, "te") is not maps[0]


def test_every_part_of_every_expert_is_somewhere_and_names_are_unique(folders):
    hf = HFConfig.from_folder(folders("mixtral", False))
    for spec in ("local", "te"):
        for name in EXPERTS:
            covered = dict.fromkeys(hf_shapes(hf), 0)
            maps = {id(m): m for m in (tile_map(hf, LAYOUTS[name], r, spec) for r in range(LAYOUTS[name].world_size))}
            once = {(tile.hf_name, tile.hf_slices): tile.numel for m in maps.values() for held in m.values() for tile in held}
            for (tensor, _), numel in once.items():
                covered[tensor] += numel
            assert covered == {tensor: torch.Size(shape).numel() for tensor, shape in hf_shapes(hf).items()}


def test_maps_of_a_large_model_for_1024_ranks_take_little_time():
    fields = json.loads((Path(__file__).parents[2] / "configs/models/qwen3_30b_a3b.json").read_text())
    layout = Layout(1024, tp=4, pp=4, ep=16)
    started = time.process_time()
    maps = [tile_map(HFConfig.from_dict(fields), layout, rank, "te") for rank in range(1024)]
    assert time.process_time() - started < 10
    assert len({id(m) for m in maps}) == 4 * 16
    assert len(maps[0]) == 1 + 12 * (2 + 2 + 2 + 1 + 2 * 128 // 16)  # embedding; norms, qk norms, qkv and proj, router, experts


def test_a_rank_with_only_padding_holds_no_vocabulary(folders):
    hf = HFConfig.from_folder(folders("llama", True))  # 131 rows, 256 with padding at TP4: ranks hold 64, 64, 3, 0
    held = [tile_map(hf, LAYOUTS["tp4"], rank)["embedding.word_embeddings.weight"] for rank in range(4)]
    assert [sum(tile.shape[0] for tile in tiles) for tiles in held] == [64, 64, 3, 0]


def test_layouts_that_do_not_divide_are_refused(folders):
    hf = HFConfig.from_folder(folders("llama", True))
    with pytest.raises(ValueError, match="num_attention_heads=8 is not a multiple of tp=3"):
        tile_map(hf, Layout(3, tp=3), 0)
    with pytest.raises(ValueError, match="num_hidden_layers=4 is too few for the 7 chunks of pp=7 x vpp=1"):
        tile_map(hf, Layout(7, pp=7), 0)
    with pytest.raises(ValueError, match="spec='apex' is unknown"):
        tile_map(hf, Layout(1), 0, "apex")
    moe = HFConfig.from_folder(folders("qwen3_moe", False))
    with pytest.raises(ValueError, match="ep=3 does not divide the model's 8 experts"):
        tile_map(moe, Layout(3, ep=3), 0)
    with pytest.raises(ValueError, match="ep=2 spreads experts, and the model has none: use ep=1"):
        tile_map(hf, Layout(2, ep=2), 0)


# ------------------------------------------------------------------------------------------------- a folder that is broken


@pytest.fixture
def broken(tmp_path):
    """A fresh one-layer model in several files, and its parameters and tiles on one rank."""
    folder = hf_models.make(tmp_path / "model", "llama", False, shard="40KB", num_hidden_layers=1)
    assert len(list(folder.glob("*.safetensors"))) > 2
    hf = HFConfig.from_folder(folder)
    fields = json.loads((folder / "config.json").read_text())
    shard = hf_models.megatron_shard(hf_models.state(folder), fields, 1, 0, [0], True, True)
    return folder, empty(shard), tile_map(hf, Layout(1), 0), shard


def test_sharded_folder_loads(broken):
    folder, parameters, tiles, expected = broken
    told = []
    load_hf(parameters, tiles, folder, tell=told.append)
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    files = {path.name for path in folder.glob("*.safetensors")}
    assert {name for name, _, _ in (line.partition(" ") for line in told)} == files
    assert [line.partition(" ")[2] for line in told] == [f"(file {n} of {len(files)})" for n in range(1, len(files) + 1)]


def test_missing_shard_is_named(broken):
    folder, parameters, tiles, _ = broken
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(WeightsError, match=f"names .*{victim.name}.*not there"):
        load_hf(parameters, tiles, folder)


def test_no_safetensors(broken):
    folder, parameters, tiles, _ = broken
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    with pytest.raises(WeightsError, match="has no .safetensors file"):
        load_hf(parameters, tiles, folder)


def test_missing_tensor_and_wrong_shape_are_named(broken):
    from safetensors.torch import save_file

    folder, parameters, tiles, _ = broken
    tensors = hf_models.state(folder)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    save_file({name: t for name, t in tensors.items() if name != "lm_head.weight"}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="lm_head.weight is missing.*tie_word_embeddings"):
        load_hf(parameters, tiles, folder)
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \(63,\).*wants \(64,\)"):
        load_hf(parameters, tiles, folder)


def test_parameters_of_another_layout_are_refused(broken):
    folder, parameters, tiles, _ = broken
    del parameters["output_layer.weight"]
    with pytest.raises(WeightsError, match="output_layer.weight"):
        load_hf(parameters, tiles, folder)


# ---------------------------------------------------------------------------------------------------------------- export


def export_from_reference(rank: int, folder: Path, name: str, destination: Path, te: bool, **options) -> list[str]:
    hf, layout = HFConfig.from_folder(folder), LAYOUTS[name]
    tiles = [tile_map(hf, layout, r, "te" if te else "local") for r in range(layout.world_size)]
    export_hf(reference(folder, name, rank, te), tiles, folder, destination, **options)
    dist.barrier()
    return sorted(file.name for file in destination.iterdir())


def scenario_export(cases: list[tuple]) -> list:
    rank = dist.get_rank()
    return [export_from_reference(rank, *case, max_shard_bytes=50_000) for case in cases]


def scenario_export_bf16(folder: Path, destination: Path) -> None:
    export_from_reference(dist.get_rank(), folder, "tp2pp2", destination, False, dtype=torch.bfloat16)


def scenario_unwritable(folder: Path, destination: Path) -> str:
    try:
        export_from_reference(dist.get_rank(), folder, "tp4", destination, False)
    except OSError as error:
        return str(error)
    return "no error"


@pytest.mark.timeout(240)
def test_export_round_trip_is_bit_exact(folders, worlds, tmp_path):
    """HF -> Megatron's shards (by hand) -> HF, for every family, tied and untied, over four ranks."""
    layouts = [name for name in LAYOUTS if LAYOUTS[name].world_size == 4]
    cases = []
    dense = [name for name in layouts if name not in EXPERTS]
    for number, (family, tied) in enumerate((family, tied) for family in DENSE for tied in (True, False)):
        vocab = (131, 300)[number % 2]
        for te, name in enumerate((dense[number % len(dense)], dense[(number + 2) % len(dense)])):
            cases.append((folders(family, tied, vocab), name, tmp_path / f"{family}-{tied}-{name}", bool(te)))
    for number, name in enumerate(name for name in layouts if name in EXPERTS):
        family = MOE[number % 2]
        cases.append((folders(family, False), name, tmp_path / f"{family}-{name}", number % 4 < 2))
    assert {case[1] for case in cases} == set(layouts)
    listings = worlds(4).run(scenario_export, cases, timeout=200)[0]
    for (folder, _, destination, _), files in zip(cases, listings, strict=True):
        original, written = hf_models.state(folder), hf_models.state(destination)
        assert original.keys() == written.keys()
        assert all(torch.equal(original[name], written[name]) for name in original)
        assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} < set(files)
        index = json.loads((destination / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in original.values())
        assert index["weight_map"].keys() == original.keys()
        assert not list(tmp_path.glob(".*"))


@pytest.mark.timeout(240)
def test_export_loads_in_transformers_and_replaces_when_complete(folders, worlds, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, destination = folders("qwen2", True), tmp_path / "hf"
    destination.mkdir()
    (destination / "old").write_text("of an earlier run")
    worlds(4).run(scenario_export_bf16, folder, destination)
    assert sorted(file.name for file in destination.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    fields = json.loads((destination / "config.json").read_text())
    assert fields["torch_dtype"] == "bfloat16" and fields["tie_word_embeddings"] is True
    model = AutoModelForCausalLM.from_pretrained(destination)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    tokens = torch.arange(12)[None] * 7
    assert torch.equal(model(tokens).logits, original(tokens).logits)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", MOE)
def test_exported_experts_load_in_transformers(folders, worlds, tmp_path, family):
    from transformers import AutoModelForCausalLM

    folder = folders(family, False)
    worlds(4).run(scenario_export, [(folder, "ep2etp2", tmp_path / "hf", True)])
    model, original = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "hf", folder))
    tokens = torch.arange(12)[None] * 7
    assert torch.equal(model(tokens).logits, original(tokens).logits)


@pytest.mark.timeout(240)
def test_failed_export_fails_on_every_rank_and_leaves_the_old_folder(folders, worlds, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    errors = worlds(4).run(scenario_unwritable, folders("llama", True), blocked / "hf")
    assert all("the export failed on rank 0" in error for error in errors)


def test_an_export_that_does_not_fit_is_named_and_deleted(folders, tmp_path):
    folder, old = folders("llama", True), tmp_path / "hf" / "old"
    old.parent.mkdir()
    old.touch()
    tiles = [tile_map(HFConfig.from_folder(folder), LAYOUTS["dp4"], 0)]
    with (
        pytest.raises(OSError, match=r"/\.hf\.partial could not be written, .*File too large"),
        no_file_grows_beyond(20_000),
    ):
        export_hf(reference(folder, "dp4", 0), tiles, folder, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and old.exists()


def test_export_with_tiles_that_leave_a_hole_is_refused(folders, tmp_path):
    folder = folders("llama", True)
    hf = HFConfig.from_folder(folder)
    tiles = dict(tile_map(hf, LAYOUTS["dp4"], 0))
    parameters = reference(folder, "dp4", 0)
    gate, _ = tiles["decoder.layers.1.mlp.linear_fc1.weight"]
    tiles["decoder.layers.1.mlp.linear_fc1.weight"] = [gate]
    with pytest.raises(WeightsError, match=r"model.layers.1.mlp.up_proj.weight has shape .* hold 0 elements"):
        export_hf(parameters, [tiles], folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
