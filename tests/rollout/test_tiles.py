"""The tile map of vLLM's parameters as arithmetic; that it is vLLM's is shown in test_engine.py."""

from dataclasses import replace

import pytest
import torch

from hybridflow.rollout.tiles import check_tp, local_shapes, tile_map
from megatron_ext.hf_config import HFConfig
from megatron_ext.tiles import Tile, as_index

QWEN2 = HFConfig(
    family="qwen2", architecture="Qwen2ForCausalLM", hidden_size=8, intermediate_size=16, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=2, vocab_size=70, tied=False, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
    qkv_bias=True, qk_norm=False,
)  # fmt: skip
QWEN3 = replace(QWEN2, family="qwen3", architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, head_dim=6, tied=True)

QWEN3_MOE = replace(
    QWEN3, family="qwen3_moe", architecture="Qwen3MoeForCausalLM", num_experts=4, experts_per_token=2, moe_intermediate_size=8
)
MIXTRAL = replace(
    QWEN2, family="mixtral", architecture="MixtralForCausalLM", qkv_bias=False, num_experts=4, experts_per_token=2,
    moe_intermediate_size=16,
)  # fmt: skip
MODELS = {
    "qwen2": QWEN2, "qwen3": QWEN3, "no-gqa": replace(QWEN2, num_kv_heads=4), "qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL
}  # fmt: skip


