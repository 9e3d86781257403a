"""What the rollout engine could not start with: its arguments, and what vLLM asks for on a CPU. Each raises ConfigError."""

from collections.abc import Mapping
from typing import Any

from hybridflow.config.schema import Config, ConfigError
from hybridflow.rollout.engine_args import check_not_owned
from megatron_ext.hf_config import HFConfig

# vLLM's attention on CPU is built for these sizes of a head, and blocks of its KV cache that are multiples of this,
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_BLOCK = 32
CPU_EXPERTS_HIDDEN_MULTIPLE = 32  # and its experts for hidden sizes that are multiples of this

_ABOVE_0 = ("max_num_seqs", "block_size", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_gpu_blocks_override")


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """`roles.rollout.engine_args`: those that are not the user's to set, and sizes that hold nothing."""
    try:
        check_not_owned(arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for name in _ABOVE_0:
        if arguments.get(name) is not None and arguments[name] < 1:
            raise ConfigError(f"roles.rollout.engine_args.{name}={arguments[name]} is too small: use at least 1")
    tokens, sequences = arguments.get("max_num_batched_tokens"), arguments.get("max_num_seqs")
    if tokens and sequences and tokens < sequences:
        raise ConfigError(
            f"roles.rollout.engine_args.max_num_batched_tokens={tokens} is below max_num_seqs={sequences}, each of which gets"
            " a token at a time: raise the one or lower the other"
        )


def check_engine_on_cpu(config: Config, hf: HFConfig) -> None:
    folder, arguments = config.model_path("actor"), config.roles.rollout.engine_args
    if hf.head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ConfigError(f"model.path={folder}: head size {hf.head_dim} is not one of vLLM's on CPU ({sizes})")
    if hf.is_moe and hf.hidden_size % CPU_EXPERTS_HIDDEN_MULTIPLE:
        raise ConfigError(
            f"model.path={folder}: hidden_size={hf.hidden_size} is not a multiple of {CPU_EXPERTS_HIDDEN_MULTIPLE},"
            " as vLLM's experts on CPU need it"
        )
    block = arguments.get("block_size") or CPU_BLOCK
    if block % CPU_BLOCK:
        raise ConfigError(
            f"roles.rollout.engine_args.block_size={block} is not a multiple of {CPU_BLOCK}, as vLLM's attention on CPU has it"
        )
    longest = config.sampling.max_prompt_tokens + config.sampling.max_response_tokens
    tokens = arguments.get("max_num_batched_tokens")
    if tokens and tokens < longest and not arguments.get("enable_chunked_prefill"):
        raise ConfigError(
            f"roles.rollout.engine_args.max_num_batched_tokens={tokens} is below the {longest} tokens of the longest sequence,"
            f" whose prompt is taken as a whole on a CPU: use at least {longest}"
        )
    _check_kv_cache(config, hf, -(-longest // block) * block)


def _check_kv_cache(config: Config, hf: HFConfig, tokens: int) -> None:
    """A sequence of `tokens` fits into the KV cache that a rank gets (rollout/engine.py)."""
    import psutil

    rollout, ranks, total = config.roles.rollout, config.cluster.ranks_per_node, psutil.virtual_memory().total
    key, value = "engine_args.kv_cache_memory_bytes", rollout.engine_args.get("kv_cache_memory_bytes")
    has = value or 0
    if value is None:
        key, value = "gpu_memory_utilization", rollout.gpu_memory_utilization
        has = int(total * value) // ranks
    itemsize = {"float32": 4, "bfloat16": 2}[config.dtype("rollout")]
    needs = 2 * hf.num_layers * max(1, hf.num_kv_heads // rollout.tp) * hf.head_dim * itemsize * tokens
    if has < needs:
        raise ConfigError(
            f"roles.rollout.{key}={value} leaves {has:,} bytes for the KV cache of each of {ranks} ranks on a host of"
            f" {total / 1e9:.0f} GB, but one sequence of {tokens} tokens takes {needs:,}: raise it"
        )
