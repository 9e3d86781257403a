"""What a whole step of a configured job takes: seconds and memory per GPU of every phase, and what limits each.

The sizes of sequences are means that the caller gives or, without, the config's limits. Phases of roles in the same pool follow
one another. Reward models that transformers runs (`backend: hf`) are not counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridflow.config.schema import Config, ConfigError, MegatronRoleConfig, TrainedConfig
from hybridflow.controller.placement import Placement, place
from hybridflow.planner import counts
from hybridflow.planner.counts import ITEMSIZE
from hybridflow.planner.generation import (
    DEFAULT_SEQUENCES,
    EngineTask,
    broadcast_seconds,
    release_seconds,
    reshard_seconds,
    rollout,
    wake_seconds,
)
from hybridflow.planner.memory import GIB, MemoryPlan, Part, engine_weights, leaving_bytes, memory_plan
from hybridflow.planner.passes import Causes, Machine, Micro, Pass, Task, forward_pass, update_pass
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout

CACHE = "training's cache"
MARGIN = 0.1  # of the GPU's memory: the forecast's own error. Beyond it a job is refused, within it warned of


@dataclass(frozen=True)
class Workload:
    """The work of a step: `prompt_tokens` and `response_tokens` are means, `longest` the most of both together."""

    prompts: int
    samples: int  # that are trained on
    generated: int  # greedy baselines among them
    prompt_tokens: float
    response_tokens: float
    longest: int
    mini_batches: int
    epochs: int
    recomputes_log_probs: bool

    @property
    def mean(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def updates(self) -> int:
        return self.mini_batches * self.epochs

    @property
    def mini_batch(self) -> int:
        return -(-self.samples // self.mini_batches)

    def micro_batches(self, layout: Layout, budget: int, sequences: int) -> tuple[Micro, int]:
        """The micro-batches of one data-parallel rank when `sequences` are spread over all of them."""
        own = -(-sequences // layout.dp)
        count = -(-own // max(1, int(budget // self.mean)))
        each = -(-own // count)
        return Micro(each * self.mean, each * self.mean**2), count


def workload(config: Config, prompt_tokens: float | None = None, response_tokens: float | None = None) -> Workload:
    """What the config asks for; mean lengths are its limits unless given.

    Raises:
        ConfigError: a mean length is not within its limit.
    """
    batch, sampling = config.batch, config.sampling
    limits = {"prompt": sampling.max_prompt_tokens, "response": sampling.max_response_tokens}
    means = {"prompt": prompt_tokens, "response": response_tokens}
    for name, mean in means.items():
        if mean is not None and not 0 < mean <= limits[name]:
            raise ConfigError(f"--{name}-tokens={mean} is not above 0 and at most sampling.max_{name}_tokens={limits[name]}")
    samples = batch.prompts * batch.samples_per_prompt
    return Workload(
        prompts=batch.prompts,
        samples=samples,
        generated=samples + (batch.prompts if config.algorithm.name == "remax" else 0),
        prompt_tokens=float(means["prompt"] or limits["prompt"]),
        response_tokens=float(means["response"] or limits["response"]),
        longest=sum(limits.values()),
        mini_batches=batch.mini_batches,
        epochs=config.algorithm.epochs,
        recomputes_log_probs=config.old_log_probs == "recompute",
    )


@dataclass(frozen=True)
class Phase:
    """One phase of a step on its GPUs.

    `stage`: rollout, experience or update. `parts`: bytes on the fullest GPU; none where nothing is added to another phase's.
    """

    name: str
    stage: str
    role: str
    gpus: int
    causes: Causes
    pool: int = 0  # phases of a stage go on at the same time in different pools
    parts: tuple[Part, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.causes.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def memory(self) -> str:
        """GiB by part, such as `actor weights 7.1 + vLLM 42.1`."""
        return " + ".join(f"{part.name} {part.nbytes / GIB:.1f}" for part in self.parts)

    def row(self) -> list[str]:
        """phase, role, GPUs, seconds, GiB per GPU, what its time goes to."""
        size = f"{self.nbytes / GIB:.1f}" if self.parts else ""
        return [self.name, self.role, str(self.gpus), f"{self.seconds:.3g}", size, self.limits()]

    def limits(self, count: int = 3) -> str:
        """What most of the time goes to, such as `matrix products 71%, bubble 12%, optimizer 9%`."""
        longest = sorted(self.causes.items(), key=lambda item: -item[1])[:count]
        return ", ".join(f"{name} {seconds / self.seconds:.0%}" for name, seconds in longest if seconds > 0.005 * self.seconds)


@dataclass(frozen=True)
class Forecast:
    phases: tuple[Phase, ...]
    total: int  # bytes of a GPU
    concurrency: int  # sequences that an engine runs at the same time, of its `engine_samples`
    engine_samples: int
    tokens: float  # prompts and responses of a step
    gpus: int

    @property
    def seconds(self) -> float:
        """Of a step: stage by stage the longest pool's phases, one after the other."""
        busy: dict[str, Counter[int]] = {}
        for phase in self.phases:
            busy.setdefault(phase.stage, Counter())[phase.pool] += phase.seconds
        return sum(max(pools.values()) for pools in busy.values())

    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.nbytes)


