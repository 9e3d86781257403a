"""What a role's pipeline schedule cannot do, known before the job starts."""

from hybridflow.config.schema import ConfigError, MegatronRoleConfig, TrainedConfig
from megatron_ext.hf_config import HFConfig

# Fields of TransformerConfig that the way micro-batches run here leaves no choice about, and why.
_FIXED = {
    "calculate_per_token_loss": "losses are means over all tokens of an update",
    "variable_seq_lengths": "micro-batches are padded to one length",
    "microbatch_group_size_per_vp_stage": "micro-batches go through the chunks in groups of pp",
    "num_microbatches_with_partial_activation_checkpoints": "a role recomputes in all micro-batches alike",
    "overlap_moe_expert_parallel_comm": "it is a schedule of its own",
    "hybrid_context_parallel": "it is a schedule of its own",
    "use_ring_exchange_p2p": "torch has no ring exchange",
}


def check_schedule(path: str, role: MegatronRoleConfig, hf: HFConfig) -> None:
    """`path`: the role's, such as roles.actor.

    Raises:
        ConfigError: the schedule, the split of its layers or what it overlaps cannot be had.
    """
    for key in role.megatron:
        if key in _FIXED:
            raise ConfigError(f"{path}.megatron.{key} cannot be chosen: {_FIXED[key]}")
    for key in ("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush"):
        if role.megatron.get(key) and role.vpp == 1:
            raise ConfigError(
                f"{path}.megatron.{key}=true needs the interleaved schedule, but {path}.vpp=1: use vpp=2 or more, or false"
            )
    if role.megatron.get("overlap_p2p_comm_warmup_flush") and not role.megatron.get("overlap_p2p_comm", True):
        raise ConfigError(
            f"{path}.megatron.overlap_p2p_comm_warmup_flush=true overlaps the rest of what"
            f" {path}.megatron.overlap_p2p_comm=false does not overlap: leave out one of them"
        )
    for key in ("loss", "stages"):
        given = getattr(role.split, key)
        if role.split.by_cost and given:
            raise ConfigError(f"{path}.split.by_cost=true derives what {path}.split.{key}={given} gives: leave out one of them")
    if hf.is_moe and isinstance(role, TrainedConfig) and role.overlap_grad_reduce:
        raise ConfigError(
            f"{path}.overlap_grad_reduce=true needs a gradient of every weight in an update's last micro-batch, but of the"
            f" model's {hf.num_experts} experts those that no token goes to have none: use false"
        )
