"""The forecast of a configured job: against a measured one, and what it refuses."""

import json
from pathlib import Path

import pytest

from benchmarks.whole_step import MOVES
from hybridflow.config.load import load
from hybridflow.config.schema import Config, ConfigError
from hybridflow.planner.forecast import Forecast, check_forecast, forecast, workload
from hybridflow.planner.memory import GIB
from hybridflow.planner.passes import Machine
from megatron_ext.layout import Layout
from tests.config.folders import write_config
from tests.planner.models import ROOT, h200s, shape

HF = shape("qwen2_7b")


def config(tmp_path, *overrides: str, ranks: int = 2, **sections) -> Config:
    sections = {"roles": {}, "cluster": {"ranks_per_node": ranks, "device": "cuda"}, **sections}
    return load(write_config(tmp_path, Path("m"), **sections), ["model.dtype=bfloat16", *overrides])


def forecast_of(chosen: Config, prompt_tokens=None, response_tokens=None) -> Forecast:
    models = {name: shape("qwen2_7b", "value" if name == "critic" else "lm") for name in chosen.megatron_roles()}
    return forecast(chosen, models, Machine(h200s(chosen.world_size)), workload(chosen, prompt_tokens, response_tokens))


def measured_job(tmp_path, *overrides: str) -> Config:
    """That of benchmarks/memory.py."""
    return config(
        tmp_path,
        "roles.actor={tp: 2, sequence_parallel: true}",
        "roles.rollout={tp: 2, gpu_memory_utilization: 0.3, engine_args: {enforce_eager: true}}",
        *overrides,
        batch={"prompts": 16, "samples_per_prompt": 4},
        sampling={"max_prompt_tokens": 32, "max_response_tokens": 64},
    )


@pytest.mark.parametrize(("run", "release"), [("released", "always"), ("kept", "never")])
def test_memory_and_seconds_of_a_measured_job(tmp_path, run, release):
    """Two H200s, 7.6B parameters, 64 samples of about 6 + 64 tokens."""
    results = json.loads((ROOT / "benchmarks" / "results" / "memory_h200x2_qwen2_7b.json").read_text())["results"][run]
    found = forecast_of(measured_job(tmp_path, f"roles.actor.release_weights={release}"), 6, 64)
    phases = {phase.name: phase for phase in found.phases}
    assert phases.keys() == {"reshard", "rollout", "update"}
    for phase in ("rollout", "update"):
        assert phases[phase].nbytes == pytest.approx(results["memory_bytes"][phase][-1], rel=0.1), phase
        # a tenth of a second of so short an update is nowhere in the forecast
        assert phases[phase].seconds == pytest.approx(results["seconds"][phase], rel=0.25, abs=0.12), phase
    assert found.seconds == pytest.approx(results["seconds"]["step"], rel=0.25)
    assert check_forecast(found) == ""


@pytest.mark.parametrize("name", ["planner", "usual", "recompute"])
def test_whole_steps_of_one_gpu(tmp_path, name):
    """An H200, 4.4B parameters, 128 samples of 255 + 512 tokens, CUDA graphs; run by benchmarks/run_one_gpu.sh."""
    results = json.loads((ROOT / "benchmarks" / "results" / "h200" / f"step_{name}.json").read_text())["results"]["layouts"][0]
    keys = [f"roles.{role}.{key}={value}" for role, fields in results["roles"].items() for key, value in fields.items()]
    sections = {"batch": {"prompts": 16, "samples_per_prompt": 8, "mini_batches": 2}}
    sections["sampling"] = {"max_prompt_tokens": 255, "max_response_tokens": 512}
    chosen = config(tmp_path, *keys, ranks=1, **sections)
    models = {"actor": shape("qwen2_7b", num_hidden_layers=14)}
    found = forecast(chosen, models, Machine(h200s(1)), workload(chosen, 255, results["response_tokens"]))
    phases = {phase.name: phase for phase in found.phases}
    for phase in ("rollout", "log_probs", "update"):
        assert phases[phase].seconds == pytest.approx(results["seconds"][phase], rel=0.25), phase
        assert phases[phase].nbytes == pytest.approx(results["memory_bytes"][phase], rel=0.1), phase
    moves = sum(results["seconds"][move] for move in MOVES)
    assert phases["reshard"].seconds == pytest.approx(moves, rel=0.35)  # 4 to 7% of the step
    assert found.seconds == pytest.approx(results["seconds"]["step"], rel=0.1)


