"""Where a Megatron rank's weights are in the HF model: tile maps, and loading from an HF folder (export.py writes one).

The maps are pure: a function of (HF config, layout, rank, spec), and ranks that hold the same share one map. Loading reads
only the slices that a rank holds. Parameters are plain `dict[name, Tensor]` everywhere, with global layer numbers in the names
(`named_parameters` makes that of a rank's chunks).
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, padded_vocab_size
from megatron_ext.tiles import Tile, TileMap, as_index, local_extent

EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
Named = TypeVar("Named")
_HEAD = "output_layer."  # the prefix of what stands on the last layer
# HF's name inside a layer <- the parameter's, by spec: Transformer Engine fuses a norm into the linear layer behind it.
_NORMS = {
    "local": {"input_layernorm": "input_layernorm.weight", "post_attention_layernorm": "pre_mlp_layernorm.weight"},
    "te": {
        "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
    },
}
_MOE_NORM = "pre_mlp_layernorm.weight"  # fused by neither: the router reads the norm's output too
# The weight of a local expert's linear layer, by spec.
_EXPERT = {"local": "local_experts.{expert}.{linear}.weight", "te": "{linear}.weight{expert}"}


class WeightsError(ValueError):
    """A model folder's weights don't fit the model; the message names the file or tensor."""


# ---------------------------------------------------------------------------------------------------------------- shapes


@functools.cache
def hf_shapes(hf: HFConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF checkpoint, in the model's order, a tied output layer not among them, that of a head
    of one number among them, stored or not. Cached: don't change it."""
    hidden, queries, keys = hf.hidden_size, hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (hf.vocab_size, hidden)}
    for layer in range(hf.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if hf.qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, queries)
        if hf.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (hf.head_dim,)
        if hf.is_moe:
            shapes[hf.router_name(layer)] = (hf.num_experts, hidden)
        inner = hf.moe_intermediate_size if hf.is_moe else hf.intermediate_size
        for gate, up, down in _mlp_names(hf, layer):
            shapes[gate] = shapes[up] = (inner, hidden)
            shapes[down] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if hf.head != "lm":
        shapes |= {"score.weight": (1, hidden)} | ({"score.bias": (1,)} if hf.has_bias else {})
    elif not hf.tied:
        shapes["lm_head.weight"] = (hf.vocab_size, hidden)
    return shapes


