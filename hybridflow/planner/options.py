"""The layouts that a role can have on so many GPUs, what each costs, and which of them no other one beats.

Costs are seconds of the experience and of the update stage, of resharding to each rollout TP, and bytes on the fullest GPU:
`static` while training, `extra` of activations beyond it, `resting` beside an awake engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybridflow.planner import counts
from hybridflow.planner.counts import ITEMSIZE
from hybridflow.planner.forecast import Workload
from hybridflow.planner.generation import reshard_seconds
from hybridflow.planner.memory import RESERVE, Release, leaving_bytes
from hybridflow.planner.passes import Machine, Micro, Pass, Task, forward_pass, update_pass
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split

MICRO_BATCH_TOKENS = (4096, 8192, 16384, 32768)
FORWARD_TOKENS = 16384
MOST_STAGES = 16
CHUNKS = (1, 2, 4)
# An option is dropped when another one is no worse by more than this: of the least seconds, and of a GPU's memory.
SAME_SECONDS = 0.005
SAME_BYTES = 0.02


@dataclass(frozen=True)
class JobRole:
    """`infers`: it has a pass without backward in each step. `trained`: it has updates."""

    name: str
    hf: HFConfig
    trained: bool
    infers: bool
    dtype: str = "bfloat16"


class Option(NamedTuple):
    """One way to run a role; `update_tokens` is 0 for a role that is not trained. `offload`: what needs not be on the GPU while
    the engine is awake (optimizer states) or outside the role's calls (frozen weights) rests on the host."""

    role: str
    layout: Layout
    update_tokens: int
    forward_tokens: int
    recompute: str
    offload: bool
    experience: float
    update: float
    static: float
    extra: float
    resting: float
    weights: float  # of the actor, which are there when the engine's arrive
    leaving: float  # gradients, and weights that masters can make again: they make room for the engine
    reshard: tuple[float, ...]  # of the actor, by the rollout TP of `Options.engine_sizes`
    offloaded: float = 0.0  # weights that are on the GPU during the role's own calls only; in `extra`

    @property
    def costs(self) -> tuple[float, ...]:
        return self.experience, self.update, *self.reshard, self.static, self.extra, self.resting


def front(costs: np.ndarray, tolerance: np.ndarray) -> list[int]:
    """Which rows of `costs` [N, C] no other one beats: the Pareto front, thinned out.

    A row is left out where a kept one is at most `tolerance` [C] worse in every column; with zeros the front is exact, and of
    equal rows one stays.
    """
    telling = np.ptp(costs, axis=0) > 0
    costs, tolerance = costs[:, telling], tolerance[telling]
    if not telling.any():
        return [0]
    left = np.lexsort(costs.T[::-1])  # whatever comes later is no better in the first column that differs
    limits, kept = costs[left] + tolerance, []
    while len(left):
        best = int(left[0])
        kept.append(best)
        beats = (limits < costs[best]).any(1)  # those that are better in some column
        left, limits = left[beats], limits[beats]
    return kept


def tolerances(costs: np.ndarray, seconds: int, capacity: float) -> np.ndarray:
    """For costs whose first so many columns are seconds, the first two of them one stage each, and whose rest are bytes."""
    least = costs[:, :2].sum(1).min()
    return np.array([SAME_SECONDS * least] * seconds + [SAME_BYTES * capacity] * (costs.shape[1] - seconds))


