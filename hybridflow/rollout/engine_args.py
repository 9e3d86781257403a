"""Which arguments of vLLM a config may not set in `roles.rollout.engine_args`. Imports no vLLM."""

from collections.abc import Iterable

LOWEST_TEMPERATURE = 0.01  # vLLM silently raises lower ones to this

# Arguments of vLLM that follow from the job's own keys, or that an engine in the training process depends on.
_OWNED = {
    "model": "model.path",
    "tensor_parallel_size": "roles.rollout.tp",
    "enable_expert_parallel": "roles.rollout.expert_parallel",
    "dtype": "model.dtype",
    "max_model_len": "sampling.max_prompt_tokens and sampling.max_response_tokens",
    "gpu_memory_utilization": "roles.rollout.gpu_memory_utilization",
    "seed": "run.seed",
}
_FIXED = {
    "distributed_executor_backend", "load_format", "skip_tokenizer_init", "tokenizer", "logprobs_mode", "enable_sleep_mode",
    "pipeline_parallel_size", "data_parallel_size", "quantization", "generation_config", "disable_log_stats",
    "speculative_config", "weight_transfer_config", "moe_backend", "kernel_config", "expert_placement_strategy",
    "enable_eplb", "eplb_config", "enable_elastic_ep", "runner", "convert", "worker_cls", "worker_extension_cls",
    "scheduler_cls", "nnodes", "node_rank", "master_addr", "master_port", "device_ids", "prefill_context_parallel_size",
    "decode_context_parallel_size", "enable_dbo", "enable_lora", "hf_overrides", "hf_config_path", "config_format",
    "model_weights", "model_class_overrides", "model_impl", "revision", "code_revision", "cpu_offload_gb",
    "kv_transfer_config", "ec_transfer_config", "enable_prompt_embeds", "tokens_only",
}  # fmt: skip
_FIXED_KINDS = ("data_parallel_", "spec_", "offload_", "_")  # of arguments that begin so


def check_not_owned(names: Iterable[str]) -> None:
    """Raises ValueError, naming the key to use, for an argument that is not the user's to set."""
    for name in names:
        key = f"roles.rollout.engine_args.{name}"
        if name in _OWNED:
            raise ValueError(f"{key} is set by the trainer: use {_OWNED[name]}")
        if name in _FIXED or name.startswith(_FIXED_KINDS):
            raise ValueError(f"{key} cannot be changed: an engine inside the training processes depends on it")
