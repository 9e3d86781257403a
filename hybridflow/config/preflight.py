"""What can be known to be wrong with a job before it starts: no process group, no engine, no torch.

`check` refuses with a `ConfigError` that shows both sides' values and the key to change; the checks go from the
cheapest to the dearest.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.checkpoints.resume import find_start
from hybridflow.config.cluster_checks import check_cluster, check_launcher
from hybridflow.config.data_checks import check_data
from hybridflow.config.engine_checks import check_engine_arguments, check_engine_on_cpu
from hybridflow.config.folders import check_paths
from hybridflow.config.library_fields import check_library_field, check_transformer_config
from hybridflow.config.model_folder import check_model_folder, expected_tensors
from hybridflow.config.own_class import load_class, load_role
from hybridflow.config.replay import check_replay
from hybridflow.config.run_folder import check_run_folder, check_space
from hybridflow.config.schedule_checks import check_schedule
from hybridflow.config.schema import ALGORITHM_METHODS, ALGORITHMS, ROLE_METHODS, Config, ConfigError, OptimizerConfig
from hybridflow.config.score_checks import check_classifier, check_scores
from hybridflow.config.tracker_checks import check_trackers
from hybridflow.controller.placement import either
from hybridflow.rollout.engine_args import LOWEST_TEMPERATURE
from hybridflow.rollout.tiles import check_tp
from megatron_ext.hf_config import HFConfig, UnsupportedModel

# Smallest allowed values; the type checks are done when the file is read.
_AT_LEAST = {
    "cluster.nodes": 1,
    "cluster.ranks_per_node": 1,
    "roles.rollout.tp": 1,
    "algorithm.epochs": 1,
    "algorithm.clip_low": 0,
    "algorithm.clip_high": 0,
    "algorithm.kl_coefficient": 0,
    "algorithm.kl_target": 0,
    "algorithm.kl_gain": 0,
    "algorithm.value_clip": 0,
    "algorithm.lambda_lr": 0,
    "batch.prompts": 1,
    "batch.samples_per_prompt": 1,
    "batch.mini_batches": 1,
    "sampling.max_prompt_tokens": 1,
    "sampling.max_response_tokens": 1,
    "warm_start.steps": 0,
    "warm_start.batch_size": 1,
    "evaluation.problems": 0,
    "evaluation.every": 0,
    "resharding.bucket_mb": 1,
    "resharding.verify_every": 0,
    "run.steps": 0,
    "run.save_every": 0,
    "run.keep_checkpoints": 0,
    "run.port": 0,
    "run.hang_minutes": 0,
    "run.max_skipped": 0,
}
_SEEDS_BELOW = 2**32  # numpy's, by which vLLM seeds itself
_MOST_RANKS = 1 << 16  # placements are worked out rank by rank
_SCORES_AT_LEAST = {"concurrency": 1, "retries": 0, "cache_size": 0}
_ROLE_AT_LEAST_ONE = ("tp", "pp", "vpp", "cp", "ep", "etp", "forward_micro_batch_tokens")

# Sections that a built-in algorithm would leave unused, and those that don't.
_ONLY_FOR = {
    "roles.critic": ("ppo", "safe_rlhf"),
    "roles.cost_critic": ("safe_rlhf",),
    "roles.cost": ("safe_rlhf",),
    "cost": ("safe_rlhf",),
}

# Fields of the other libraries that follow from keys of ours: given twice, one of the two would be ignored.
_OWNED_BY_US = {
    "megatron": {
        "tensor_model_parallel_size": "tp",
        "pipeline_model_parallel_size": "pp",
        "virtual_pipeline_model_parallel_size": "vpp",
        "pipeline_model_parallel_layout": "split.stages",
        "num_layers_in_first_pipeline_stage": "split.stages",
        "num_layers_in_last_pipeline_stage": "split.stages",
        "account_for_embedding_in_pipeline_split": "split.embedding",
        "account_for_loss_in_pipeline_split": "split.loss",
        "context_parallel_size": "cp",
        "expert_model_parallel_size": "ep",
        "expert_tensor_parallel_size": "etp",
        "sequence_parallel": "sequence_parallel",
        "batch_p2p_comm": "megatron.overlap_p2p_comm",
        "deallocate_pipeline_outputs": "megatron.overlap_p2p_comm",
        "recompute_granularity": "recompute",
        "bf16": "dtype",
        "params_dtype": "dtype",
        "num_layers": "model.path",
        "hidden_size": "model.path",
        "ffn_hidden_size": "model.path",
        "num_attention_heads": "model.path",
        "num_query_groups": "model.path",
        "kv_channels": "model.path",
        "num_moe_experts": "model.path",
        "moe_ffn_hidden_size": "model.path",
        "moe_router_topk": "model.path",
        "moe_router_pre_softmax": "model.path",
        "moe_router_score_function": "model.path",
        "normalization": "model.path",
        "layernorm_epsilon": "model.path",
        "layernorm_zero_centered_gamma": "model.path",
        "gated_linear_unit": "model.path",
        "activation_func": "model.path",
        "add_bias_linear": "model.path",
        "add_qkv_bias": "model.path",
        "qk_layernorm": "model.path",
        "multi_latent_attention": "model.path",
        "rotary_interleaved": "model.path",
        "softmax_scale": "model.path",
        "mtp_num_layers": "model.path",
        "fp16": "dtype",
        "pipeline_dtype": "dtype",
    },
    "engine_args": {
        "tensor_parallel_size": "tp",
        "dtype": "dtype",
        "enable_expert_parallel": "expert_parallel",
        "gpu_memory_utilization": "gpu_memory_utilization",
    },
}


def check(config: Config, run_folder: bool = True) -> dict[str, HFConfig]:
    """Refuse a job that cannot run or would silently do something else than asked.

    Returns the models of the roles that live in Megatron.

    Raises:
        ConfigError: one line. `run_folder=False` leaves out the check of `run.dir`, once the run has begun to write there.
    """
    models = check_shapes(config)
    check_trackers(config)
    for role, hf in models.items():
        check_model_folder(Path(config.model_path(role)), hf)
    for role in config.scoring_roles():
        if role not in models:
            check_classifier(config, role)
    if run_folder:
        start = find_start(config)
        check_run_folder(Path(config.run.dir), config.run.overwrite or start.own or start.restarts, start.broken)
        check_space(Path(config.run.dir), _export_bytes(config, models["actor"]))
    check_data(config)
    if config.run.replay:
        check_replay(config, models["actor"].vocab_size)
    if ":" in config.algorithm.name:
        load_class("algorithm.name", config.algorithm.name, ALGORITHM_METHODS)
    for name, role in config.megatron_roles().items():
        if role.megatron:
            check_transformer_config(config, name, models[name])
        if role.implementation:
            load_role(f"roles.{name}.implementation", role.implementation, ROLE_METHODS.get(name, ()))
    return models


def _export_bytes(config: Config, hf: HFConfig) -> int:
    """Of the trained model as an HF folder."""
    size = {"float32": 4, "bfloat16": 2}[config.dtype("actor")]
    return size * sum(math.prod(shape) for shape in expected_tensors(hf).values())


def check_shapes(config: Config) -> dict[str, HFConfig]:
    """What can be checked with the models' `config.json` alone, before there are weights, data or a folder for the run.

    Returns and raises as `check`.
    """
    _check_not_yet(config)
    _check_numbers(config)
    check_paths(config)
    check_launcher(config)
    check_cluster(config)
    _check_offload(config)
    _check_name(config)
    _check_algorithm(config)
    check_scores(config)
    _check_libraries(config)
    models = {role: _read_model(config, role) for role in config.megatron_roles()}
    for role, hf in models.items():
        check_schedule(f"roles.{role}", config.megatron_roles()[role], hf)
        _check_layout(config, role, hf)
    _check_rollout(config, models["actor"])
    _check_lengths(config, models)
    return models


def check_devices(config: Config) -> str:
    """The device that the job runs on, `cuda` or `cpu`; imports torch.

    Raises:
        ConfigError: fewer GPUs than ranks on this node, or a model that the rollout engine cannot run on this device.
    """
    import torch

    gpus, ranks = torch.cuda.device_count(), config.cluster.ranks_per_node
    device = chosen_device(config)
    if device == "cuda" and gpus < ranks and not config.cluster.address:
        raise ConfigError(
            f"cluster.ranks_per_node={ranks} but torch can use {gpus} GPUs on this machine: lower it, or set cluster.device=cpu"
        )
    if device == "cpu":
        check_engine_on_cpu(config, _read_model(config, "actor"))
    return device


def chosen_device(config: Config) -> str:
    """What `cluster.device` stands for; imports torch. A cluster with an address is asked for GPUs, whatever is here."""
    if config.cluster.device != "auto":
        return config.cluster.device
    import torch

    return "cuda" if config.cluster.address or torch.cuda.device_count() else "cpu"


def check_memory(config: Config, models: Mapping[str, HFConfig], device: str) -> str:
    """What the job keeps on a GPU in each stage of a step, as text; empty where the roles live on a CPU. Imports torch.

    Raises:
        ConfigError: it surely runs out of memory, on the GPU or, with what is offloaded, on the host.
    """
    if device == "cpu":
        return ""
    import psutil

    from hybridflow.planner.memory import check_fits, gpu_total, memory_plan

    if config.cluster.address:  # the nodes are other machines than this
        return memory_plan(config, models, None).render()
    plan = memory_plan(config, models, gpu_total())
    check_fits(config, models, plan, psutil.virtual_memory().total)
    return plan.render()


def _check_not_yet(config: Config) -> None:
    for name, role in config.megatron_roles().items():
        if role.cp > 1:
            raise ConfigError(f"roles.{name}.cp={role.cp} is not supported yet: use 1")


def _check_numbers(config: Config) -> None:
    values = asdict(config)
    _check_finite(values)
    limits = dict(_AT_LEAST)
    for name in config.megatron_roles():
        limits |= {f"roles.{name}.{key}": 1 for key in _ROLE_AT_LEAST_ONE}
    limits |= {f"roles.{name}.micro_batch_tokens": 1 for name in config.trained_roles()}
    limits |= {f"{name}.{key}": least for name in config.scores() for key, least in _SCORES_AT_LEAST.items()}
    for key, least in limits.items():
        value = values
        for part in key.split("."):
            value = value[part]
        if value < least:
            raise ConfigError(f"{key}={value} is too small: use at least {least}")
    if config.sampling.temperature <= 0:
        raise ConfigError(
            f"sampling.temperature={config.sampling.temperature} must be above 0: training samples are never greedy"
        )
    if config.sampling.temperature < LOWEST_TEMPERATURE:
        raise ConfigError(
            f"sampling.temperature={config.sampling.temperature} is below {LOWEST_TEMPERATURE}, which vLLM would take instead:"
            f" use at least {LOWEST_TEMPERATURE}"
        )
    for key, seed in (("run.seed", config.run.seed), ("data.seed", config.data.seed)):
        if not 0 <= seed < _SEEDS_BELOW:
            raise ConfigError(f"{key}={seed} is no seed: use 0 to {_SEEDS_BELOW - 1}")
    if config.world_size > _MOST_RANKS:
        c = config.cluster
        raise ConfigError(
            f"cluster.nodes={c.nodes} x cluster.ranks_per_node={c.ranks_per_node} = {config.world_size} ranks are more than"
            f" {_MOST_RANKS}: lower one of them"
        )
    for key, value in (
        ("sampling.top_p", config.sampling.top_p),
        ("roles.rollout.gpu_memory_utilization", config.roles.rollout.gpu_memory_utilization),
    ):
        if not 0 < value <= 1:
            raise ConfigError(f"{key}={value} is not in (0, 1]")
    for key, value in (
        ("warm_start.correct_fraction", config.warm_start.correct_fraction),
        ("algorithm.gamma", config.algorithm.gamma),
        ("algorithm.gae_lambda", config.algorithm.gae_lambda),
    ):
        if not 0 <= value <= 1:
            raise ConfigError(f"{key}={value} is not in [0, 1]")
    for name, settings in config.scores().items():
        if settings.timeout <= 0:
            raise ConfigError(f"{name}.timeout={settings.timeout} must be above 0 seconds")
    if not 0 <= config.run.port <= 65535:
        raise ConfigError(f"run.port={config.run.port} is not a port: use 0 (a free one) to 65535")
    for name, role in config.trained_roles().items():
        _check_optimizer(f"roles.{name}.optimizer", role.optimizer)
    _check_optimizer("warm_start.optimizer", config.warm_start.optimizer)


def _check_finite(values: Any, path: str = "") -> None:
    if isinstance(values, dict):
        for key, value in values.items():
            _check_finite(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            _check_finite(value, f"{path}[{index}]")
    elif isinstance(values, float) and not math.isfinite(values):
        raise ConfigError(f"{path}={values} is not a finite number")


def _check_optimizer(key: str, o: OptimizerConfig) -> None:
    for name in ("lr", "grad_clip", "weight_decay", "warmup_steps", "decay_steps", "min_lr"):
        if getattr(o, name) < 0:
            raise ConfigError(f"{key}.{name}={getattr(o, name)} is too small: use at least 0")
    if o.eps <= 0:
        raise ConfigError(f"{key}.eps={o.eps} must be above 0")
    if len(o.betas) != 2 or not all(0 <= beta < 1 for beta in o.betas):
        raise ConfigError(f"{key}.betas={o.betas} are not two numbers in [0, 1)")
    if o.schedule != "constant" and o.min_lr > o.lr:
        raise ConfigError(f"{key}.min_lr={o.min_lr}, down to which the rate is to decay, is above {key}.lr={o.lr}: lower it")
    if o.schedule != "constant" and o.decay_steps <= o.warmup_steps:
        raise ConfigError(
            f"{key}.schedule={o.schedule} needs decay_steps={o.decay_steps} above warmup_steps={o.warmup_steps}:"
            f" set {key}.decay_steps"
        )


def _check_offload(config: Config) -> None:
    trained = config.trained_roles()
    for name, role in config.megatron_roles().items():
        has = ("params", "grads", "optimizer") if name in trained else ("params",)
        for what in role.offload:
            if what not in has:
                reason = "is never trained: use [params]" if what in ("grads", "optimizer") else f"has {', '.join(has)}"
                raise ConfigError(f"roles.{name}.offload={role.offload}: {what!r} cannot be offloaded, the {name} {reason}")
    for name, role in trained.items():
        if role.release_weights != "always":
            continue
        if config.dtype(name) == "float32":
            raise ConfigError(
                f"roles.{name}.release_weights=always rebuilds 16-bit weights from float32 masters, but with dtype=float32 the"
                f" weights are the masters: use roles.{name}.offload=[params], or bfloat16"
            )
        if "params" in role.offload:
            raise ConfigError(
                f"roles.{name}.offload={role.offload} copies the weights that roles.{name}.release_weights=always rebuilds:"
                " leave out params, or use release_weights=never"
            )


def _check_name(config: Config) -> None:
    """The algorithm is there, and the roles are those that it asks for."""
    name, known = config.algorithm.name, ", ".join(ALGORITHMS)
    if ":" in name:  # of the user's own, which may have any roles; whether it can be imported is checked last
        return
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {known}, or package.module:Class of your own"
        raise ConfigError(f"algorithm.name={name!r} is unknown: {hint}")
    for key, users in _ONLY_FOR.items():
        section = config
        for part in key.split("."):
            section = getattr(section, part)
        if section is not None and name not in users:
            raise ConfigError(f"{key} would not be used by algorithm.name={name}: leave it out, or use {' or '.join(users)}")
    if name == "safe_rlhf" and config.cost is None:
        raise ConfigError("algorithm.name=safe_rlhf needs costs: give the section cost a kind, or roles.cost a model")


def _check_algorithm(config: Config) -> None:
    b, a = config.batch, config.algorithm
    samples = b.prompts * b.samples_per_prompt
    if not 0 < a.lambda_init <= a.lambda_max:
        raise ConfigError(f"algorithm.lambda_init={a.lambda_init} is not above 0 and at most lambda_max={a.lambda_max}")
    if a.kl_target and not a.kl_coefficient:
        raise ConfigError(
            f"algorithm.kl_target={a.kl_target} adapts algorithm.kl_coefficient, which stays 0 once it is:"
            " give it a start, such as 0.1"
        )
    if samples < b.mini_batches:
        raise ConfigError(
            f"batch.mini_batches={b.mini_batches} is more than the {samples} samples of a step"
            f" (batch.prompts={b.prompts} x batch.samples_per_prompt={b.samples_per_prompt})"
        )
    if a.name == "grpo" and b.samples_per_prompt < 2:
        raise ConfigError(
            "batch.samples_per_prompt=1 gives no advantage, since grpo compares the samples of a prompt: use at least 2"
        )
    if config.sampling.top_p < 1 and config.old_log_probs != "recompute":
        raise ConfigError(
            f"sampling.top_p={config.sampling.top_p} truncates the distribution that the rollout's log-probs refer to:"
            " use 1.0, or algorithm.old_log_probs=recompute"
        )


def _check_libraries(config: Config) -> None:
    """What is passed on to Megatron and vLLM is known there, and not decided by a key of ours."""
    for section, keys in _OWNED_BY_US.items():
        roles = config.megatron_roles() if section == "megatron" else {"rollout": config.roles.rollout}
        for name, role in roles.items():
            for key, value in getattr(role, section).items():
                if key in keys:
                    raise ConfigError(
                        f"roles.{name}.{section}.{key} follows from another key: set roles.{name}.{keys[key]} instead"
                    )
                check_library_field(f"roles.{name}.{section}", key, value)
    check_engine_arguments(config.roles.rollout.engine_args)


def _read_model(config: Config, role: str) -> HFConfig:
    try:
        return config.read_model(role)
    except UnsupportedModel as error:
        raise ConfigError(str(error)) from error


def _check_layout(config: Config, role: str, hf: HFConfig) -> None:
    layout = config.layout(role)
    sizes = {"num_attention_heads": hf.num_heads, "num_key_value_heads": hf.num_kv_heads}
    if not hf.is_moe:  # experts are split by ep and etp
        sizes["intermediate_size"] = hf.intermediate_size
    for name, size in sizes.items():
        if size % layout.tp:
            fits = [n for n in range(1, hf.num_heads + 1) if all(other % n == 0 for other in sizes.values())]
            raise ConfigError(f"roles.{role}.tp={layout.tp} does not divide the model's {name}={size}: use {either(fits)}")
    try:
        layout.stage_layers(hf.num_layers)
    except ValueError as error:
        raise ConfigError(f"roles.{role}: {error}") from error
    try:
        layout.check_experts(hf.num_experts, hf.moe_intermediate_size)
        layout.check_training(hf.num_experts)
    except ValueError as error:
        raise ConfigError(f"roles.{role}.{error}") from error


def _check_rollout(config: Config, hf: HFConfig) -> None:
    try:
        check_tp(hf, config.roles.rollout.tp, config.roles.rollout.expert_parallel)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_lengths(config: Config, models: Mapping[str, HFConfig]) -> None:
    s = config.sampling
    longest = s.max_prompt_tokens + s.max_response_tokens
    both = (
        f"sampling.max_prompt_tokens={s.max_prompt_tokens} + sampling.max_response_tokens={s.max_response_tokens} = {longest}"
    )
    for name, hf in models.items():
        if longest > hf.max_position_embeddings:
            whose = "the model" if name == "actor" else f"the {name}"
            raise ConfigError(
                f"{both} is more than {whose}'s max_position_embeddings={hf.max_position_embeddings}: lower one of them"
            )
    budgets = {}
    for name, role in config.trained_roles().items():
        budgets[f"roles.{name}.micro_batch_tokens"] = role.micro_batch_tokens, role.tp
    for name, role in config.megatron_roles().items():
        budgets[f"roles.{name}.forward_micro_batch_tokens"] = role.forward_micro_batch_tokens, role.tp
    for key, (budget, multiple) in budgets.items():
        least = -(-longest // multiple) * multiple  # micro-batches are padded to a multiple of tp
        if budget < least:
            raise ConfigError(f"{key}={budget} does not hold one sequence: {both}: use at least {least}")
