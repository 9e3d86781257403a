"""The configuration derived from an HF config and a layout, and what it refuses."""

import dataclasses

import pytest
import torch

from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split

HF = HFConfig(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=131,
    tied=False,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=128,
    qkv_bias=False,
    qk_norm=True,
)


def test_config_carries_architecture_layout_and_overrides():
    from megatron_ext.model import transformer_config

    layout = Layout(8, tp=2, pp=2, vpp=2, sequence_parallel=True)
    config = transformer_config(HF, layout, torch.bfloat16, "full", {"hidden_dropout": 0.1, "bias_dropout_fusion": False})
    assert (config.kv_channels, config.num_query_groups, config.qk_layernorm, config.add_qkv_bias) == (16, 2, True, False)
    assert (config.virtual_pipeline_model_parallel_size, config.sequence_parallel) == (2, True)
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16 and config.bf16
    assert (config.recompute_granularity, config.hidden_dropout) == ("full", 0.1)
    assert config.calculate_per_token_loss and not config.variable_seq_lengths


MOE = {"family": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 20, "intermediate_size": 99}


@pytest.mark.parametrize("normalised", [True, False])
def test_config_of_experts(normalised: bool):
    from megatron_ext.model import transformer_config

    hf = dataclasses.replace(HF, **MOE, norm_topk_prob=normalised)
    layout = Layout(8, tp=2, ep=4, etp=2, sequence_parallel=True)
    config = transformer_config(hf, layout, torch.bfloat16, "mlp")
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (8, 2, 20)
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (4, 2)
    assert config.moe_router_pre_softmax is not normalised
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("none", 0.0)
    assert config.moe_expert_capacity_factor is None and config.moe_router_dtype == "fp32"
    assert config.recompute_modules == ["moe"]


@pytest.mark.parametrize(
    ("hf", "layout", "message"),
    [
        ({}, Layout(4, tp=4), "tp=4 does not divide num_attention_heads=6: use 1 or 2"),
        ({}, Layout(3, tp=3), "tp=3 does not divide num_key_value_heads=2: use 1 or 2"),
        ({}, Layout(4, pp=2, split=Split((3, 2))), "are 5 layers, but num_hidden_layers=4"),
        ({}, Layout(2, vpp=2), "vpp=2 needs more than one pipeline stage"),
        ({}, Layout(2, sequence_parallel=True), "sequence_parallel=true needs tp > 1"),
        ({}, Layout(2, cp=2), "cp=2 is not supported"),
        ({}, Layout(2, ep=2), "ep=2 spreads experts, and the model has none: use ep=1"),
        (MOE, Layout(6, ep=3), "ep=3 does not divide the model's 8 experts"),
        (MOE, Layout(2, tp=2, ep=2), "sequence_parallel=false: Megatron trains experts at tp=2"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(hf: dict, layout: Layout, message: str):
    from megatron_ext.model import transformer_config

    with pytest.raises(ValueError, match=message):
        transformer_config(dataclasses.replace(HF, **hf), layout, torch.float32)


def test_megatron_gets_the_layouts_own_split():
    from megatron_ext.model import transformer_config

    hf = dataclasses.replace(HF, num_layers=7)
    layout = Layout(4, pp=2, vpp=2)
    theirs = transformer_config(hf, layout, torch.float32).pipeline_model_parallel_layout
    for stage, chunks in enumerate(layout.stage_layers(7)):
        kinds = [[kind.name for kind in chunk] for chunk in theirs.layout[stage]]
        assert [chunk.count("decoder") for chunk in kinds] == [len(chunk) for chunk in chunks]
    assert [kind.name for kind in theirs.layout[0][0]] == ["embedding", "decoder", "decoder"]
    assert [kind.name for kind in theirs.layout[1][1]] == ["decoder", "loss"]
    assert transformer_config(hf, Layout(4), torch.float32).pipeline_model_parallel_layout is None


def build_with_a_split_of_megatrons_own(layout: Layout) -> str:
    from megatron_ext.model import build_model, transformer_config
    from megatron_ext.parallel import ParallelState

    theirs = {"pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder"] * 3 + ["loss"]]}
    with ParallelState("actor", layout, seed=1).current():
        try:
            build_model(HF, layout, transformer_config(HF, layout, torch.float32, overrides=theirs), "local")
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_model_that_disagrees_with_the_layout_is_an_error(worlds):
    """Told otherwise behind our back, Megatron numbers the second stage's layers from 1 on."""
    messages = worlds(4).run(build_with_a_split_of_megatrons_own, Layout(4, tp=2, pp=2), timeout=100)
    assert messages[:2] == ["", ""]
    for message in messages[2:]:
        assert "pipeline stage 1: megatron-core" in message
        assert "numbers its layers [[1, 2]], the layout [[2, 3]]" in message


def test_unknown_names_are_refused():
    from megatron_ext.model import transformer_config

    with pytest.raises(ValueError, match="megatron.num_layer is not a field of TransformerConfig"):
        transformer_config(HF, Layout(1), torch.float32, overrides={"num_layer": 3})
    with pytest.raises(ValueError, match="recompute='some' is unknown: use one of none, selective, mlp, full"):
        transformer_config(HF, Layout(1), torch.float32, recompute="some")
    with pytest.raises(ValueError, match="model.dtype=float16 is not supported"):
        transformer_config(HF, Layout(1), torch.float16)
