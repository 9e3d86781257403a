"""HF folder -> checkpoint -> HF folder without Megatron: bit for bit, for every family, in several files."""

import json

import pytest
import torch

from megatron_ext.offline import hf_to_role, role_to_hf
from megatron_ext.stored import read_about
from megatron_ext.weights import WeightsError
from tests import hf_models


def nothing(line: str) -> None:
    pass


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False), ("qwen3_moe", False), ("mixtral", True)]
)
def test_there_and_back(tmp_path, family, tied):
    model, back = hf_models.make(tmp_path / "hf", family, tied), tmp_path / "back"
    hf_to_role(model, tmp_path / "actor", tmp_path / "about", nothing, file_bytes=50_000)
    assert read_about(tmp_path / "actor")["updates"] is None
    assert len(list((tmp_path / "actor").glob("part-*"))) > 1
    role_to_hf(tmp_path / "actor", tmp_path / "about", back, nothing, file_bytes=70_000)
    expected, found = hf_models.state(model), hf_models.state(back)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(list(back.glob("*.safetensors"))) > 1
    for name in ("generation_config.json", "tokenizer.json"):
        assert (back / name).read_bytes() == (model / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, back))
    assert after | {"tie_word_embeddings": tied} == before | {"tie_word_embeddings": tied}


def test_another_models_config_is_refused(tmp_path):
    model = hf_models.make(tmp_path / "hf", "qwen2", True)
    hf_to_role(model, tmp_path / "actor", tmp_path / "about", nothing)
    fields = json.loads((tmp_path / "about" / "config.json").read_text())
    (tmp_path / "about" / "config.json").write_text(json.dumps(fields | {"vocab_size": 140}))
    with pytest.raises(WeightsError, match=r"embed_tokens.weight of shape \(140, .*has it in shape \(131, "):
        role_to_hf(tmp_path / "actor", tmp_path / "about", tmp_path / "back", nothing)
    assert not (tmp_path / "back").exists()
