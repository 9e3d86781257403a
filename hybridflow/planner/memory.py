"""What a job keeps on a GPU at each stage of a step, from shapes alone, and what training lets go of so that it fits.

A lower bound: activations, communicators and CUDA's own needs come on top. So what does not fit here surely fails, and is
refused before anything starts; what fits may still be too tight (forecast.py adds those). Imports no torch.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, prod
from pathlib import Path
from typing import NamedTuple

from hybridflow.config.model_folder import tensor_shapes
from hybridflow.config.schema import Config, ConfigError
from hybridflow.planner.calibration import Calibration
from hybridflow.planner.counts import ITEMSIZE, stage_elements
from hybridflow.planner.hardware import memory_sizes
from hybridflow.rollout import tiles as rollout_tiles
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout

GIB = 1 << 30
# Of a GPU's memory, for the error of a forecast. Here only the choice of release_weights=auto leaves room for it, and for what
# is not counted (`Calibration.fixed_bytes`): releasing costs milliseconds, running out of memory the job.
RESERVE = 0.05
_FROZEN = ("reference", "reward", "cost")


class Part(NamedTuple):
    name: str
    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """What a role keeps on one rank, in bytes."""

    weights: int
    gradients: int = 0
    optimizer: int = 0


class Release(NamedTuple):
    """What a trained role drops while the engine is awake."""

    gradients: bool
    weights: bool


@dataclass(frozen=True)
class MemoryPlan:
    """`stages`: what is on the fullest GPU in each stage of a step. `by_rank`: on one rank of every combination of pipeline
    stages. `total`: the GPU's bytes, None where unknown.

    `releases`: by trained role. `host_bytes`: page-locked memory for what is offloaded, on the fullest node.
    """

    stages: dict[str, tuple[Part, ...]]
    by_rank: dict[int, dict[str, tuple[Part, ...]]]
    releases: dict[str, Release]
    host_bytes: int
    total: int | None

    def render(self) -> str:
        """Lines such as `rollout   99.2 GiB  vLLM 56.6 + actor optimizer 42.6`."""
        size = f"{_gib(self.total)} GiB" if self.total else "size unknown, so that release_weights=auto is undecided"
        lines = [f"on the fullest GPU ({size}), activations not counted:"]
        lines += [f"  {name:<8} {_gib(_sum(parts)):>7} GiB  {_list(parts)}" for name, parts in self.stages.items()]
        for name, release in self.releases.items():
            gone = ["gradients"] * release.gradients + ["weights (rebuilt from the optimizer's masters)"] * release.weights
            if gone:
                lines.append(f"  during the rollout the {name} drops {' and '.join(gone)}")
        if self.host_bytes:
            lines.append(f"  offloaded to page-locked host memory: {_gib(self.host_bytes)} GiB on a node")
        return "\n".join(lines)


def footprint(hf: HFConfig, layout: Layout, rank: int, dtype: str, trained: bool) -> Footprint:
    """A Megatron role's weights on one rank; of a trained one also the fp32 gradients, and the rank's share of Adam's two
    moments and, for 16-bit weights, of the masters."""
    held = stage_elements(hf, layout)[layout.coordinates(rank).pp]
    itemsize = ITEMSIZE[dtype]
    if not trained:
        return Footprint(held.all * itemsize)
    # context-parallel ranks share the optimizer's work as data-parallel ones do; experts have groups of their own
    share = held.dense / (layout.dp * layout.cp) + held.experts / layout.edp
    return Footprint(held.all * itemsize, 4 * held.all, int(share * (12 if itemsize == 2 else 8)))


def leaving_bytes(hf: HFConfig, layout: Layout, itemsize: int, release: Release) -> int:
    """What makes room for the engine on the fullest stage."""
    size = 4 * release.gradients + itemsize * release.weights
    return size * max(held.all for held in stage_elements(hf, layout))


def engine_weights(config: Config, hf: HFConfig) -> int:
    """Bytes of vLLM's weights on one rank."""
    rollout = config.roles.rollout
    return ITEMSIZE[config.dtype("rollout")] * engine_elements(hf, rollout.tp, rollout.expert_parallel)


@functools.cache
def engine_elements(hf: HFConfig, tp: int, expert_parallel: bool = False) -> int:
    """Parameters of one rank of an engine."""
    return sum(prod(shape) for shape in rollout_tiles.local_shapes(hf, tp, 0, expert_parallel).values())


