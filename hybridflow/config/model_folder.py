"""Checks a model folder in HF format against its config.json by reading the headers of its safetensors files only."""

import json
import re
import struct
from math import prod
from pathlib import Path
from typing import NamedTuple

from hybridflow.config.schema import ConfigError
from megatron_ext.hf_config import HFConfig

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_LAYERS = re.compile(r"model\.layers\.\d+\.")
# Bytes of an element, of the kinds that weights are loaded from
_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class _Stored(NamedTuple):
    """A tensor as a header describes it."""

    dtype: str
    shape: list[int]
    nbytes: int


def check_model_folder(folder: Path, hf: HFConfig) -> None:
    """Every tensor that `hf` asks for is there, in its shape, in files that are complete; so is a tokenizer.

    Raises:
        ConfigError: names the file or the tensor.
    """
    tensors, expected = _tensors(folder), expected_tensors(hf)
    for name, shape in expected.items():
        if name not in tensors:
            raise ConfigError(f"model folder {folder} lacks the tensor {name}, which its config.json asks for")
        found = tensors[name]
        if found.shape != shape:
            raise ConfigError(f"model folder {folder}: {name} has shape {found.shape}, but config.json asks for {shape}")
        if found.dtype not in _ITEMSIZE:
            raise ConfigError(f"model folder {folder}: {name} is of dtype {found.dtype}: use one of {', '.join(_ITEMSIZE)}")
        if found.nbytes != prod(shape) * _ITEMSIZE[found.dtype]:
            kind = f"{name} of shape {shape} and {found.dtype}"
            raise ConfigError(f"model folder {folder}: {kind} has {found.nbytes} bytes: copy it again")
    # of the model's own parts, besides what every rank computes itself: left out, it would be another model in silence
    ignored = sorted(name for name in tensors.keys() - expected.keys() if _LAYERS.match(name) and "rotary_emb" not in name)
    if ignored:
        raise ConfigError(
            f"model folder {folder} has the tensor {ignored[0]}, which its config.json has no place for"
            f" (architectures={hf.architecture}, num_hidden_layers={hf.num_layers}): is it of another model?"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model folder {folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json into it")


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor that the folder's index, or its one file, names, in safetensors files that are complete.

    Raises:
        ConfigError: names the file.
    """
    return {name: tensor.shape for name, tensor in _tensors(folder).items()}


def _tensors(folder: Path) -> dict[str, _Stored]:
    files = _weight_map(folder)
    if not files:
        return _header(folder / ONE_FILE)
    headers = {file: _header(folder / file) for file in sorted(set(files.values()))}
    wrong = next((name for name, file in files.items() if name not in headers[file]), None)
    if wrong is not None:
        raise ConfigError(f"model folder {folder}: by {INDEX}, {wrong} is in {files[wrong]}, which lacks it: copy both again")
    return {name: headers[file][name] for name, file in files.items()}


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


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file, all of which are there; empty where one file holds all of them."""
    index = folder / INDEX
    for path in (index, folder / ONE_FILE):
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"{path} is a link to {path.readlink()}, which is not there: copy what it stands for")
    if not index.is_file():
        if not (folder / ONE_FILE).is_file():
            raise ConfigError(f"model folder {folder} has no safetensors: it needs {ONE_FILE} or {INDEX}")
        return {}
    try:
        files = dict(json.loads(index.read_text())["weight_map"])
        shards = sorted(set(files.values()))
        missing = [name for name in shards if not (folder / name).is_file()]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    if missing or not shards:
        raise ConfigError(
            f"model folder {folder} lacks {missing[0]} ({len(missing)} of {len(shards)} shards in its index are missing)"
            if missing
            else f"{index} is not an index of safetensors files: it names no file"
        )
    return files


def _header(path: Path) -> dict[str, _Stored]:
    """The tensors of a safetensors file: 8 bytes of length, that much JSON, then the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if length + 8 > size:
            raise ConfigError(f"{path} is not a complete safetensors file ({size} bytes): copy it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {}
            for name, about in header.items():
                start, stop = about["data_offsets"]
                tensors[name] = _Stored(about["dtype"], about["shape"], stop - start)
            end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error!r}: copy it again") from error
    if end != size:
        raise ConfigError(f"{path} is not a complete safetensors file ({size} bytes, not {end}): copy it again")
    return tensors
