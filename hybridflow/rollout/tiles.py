"""Where every rectangle of vLLM's fused, tensor-parallel parameters comes from in the HF checkpoint.

vLLM stacks [q; k; v] and [gate; up], splits heads and columns evenly over the ranks, replicates KV heads where there are
fewer of them than ranks, and pads the vocabulary. Experts lie one below another: every rank has its columns of all of them,
or with expert parallelism its share of whole ones. Pure: neither vLLM nor torch is imported.
"""

import functools
from collections.abc import Sequence

from megatron_ext.hf_config import HFConfig
from megatron_ext.tiles import Slices, Tile, TileMap, local_extent

VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this, whatever the tensor-parallel size


@functools.cache
def tile_map(hf: HFConfig, tp: int, tp_rank: int, expert_parallel: bool = False) -> TileMap:
    """The tiles of one engine rank, keyed by the names of `Engine.parameters()`.

    Rows of the embedding and of the output layer that pad the vocabulary belong to no tile. Equal arguments give the same
    object, which is not to be changed.

    Raises:
        ValueError: `tp` cannot split this model in vLLM's way.
    """
    check_tp(hf, tp, expert_parallel)
    tiles: TileMap = {"model.embed_tokens.weight": _vocabulary("model.embed_tokens.weight", hf, tp, tp_rank)}
    for layer in range(hf.num_layers):
        prefix = f"model.layers.{layer}."
        tiles.update(_attention(prefix + "self_attn.", hf, tp, tp_rank))
        tiles.update(_experts(layer, hf, tp, tp_rank, expert_parallel) if hf.is_moe else _mlp(prefix, hf, tp, tp_rank))
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            tiles[prefix + name] = _whole(prefix + name, hf.hidden_size)
    tiles["model.norm.weight"] = _whole("model.norm.weight", hf.hidden_size)
    if not hf.tied:
        tiles["lm_head.weight"] = _vocabulary("lm_head.weight", hf, tp, tp_rank)
    return tiles


