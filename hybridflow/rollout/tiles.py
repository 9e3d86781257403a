"""Where every rectangle of vLLM's fused, tensor-parallel parameters comes from in the HF checkpoint.

vLLM stacks [q; k; v] and [gate; up], splits heads and columns evenly over the ranks, replicates KV heads where there are
fewer of them than ranks, and pads the vocabulary. Pure: neither vLLM nor torch is imported.
"""

from megatron_ext.hf_config import HFConfig
from megatron_ext.tiles import Slices, Tile, TileMap, local_extent

VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this, whatever the tensor-parallel size


def tile_map(hf: HFConfig, tp: int, tp_rank: int) -> TileMap:
    """The tiles of one engine rank, keyed by the names of `Engine.parameters()`.

    Rows of the embedding and of the output layer that pad the vocabulary belong to no tile.

    Raises:
        ValueError: `tp` cannot split this model in vLLM's way.
    """
    check_tp(hf, tp)
    tiles: TileMap = {"model.embed_tokens.weight": _vocabulary("model.embed_tokens.weight", hf, tp, tp_rank)}
    for layer in range(hf.num_layers):
        tiles.update(_layer(f"model.layers.{layer}.", hf, tp, tp_rank))
    tiles["model.norm.weight"] = _whole("model.norm.weight", hf.hidden_size)
    if not hf.tied:
        tiles["lm_head.weight"] = _vocabulary("lm_head.weight", hf, tp, tp_rank)
    return tiles


def local_shapes(hf: HFConfig, tp: int, tp_rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of one engine rank's parameters, with the rows that pad the vocabulary."""
    vocabulary = (_padded_vocabulary(hf) // tp, hf.hidden_size)
    padded = ("model.embed_tokens.weight", "lm_head.weight")
    tiles = tile_map(hf, tp, tp_rank)
    return {name: vocabulary if name in padded else local_extent(held) for name, held in tiles.items()}


def check_tp(hf: HFConfig, tp: int) -> None:
    """Raise ValueError, with the sizes that do work, if vLLM cannot split the model over `tp` ranks."""
    if not _splits(hf, tp):
        usable = [size for size in range(1, hf.num_heads + 1) if _splits(hf, size)]
        raise ValueError(
            f"roles.rollout.tp={tp} cannot split this model (num_attention_heads={hf.num_heads}, "
            f"num_key_value_heads={hf.num_kv_heads}, intermediate_size={hf.intermediate_size}, "
            f"vocab_size={hf.vocab_size}): use one of {', '.join(map(str, usable))}"
        )


def _splits(hf: HFConfig, tp: int) -> bool:
    even = (hf.num_heads, hf.intermediate_size, _padded_vocabulary(hf))
    kv_heads_fit = hf.num_kv_heads % tp == 0 or tp % hf.num_kv_heads == 0
    return tp > 0 and all(size % tp == 0 for size in even) and kv_heads_fit


def _padded_vocabulary(hf: HFConfig) -> int:
    return -(-hf.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _layer(prefix: str, hf: HFConfig, tp: int, tp_rank: int) -> TileMap:
    attention, mlp, hidden = prefix + "self_attn.", prefix + "mlp.", hf.hidden_size
    query, key_value = _head_rows(hf, tp, tp_rank)
    qkv = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    inner = _share(hf.intermediate_size, tp, tp_rank)
    tiles = {
        attention + "qkv_proj.weight": _stacked({f"{attention}{n}.weight": rows for n, rows in qkv.items()}, (hidden,)),
        attention + "o_proj.weight": _columns(attention + "o_proj.weight", hidden, query),
        mlp + "gate_up_proj.weight": _stacked({f"{mlp}{n}.weight": inner for n in ("gate_proj", "up_proj")}, (hidden,)),
        mlp + "down_proj.weight": _columns(mlp + "down_proj.weight", hidden, inner),
    }
    if hf.qkv_bias:
        tiles[attention + "qkv_proj.bias"] = _stacked({f"{attention}{n}.bias": rows for n, rows in qkv.items()}, ())
    if hf.qk_norm:
        for name in ("q_norm.weight", "k_norm.weight"):
            tiles[attention + name] = _whole(attention + name, hf.head_dim)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        tiles[prefix + name] = _whole(prefix + name, hidden)
    return tiles


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


def _columns(name: str, rows: int, columns: tuple[int, int]) -> list[Tile]:
    return [Tile(name, ((0, rows), columns), ((0, rows), (0, columns[1] - columns[0])))]


def _whole(name: str, size: int) -> list[Tile]:
    return [Tile(name, ((0, size),), ((0, size),))]


def _vocabulary(name: str, hf: HFConfig, tp: int, tp_rank: int) -> list[Tile]:
    start, stop = _share(_padded_vocabulary(hf), tp, tp_rank)
    stop = min(stop, hf.vocab_size)
    if start >= stop:  # a rank may hold nothing but padding
        return []
    return [Tile(name, ((start, stop), (0, hf.hidden_size)), ((0, stop - start), (0, hf.hidden_size)))]
