"""The best placement of a job's roles on a cluster, their layouts, and the rollout's.

HybridFlow, section 6 (arXiv 2409.19256): every set partition of the roles into pools, every allocation of GPUs to the pools,
every layout of each role on its pool. A step is the rollout, then the longest pool's passes without backward, then the longest
pool's updates, where the roles of a pool follow one another:

    step = rollout + resharding + max over pools(sum of experience) + max over pools(sum of updates)

The rollout is on the actor's pool, in the memory that its roles leave, or on GPUs of its own. What is left out on the way is
not better in any cost, but for SAME_SECONDS and SAME_BYTES, than something that is kept; so, up to those, the best over the
layouts of `options.py` and the pool sizes of `pool_sizes` is found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, inf

import numpy as np

from hybridflow.planner.counts import ITEMSIZE
from hybridflow.planner.forecast import Phase, Workload, phase_name
from hybridflow.planner.generation import EngineTask, broadcast_seconds, release_seconds, rollout, wake_seconds
from hybridflow.planner.memory import Part, engine_elements
from hybridflow.planner.options import SAME_SECONDS, JobRole, Option, Options, front, tolerances
from hybridflow.planner.passes import Causes, Machine
from hybridflow.rollout.tiles import check_tp
from megatron_ext.hf_config import HFConfig

ENGINE = "rollout"  # in a placement's pools
STAGES = ("rollout", "experience", "update")
MOST_OF_A_GPU = 0.9  # for the engine


@dataclass(frozen=True)
class Engine:
    """The rollout of a pool: `causes` of its seconds, `around` of the transitions before and after. `utilization`: of a GPU's
    memory. `sleeps`: while the pool's other roles work."""

    tp: int
    utilization: float
    causes: Causes
    around: Causes
    sleeps: bool

    @property
    def seconds(self) -> float:
        return sum(self.causes.values()) + sum(self.around.values())


@dataclass(frozen=True)
class PoolPlan:
    """A pool of `gpus`, and how each of its roles runs there."""

    gpus: int
    options: tuple[Option, ...]
    engine: Engine | None

    @property
    def costs(self) -> tuple[float, float, float]:
        return self.rollout, self.experience, self.update

    @cached_property
    def rollout(self) -> float:
        return self.engine.seconds if self.engine else 0.0

    @cached_property
    def experience(self) -> float:
        return sum(option.experience for option in self.options)

    @cached_property
    def update(self) -> float:
        return sum(option.update for option in self.options)

    @property
    def names(self) -> tuple[str, ...]:
        return (*(option.role for option in self.options), *((ENGINE,) if self.engine else ()))


@dataclass(frozen=True)
class Placement:
    """The best that one set partition of the roles comes to; without `pools` it cannot be had, as `reason` says."""

    partition: tuple[tuple[str, ...], ...]
    pools: tuple[PoolPlan, ...] = ()
    reason: str = ""

    @property
    def stages(self) -> dict[str, float]:
        return {stage: max(getattr(pool, stage) for pool in self.pools) for stage in STAGES}

    @property
    def seconds(self) -> float:
        return sum(self.stages.values()) if self.pools else inf