class Options:
    """Evaluates a role's layouts. `evaluated` counts them."""

    def __init__(self, machine: Machine, work: Workload, engine_sizes: Sequence[int], rollout_itemsize: int = 2):
        self.machine, self.work = machine, work
        self.engine_sizes = tuple(engine_sizes)
        self._rollout_itemsize = rollout_itemsize
        self.evaluated = 0
        self._fronts: dict[tuple[JobRole, int], list[Option]] = {}

    @property
    def capacity(self) -> float:
        """Bytes of a GPU for what is counted here."""
        return (1 - RESERVE) * self.machine.cluster.gpu.memory_bytes - self.machine.calibration.fixed_bytes

    def front(self, role: JobRole, gpus: int) -> list[Option]:
        """The role's options that are worth a look."""
        key = (role, gpus)
        if key not in self._fronts:
            found = list(self.all(role, gpus))
            if found:
                costs = np.array([option.costs for option in found])
                kept = front(costs, tolerances(costs, 2 + len(self.engine_sizes), self.capacity))
                found = [found[index] for index in kept]
            self._fronts[key] = found
        return self._fronts[key]

    def all(self, role: JobRole, gpus: int) -> Iterator[Option]:
        """Every option on `gpus` GPUs that fits on them alone."""
        for layout in self._layouts(role, gpus):
            static, resting, weights = self._static(role, layout)
            if static > self.capacity:
                continue
            forward_tokens = self._at_least_longest(FORWARD_TOKENS, layout.tp)
            inferred = self._forward(role, layout, forward_tokens) if role.infers else None
            for tokens, recompute, updated in self._updates(role, layout):
                self.evaluated += 1
                yield from self._offloads(
                    Option(
                        role=role.name,
                        layout=layout,
                        update_tokens=tokens,
                        forward_tokens=forward_tokens,
                        recompute=recompute,
                        offload=False,
                        experience=inferred.seconds if inferred else 0.0,
                        update=self.work.updates * updated.seconds if updated else 0.0,
                        static=static,
                        extra=self._extra(role, layout, [found for found in (inferred, updated) if found], static),
                        resting=resting,
                        weights=weights if role.name == "actor" else 0.0,
                        leaving=leaving_bytes(role.hf, layout, ITEMSIZE[role.dtype], _release(role)),
                        reshard=self._reshard(role, layout),
                    ),
                    weights,
                )

    def _reshard(self, role: JobRole, layout: Layout) -> tuple[float, ...]:
        if role.name != "actor":
            return (0.0,) * len(self.engine_sizes)
        return tuple(
            reshard_seconds(self.machine, role.hf, layout, tp, self._rollout_itemsize, False) for tp in self.engine_sizes
        )

    def passes(self, role: JobRole, option: Option) -> tuple[Pass | None, Pass | None]:
        """What the option's seconds are made of: the pass without backward, and one update."""
        inferred = self._forward(role, option.layout, option.forward_tokens) if role.infers else None
        updates = self._updates(role, option.layout)
        wanted = option.update_tokens, option.recompute
        return inferred, next(found for tokens, recompute, found in updates if (tokens, recompute) == wanted)

    def _offloads(self, option: Option, weights: float) -> Iterator[Option]:
        """The option as it is, and with what it can rest on the host, which it waits for."""
        if option.static + option.extra > self.capacity:
            return
        yield option
        link = self.machine.calibration.host_link
        if option.update_tokens:
            yield option._replace(offload=True, experience=option.experience + 2 * option.resting / link, resting=0.0)
        else:
            seconds = option.experience + weights / link
            yield option._replace(
                offload=True, experience=seconds, static=0.0, extra=option.static + option.extra, resting=0.0, offloaded=weights
            )

    def _layouts(self, role: JobRole, gpus: int) -> Iterator[Layout]:
        hf, per_node = role.hf, self.machine.cluster.gpus_per_node
        for tp in self._tensor_parallel(hf, gpus):
            for pp in range(1, min(MOST_STAGES, hf.num_layers) + 1):
                if gpus % (tp * pp) or gpus // (tp * pp) > (self.work.mini_batch if role.trained else self.work.samples):
                    continue
                ranks = gpus // pp
                for vpp in CHUNKS if pp > 1 and role.trained else (1,):
                    if pp * vpp > hf.num_layers:
                        continue
                    for split in _splits(hf, pp, vpp):
                        for ep in _expert_parallel(hf, ranks, per_node):
                            yield Layout(gpus, tp, pp, vpp, 1, ep, 1, tp > 1, split)

    def _tensor_parallel(self, hf: HFConfig, gpus: int) -> list[int]:
        """Within a node, as preflight takes them."""
        sizes = [hf.num_heads, hf.num_kv_heads] + ([] if hf.is_moe else [hf.intermediate_size])
        within = min(gpus, self.machine.cluster.gpus_per_node)
        return [tp for tp in range(1, within + 1) if within % tp == 0 and all(size % tp == 0 for size in sizes)]

    def _at_least_longest(self, tokens: int, tp: int) -> int:
        return max(tokens, -(-self.work.longest // tp) * tp)

    def _task(self, role: JobRole, layout: Layout, micro: Micro, count: int, recompute: str = "none") -> Task:
        return Task(role.hf, layout, micro, count, ITEMSIZE[role.dtype], recompute)

    def _forward(self, role: JobRole, layout: Layout, tokens: int) -> Pass:
        micro, count = self.work.micro_batches(layout, tokens, self.work.samples)
        return forward_pass(self.machine, self._task(role, layout, micro, count))

    def _updates(self, role: JobRole, layout: Layout) -> Iterator[tuple[int, str, Pass | None]]:
        """(micro_batch_tokens, recompute, its pass); budgets that give the same micro-batches once."""
        if not role.trained:
            yield 0, "none", None
            return
        seen = set()
        for tokens in MICRO_BATCH_TOKENS:
            tokens = self._at_least_longest(tokens, layout.tp)
            micro, count = self.work.micro_batches(layout, tokens, self.work.mini_batch)
            if count in seen:
                continue
            seen.add(count)
            for recompute in ("none", "mlp", "full"):
                yield tokens, recompute, update_pass(self.machine, self._task(role, layout, micro, count, recompute))

    def _static(self, role: JobRole, layout: Layout) -> tuple[float, float, float]:
        """Bytes on the fullest stage: while training, resting beside an awake engine, and of the weights."""
        itemsize = ITEMSIZE[role.dtype]
        found = []
        for held in counts.stage_elements(role.hf, layout):
            weights = itemsize * held.all
            states = _optimizer_states(held, layout, itemsize)
            # 16-bit weights are made again from the masters, gradients carry nothing over
            resting = (states if itemsize == 2 else states + weights) if role.trained else weights
            found.append((weights + 4 * held.all + states if role.trained else weights, resting, weights))
        return tuple(max(column) for column in zip(*found, strict=True))

    def _extra(self, role: JobRole, layout: Layout, passes: list[Pass], static: float) -> float:
        """Activations of the fullest stage beyond the largest static part of any."""
        itemsize, most = ITEMSIZE[role.dtype], 0.0
        for stage, held in enumerate(counts.stage_elements(role.hf, layout)):
            own = itemsize * held.all
            if role.trained:
                own += 4 * held.all + _optimizer_states(held, layout, itemsize)
            most = max(most, own + max((found.activations[stage] for found in passes), default=0.0))
        return max(0.0, most - static)


def _release(role: JobRole) -> Release:
    """All that can be made again: gradients, and weights that have masters."""
    return Release(gradients=role.trained, weights=role.trained and role.dtype != "float32")


def _optimizer_states(held: counts.Elements, layout: Layout, itemsize: int) -> float:
    return (12 if itemsize == 2 else 8) * (held.dense / (layout.dp * layout.cp) + held.experts / layout.edp)


def _splits(hf: HFConfig, pp: int, vpp: int) -> list[Split]:
    """Even stages, and those where the output layer counts as the layers that take as long."""
    counted = round(hf.output_weights / hf.layer_weights)
    if pp == 1 or not counted or hf.num_layers < pp * vpp + counted:
        return [Split()]
    return [Split(), Split(loss=counted)]


def _expert_parallel(hf: HFConfig, ranks: int, per_node: int) -> list[int]:
    """Within a node, of a stage's ranks."""
    if not hf.is_moe:
        return [1]
    return [ep for ep in range(1, per_node + 1) if per_node % ep == 0 and ranks % ep == 0 and hf.num_experts % ep == 0]