def forecast(config: Config, models: Mapping[str, HFConfig], machine: Machine, work: Workload) -> Forecast:
    """The forecast of a job whose shapes were checked (`preflight.check_shapes`).

    Raises:
        ConfigError: the KV cache does not hold a single sequence.
    """
    total = machine.cluster.gpu.memory_bytes
    plan, placement = memory_plan(config, models, total), place(config)
    fixed = Part("fixed", int(machine.calibration.fixed_bytes))
    engine = engine_task(config, models["actor"], work, machine)
    engines, trained, phases = set(placement.roles["rollout"]), config.trained_roles(), []
    shares = [name for name in trained if not engines.isdisjoint(placement.roles[name])]
    cached = 0.0
    for stage in ("experience", "update"):
        for name, role in config.megatron_roles().items():
            found, causes = _pass(stage, role, models[name], config.layout(name), config.dtype(name), machine, work, name)
            if found is None:
                continue
            parts = _with_activations(config, name, plan, found, fixed)
            if "host link" in causes:
                parts = (Part(f"{name} weights", int(_weights(models[name], config.layout(name), config.dtype(name)))), *parts)
            if name in shares:
                cached = max(cached, *found.activations)
            pool = placement.pool_of(placement.roles[name][0])
            phases.append(Phase(phase_name(name, stage), stage, name, len(placement.roles[name]), causes, pool, parts))
    beside = [fixed]
    if not any(trained[name].offload or plan.releases[name].gradients for name in shares):
        beside.append(Part(CACHE, int(cached)))  # what torch keeps of activations: nobody empties it before the engine wakes
    phases = [*_rollout(config, models, machine, engine, plan, beside, placement), *phases]
    tokens = work.samples * work.mean
    return Forecast(tuple(phases), total, engine.concurrency, engine.samples, tokens, config.world_size)


def _pass(
    stage: str,
    role: MegatronRoleConfig,
    hf: HFConfig,
    layout: Layout,
    dtype: str,
    machine: Machine,
    work: Workload,
    name: str,
) -> tuple[Pass | None, Causes]:
    """A role's pass in a stage, None where it has none there, and where a step's seconds go."""
    trained = isinstance(role, TrainedConfig)
    if stage == "update":
        if not trained:
            return None, {}
        found = update_pass(machine, update_task(role, hf, layout, dtype, work))
        return found, {cause: work.updates * seconds for cause, seconds in found.causes.items()}
    if name == "actor" and not work.recomputes_log_probs:
        return None, {}
    found = forward_pass(machine, forward_task(role, hf, layout, dtype, work))
    causes = dict(found.causes)
    if not trained and "params" in role.offload:
        causes["host link"] = _weights(hf, layout, dtype) / machine.calibration.host_link
    return found, causes