def memory_plan(config: Config, models: Mapping[str, HFConfig], total: int | None) -> MemoryPlan:
    """What `config` keeps on a GPU of `total` bytes, and how `release_weights=auto` is decided for it.

    Args:
        models: of the Megatron roles, by name.
    """
    kept = {rank: _kept(config, models, rank) for rank in _representatives(config)}
    sizes = engine_weights(config, models["actor"]), awake_engine(config, models["actor"], total)
    engines = {rank: sizes for rank in kept if rank in config.ranks("rollout")}
    trained = config.trained_roles()
    may = {
        name: role.release_weights != "never" and config.dtype(name) != "float32" and "params" not in role.offload
        for name, role in trained.items()
    }
    always = {name: role.release_weights == "always" and may[name] for name, role in trained.items()}
    releases = {name: Release("grads" in role.offload or always[name], always[name]) for name, role in trained.items()}

    def by_rank() -> dict[int, dict[str, tuple[Part, ...]]]:
        return {rank: _stages(config, parts, *engines.get(rank, (0, 0)), releases) for rank, parts in kept.items()}

    def stages(only_beside_engines: bool = False) -> dict[str, tuple[Part, ...]]:
        found = [stage for rank, stage in by_rank().items() if rank in engines or not only_beside_engines]
        return {name: max((stage[name] for stage in found), key=_sum) for name in found[0]}

    def tight() -> bool:
        if total is None:
            return False
        room = (1 - RESERVE) * total - Calibration.fixed_bytes
        return max(_sum(parts) for name, parts in stages(only_beside_engines=True).items() if name != "update") > room

    # on ranks without an engine there is nobody to make room for
    beside = [name for name in trained if not set(config.ranks(name)).isdisjoint(config.ranks("rollout"))]
    if tight():
        releases |= {name: Release(True, releases[name].weights) for name in beside}
    if tight():
        releases |= {name: Release(True, may[name]) for name in beside}
    host = max(_offloaded(config, parts) for parts in kept.values()) * config.cluster.ranks_per_node
    return MemoryPlan(stages(), by_rank(), releases, host, total)


def check_fits(config: Config, models: Mapping[str, HFConfig], plan: MemoryPlan, host_total: int) -> None:
    """Refuse what surely runs out of memory.

    Raises:
        ConfigError: with the numbers and the keys to change.
    """
    if plan.host_bytes > host_total:
        raise ConfigError(
            f"roles.*.offload needs {_gib(plan.host_bytes)} GiB of page-locked memory for the ranks of a node, which has"
            f" {_gib(host_total)} GiB: offload less, or use fewer ranks on a node"
        )
    if plan.total is None:
        return
    share, engine = config.roles.rollout.gpu_memory_utilization, engine_weights(config, models["actor"])
    if engine > awake_engine(config, models["actor"], plan.total):
        raise ConfigError(
            f"roles.rollout.gpu_memory_utilization={share} of {_gib(plan.total)} GiB is {_gib(share * plan.total)} GiB, less"
            f" than vLLM's weights of {_gib(engine)} GiB: raise it, or roles.rollout.tp={config.roles.rollout.tp}"
        )
    for stage, parts in plan.stages.items():
        if _sum(parts) > plan.total:
            raise ConfigError(
                f"out of memory at {stage}: {_list(parts)} = {_gib(_sum(parts))} GiB on a GPU of {_gib(plan.total)} GiB:"
                f" {_remedies(config, stage, parts, plan)}"
            )


def gpu_total() -> int | None:
    """Bytes of this node's smallest GPU as nvidia-smi says, or None without it."""
    return min(memory_sizes(), default=None)


def _representatives(config: Config) -> list[int]:
    """One rank for every combination of roles and of their pipeline stages: the others keep the same."""
    placed = {name: (config.layout(name), config.ranks(name)) for name in [*config.megatron_roles(), "rollout"]}
    stages = [{rank: layout.coordinates(place).pp for place, rank in enumerate(ranks)} for layout, ranks in placed.values()]
    found: dict[tuple, int] = {}
    for rank in range(config.world_size):
        found.setdefault(tuple(stage.get(rank) for stage in stages), rank)
    return list(found.values())


def _kept(config: Config, models: Mapping[str, HFConfig], rank: int) -> dict[str, Footprint]:
    """What the roles that live on this rank keep there."""
    found, megatron = {}, config.megatron_roles()
    for name in [*megatron, *(name for name in config.scoring_roles() if name not in megatron)]:
        ranks, trained = config.ranks(name), name in config.trained_roles()
        if rank in ranks and name in megatron:
            found[name] = footprint(models[name], config.layout(name), ranks.index(rank), config.dtype(name), trained)
        elif rank in ranks:
            found[name] = _whole(config, name)
    return found


def _whole(config: Config, name: str) -> Footprint:
    """Of a classifier that transformers runs."""
    elements = sum(prod(shape) for shape in tensor_shapes(Path(config.model_path(name))).values())
    return Footprint(elements * ITEMSIZE[config.dtype(name)])


