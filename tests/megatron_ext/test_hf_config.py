"""What is read from config.json: against transformers' own classes, and what is refused by name."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from megatron_ext.hf_config import HFConfig, UnsupportedModel
from tests import hf_models

# Qwen/Qwen3-30B-A3B's and mistralai/Mixtral-8x7B-v0.1's published files
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip


def moe(family: str = "qwen3_moe", **changes) -> HFConfig:
    return HFConfig.from_dict(hf_models.config(family, False, **changes))


def test_published_models():
    qwen, mixtral = HFConfig.from_dict(QWEN3_30B), HFConfig.from_dict(MIXTRAL_8X7B)
    assert (qwen.family, qwen.num_experts, qwen.experts_per_token, qwen.moe_intermediate_size) == ("qwen3_moe", 128, 8, 768)
    assert (qwen.head_dim, qwen.qk_norm, qwen.qkv_bias, qwen.norm_topk_prob, qwen.is_moe) == (128, True, False, True, True)
    assert (mixtral.family, mixtral.num_experts, mixtral.experts_per_token) == ("mixtral", 8, 2)
    assert (mixtral.moe_intermediate_size, mixtral.head_dim, mixtral.qk_norm) == (14336, 128, False)
    assert mixtral.norm_topk_prob
    assert mixtral.is_moe


@pytest.mark.parametrize("family", hf_models.ARCHITECTURES)
def test_as_written_by_transformers(tmp_path, family):
    """Its own to_dict differs from published files: other names, every default spelled out."""
    hf_models.make(tmp_path, family, tied=False)
    fields = AutoConfig.from_pretrained(tmp_path).to_dict() | {"architectures": [hf_models.ARCHITECTURES[family]]}
    assert HFConfig.from_dict(fields) == HFConfig.from_folder(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_defaults_are_those_of_transformers(tmp_path, family):
    left_out = ("rms_norm_eps", "rope_theta", "max_position_embeddings", "norm_topk_prob", "tie_word_embeddings", "head_dim")
    fields = {name: value for name, value in hf_models.config(family, False).items() if name not in left_out}
    ours = HFConfig.from_dict(fields)
    theirs = AutoConfig.for_model(family, **{k: v for k, v in fields.items() if k != "model_type"})
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)
    assert ours.head_dim == fields["hidden_size"] // fields["num_attention_heads"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_names_and_shapes_are_the_checkpoints(tmp_path, family):
    hf = HFConfig.from_folder(hf_models.make(tmp_path, family, tied=False))
    state = hf_models.state(tmp_path)
    named = {}
    for layer in range(hf.num_layers):
        named[hf.router_name(layer)] = (hf.num_experts, hf.hidden_size)
        for expert in range(hf.num_experts):
            gate, up, down = hf.expert_names(layer, expert)
            named[gate] = named[up] = (hf.moe_intermediate_size, hf.hidden_size)
            named[down] = (hf.hidden_size, hf.moe_intermediate_size)
    assert named == {name: tuple(t.shape) for name, t in state.items() if "moe" in name or ".mlp." in name}


def test_gate_and_up_are_not_exchanged():
    assert moe().expert_names(3, 5)[0] == "model.layers.3.mlp.experts.5.gate_proj.weight"
    names = [name.rsplit(".", 2)[1] for name in moe("mixtral").expert_names(3, 5)]
    assert names == ["w1", "w3", "w2"]  # w2(silu(w1 x) * w3 x)


def test_dense_models_have_no_experts():
    hf = moe("qwen3")
    assert (hf.is_moe, hf.num_experts, hf.moe_intermediate_size) == (False, 0, 0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported (only 1)"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported (only [])"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64 is not supported"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts=1 is not supported"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is not from 1 to the number of experts, 8"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok=0 is not from 1 to the number of experts, 8"),
        (
            "mixtral",
            {"num_experts_per_tok": 1},
            "num_experts_per_tok=1 with a weight that is always 1 leaves the router untrained",
        ),
        ("mixtral", {"sliding_window": 128}, "sliding_window=128 below max_position_embeddings=512 is not supported"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
        ("qwen3", {"hidden_size": "64"}, "hidden_size='64' is not a whole number above 0"),
        ("qwen3", {"num_attention_heads": 0}, "num_attention_heads=0 is not a whole number above 0"),
        ("qwen3", {"num_hidden_layers": 2.0}, "num_hidden_layers=2.0 is not a whole number above 0"),
        ("qwen3", {"vocab_size": True}, "vocab_size=True is not a whole number above 0"),
        ("qwen3", {"num_key_value_heads": [2]}, "num_key_value_heads=[2] is not a whole number above 0"),
        ("qwen3", {"max_position_embeddings": "512"}, "max_position_embeddings='512' is not a whole number above 0"),
        ("qwen3", {"rms_norm_eps": None}, "rms_norm_eps=None is not a number above 0"),
        ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not true or false"),
        ("qwen3", {"rope_parameters": 5}, "rope_parameters=5 is not a section or null"),
        ("qwen3", {"rope_parameters": {"rope_theta": "big"}}, "rope_theta='big' is not a number above 0"),
        ("qwen3", {"rope_scaling": {"factor": 2.0}}, "rope_scaling of type None is not supported"),
        ("qwen3", {"layer_types": 5}, "layer_types=5 is not a list"),
        ("qwen3", {"architectures": "Qwen3ForCausalLM"}, "architecture (none) is not supported"),
        ("qwen3", {"architectures": {"a": 1}}, "architecture (none) is not supported"),
        ("mixtral", {"num_experts_per_tok": "2"}, "num_experts_per_tok='2' is not from 1 to the number of experts, 8"),
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts='8' is not a whole number above 0"),
        ("qwen3", {"num_experts": 8}, "field num_experts=8 is unknown here and may change the computation"),
    ],
)
def test_refused_by_name(family, changes, message):
    with pytest.raises(UnsupportedModel) as refused:
        moe(family, **changes)
    assert message in str(refused.value)


def test_a_window_as_long_as_the_context_has_no_effect():
    assert moe("mixtral", sliding_window=512).is_moe


@pytest.mark.parametrize(
    ("family", "missing"),
    [("qwen3_moe", "num_experts"), ("qwen3_moe", "moe_intermediate_size"), ("mixtral", "num_experts_per_tok")],
)
def test_a_missing_number_is_named(family, missing):
    fields = hf_models.config(family, False)
    del fields[missing]
    with pytest.raises(UnsupportedModel, match=f"field {missing} is missing"):
        HFConfig.from_dict(fields)


def test_weights_and_costs_of_a_qwen2_7b_layer():
    fields = json.loads((Path(__file__).parents[2] / "configs/models/qwen2_7b.json").read_text())
    hf = HFConfig.from_dict(fields)
    # q and o 3584 x 3584, k and v 3584 x 512, gate, up and down 3584 x 18944
    assert hf.layer_weights == 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    assert round(hf.output_weights / hf.layer_weights, 2) == 2.34  # layers that the output layer counts as
    assert hf.attention_cost * 4096 == pytest.approx(0.063, abs=1e-3)  # a sequence of 4096 tokens: 6 % of the matrices' time
    assert HFConfig.from_dict(fields, head="value").output_weights == 3584