def phase_name(role: str, stage: str) -> str:
    """As the metrics call it."""
    if stage == "update":
        return "update" if role == "actor" else f"update_{role}"
    return {"actor": "log_probs", "critic": "values", "cost_critic": "values of cost_critic"}.get(role, role)


def check_forecast(found: Forecast) -> str:
    """A warning where memory is tight within the forecast's own error, else an empty text.

    Raises:
        ConfigError: a phase needs more than the GPU has beyond that error.
    """
    # what training alone lacks comes first: the engine would lack it as well where it inherits training's cache
    phase = max(found.phases, key=lambda phase: (phase.stage != "rollout" and phase.nbytes > found.total, phase.nbytes))
    needed, have = phase.nbytes / GIB, found.total / GIB
    if needed <= have:
        return ""
    text = f"{phase.name} needs {needed:.1f} GiB on a GPU of {have:.1f} GiB: {phase.memory()}"
    if needed <= (1 + MARGIN) * have:
        return f"warning: {text}; within the forecast's error of {MARGIN:.0%}, it may run out of memory"
    raise ConfigError(f"{text}: {_remedy(phase)}, or use more GPUs")


def _remedy(phase: Phase) -> str:
    role = phase.role
    if phase.stage == "update":
        return (
            f"lower roles.{role}.micro_batch_tokens, set roles.{role}.recompute=mlp or full, use a larger roles.{role}.tp or pp"
        )
    if phase.stage == "experience":
        return f"lower roles.{role}.forward_micro_batch_tokens, use a larger roles.{role}.tp or pp"
    lower = "lower roles.rollout.gpu_memory_utilization, use a larger roles.rollout.tp"
    return f"add grads to roles.actor.offload, {lower}" if CACHE in dict(phase.parts) else lower


def forward_task(role: MegatronRoleConfig, hf: HFConfig, layout: Layout, dtype: str, work: Workload) -> Task:
    """All samples through a role without backward."""
    micro, count = work.micro_batches(layout, role.forward_micro_batch_tokens, work.samples)
    return Task(hf, layout, micro, count, ITEMSIZE[dtype])


def update_task(role: TrainedConfig, hf: HFConfig, layout: Layout, dtype: str, work: Workload) -> Task:
    """One mini-batch's update."""
    micro, count = work.micro_batches(layout, role.micro_batch_tokens, work.mini_batch)
    return Task(hf, layout, micro, count, ITEMSIZE[dtype], recomputed(role))


def recomputed(role: TrainedConfig) -> str:
    """What a layer runs again in the backward pass, by the names of `counts.RECOMPUTE`."""
    mlp = role.recompute == "selective" and "mlp" in role.megatron.get("recompute_modules", ())
    return "mlp" if mlp else role.recompute


