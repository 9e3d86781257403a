"""Bytes on a GPU from shapes: against HF's own parameter count, and the arithmetic of what stays, goes and does not fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from hybridflow.config.load import load
from hybridflow.config.schema import Config, ConfigError
from hybridflow.planner import memory
from hybridflow.planner.memory import GIB, Footprint, check_fits, footprint, memory_plan
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout
from tests import hf_models
from tests.config.folders import write_config

SHAPE = Path(__file__).parents[2] / "configs" / "models" / "qwen2_7b.json"
H200 = int(139.8 * GIB)
HOST = 2000 * GIB


@pytest.fixture(scope="module")
def hf() -> HFConfig:
    return HFConfig.from_dict(json.loads(SHAPE.read_text()))


@pytest.fixture(scope="module")
def elements() -> int:
    """Parameters of the 7.6B shape, counted by transformers."""
    fields = json.loads(SHAPE.read_text())
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**fields))
    return sum(parameter.numel() for parameter in model.parameters())


def config(tmp_path, *overrides: str, ranks: int = 2) -> Config:
    sections = {"roles": {}, "cluster": {"ranks_per_node": ranks, "device": "cuda"}}
    return load(write_config(tmp_path, Path("m"), **sections), ["model.dtype=bfloat16", *overrides])


def plan(tmp_path, hf, *overrides: str, total: int | None = H200, ranks: int = 2) -> memory.MemoryPlan:
    chosen = config(tmp_path, *overrides, ranks=ranks)
    return memory_plan(chosen, dict.fromkeys(chosen.megatron_roles(), hf), total)


def refused(tmp_path, hf, *overrides: str, ranks: int = 2, total: int = H200, host: int = HOST) -> str:
    chosen = config(tmp_path, *overrides, ranks=ranks)
    models = dict.fromkeys(chosen.megatron_roles(), hf)
    with pytest.raises(ConfigError) as error:
        check_fits(chosen, models, memory_plan(chosen, models, total), host)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_footprints_add_up_to_the_model(hf, elements):
    assert footprint(hf, Layout(1), 0, "bfloat16", True) == Footprint(2 * elements, 4 * elements, 12 * elements)
    assert footprint(hf, Layout(1), 0, "float32", True) == Footprint(4 * elements, 4 * elements, 8 * elements)
    assert footprint(hf, Layout(1), 0, "bfloat16", False) == Footprint(2 * elements)
    halves = [footprint(hf, Layout(4, pp=2), rank, "bfloat16", True) for rank in (0, 2)]
    assert sum(half.weights for half in halves) == 2 * elements
    assert sum(half.gradients for half in halves) == 4 * elements
    assert sum(half.optimizer for half in halves) == 12 * elements // 2  # over two data-parallel ranks
    norms = hf.num_layers * 2 + 1  # whole on every tensor-parallel rank
    split = footprint(hf, Layout(2, tp=2), 1, "bfloat16", False)
    assert split.weights == elements + norms * hf.hidden_size


def test_what_is_where_in_a_step(tmp_path, hf, elements):
    found = plan(tmp_path, hf, "roles.actor.release_weights=never", "roles.rollout.gpu_memory_utilization=0.4")
    parts = {name: dict(stage) for name, stage in found.stages.items()}
    model = 2 * elements
    assert parts["rollout"] == {
        "vLLM": int(0.4 * H200),
        "actor weights": model,
        "actor optimizer": 3 * model,
    }
    assert parts["reshard"] == {
        "vLLM weights": model,
        "actor weights": model,
        "actor optimizer": 3 * model,
        "messages": 256 << 20,
    }
    assert parts["update"] == {"actor weights": model, "actor gradients": 2 * model, "actor optimizer": 3 * model}
    assert found.releases == {"actor": (True, False)} and not found.host_bytes


@pytest.mark.parametrize(
    ("utilization", "more", "gradients", "weights"),
    [
        (0.4, [], True, False),  # 55.9 + 42.6 + 14.2 of 139.8, and 28.4 of gradients more
        (0.6, [], True, True),
        (0.28, [], False, False),
        (0.3, [], True, False),  # 127.1 of 139.8 GiB, but CUDA, communicators and workspaces want 7.8, and an error 7.0
        (0.2, ["roles.actor.release_weights=always"], True, True),
        (0.6, ["roles.actor.release_weights=never"], True, False),
        (0.6, ["roles.actor.offload=[params]"], True, False),
        (0.2, ["roles.actor.offload=[grads]"], True, False),
        (0.2, ["roles.actor.offload=[optimizer]"], False, False),
    ],
)
def test_what_goes_is_what_does_not_fit(tmp_path, hf, utilization, more, gradients, weights):
    found = plan(tmp_path, hf, f"roles.rollout.gpu_memory_utilization={utilization}", *more)
    assert found.releases == {"actor": (gradients, weights)}
    assert ("drops gradients" in found.render()) == gradients
    assert ("rebuilt from the optimizer's masters" in found.render()) == weights


def test_without_a_known_gpu_nothing_is_decided(tmp_path, hf):
    found = plan(tmp_path, hf, total=None)
    assert found.releases == {"actor": (False, False)}
    assert "size unknown" in found.render() and "vLLM without its KV cache 14.2" in found.render()


PPO = ["algorithm.name=ppo", "roles.rollout.gpu_memory_utilization=0.23"]


def test_a_critic_has_no_output_layer_but_all_that_training_needs(tmp_path, hf, elements):
    critic = HFConfig.from_dict(json.loads(SHAPE.read_text()), head="value")
    chosen = config(tmp_path, *PPO, ranks=4)
    found = memory_plan(chosen, {"actor": hf, "critic": critic}, H200)
    parts = {name: dict(stage) for name, stage in found.stages.items()}
    values = elements - hf.vocab_size * hf.hidden_size + hf.hidden_size + 1
    updates = {"critic weights": 2 * values, "critic gradients": 4 * values, "critic optimizer": 12 * values // 4}
    assert parts["update"] == updates | {
        "actor weights": 2 * elements,
        "actor gradients": 4 * elements,
        "actor optimizer": 12 * elements // 4,
    }
    assert parts["rollout"].keys() == {"vLLM", "actor weights", "actor optimizer", "critic weights", "critic optimizer"}


@pytest.mark.parametrize(
    ("more", "releases", "left"),
    [
        # 32.2 for vLLM, of each role 14.2 of weights, 28.4 of gradients, 21.3 of states; 125.0 of 139.8 to be had
        ([], ((True, False), (True, False)), {"weights", "optimizer"}),
        (["roles.critic.release_weights=always"], ((False, False), (True, True)), {"optimizer"}),
        (["roles.critic.offload=[params,optimizer]"], ((False, False), (False, False)), {"gradients"}),
        (["roles.critic.offload=[params,optimizer,grads]"], ((False, False), (True, False)), set()),
        (["roles.rollout.gpu_memory_utilization=0.55"], ((True, True), (True, True)), {"optimizer"}),
        (
            ["roles.rollout.gpu_memory_utilization=0.55", "roles.critic.release_weights=never"],
            ((True, True), (True, False)),
            {"weights", "optimizer"},
        ),
        (["roles.rollout.gpu_memory_utilization=0.15", "cluster.ranks_per_node=16"], ((False,) * 2,) * 2, None),
    ],
)
def test_a_critics_memory_goes_before_the_engine_wakes(tmp_path, hf, more, releases, left):
    found = plan(tmp_path, hf, *PPO, "roles.critic={}", *more, ranks=4)
    assert tuple(found.releases.values()) == releases
    for stage in ("reshard", "rollout"):
        held = {name.partition(" ")[2] for name, _ in found.stages[stage] if name.startswith("critic")}
        assert held == (left if left is not None else {"weights", "gradients", "optimizer"})
    assert "actor weights" in dict(found.stages["reshard"])
    assert ("the critic drops gradients" in found.render()) == releases[1][0]


def test_a_critic_that_does_not_fit_beside(tmp_path, hf):
    text = refused(tmp_path, hf, *PPO, "roles.critic={release_weights: never}", total=80 * GIB, ranks=4)
    assert "out of memory at reshard: " in text
    assert "add params to roles.critic.offload=[], or add optimizer to roles.actor.offload=[], or add optimizer to" in text


def test_models_that_score(tmp_path, hf, elements):
    """One in Megatron, one that transformers runs, whose bytes are those of its files in the role's dtype."""
    fields = json.loads(SHAPE.read_text()) | {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "good"}}
    score = HFConfig.from_dict(fields, head="score")
    cost = hf_models.make_classifier(tmp_path / "cost", "llama")
    size = sum(tensor.numel() for tensor in hf_models.state(cost).values())
    chosen = config(
        tmp_path,
        "algorithm.name=safe_rlhf",
        "roles.critic={offload: [params,optimizer,grads]}",
        "reward.kind=model",
        "roles.reward={tp: 2, offload: [params], model: {path: r}}",
        f"roles.cost={{backend: hf, dtype: float32, model: {{path: {cost}}}}}",
    )
    values = HFConfig.from_dict(json.loads(SHAPE.read_text()), head="value")
    models = {"actor": hf, "critic": values, "cost_critic": values, "reward": score}
    found = memory_plan(chosen, models, None)
    parts = {name: dict(stage) for name, stage in found.stages.items()}
    assert all(stage["cost weights"] == 4 * size for stage in parts.values())
    assert all("reward weights" not in stage for stage in parts.values())  # on the host but during its own calls
    assert {"cost_critic gradients", "cost_critic optimizer", "critic weights"} <= parts["update"].keys()
    norms = hf.num_layers * 2 + 1  # whole on every tensor-parallel rank, as the head is
    reward = (elements - hf.vocab_size * hf.hidden_size + norms * hf.hidden_size) // 2 + hf.hidden_size
    critics = 2 * (2 + 12 // 2) * (elements - hf.vocab_size * hf.hidden_size + hf.hidden_size + 1)
    assert found.host_bytes == pytest.approx(2 * (2 * reward + critics), rel=1e-3)
    with pytest.raises(ConfigError, match=r"set roles\.cost\.offload=\[params\], or add optimizer to roles\.actor\.offload"):
        check_fits(chosen, models, replace(memory_plan(chosen, models, 60 * GIB), host_bytes=0), HOST)


def test_host_memory_of_what_is_offloaded(tmp_path, hf, elements):
    overrides = ["roles.actor.offload=[params,optimizer,grads]", "roles.reference={offload: [params]}"]
    found = plan(tmp_path, hf, *overrides)
    assert found.host_bytes == 2 * (2 + 6 + 2) * elements
    assert refused(tmp_path, hf, *overrides, host=100 * GIB) == (
        "roles.*.offload needs 141.9 GiB of page-locked memory for the ranks of a node, which has 100.0 GiB:"
        " offload less, or use fewer ranks on a node"
    )


def test_refusals(tmp_path, hf):
    one = {"ranks": 1}
    assert refused(tmp_path, hf, **one) == (
        "out of memory at rollout: vLLM 83.9 + actor optimizer 85.1 = 169.0 GiB on a GPU of 139.8 GiB: add optimizer to"
        " roles.actor.offload=[], or lower roles.rollout.gpu_memory_utilization to at most 0.39, or use more ranks (now 1) or"
        " a larger roles.actor.tp=1 or pp=1"
    )
    assert "use roles.actor.release_weights=auto instead of never, or" in refused(
        tmp_path, hf, "roles.actor.release_weights=never", "roles.rollout.gpu_memory_utilization=0.65"
    )
    assert "add params to roles.actor.offload=[], or set roles.reference.offload=[params], or add optimizer" in refused(
        tmp_path, hf, "model.dtype=float32", "roles.reference={}"
    )
    assert refused(tmp_path, hf, "roles.rollout.gpu_memory_utilization=0.1") == (
        "roles.rollout.gpu_memory_utilization=0.1 of 139.8 GiB is 14.0 GiB, less than vLLM's weights of 14.2 GiB: raise it,"
        " or roles.rollout.tp=1"
    )
    assert refused(tmp_path, hf, "roles.actor.offload=[optimizer]", total=100 * GIB, **one).startswith(
        "out of memory at update: actor weights 14.2 + actor gradients 28.4 + actor optimizer 85.1 = 127.7 GiB on a GPU of"
        " 100.0 GiB: use more ranks"
    )


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (["roles.actor.offload=[optimizer]"], 1),
        ([], 2),
        (["roles.actor.tp=2", "roles.rollout.tp=2"], 2),
        (["roles.reference={offload: [params]}"], 2),
        (["roles.rollout={gpu_memory_utilization: 0.9, engine_args: {kv_cache_memory_bytes: 1073741824}}"], 1),
    ],
)
def test_what_fits_passes(tmp_path, hf, overrides, ranks):
    chosen = config(tmp_path, *overrides, ranks=ranks)
    models = dict.fromkeys(chosen.megatron_roles(), hf)
    check_fits(chosen, models, memory_plan(chosen, models, H200), HOST)


def test_an_engine_on_ranks_of_its_own_asks_nothing_of_training(tmp_path, hf):
    """One GPU trains, the other has the engine: nothing goes, and no GPU holds both."""
    alone = ["roles.actor={ranks: [0], tp: 1, pp: 1}", "roles.rollout={ranks: [1], tp: 1, gpu_memory_utilization: 0.9}"]
    for name in ("both", "apart"):
        (tmp_path / name).mkdir()
    both = plan(tmp_path / "both", hf, "roles.actor={tp: 1, pp: 1}", "roles.rollout={tp: 1, gpu_memory_utilization: 0.9}")
    apart = plan(tmp_path / "apart", hf, *alone)
    assert both.releases["actor"] == memory.Release(True, True)
    assert apart.releases["actor"] == memory.Release(False, False)
    names = {part.name for parts in apart.stages.values() for part in parts}
    assert {"actor weights", "actor gradients", "actor optimizer"} <= names
    rollout = dict(apart.stages["rollout"])
    assert ("vLLM" in rollout) != ("actor weights" in rollout)
    check_fits(config(tmp_path / "apart", *alone), dict.fromkeys(["actor"], hf), apart, HOST)
