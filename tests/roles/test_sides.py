"""What the ends of a transfer take for granted about a role's parameters."""

import pytest
import torch

from hybridflow.config.load import load
from hybridflow.roles import sides
from tests.config.folders import write_config, write_model


@pytest.mark.parametrize(("dtype", "spec"), [("float32", "local"), ("bfloat16", "te")])
def test_names_are_those_of_the_layers_for_the_roles_dtype(tmp_path, monkeypatch, dtype: str, spec: str):
    """As on a GPU, where fp32 has no Transformer Engine."""
    monkeypatch.setattr(sides.layers, "default_spec", lambda wanted: "te" if wanted == torch.bfloat16 else "local")
    config = load(write_config(tmp_path, write_model(tmp_path / "model")), [f"model.dtype={dtype}"])
    names = sides.tile_maps(config, "actor", config.layout("actor"))(0)
    assert any("linear_fc1.layer_norm_weight" in name for name in names) == (spec == "te")