def engine_task(config: Config, hf: HFConfig, work: Workload, machine: Machine) -> EngineTask:
    """What each engine of the config generates.

    Raises:
        ConfigError: the KV cache does not hold a single sequence.
    """
    role, total = config.roles.rollout, machine.cluster.gpu.memory_bytes
    engines = config.layout("rollout").dp
    weights = engine_weights(config, hf)
    memory = role.gpu_memory_utilization * total - machine.calibration.engine_bytes
    if role.engine_args.get("kv_cache_memory_bytes"):
        memory = weights + int(role.engine_args["kv_cache_memory_bytes"])
    task = EngineTask(
        hf=hf,
        tp=role.tp,
        samples=-(-work.generated // engines),
        prompts=-(-work.prompts // engines),
        prompt_tokens=work.prompt_tokens,
        response_tokens=work.response_tokens,
        memory=memory,
        weights=weights,
        itemsize=ITEMSIZE[config.dtype("rollout")],
        max_sequences=int(role.engine_args.get("max_num_seqs", DEFAULT_SEQUENCES)),
        eager=bool(role.engine_args.get("enforce_eager", False)),
    )
    if task.concurrency < 1:
        raise ConfigError(
            f"roles.rollout.gpu_memory_utilization={role.gpu_memory_utilization} of {total / GIB:.1f} GiB:"
            f" {role.gpu_memory_utilization * total / GIB:.1f} GiB are too few for vLLM's weights of {weights / GIB:.1f}, its"
            f" activations of some {machine.calibration.engine_bytes / GIB:.1f} and {task.sequence_bytes / GIB:.2f} of KV cache"
            f" for one sequence of {work.mean:.0f} tokens: raise it, or roles.rollout.tp={role.tp}"
        )
    return task


def _rollout(
    config: Config,
    models: Mapping[str, HFConfig],
    machine: Machine,
    engine: EngineTask,
    plan: MemoryPlan,
    beside: Sequence[Part],
    placement: Placement,
) -> list[Phase]:
    role, layout = config.roles.rollout, config.layout("actor")
    hf, calibration, itemsize = models["actor"], machine.calibration, ITEMSIZE[config.dtype("rollout")]
    if config.ranks("actor") == config.ranks("rollout"):
        around: Causes = {"reshard": reshard_seconds(machine, hf, layout, role.tp, itemsize, role.expert_parallel)}
    else:
        around = {"weights over the network": broadcast_seconds(machine, engine.weights)}
    if role.sleep and config.rollout_shares:
        around |= {"wake": wake_seconds(machine, engine.weights), "sleep": calibration.sleep_seconds}
    engines = set(placement.roles["rollout"])
    leaving = sum(
        leaving_bytes(models[name], config.layout(name), ITEMSIZE[config.dtype(name)], release)
        for name, release in plan.releases.items()
        if not engines.isdisjoint(placement.roles[name])
    )
    if leaving:
        around["release"] = release_seconds(machine, leaving)
    offloaded = [name for name, r in config.trained_roles().items() if "optimizer" in r.offload]
    states = sum(_optimizer_bytes(config, models, name) for name in offloaded)
    if states:
        around["host link"] = 2 * states / calibration.host_link
    gpus, pool = len(placement.roles["rollout"]), placement.pool_of(placement.roles["rollout"][0])
    static = {name: _fullest_of_engines(plan, placement, name) for name in ("reshard", "rollout")}
    return [
        Phase("reshard", "rollout", "rollout", gpus, around, pool, (*static["reshard"], *beside)),
        Phase("rollout", "rollout", "rollout", gpus, rollout(machine, engine), pool, (*static["rollout"], *beside)),
    ]


def _fullest_of_engines(plan: MemoryPlan, placement: Placement, stage: str) -> tuple[Part, ...]:
    """What the fullest GPU that has an engine holds."""
    found = [stages[stage] for rank, stages in plan.by_rank.items() if rank in placement.roles["rollout"]]
    return max(found, key=lambda parts: sum(part.nbytes for part in parts))


def _optimizer_bytes(config: Config, models: Mapping[str, HFConfig], name: str) -> float:
    """Of a rank, at most."""
    layout = config.layout(name)
    states = 12 if config.dtype(name) == "bfloat16" else 8
    stages = counts.stage_elements(models[name], layout)
    return max(states * (held.dense / layout.dp + held.experts / layout.edp) for held in stages)


def _weights(hf: HFConfig, layout: Layout, dtype: str) -> float:
    """Bytes on the fullest stage."""
    return ITEMSIZE[dtype] * max(held.all for held in counts.stage_elements(hf, layout))


def _with_activations(config: Config, name: str, plan: MemoryPlan, found: Pass, fixed: Part) -> tuple[Part, ...]:
    """What the fullest GPU holds while the role runs: a rank's static memory and what its own stage adds."""
    layout, ranks = config.layout(name), config.ranks(name)
    sums = []
    for rank, stages in plan.by_rank.items():
        if rank in ranks:
            added = Part(f"{name} activations", int(found.activations[layout.coordinates(ranks.index(rank)).pp]))
            sums.append((*stages["update"], added, fixed))
    return max(sums, key=lambda parts: sum(part.nbytes for part in parts))
