"""Checks a model folder in HF format against its config.json by reading the headers of its safetensors files only."""

import json
import struct
from pathlib import Path

from hybridflow.config.schema import ConfigError
from megatron_ext.hf_config import HFConfig

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_model_folder(folder: Path, hf: HFConfig) -> None:
    """Every tensor that `hf` asks for is there, in its shape, in files that are complete; so is a tokenizer.

    Raises:
        ConfigError: names the file or the tensor.
    """
    shapes = tensor_shapes(folder)
    for name, shape in expected_tensors(hf).items():
        if name not in shapes:
            raise ConfigError(f"model folder {folder} lacks the tensor {name}, which its config.json asks for")
        if shapes[name] != shape:
            raise ConfigError(f"model folder {folder}: {name} has shape {shapes[name]}, but config.json asks for {shape}")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model folder {folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json into it")


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor in the folder's safetensors files, which are complete.

    Raises:
        ConfigError: names the file.
    """
    shapes: dict[str, list[int]] = {}
    for name in _shards(folder):
        shapes |= _header(folder / name)
    return shapes


def expected_tensors(hf: HFConfig) -> dict[str, list[int]]:
    """HF name -> shape of every parameter of a model that its folder must hold."""
    h, q, kv = hf.hidden_size, hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim
    shapes = {"model.embed_tokens.weight": [hf.vocab_size, h], "model.norm.weight": [h]}
    if hf.head != "lm" and hf.head_stored:
        shapes |= {"score.weight": [1, h]} | ({"score.bias": [1]} if hf.has_bias else {})
    if hf.head == "lm" and not hf.tied:
        shapes["lm_head.weight"] = [hf.vocab_size, h]
    layer = {
        "input_layernorm.weight": [h],
        "post_attention_layernorm.weight": [h],
        "self_attn.q_proj.weight": [q, h],
        "self_attn.k_proj.weight": [kv, h],
        "self_attn.v_proj.weight": [kv, h],
        "self_attn.o_proj.weight": [h, q],
    }
    if not hf.is_moe:
        layer |= {f"mlp.{name}_proj.weight": [hf.intermediate_size, h] for name in ("gate", "up")}
        layer["mlp.down_proj.weight"] = [h, hf.intermediate_size]
    if hf.qkv_bias:
        layer |= {"self_attn.q_proj.bias": [q], "self_attn.k_proj.bias": [kv], "self_attn.v_proj.bias": [kv]}
    if hf.qk_norm:
        layer |= {"self_attn.q_norm.weight": [hf.head_dim], "self_attn.k_norm.weight": [hf.head_dim]}
    for n in range(hf.num_layers):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
        if hf.is_moe:
            shapes[hf.router_name(n)] = [hf.num_experts, h]
        for expert in range(hf.num_experts):
            gate, up, down = hf.expert_names(n, expert)
            shapes[gate] = shapes[up] = [hf.moe_intermediate_size, h]
            shapes[down] = [h, hf.moe_intermediate_size]
    return shapes


def _shards(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            raise ConfigError(f"model folder {folder} has no safetensors: it needs model.safetensors or {INDEX}")
        return ["model.safetensors"]
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model folder {folder} lacks {missing[0]} ({len(missing)} of {len(shards)} shards in its index are missing)"
        )
    return shards


def _header(path: Path) -> dict[str, list[int]]:
    """Name -> shape of the tensors of a safetensors file: 8 bytes of length, that much JSON, then the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if length + 8 > size:
            raise ConfigError(f"{path} is not a complete safetensors file ({size} bytes): copy it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            shapes = {name: tensor["shape"] for name, tensor in header.items()}
            end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error!r}: copy it again") from error
    if end != size:
        raise ConfigError(f"{path} is not a complete safetensors file ({size} bytes, not {end}): copy it again")
    return shapes
