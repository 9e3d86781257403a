"""From a config to a search, and from what it found to words and to a config again."""

import copy
from collections.abc import Mapping
from typing import Any

from hybridflow.config.schema import Config, MegatronRoleConfig, SplitConfig, TrainedConfig
from hybridflow.planner.forecast import Workload
from hybridflow.planner.hardware import Cluster
from hybridflow.planner.options import JobRole, Option
from hybridflow.planner.search import ENGINE, STAGES, Placement
from megatron_ext.hf_config import HFConfig


def job_roles(config: Config, models: Mapping[str, HFConfig], work: Workload) -> list[JobRole]:
    """A job's Megatron roles. All infer, but for an actor whose log-probs are not computed again."""
    return [
        JobRole(name, hf, name in config.trained_roles(), name != "actor" or work.recomputes_log_probs, config.dtype(name))
        for name, hf in models.items()
    ]


def why_slower(loser: Placement, winner: Placement) -> str:
    """The stage in which most of the difference lies, and who waits for whom there."""
    if loser.reason:
        return loser.reason
    stage = max(STAGES, key=lambda name: loser.stages[name] - winner.stages[name])
    slowest = max(loser.pools, key=lambda pool: getattr(pool, stage))
    others = [pool for pool in loser.pools if pool is not slowest]
    roles = [option.role for option in slowest.options if getattr(option, stage)] if stage != "rollout" else [ENGINE]
    text = (
        f"{stage} {getattr(slowest, stage):.3g} s against {winner.stages[stage]:.3g}: {', '.join(roles)} on {slowest.gpus} GPUs"
    )
    if not others:
        return text
    waiting = ", ".join(f"{'/'.join(p.names)} on {p.gpus} ({getattr(p, stage):.3g} s)" for p in others)
    return f"{text} while others wait: {waiting}"


def configured(config: Config, placement: Placement, cluster: Cluster) -> Config:
    """The config with the placement's ranks and layouts. Larger pools come first, so that parts of nodes lie within nodes;
    nodes that no pool needs are left out."""
    found = copy.deepcopy(config)
    used = sum(pool.gpus for pool in placement.pools)
    found.cluster.nodes = -(-used // cluster.gpus_per_node)
    found.cluster.ranks_per_node = cluster.gpus_per_node
    roles, first = found.megatron_roles(), 0
    for pool in sorted(placement.pools, key=lambda pool: -pool.gpus):
        ranks = "all" if pool.gpus == found.world_size else [f"{first}-{first + pool.gpus - 1}"]
        first += pool.gpus
        for option in pool.options:
            _configure(roles[option.role], option, ranks, makes_room=pool.engine is None or pool.engine.sleeps)
        if pool.engine:
            rollout = found.roles.rollout
            rollout.ranks, rollout.tp, rollout.gpu_memory_utilization = ranks, pool.engine.tp, pool.engine.utilization
            rollout.expert_parallel, rollout.sleep = False, pool.engine.sleeps
    return found


def _configure(role: MegatronRoleConfig, option: Option, ranks: Any, makes_room: bool) -> None:
    layout = option.layout
    role.ranks = ranks
    role.tp, role.pp, role.vpp, role.cp, role.ep, role.etp = layout.tp, layout.pp, layout.vpp, 1, layout.ep, 1
    role.sequence_parallel = layout.sequence_parallel
    role.split = SplitConfig(loss=layout.split.loss)
    role.recompute = option.recompute
    role.forward_micro_batch_tokens = option.forward_tokens
    role.offload = []
    if isinstance(role, TrainedConfig):
        role.micro_batch_tokens, role.release_weights = option.update_tokens, "auto"
        # with anything to offload, training's cache of activations goes to the engine as well
        role.offload = ["grads"] * makes_room + ["optimizer"] * option.offload
    elif option.offload:
        role.offload = ["params"]