class Search:
    """`evaluated`: layouts of roles; `combined`: ways to put roles or pools together that were looked at."""

    def __init__(self, roles: Sequence[JobRole], machine: Machine, work: Workload, rollout_dtype: str = "bfloat16"):
        self.roles = {role.name: role for role in roles}
        self.machine, self.work = machine, work
        self._itemsize = ITEMSIZE[rollout_dtype]
        per_node, hf = machine.cluster.gpus_per_node, self.roles["actor"].hf
        sizes = [tp for tp in range(1, per_node + 1) if per_node % tp == 0 and _splits_for_engine(hf, tp)]
        self.options = Options(machine, work, sizes, self._itemsize)
        self.combined = 0
        self._plans: dict[tuple[tuple[str, ...], int], list[PoolPlan]] = {}
        self._rollouts: dict[EngineTask, Causes] = {}
        self._sizes = pool_sizes(machine.cluster.nodes, machine.cluster.gpus_per_node)

    @property
    def evaluated(self) -> int:
        return self.options.evaluated

    def run(self) -> list[Placement]:
        """Every placement's best, the fastest first, those that cannot be had last."""
        return sorted((self.best(partition) for partition in placements(list(self.roles))), key=lambda found: found.seconds)

    def phases(self, placement: Placement) -> list[Phase]:
        """The phases of a placement's step, in their order."""
        found = [phase for pool in placement.pools for phase in self._pool_phases(pool)]
        return sorted(found, key=lambda phase: STAGES.index(phase.stage))

    def _pool_phases(self, pool: PoolPlan) -> Iterator[Phase]:
        fixed = Part("fixed", int(self.machine.calibration.fixed_bytes))
        static = [Part(f"{option.role} while training", int(option.static)) for option in pool.options if option.static]
        if pool.engine:
            vllm = Part("vLLM", int(pool.engine.utilization * self.machine.cluster.gpu.memory_bytes))
            resting = [Part(f"{option.role} at rest", int(option.resting)) for option in pool.options if option.resting]
            beside = resting if pool.engine.sleeps else static
            yield Phase("reshard", "rollout", ENGINE, pool.gpus, pool.engine.around)
            yield Phase("rollout", "rollout", ENGINE, pool.gpus, pool.engine.causes, parts=(vllm, *beside, fixed))
            static = static if pool.engine.sleeps else [vllm, *static]
        for option in pool.options:
            inferred, updated = self.options.passes(self.roles[option.role], option)
            for stage, found, times in (("experience", inferred, 1), ("update", updated, self.work.updates)):
                if found:
                    causes = {cause: times * seconds for cause, seconds in found.causes.items()}
                    waiting = getattr(option, stage) - sum(causes.values())
                    causes |= {"host link": waiting} if stage == "experience" and option.offload else {}
                    own = [Part(f"{option.role} weights", int(option.offloaded))] if option.offloaded else []
                    parts = (*static, *own, Part(f"{option.role} activations", int(max(found.activations))), fixed)
                    yield Phase(phase_name(option.role, stage), stage, option.role, pool.gpus, causes, parts=parts)

    def best(self, partition: tuple[tuple[str, ...], ...]) -> Placement:
        """The best allocation of one placement."""
        gpus = self.machine.cluster.gpus
        if gpus < len(partition):
            return Placement(partition, reason=f"{len(partition)} pools need as many GPUs, there are {gpus}")
        candidates = [self._candidates(names, gpus - len(partition) + 1) for names in partition]
        for names, plans in zip(partition, candidates, strict=True):
            if not plans:
                return Placement(partition, reason=f"{', '.join(names)} do not fit on {gpus - len(partition) + 1} GPUs")
        chosen = self._allocate(candidates, gpus)
        if not chosen:
            return Placement(partition, reason=f"no split of {gpus} GPUs holds all pools")
        return Placement(partition, chosen)

    def _candidates(self, names: tuple[str, ...], most: int) -> list[PoolPlan]:
        """A pool's plans of all sizes; a larger pool must be faster in something."""
        plans = [plan for size in self._sizes if size <= most for plan in self.plans(names, size)]
        return _fastest(plans, [(*plan.costs, plan.gpus) for plan in plans])

    def _allocate(self, candidates: Sequence[list[PoolPlan]], gpus: int) -> tuple[PoolPlan, ...]:
        """One plan for every pool with the shortest step, by branch and bound: what is left cannot be faster than each pool's
        fastest stages."""
        least = [min(plan.gpus for plan in plans) for plans in candidates]
        fastest = [tuple(min(plan.costs[stage] for plan in plans) for stage in range(3)) for plans in candidates]
        best: tuple[float, tuple[PoolPlan, ...]] = (inf, ())

        def bound(chosen: tuple[PoolPlan, ...]) -> float:
            rest = fastest[len(chosen) :]
            return sum(max(*(p.costs[s] for p in chosen), *(f[s] for f in rest), 0.0) for s in range(3))

        def descend(chosen: tuple[PoolPlan, ...], left: int) -> None:
            nonlocal best
            if len(chosen) == len(candidates):
                best = (bound(chosen), chosen)
                return
            needed = sum(least[len(chosen) + 1 :])
            reachable = [(bound((*chosen, plan)), plan) for plan in candidates[len(chosen)] if plan.gpus + needed <= left]
            self.combined += len(reachable)
            for lower, plan in sorted(reachable, key=lambda pair: pair[0]):
                if lower >= best[0]:
                    break
                descend((*chosen, plan), left - plan.gpus)

        descend((), gpus)
        return best[1]

    def plans(self, names: tuple[str, ...], gpus: int) -> list[PoolPlan]:
        """What a pool of these roles can do on so many GPUs."""
        key = (names, gpus)
        if key not in self._plans:
            found = [plan for together in self._together(names, gpus) for plan in self._with_engine(names, gpus, together)]
            self._plans[key] = _fastest(found, [plan.costs for plan in found])
        return self._plans[key]

    def _together(self, names: tuple[str, ...], gpus: int) -> list[tuple[Option, ...]]:
        """Options for the Megatron roles that fit on the same GPUs, none of them beaten by another."""
        roles = sorted(
            (name for name in names if name != ENGINE), key=lambda name: len(self.options.front(self.roles[name], gpus))
        )
        found: list[tuple[Option, ...]] = [()]
        seconds = 2 + len(self.options.engine_sizes)
        static, extra, resting = range(seconds, seconds + 3)
        for name in roles:
            more = self.options.front(self.roles[name], gpus)
            self.combined += len(found) * len(more)
            costs = _joint(found, more, extra)
            fits = np.flatnonzero(costs[:, static] + costs[:, extra] <= self.options.capacity)
            if not len(fits):
                return []
            costs = costs[fits]
            if ENGINE not in names:
                costs[:, [*range(2, seconds), resting]] = 0  # nothing rests beside an engine, and nothing is read from here
            if name == roles[-1]:  # what fits fits, and an engine that stays awake has what both leave
                costs[:, static] += costs[:, extra] if ENGINE in names else -costs[:, static]
                costs[:, extra] = 0
            kept = fits[front(costs, tolerances(costs, seconds, self.options.capacity))]
            found = [(*found[index // len(more)], more[index % len(more)]) for index in kept.tolist()]
        return found

    def _with_engine(self, names: tuple[str, ...], gpus: int, options: tuple[Option, ...]) -> Iterator[PoolPlan]:
        if ENGINE not in names:
            yield PoolPlan(gpus, options, None)
            return
        for index, tp in enumerate(self.options.engine_sizes):
            for sleeps in (True, False) if options else (False,):
                engine = self._engine(gpus, tp, index, options, sleeps) if gpus % tp == 0 else None
                if engine:
                    yield PoolPlan(gpus, options, engine)

    def _engine(self, gpus: int, tp: int, index: int, options: tuple[Option, ...], sleeps: bool) -> Engine | None:
        """The engine in the memory that the roles leave; None where its weights or one sequence do not fit."""
        machine, work, hf = self.machine, self.work, self.roles["actor"].hf
        total, calibration = machine.cluster.gpu.memory_bytes, machine.calibration
        if sleeps:
            beside = sum(option.resting for option in options)
        else:
            beside = sum(option.static for option in options) + max((option.extra for option in options), default=0.0)
        free = self.options.capacity - beside
        utilization = floor(100 * min(MOST_OF_A_GPU, free / total)) / 100
        weights = self._itemsize * engine_elements(hf, tp)
        actor = next((option for option in options if option.role == "actor"), None)
        if actor and sleeps and weights + actor.weights > free:
            return None  # when the weights arrive, the actor's are still there
        engines = gpus // tp
        task = EngineTask(
            hf=hf,
            tp=tp,
            samples=-(-work.generated // engines),
            prompts=-(-work.prompts // engines),
            prompt_tokens=work.prompt_tokens,
            response_tokens=work.response_tokens,
            memory=utilization * total - calibration.engine_bytes,
            weights=weights,
            itemsize=self._itemsize,
        )
        if task.concurrency < 1:
            return None
        if actor is None:
            around = {"weights over the network": broadcast_seconds(machine, weights)}
        else:
            around = {"reshard": actor.reshard[index]}
        if sleeps:
            around |= {
                "wake": wake_seconds(machine, weights),
                "sleep": calibration.sleep_seconds,
                "release": release_seconds(machine, sum(option.leaving for option in options)),
            }
        if task not in self._rollouts:
            self._rollouts[task] = rollout(machine, task)
        return Engine(tp, utilization, self._rollouts[task], around, sleeps)


def placements(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every set partition of the roles, with the rollout in the actor's pool and in one of its own."""
    for partition in partitions(names):
        yield tuple((*pool, ENGINE) if "actor" in pool else pool for pool in partition)
        yield (*partition, (ENGINE,))


def partitions(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to put the names into sets; their number is Bell's."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for partition in partitions(rest):
        yield ((first,), *partition)
        for number, pool in enumerate(partition):
            yield (*partition[:number], (first, *pool), *partition[number + 1 :])


def pool_sizes(nodes: int, gpus_per_node: int) -> list[int]:
    """Sizes of pools: parts of a node that divide it, and 1, 2, 3, 4, 6, 8, 12, ... nodes, all of them among these."""
    parts = [size for size in range(1, gpus_per_node) if gpus_per_node % size == 0]
    whole = {nodes} | {factor << power for factor in (1, 3) for power in range(nodes.bit_length())}
    return parts + [gpus_per_node * count for count in sorted(whole) if count <= nodes]


def _joint(before: Sequence[tuple[Option, ...]], more: Sequence[Option], extra: int) -> np.ndarray:
    """Costs [before x more, C] of roles on the same GPUs: seconds one after the other, bytes side by side but for the
    activations in column `extra`, of which one role has some at a time."""
    if not before or not more:
        return np.zeros((0, extra + 2))
    own = np.array([option.costs for option in more])
    theirs = np.zeros((len(before), own.shape[1]))
    for row, options in enumerate(before):
        for option in options:
            most = max(theirs[row, extra], option.extra)
            theirs[row] += option.costs
            theirs[row, extra] = most
    joint = theirs[:, None] + own[None]
    joint[:, :, extra] = np.maximum(theirs[:, None, extra], own[None, :, extra])
    return joint.reshape(-1, own.shape[1])


def _fastest(plans: list[PoolPlan], costs: Sequence[tuple[float, ...]]) -> list[PoolPlan]:
    """The plans that no other one beats in seconds of each stage, and in GPUs where those are given as a fourth cost."""
    if not plans:
        return []
    rows = np.array(costs)
    least = SAME_SECONDS * rows[:, :3].sum(1).min()
    tolerance = np.array([least, least, least, 0.0])[: rows.shape[1]]
    return [plans[index] for index in front(rows, tolerance)]


def _splits_for_engine(hf: HFConfig, tp: int) -> bool:
    try:
        check_tp(hf, tp)
    except ValueError:
        return False
    return True