def awake_engine(config: Config, hf: HFConfig, total: int | None) -> int:
    """Bytes that the awake engine takes on a GPU of `total`: its share of it, or what `engine_args` say instead."""
    arguments, engine = config.roles.rollout.engine_args, engine_weights(config, hf)
    if arguments.get("kv_cache_memory_bytes"):
        return engine + int(arguments["kv_cache_memory_bytes"])
    if arguments.get("num_gpu_blocks_override") or total is None:
        return engine
    return int(config.roles.rollout.gpu_memory_utilization * total)


def _stages(
    config: Config, kept: Mapping[str, Footprint], engine: int, awake: int, releases: Mapping[str, Release]
) -> dict[str, tuple[Part, ...]]:
    """The actor's weights are there until the engine has them; what else goes, goes before the engine wakes."""
    training: list[Part] = []
    aside: list[Part] = []  # of them, what stays beside the engine
    for name, size in kept.items():
        offload, release = getattr(config.roles, name).offload, releases.get(name, Release(False, False))
        weights = Part(f"{name} weights", size.weights)
        gradients, states = Part(f"{name} gradients", size.gradients), Part(f"{name} optimizer", size.optimizer)
        resting = "params" in offload and name not in releases  # on the host but during its own calls
        training += [*([] if resting else [weights]), gradients, states]
        aside += [weights] * (not release.weights and "params" not in offload)
        aside += [gradients] * (not release.gradients) + [states] * ("optimizer" not in offload)
    actor_weights = Part("actor weights", kept["actor"].weights if "actor" in kept else 0)
    buckets = Part("messages", config.resharding.bucket_mb << 20 if config.world_size > 1 else 0)
    vllm = Part("vLLM" if awake > engine else "vLLM without its KV cache", awake)
    sleeps = config.roles.rollout.sleep and config.rollout_shares
    others = [part for part in aside if part != actor_weights]
    found = {
        "reshard": [Part("vLLM weights", engine) if sleeps else vllm, actor_weights, *others, buckets],
        "rollout": [vllm, *aside],
        "update": training if sleeps else [vllm, *training],
    }
    return {name: tuple(part for part in parts if part.nbytes) for name, parts in found.items()}


def _offloaded(config: Config, kept: Mapping[str, Footprint]) -> int:
    """Bytes of one rank that rest on the host."""
    offloaded = 0
    for name, size in kept.items():
        sizes = {"params": size.weights, "grads": 0, "optimizer": size.optimizer}
        offloaded += sum(sizes[what] for what in set(getattr(config.roles, name).offload))
    return offloaded


def _remedies(config: Config, stage: str, parts: tuple[Part, ...], plan: MemoryPlan) -> str:
    """The keys that help in this stage, the cheapest first."""
    sizes, actor = dict(parts), config.roles.actor
    critics = {name: role for name, role in config.trained_roles().items() if name != "actor"}
    found = []
    if not config.roles.rollout.sleep and stage != "rollout":
        found.append("set roles.rollout.sleep=true")
    if stage == "rollout" and "actor weights" in sizes:
        if config.dtype("actor") == "float32":
            found.append(f"add params to roles.actor.offload={actor.offload}")
        else:
            found.append(f"use roles.actor.release_weights=auto instead of {actor.release_weights}")
    found += [f"set roles.{name}.offload=[params]" for name in _FROZEN if f"{name} weights" in sizes]
    for name, critic in critics.items():
        if stage != "update" and f"{name} weights" in sizes:
            found.append(f"add params to roles.{name}.offload={critic.offload}")
    if stage != "update" and "actor optimizer" in sizes:
        found.append(f"add optimizer to roles.actor.offload={actor.offload}")
    for name, critic in critics.items():
        if stage != "update" and f"{name} optimizer" in sizes:
            found.append(f"add optimizer to roles.{name}.offload={critic.offload}")
    if stage == "rollout":
        share = floor(100 * (plan.total - _sum(parts) + sizes.get("vLLM", 0)) / plan.total) / 100
        if "vLLM" in sizes and share * plan.total > dict(plan.stages["reshard"]).get("vLLM weights", 0):
            found.append(f"lower roles.rollout.gpu_memory_utilization to at most {share}")
    found.append(f"use more ranks (now {config.world_size}) or a larger roles.actor.tp={actor.tp} or pp={actor.pp}")
    return ", or ".join(found)


def _sum(parts: tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in parts)


def _list(parts: tuple[Part, ...]) -> str:
    return " + ".join(f"{part.name} {_gib(part.nbytes)}" for part in parts)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"