def local_shapes(hf: HFConfig, tp: int, tp_rank: int, expert_parallel: bool = False) -> dict[str, tuple[int, ...]]:
    """The shapes of one engine rank's parameters, with the rows that pad the vocabulary."""
    vocabulary = (_padded_vocabulary(hf) // tp, hf.hidden_size)
    padded = ("model.embed_tokens.weight", "lm_head.weight")
    tiles = tile_map(hf, tp, tp_rank, expert_parallel)
    return {name: vocabulary if name in padded else local_extent(held) for name, held in tiles.items()}


def check_tp(hf: HFConfig, tp: int, expert_parallel: bool = False) -> None:
    """Raise ValueError, with the sizes that do work, if vLLM cannot split the model over `tp` ranks."""
    if expert_parallel and not hf.is_moe:
        raise ValueError(f"roles.rollout.expert_parallel=true needs experts, which {hf.architecture} does not have: use false")
    sizes = _split_evenly(hf, expert_parallel)
    if tp < 1 or not _splits(hf, tp, sizes):
        usable = [size for size in range(1, hf.num_heads + 1) if _splits(hf, size, sizes)]
        given = {"num_attention_heads": hf.num_heads, "num_key_value_heads": hf.num_kv_heads} | sizes
        given |= {"num_experts": hf.num_experts} if hf.family == "qwen3_moe" else {}
        raise ValueError(
            f"roles.rollout.tp={tp} cannot split this model ({', '.join(f'{name}={size}' for name, size in given.items())}): "
            f"use one of {', '.join(map(str, usable))}"
        )


def _split_evenly(hf: HFConfig, expert_parallel: bool) -> dict[str, int]:
    """What is split over the ranks beside the heads, by the name that the model's config has for it."""
    if not hf.is_moe:
        inner = {"intermediate_size": hf.intermediate_size}
    elif expert_parallel:
        inner = {"num_experts": hf.num_experts}
    else:
        inner = {"intermediate_size" if hf.family == "mixtral" else "moe_intermediate_size": hf.moe_intermediate_size}
    return inner | {"padded vocab_size": _padded_vocabulary(hf)}


def _splits(hf: HFConfig, tp: int, sizes: dict[str, int]) -> bool:
    even = all(size % tp == 0 for size in (hf.num_heads, *sizes.values()))
    few_experts = hf.family == "qwen3_moe" and tp > hf.num_experts  # vLLM's Qwen3-MoE refuses it, its Mixtral does not
    return even and not few_experts and (hf.num_kv_heads % tp == 0 or tp % hf.num_kv_heads == 0)


def _padded_vocabulary(hf: HFConfig) -> int:
    return -(-hf.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _attention(prefix: str, hf: HFConfig, tp: int, tp_rank: int) -> TileMap:
    query, key_value = _head_rows(hf, tp, tp_rank)
    qkv = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    tiles = {
        prefix + "qkv_proj.weight": _stacked({f"{prefix}{n}.weight": rows for n, rows in qkv.items()}, (hf.hidden_size,)),
        prefix + "o_proj.weight": _columns([prefix + "o_proj.weight"], hf.hidden_size, query),
    }
    if hf.qkv_bias:
        tiles[prefix + "qkv_proj.bias"] = _stacked({f"{prefix}{n}.bias": rows for n, rows in qkv.items()}, ())
    if hf.qk_norm:
        for name in ("q_norm.weight", "k_norm.weight"):
            tiles[prefix + name] = _whole(prefix + name, hf.head_dim)
    return tiles


def _mlp(prefix: str, hf: HFConfig, tp: int, tp_rank: int) -> TileMap:
    mlp, inner = prefix + "mlp.", _share(hf.intermediate_size, tp, tp_rank)
    gate_up = {f"{mlp}{name}.weight": inner for name in ("gate_proj", "up_proj")}
    return {
        mlp + "gate_up_proj.weight": _stacked(gate_up, (hf.hidden_size,)),
        mlp + "down_proj.weight": _columns([mlp + "down_proj.weight"], hf.hidden_size, inner),
    }


def _experts(layer: int, hf: HFConfig, tp: int, tp_rank: int, expert_parallel: bool) -> TileMap:
    """The router, and the experts' three-dimensional parameters as `Engine.parameters()` shows them, in two dimensions."""
    held, inner = (0, hf.num_experts), _share(hf.moe_intermediate_size, tp, tp_rank)
    if expert_parallel:
        held, inner = _share(hf.num_experts, tp, tp_rank), (0, hf.moe_intermediate_size)
    names = [hf.expert_names(layer, expert) for expert in range(*held)]
    router = hf.router_name(layer)
    experts = router.removesuffix("gate.weight") + "experts.routed_experts."
    return {
        router: _columns([router], hf.num_experts, (0, hf.hidden_size)),
        experts + "w13_weight": _stacked({n: inner for gate, up, _ in names for n in (gate, up)}, (hf.hidden_size,)),
        experts + "w2_weight": _columns([down for _, _, down in names], hf.hidden_size, inner),
    }


def _head_rows(hf: HFConfig, tp: int, tp_rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows of q_proj, and of k_proj and v_proj, on this rank. With fewer KV heads than ranks, neighbours share one."""
    query = _share(hf.num_heads * hf.head_dim, tp, tp_rank)
    if hf.num_kv_heads >= tp:
        return query, _share(hf.num_kv_heads * hf.head_dim, tp, tp_rank)
    head = tp_rank // (tp // hf.num_kv_heads)
    return query, (head * hf.head_dim, (head + 1) * hf.head_dim)


def _share(size: int, tp: int, tp_rank: int) -> tuple[int, int]:
    return size // tp * tp_rank, size // tp * (tp_rank + 1)


def _stacked(parts: dict[str, tuple[int, int]], trailing: tuple[int, ...]) -> list[Tile]:
    """Rows of several HF tensors below one another; `trailing` are the whole dimensions after the first."""
    tiles, offset = [], 0
    rest: Slices = tuple((0, size) for size in trailing)
    for name, (start, stop) in parts.items():
        local = (offset, offset + stop - start)
        tiles.append(Tile(name, ((start, stop), *rest), (local, *rest)))
        offset = local[1]
    return tiles


def _columns(names: Sequence[str], rows: int, columns: tuple[int, int]) -> list[Tile]:
    """The same columns of several HF tensors of so many rows, below one another."""
    local = (0, columns[1] - columns[0])
    return [Tile(name, ((0, rows), columns), ((n * rows, (n + 1) * rows), local)) for n, name in enumerate(names)]


def _whole(name: str, size: int) -> list[Tile]:
    return [Tile(name, ((0, size),), ((0, size),))]


def _vocabulary(name: str, hf: HFConfig, tp: int, tp_rank: int) -> list[Tile]:
    start, stop = _share(_padded_vocabulary(hf), tp, tp_rank)
    stop = min(stop, hf.vocab_size)
    if start >= stop:  # a rank may hold nothing but padding
        return []
    return [Tile(name, ((start, stop), (0, hf.hidden_size)), ((0, stop - start), (0, hf.hidden_size)))]