def test_the_phases_of_ppo(tmp_path):
    chosen = config(
        tmp_path,
        "algorithm.name=ppo",
        "algorithm.kl_coefficient=0.1",
        "batch.mini_batches=4",
        "algorithm.epochs=2",
        "roles.rollout.gpu_memory_utilization=0.3",
        "roles.reference={offload: [params]}",
        "roles.actor.offload=[optimizer]",
        ranks=8,
        sampling={"max_prompt_tokens": 512, "max_response_tokens": 512},
        batch={"prompts": 64, "samples_per_prompt": 4},
    )
    found = forecast_of(chosen)
    phases = {phase.name: phase for phase in found.phases}
    assert list(phases) == ["reshard", "rollout", "log_probs", "values", "reference", "update", "update_critic"]
    assert found.seconds == pytest.approx(sum(phase.seconds for phase in found.phases))
    # a reference on the host comes for its own pass only
    assert "host link" in phases["reference"].causes and "host link" in phases["reshard"].causes
    held = {name: {part.name for part in phases[name].parts} for name in phases}
    assert "reference weights" in held["reference"] and "reference weights" not in held["update"]
    assert "actor optimizer" not in held["rollout"] and "actor optimizer" in held["update"]
    # eight updates of a quarter of the samples each: six passes' worth of matrix products
    products = phases["update"].causes["matrix products"] / phases["log_probs"].causes["matrix products"]
    assert products == pytest.approx(6, rel=0.01)


def test_micro_batches_hold_whole_sequences(tmp_path):
    chosen = config(tmp_path, sampling={"max_prompt_tokens": 512, "max_response_tokens": 512})
    work = workload(chosen, 300, 400)
    micro, count = work.micro_batches(Layout(2), 2048, 32)
    assert (micro.tokens, micro.squares, count) == (2 * 700, 2 * 700**2, 8)
    micro, count = work.micro_batches(Layout(2), 65536, 32)
    assert (micro.tokens, count) == (16 * 700, 1)
    with pytest.raises(ConfigError, match="--prompt-tokens=600 is not above 0 and at most sampling.max_prompt_tokens=512"):
        workload(chosen, 600)


def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path):
    sampling = {"max_prompt_tokens": 1024, "max_response_tokens": 7168}
    overrides = ("roles.actor.micro_batch_tokens=32768", "roles.rollout.gpu_memory_utilization=0.3")
    batch = {"prompts": 64, "samples_per_prompt": 8}
    found = forecast_of(config(tmp_path, *overrides, sampling=sampling, batch=batch))
    needed = next(phase.nbytes for phase in found.phases if phase.name == "update") / GIB
    with pytest.raises(ConfigError) as error:
        check_forecast(found)
    assert str(error.value).startswith(f"update needs {needed:.1f} GiB on a GPU of 140.4 GiB: actor weights 14.2 + actor gradi")
    assert (
        "lower roles.actor.micro_batch_tokens, set roles.actor.recompute=mlp or full, use a larger roles.actor.tp or pp"
        in str(error.value)
    )
    assert "\n" not in str(error.value)
    update = next(phase for phase in found.phases if phase.name == "update")
    assert check_forecast(Forecast((update,), int(0.95 * update.nbytes), 1, 1, 1, 1)).startswith("warning: update needs")
    kept = ("roles.actor.release_weights=never", "roles.rollout.gpu_memory_utilization=0.27")  # nor need gradients go
    waiting = forecast_of(config(tmp_path, *kept, batch=batch, sampling=sampling))
    with pytest.raises(ConfigError, match="rollout needs .* training's cache .*: add grads to roles.actor.offload, lower"):
        check_forecast(Forecast(waiting.phases, int(0.85 * waiting.fullest().nbytes), 1, 1, 1, 1))
    saved = forecast_of(
        config(
            tmp_path, *overrides, "roles.actor.recompute=full", "roles.actor.offload=[grads]", sampling=sampling, batch=batch
        )
    )
    assert saved.fullest().nbytes < found.fullest().nbytes
    assert check_forecast(saved) == ""


def test_a_cache_without_room_for_a_sequence_is_refused(tmp_path):
    sampling = {"max_prompt_tokens": 1024, "max_response_tokens": 30000}
    tokens = "roles.actor={micro_batch_tokens: 32768, forward_micro_batch_tokens: 32768, release_weights: never}"
    with pytest.raises(
        ConfigError,
        match="15.4 GiB are too few for vLLM's weights of 14.2, its activations of some 2.5 and 1.66 of KV cache for",
    ):
        forecast_of(config(tmp_path, tokens, "roles.rollout.gpu_memory_utilization=0.11", sampling=sampling))
