"""Layouts of experts: what is refused before a start, with its exact message; what is fine passes."""

import json

import pytest

from hybridflow.config import preflight
from hybridflow.config.load import load
from hybridflow.config.schema import ConfigError
from tests.config.folders import write_config, write_model
from tests.config.test_preflight import check, refused


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return write_model(
        tmp_path_factory.mktemp("models") / "moe",
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        intermediate_size=99,  # of no use where every layer has experts
        vocab_size=128,
    )


@pytest.mark.parametrize(
    "actor",
    [
        "{tp: 1, ep: 2}",
        "{tp: 2, ep: 2, sequence_parallel: true}",
        "{tp: 1, pp: 2, ep: 2}",
        "{tp: 1, pp: 1, ep: 2, etp: 2}",
        "{tp: 1, ep: 1}",
        "{tp: 2, pp: 2, ep: 1, etp: 2, sequence_parallel: true}",
    ],
)
def test_experts_pass(tmp_path, experts, actor):
    check(tmp_path, experts, f"roles.actor={actor}")
    check(tmp_path, experts, f"roles.actor={actor}", "roles.rollout.expert_parallel=true")


@pytest.mark.parametrize(
    "actor,message",
    [
        ("{ep: 4, pp: 1, tp: 1}", "roles.actor.ep=4 does not divide the model's 6 experts: choose one that does"),
        (
            "{ep: 3, tp: 1, pp: 1}",
            "roles.actor.ep=3 x etp=1 = 3 does not divide the 4 ranks of a pipeline stage: change ep or etp",
        ),
        (
            "{ep: 2, etp: 2, pp: 2}",
            "roles.actor.ep=2 x etp=2 = 4 does not divide the 2 ranks of a pipeline stage: change ep or etp",
        ),
        (
            "{ep: 2, tp: 2}",
            "roles.actor.sequence_parallel=false: Megatron trains experts at tp=2 with sequence_parallel=true only",
        ),
        ("{cp: 2, ep: 2}", "roles.actor.cp=2 is not supported yet: use 1"),
        ("{ep: 0}", "roles.actor.ep=0 is too small: use at least 1"),
        (
            "{tp: 1, megatron: {moe_router_topk: 4}}",
            "roles.actor.megatron.moe_router_topk follows from another key: set roles.actor.model.path instead",
        ),
    ],
)
def test_experts_refused(tmp_path, experts, actor, message):
    assert refused(tmp_path, experts, f"roles.actor={actor}") == message


@pytest.mark.parametrize(
    "expert_parallel,size", [("false", "moe_intermediate_size=48"), ("true", "num_experts=6")], ids=["columns", "whole"]
)
def test_experts_of_an_engine_must_divide(tmp_path, experts, expert_parallel, size):
    overrides = [
        "cluster.ranks_per_node=5",
        f"roles={{actor: {{tp: 1, pp: 1}}, rollout: {{tp: 5, expert_parallel: {expert_parallel}}}}}",
    ]
    assert refused(tmp_path, experts, *overrides) == (
        f"roles.rollout.tp=5 cannot split this model (num_attention_heads=4, num_key_value_heads=2, {size},"
        f" padded vocab_size=128{', num_experts=6' * (expert_parallel == 'false')}): use one of 1, 2"
        + (", 4" if expert_parallel == "false" else "")
    )


def test_an_engine_of_more_ranks_than_experts(tmp_path, experts):
    few = {"num_experts": 2, "num_experts_per_tok": 1}
    model = write_model(tmp_path / "few", **json.loads((experts / "config.json").read_text()) | few)
    found = refused(tmp_path, model, "roles={actor: {tp: 1, pp: 1}, rollout: {tp: 4}}")
    assert found.startswith("roles.rollout.tp=4 cannot split") and found.endswith("num_experts=2): use one of 1, 2")


def test_experts_split_by_etp_must_divide(tmp_path, experts):
    overrides = ["cluster.ranks_per_node=5", "roles={actor: {tp: 1, pp: 1, etp: 5}, rollout: {tp: 1}}"]
    assert refused(tmp_path, experts, *overrides) == (
        "roles.actor.etp=5 does not divide the experts' inner size of 48: choose one that does"
    )


@pytest.mark.parametrize("key", ["ep", "etp"])
def test_dense_models_have_no_experts_to_spread(tmp_path, key):
    model = write_model(tmp_path / "dense")
    overrides = [f"roles.actor={{tp: 1, {key}: 2}}"]
    assert refused(tmp_path, model, *overrides) == (f"roles.actor.{key}=2 spreads experts, and the model has none: use {key}=1")


def test_a_missing_expert_is_named(tmp_path, experts):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(experts / "model.safetensors")
    gone = "model.layers.3.mlp.experts.5.down_proj.weight"
    folder = write_model(tmp_path / "moe", **json.loads((experts / "config.json").read_text()))
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, folder / "model.safetensors")
    message = f"model folder {folder} lacks the tensor {gone}, which its config.json asks for"
    assert refused(tmp_path, folder, "roles.actor={tp: 1, ep: 2}") == message


def test_experts_on_cpu_that_vllm_has_not(tmp_path, experts):
    odd = write_model(tmp_path / "odd", **json.loads((experts / "config.json").read_text()) | {"hidden_size": 80})
    with pytest.raises(ConfigError, match="hidden_size=80 is not a multiple of 32, as vLLM's experts on CPU need it"):
        preflight.check_devices(load(write_config(tmp_path, odd)))