def _mlp_names(hf: HFConfig, layer: int) -> list[tuple[str, str, str]]:
    """Gate, up and down projection of each expert of a layer; of its only MLP in a dense model."""
    if hf.is_moe:
        return [hf.expert_names(layer, expert) for expert in range(hf.num_experts)]
    prefix = f"model.layers.{layer}.mlp."
    return [(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight", f"{prefix}down_proj.weight")]


# -------------------------------------------------------------------------------------------------------------- tile map


class _Place(NamedTuple):
    """What of a rank's coordinates decides what it holds: (size, rank) of each dimension."""

    tp: tuple[int, int]
    etp: tuple[int, int]
    ep: tuple[int, int]
    first: bool
    last: bool
    layers: tuple[int, ...]


def tile_map(hf: HFConfig, layout: Layout, rank: int, spec: str = "local") -> TileMap:
    """The tiles of one rank's parameters, for the "local" or the "te" layer spec. Ranks that hold the same get the same object:
    don't change it.

    Parameters have global layer numbers; rows of the padded vocabulary that HF lacks belong to no tile, and a parameter that
    is padding only has an empty list. Under PP a tied embedding is on the first stage and again, as `output_layer.weight`,
    on the last. Experts are numbered from 0 on each rank; expert parallel rank r has the r-th even share of them.

    Raises:
        ValueError: the layout doesn't divide the model.
    """
    if spec not in _NORMS:
        raise ValueError(f"spec={spec!r} is unknown: use one of {', '.join(_NORMS)}")
    layout.check_experts(hf.num_experts, hf.moe_intermediate_size)
    where, experts = layout.coordinates(rank), layout.expert_coordinates(rank)
    place = _Place(
        tp=(layout.tp, where.tp),
        etp=(layout.etp, experts.etp),
        ep=(layout.ep, experts.ep),
        first=where.pp == 0,
        last=where.pp == layout.pp - 1,
        layers=tuple(layer for chunk in layout.stage_layers(hf.num_layers)[where.pp] for layer in chunk),
    )
    return _tiles(hf, place, spec)


@functools.cache
def _tiles(hf: HFConfig, place: _Place, spec: str) -> TileMap:
    tp, tp_rank = place.tp
    tiles: TileMap = {}
    if place.first:
        tiles["embedding.word_embeddings.weight"] = _vocabulary(hf, tp, tp_rank, EMBEDDING)
    for layer in place.layers:
        tiles |= _layer(hf, layer, place, spec)
    if place.last:
        tiles["decoder.final_layernorm.weight"] = [_whole("model.norm.weight", hf_shapes(hf))]
        if hf.head != "lm":
            kinds = ("weight", "bias") if hf.has_bias else ("weight",)
            tiles |= {f"{_HEAD}{kind}": [_whole(f"score.{kind}", hf_shapes(hf))] for kind in kinds}
        elif not hf.tied:
            tiles["output_layer.weight"] = _vocabulary(hf, tp, tp_rank, "lm_head.weight")
        elif not place.first:
            tiles["output_layer.weight"] = _vocabulary(hf, tp, tp_rank, EMBEDDING)
    return tiles


def without_head(named: Mapping[str, Named]) -> dict[str, Named]:
    """A rank's tile map or parameters without what stands on the last layer: what a policy and its critic have in common."""
    return {name: value for name, value in named.items() if not name.startswith(_HEAD)}


def local_shapes(hf: HFConfig, layout: Layout, rank: int, spec: str = "local") -> dict[str, tuple[int, ...]]:
    """The shapes of one rank's parameters, with the rows that pad the vocabulary."""
    vocabulary = (padded_vocab_size(hf.vocab_size, layout.tp) // layout.tp, hf.hidden_size)
    padded = {"embedding.word_embeddings.weight"} | ({"output_layer.weight"} if hf.head == "lm" else set())
    tiles = tile_map(hf, layout, rank, spec)
    return {name: vocabulary if name in padded else local_extent(held) for name, held in tiles.items()}


def _layer(hf: HFConfig, layer: int, place: _Place, spec: str) -> TileMap:
    theirs, ours, shapes = f"model.layers.{layer}.", f"decoder.layers.{layer}.", hf_shapes(hf)
    tp, rank = place.tp
    norms = _NORMS[spec] | ({"post_attention_layernorm": _MOE_NORM} if hf.is_moe else {})
    tiles: TileMap = {ours + name: [_whole(f"{theirs}{norm}.weight", shapes)] for norm, name in norms.items()}
    for kind in ("weight", "bias") if hf.qkv_bias else ("weight",):
        tiles[f"{ours}self_attention.linear_qkv.{kind}"] = _qkv(hf, f"{theirs}self_attn.", kind, tp, rank)
    if hf.qk_norm:
        for letter in "qk":
            tiles[f"{ours}self_attention.{letter}_layernorm.weight"] = [
                _whole(f"{theirs}self_attn.{letter}_norm.weight", shapes)
            ]
    tiles[f"{ours}self_attention.linear_proj.weight"] = [_share(f"{theirs}self_attn.o_proj.weight", shapes, 1, tp, rank)]
    if not hf.is_moe:
        fc1, fc2 = _mlp(_mlp_names(hf, layer)[0], shapes, tp, rank)
        return tiles | {f"{ours}mlp.linear_fc1.weight": fc1, f"{ours}mlp.linear_fc2.weight": fc2}
    tiles[f"{ours}mlp.router.weight"] = [_whole(hf.router_name(layer), shapes)]
    ep, ep_rank = place.ep
    held = hf.num_experts // ep
    for expert in range(held):
        names = hf.expert_names(layer, ep_rank * held + expert)
        for linear, parts in zip(("linear_fc1", "linear_fc2"), _mlp(names, shapes, *place.etp), strict=True):
            tiles[f"{ours}mlp.experts.{_EXPERT[spec].format(expert=expert, linear=linear)}"] = parts
    return tiles


def _mlp(
    names: tuple[str, str, str], shapes: Mapping[str, tuple[int, ...]], tp: int, rank: int
) -> tuple[list[Tile], list[Tile]]:
    """The tiles of fc1, gate over up, and of fc2."""
    gate = _share(names[0], shapes, 0, tp, rank)
    up = _share(names[1], shapes, 0, tp, rank, local_start=gate.shape[0])
    return [gate, up], [_share(names[2], shapes, 1, tp, rank)]


def _whole(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tile:
    slices = tuple((0, size) for size in shapes[name])
    return Tile(name, slices, slices)


def _share(name: str, shapes: Mapping[str, tuple[int, ...]], dim: int, tp: int, rank: int, local_start: int = 0) -> Tile:
    """The rank's even share of an HF tensor along `dim`, at `local_start` of the parameter."""
    size = _divide(shapes[name][dim], tp, f"{name}'s dimension {dim}")
    hf_slices, local_slices = ([(0, n) for n in shapes[name]] for _ in range(2))
    hf_slices[dim] = (rank * size, (rank + 1) * size)
    local_slices[dim] = (local_start, local_start + size)
    return Tile(name, tuple(hf_slices), tuple(local_slices))


def _divide(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise ValueError(f"{what}={size} is not a multiple of tp={tp}: choose a tp that divides it")
    return size // tp


def _vocabulary(hf: HFConfig, tp: int, rank: int, name: str) -> list[Tile]:
    rows = padded_vocab_size(hf.vocab_size, tp) // tp
    start, stop = rank * rows, min((rank + 1) * rows, hf.vocab_size)
    if start >= stop:
        return []
    columns = (0, hf.hidden_size)
    return [Tile(name, ((start, stop), columns), ((0, stop - start), columns))]


def _qkv(hf: HFConfig, prefix: str, kind: str, tp: int, rank: int) -> list[Tile]:
    """Megatron's rows are [queries of group 0, key 0, value 0, queries of group 1, ...], split evenly over TP ranks.

    With more TP ranks than groups a rank's rows are a part of a group; Megatron gathers activations then.
    """
    _divide(hf.num_heads, tp, "num_attention_heads")
    if hf.num_kv_heads % tp and tp % hf.num_kv_heads:
        raise ValueError(f"num_key_value_heads={hf.num_kv_heads} is neither a multiple nor a divisor of tp={tp}")
    size, queries = hf.head_dim, hf.num_heads // hf.num_kv_heads
    rows = (hf.num_heads + 2 * hf.num_kv_heads) * size // tp
    columns = ((0, hf.hidden_size),) if kind == "weight" else ()
    tiles, at = [], -rank * rows  # of the next block of rows, counted from the rank's first
    for group in range(hf.num_kv_heads):
        for letter, heads in (("q", queries), ("k", 1), ("v", 1)):
            block = group * heads * size  # the block's first row in the HF tensor
            start, stop = max(at, 0), min(at + heads * size, rows)
            if start < stop:
                hf_rows = (block + start - at, block + stop - at)
                tiles.append(Tile(f"{prefix}{letter}_proj.{kind}", (hf_rows, *columns), ((start, stop), *columns)))
            at += heads * size
    return tiles


def named_parameters(chunks: Iterable[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """The parameters of a rank's model chunks (wrapped in DDP or not) under the names that tile maps have."""
    parameters: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        while not hasattr(chunk, "decoder"):
            chunk = chunk.module
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]

        def renumber(match: re.Match, numbers: list[int] = numbers) -> str:
            return f"decoder.layers.{numbers[int(match[1])]}."

        for name, parameter in chunk.named_parameters():
            parameters[re.sub(r"^decoder\.layers\.(\d+)\.", renumber, name)] = parameter
    return parameters


# ------------------------------------------------------------------------------------------------------------------ load


@torch.no_grad()
def load_hf(
    parameters: Mapping[str, Tensor],
    tiles: TileMap,
    folder: str | Path,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    tell: Callable[[str], None] = lambda file: None,
) -> None:
    """Fill a rank's parameters from an HF folder, reading only this rank's slices; padding becomes zero.

    Args:
        shapes: what each HF tensor must look like; by default what the folder's own config.json asks for of a language model.
        tell: called with "NAME (file 3 of 30)" before a file is read.

    Raises:
        WeightsError: the parameters and tiles differ, or the folder lacks a file or tensor, or has one of another shape.
    """
    folder = Path(folder)
    check_parameters(parameters, tiles)
    shapes = hf_shapes(HFConfig.from_folder(folder)) if shapes is None else shapes
    files = weight_files(folder)
    wanted: dict[Path, list[tuple[str, Tile]]] = {}
    for name, held in tiles.items():
        if sum(tile.numel for tile in held) < parameters[name].numel():
            parameters[name].zero_()
        for tile in held:
            if tile.hf_name not in files:
                raise WeightsError(f"{folder}: tensor {tile.hf_name} is missing{_hint(tile.hf_name, files)}")
            wanted.setdefault(files[tile.hf_name], []).append((name, tile))
    for number, (file, entries) in enumerate(wanted.items(), start=1):
        tell(f"{file.name} (file {number} of {len(wanted)})")
        with safe_open(file, framework="pt", device="cpu") as opened:
            _read(parameters, entries, opened, file, shapes)


def _read(parameters: Mapping[str, Tensor], entries: list[tuple[str, Tile]], opened, file: Path, shapes) -> None:
    present = set(opened.keys())
    for name, tile in entries:
        if tile.hf_name not in present:
            raise WeightsError(f"{file}: tensor {tile.hf_name} is missing, though {INDEX} says that it is there")
        stored = opened.get_slice(tile.hf_name)
        shape = tuple(stored.get_shape())
        if shape != shapes[tile.hf_name]:
            raise WeightsError(f"{file}: {tile.hf_name} has shape {shape}, the model's config wants {shapes[tile.hf_name]}")
        if any(stop > size for (_, stop), size in zip(tile.hf_slices, shape, strict=True)):
            raise WeightsError(f"{file}: {tile.hf_name} has shape {shape}, parameter {name} holds {tile.hf_slices} of it")
        parameters[name][as_index(tile.local_slices)].copy_(stored[as_index(tile.hf_slices)])


def _hint(name: str, files: Mapping[str, Path]) -> str:
    if name == "lm_head.weight" and EMBEDDING in files:
        return ": if the model shares it with the embedding, its config.json must say tie_word_embeddings=true"
    return ": was the folder copied or converted completely?"


def weight_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in an HF folder, by its index where there is one.

    Raises:
        WeightsError: there are no safetensors files, or one that the index names is missing.
    """
    if (folder / INDEX).is_file():
        files = {name: folder / file for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            raise WeightsError(f"{folder}: {INDEX} names {', '.join(missing)}, which is not there: copy the folder again")
        return files
    present = sorted(folder.glob("*.safetensors"))
    if not present:
        raise WeightsError(f"model folder {folder} has no .safetensors file: convert it with `hybridflow convert`")
    files = {}
    for file in present:
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    return files


def check_parameters(parameters: Mapping[str, Tensor], tiles: TileMap) -> None:
    """Raise WeightsError unless the tile map is about exactly these parameters and within their shapes."""
    if parameters.keys() != tiles.keys():
        raise WeightsError(
            f"the model and its tile map differ: only in the model {sorted(parameters.keys() - tiles.keys())[:4]}, "
            f"only in the map {sorted(tiles.keys() - parameters.keys())[:4]}; is it the right layout and spec?"
        )
    for name, held in tiles.items():
        shape = tuple(parameters[name].shape)
        for tile in held:
            fits = len(shape) == len(tile.local_slices)
            if not fits or any(stop > size for (_, stop), size in zip(tile.local_slices, shape, strict=True)):
                raise WeightsError(f"{name} has shape {shape}, its tile of {tile.hf_name} is {tile.local_slices}")
