"""HF -> real Megatron models -> HF, bit-exact, over four gloo ranks."""

from pathlib import Path

import pytest
import torch

from megatron_ext.layout import Layout, Split
from tests import hf_models

LAYOUTS = [
    Layout(4),
    Layout(4, tp=4),
    Layout(4, pp=4),
    Layout(4, tp=2, pp=2, sequence_parallel=True),
    Layout(4, pp=2, vpp=2),
]
MOE = [
    Layout(4, tp=2, ep=2, sequence_parallel=True),
    Layout(4, ep=4),
    Layout(4, ep=2, etp=2),
    Layout(4, pp=2, vpp=2, ep=2),
    Layout(4, tp=2, pp=2, ep=2, sequence_parallel=True),
]
UNEVEN = [  # of 7 layers
    Layout(4, pp=4),
    Layout(4, pp=2, vpp=2),
    Layout(4, tp=2, pp=2, split=Split(loss=3)),
    Layout(4, pp=4, split=Split((0, 5, 2, 0))),
]


def scenario_round_trip(folder: Path, layout: Layout, destination: Path) -> int:
    """Build, load, export; returns how many parameters this rank has."""
    import torch.distributed as dist

    from megatron_ext import device
    from megatron_ext.export import export_hf
    from megatron_ext.hf_config import HFConfig
    from megatron_ext.model import build_model, transformer_config
    from megatron_ext.parallel import ParallelState
    from megatron_ext.weights import load_hf, named_parameters, tile_map

    hf = HFConfig.from_folder(folder)
    state = ParallelState("actor", layout, seed=1)
    with state.current():
        chunks = build_model(hf, layout, transformer_config(hf, layout, torch.float32), "local")
    tiles = [tile_map(hf, layout, rank) for rank in range(layout.world_size)]
    parameters = named_parameters(chunks)
    load_hf(parameters, tiles[dist.get_rank()], folder)
    export_hf(parameters, tiles, folder, destination, max_shard_bytes=60_000)
    assert device.current().type == next(iter(parameters.values())).device.type
    return len(parameters)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_round_trip_through_megatron(worlds, tmp_path, family, tied):
    folder = hf_models.make(tmp_path / "model", family, tied, vocab_size=300 if tied else 131)
    check_round_trips(worlds, folder, LAYOUTS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_round_trip_of_experts(worlds, tmp_path, family):
    check_round_trips(worlds, hf_models.make(tmp_path / "model", family, False), MOE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_round_trip_over_uneven_stages(worlds, tmp_path, tied):
    check_round_trips(worlds, hf_models.make(tmp_path / "model", "qwen2", tied, num_hidden_layers=7), UNEVEN)


def check_round_trips(worlds, folder: Path, layouts: list[Layout]) -> None:
    original = hf_models.state(folder)
    for number, layout in enumerate(layouts):
        destination = folder.parent / f"out-{number}"
        counts = worlds(4).run(scenario_round_trip, folder, layout, destination)
        assert all(counts)
        written = hf_models.state(destination)
        assert written.keys() == original.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in original.items()), layout