def hf_shapes(hf: HFConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, written down from the architecture rather than from the code under test."""
    query, key_value, hidden, inner = hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim, hf.hidden_size, 16
    rows = (("q", query), ("k", key_value), ("v", key_value))
    shapes = {"model.embed_tokens.weight": (hf.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not hf.tied:
        shapes["lm_head.weight"] = (hf.vocab_size, hidden)
    for layer in range(hf.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {at + f"self_attn.{n}_proj.weight": (s, hidden) for n, s in rows}
        if hf.qkv_bias:
            shapes |= {at + f"self_attn.{n}_proj.bias": (s,) for n, s in rows}
        if hf.qk_norm:
            shapes |= {at + f"self_attn.{n}_norm.weight": (hf.head_dim,) for n in "qk"}
        shapes |= {at + "self_attn.o_proj.weight": (hidden, query)} | mlp_shapes(hf, at, inner)
        shapes |= {at + f"{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return shapes


def mlp_shapes(hf: HFConfig, at: str, inner: int) -> dict[str, tuple[int, ...]]:
    hidden, shapes = hf.hidden_size, {}
    prefixes, names = [at + "mlp."], ("gate_proj", "up_proj", "down_proj")
    if hf.family == "qwen3_moe":
        shapes, inner = {at + "mlp.gate.weight": (4, hidden)}, 8
        prefixes = [f"{at}mlp.experts.{expert}." for expert in range(4)]
    elif hf.family == "mixtral":
        shapes, names = {at + "block_sparse_moe.gate.weight": (4, hidden)}, ("w1", "w3", "w2")
        prefixes = [f"{at}block_sparse_moe.experts.{expert}." for expert in range(4)]
    for prefix in prefixes:
        gate, up, down = (f"{prefix}{name}.weight" for name in names)
        shapes |= {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    return shapes


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_hold_every_element_of_the_checkpoint(model: str, tp: int, expert_parallel: bool):
    hf = MODELS[model]
    expert_parallel = expert_parallel and hf.is_moe
    shapes = hf_shapes(hf)
    holders = {name: torch.zeros(shape, dtype=torch.int) for name, shape in shapes.items()}
    for rank in range(tp):
        for tiles in tile_map(hf, tp, rank, expert_parallel).values():
            for tile in tiles:
                assert tile.shape == tuple(stop - start for start, stop in tile.local_slices)
                holders[tile.hf_name][as_index(tile.hf_slices)] += 1
    for name, count in holders.items():
        replicas = 1
        if "norm" in name or name.endswith(("mlp.gate.weight", "moe.gate.weight")):
            replicas = tp
        elif any(part in name for part in ("k_proj", "v_proj")):
            replicas = max(1, tp // hf.num_kv_heads)
        assert (count == replicas).all(), name


def test_neighbours_share_a_kv_head_when_there_are_more_ranks_than_heads():
    keys = [tile_map(QWEN2, 4, rank)["model.layers.1.self_attn.qkv_proj.weight"][1] for rank in range(4)]
    assert [tile.hf_slices[0] for tile in keys] == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert {tile.local_slices[0] for tile in keys} == {(2, 4)}  # below the rank's one query head


def test_rows_that_pad_the_vocabulary_belong_to_no_tile():
    # 70 rows are padded to 128, so 32 on each of 4 ranks: 32, 32, 6 and none
    tiles = [tile_map(QWEN2, 4, rank)["lm_head.weight"] for rank in range(4)]
    assert [[t.hf_slices[0] for t in rank] for rank in tiles] == [[(0, 32)], [(32, 64)], [(64, 70)], []]
    assert tiles[2][0].local_slices[0] == (0, 6)


def test_local_shapes_are_what_the_engine_allocates():
    shapes = local_shapes(QWEN2, 4, 3)  # one query head, a shared KV head, a quarter of the rest; 70 rows padded to 128
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (32, 8)
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (6, 8) and shapes["model.norm.weight"] == (8,)
    assert shapes["model.layers.1.mlp.gate_up_proj.weight"] == (8, 8)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (8, 4)
    assert shapes.keys() == tile_map(QWEN2, 4, 3).keys()


EXPERTS = "model.layers.1.mlp.experts.routed_experts."


def test_each_rank_has_its_columns_of_every_expert_or_its_share_of_whole_experts():
    columns, whole = (tile_map(QWEN3_MOE, 2, 1, expert_parallel) for expert_parallel in (False, True))
    up, down = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight"
    assert columns[EXPERTS + "w13_weight"][-1] == Tile(up, ((4, 8), (0, 8)), ((28, 32), (0, 8)))  # below 7 others of 4 rows
    assert columns[EXPERTS + "w2_weight"][-1] == Tile(down, ((0, 8), (4, 8)), ((24, 32), (0, 4)))
    assert whole[EXPERTS + "w13_weight"][-1] == Tile(up, ((0, 8), (0, 8)), ((24, 32), (0, 8)))  # below 3 others of 8 rows
    assert whole[EXPERTS + "w2_weight"][-1] == Tile(down, ((0, 8), (0, 8)), ((8, 16), (0, 8)))
    assert {tile.hf_name.split(".")[5] for tile in whole[EXPERTS + "w13_weight"]} == {"2", "3"}
    for expert_parallel, shape in ((False, (32, 4)), (True, (16, 8))):
        assert local_shapes(QWEN3_MOE, 2, 1, expert_parallel)[EXPERTS + "w2_weight"] == shape


def test_equal_ranks_share_one_map():
    assert tile_map(QWEN3_MOE, 2, 1, True) is tile_map(replace(QWEN3_MOE), 2, 1, True)
    assert tile_map(QWEN3_MOE, 2, 1, True) is not tile_map(QWEN3_MOE, 2, 1, False)


def test_tied_models_have_no_output_layer():
    assert "lm_head.weight" not in tile_map(QWEN3, 2, 0)


def test_a_size_that_cannot_split_the_model_is_refused_with_those_that_can():
    with pytest.raises(ValueError, match=r"roles.rollout.tp=3 cannot split .*num_attention_heads=4.*use one of 1, 2, 4$"):
        tile_map(QWEN2, 3, 0)
    with pytest.raises(ValueError, match="use one of 1, 3$"):
        check_tp(replace(QWEN2, num_heads=9, num_kv_heads=3, intermediate_size=18, vocab_size=192), 2)
    three = replace(QWEN3_MOE, moe_intermediate_size=6, num_experts=3)
    with pytest.raises(ValueError, match=r"moe_intermediate_size=6, padded vocab_size=128, num_experts=3\): use one of 1, 2$"):
        check_tp(three, 4)
    with pytest.raises(ValueError, match=r"tp=2 .*num_experts=3, padded vocab_size=128\): use one of 1$"):
        check_tp(three, 2, expert_parallel=True)
    with pytest.raises(ValueError, match=r"tp=3 .*, intermediate_size=16, padded vocab_size=128\): use one of 1, 2, 4$"):
        check_tp(MIXTRAL, 3)
    with pytest.raises(ValueError, match="roles.rollout.expert_parallel=true needs experts, which Qwen2ForCausalLM does not"):
        check_tp(QWEN2, 2, expert_parallel=True)
