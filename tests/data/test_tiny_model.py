"""The folder that make_tiny_model writes, read back by transformers and by HFConfig."""

import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.data.tiny_model import make_tiny_model
from megatron_ext.hf_config import HFConfig


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_folder_loads_and_generates(tmp_path):
    folder = make_tiny_model(tmp_path / "tiny")
    config = HFConfig.from_folder(folder)
    assert (config.family, config.num_layers, config.hidden_size, config.intermediate_size) == ("qwen2", 4, 128, 256)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.tied) == (4, 2, 32, False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.vocab_size == len(tokenizer) <= 64 and model.dtype == torch.float32
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    assert model.lm_head.weight.std().item() == pytest.approx(0.06, rel=0.1)
    out = model.generate(**tokenizer("1 + 2 =", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert out.shape[1] <= 7


def test_the_seed_decides_the_bytes_and_the_global_rng_is_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = digest(make_tiny_model(tmp_path / "a", seed=1))
    assert torch.equal(torch.rand(3), expected)
    assert digest(make_tiny_model(tmp_path / "b", seed=1)) == first
    assert digest(make_tiny_model(tmp_path / "c", seed=2))["model.safetensors"] != first["model.safetensors"]


def test_replaces_an_older_one_and_ties(tmp_path):
    make_tiny_model(tmp_path / "m", layers=2)
    folder = make_tiny_model(tmp_path / "m", layers=1, tied=True)
    config = HFConfig.from_folder(folder)
    assert config.num_layers == 1 and config.tied
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_bad_shape(tmp_path):
    with pytest.raises(ValueError, match="heads=3 must divide hidden=128"):
        make_tiny_model(tmp_path / "m", heads=3)
