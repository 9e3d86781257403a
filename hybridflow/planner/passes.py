"""Seconds and activation memory of a forward pass or an update of one Megatron role, and where the seconds go.

An update of m micro-batches: every stage's time per micro-batch, the span of the pipeline schedule, then gradients to and
parameters from the optimizer's shards, and the optimizer's step. The parts are added up: as it is set up here, Megatron
overlaps few of them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from hybridflow.planner import counts
from hybridflow.planner.calibration import Calibration
from hybridflow.planner.hardware import Cluster
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout

Causes = dict[str, float]  # seconds by what they are spent on

LOGIT_TRAFFIC = 3  # bytes per 16-bit logit: read once forward; read, and the gradient written over it, backward; the mean
ACCUMULATION_TRAFFIC = 8  # bytes per parameter for a product to add itself to the fp32 gradient: read and written
OPTIMIZER_TRAFFIC = 34  # per parameter of the rank's shard: gradient, two moments and master read, three written, weight, norm
LOCAL_TRAFFIC = 8  # per parameter of the rank: gradients zeroed, scaled


@dataclass(frozen=True)
class Machine:
    cluster: Cluster
    calibration: Calibration = Calibration()

    def matrix_rate(self, itemsize: int) -> float:
        gpu = self.cluster.gpu
        return self.calibration.matrix * (gpu.bf16_flops if itemsize == 2 else gpu.fp32_flops)

    @property
    def memory_rate(self) -> float:
        return self.calibration.memory * self.cluster.gpu.memory_bytes_per_second

    def collective(self, received: float, size: int, stride: int) -> float:
        """Seconds in which each of `size` ranks at a distance of `stride` receives so many bytes. Between nodes the bytes come
        in over the adapters of all the group's ranks on a node."""
        if size == 1 or not received:
            return 0.0
        together = self.cluster.ranks_together(size, stride)
        rate = self.calibration.wire * self.cluster.gpu.wire_bytes_per_second
        if together < size:
            rate = min(rate, self.calibration.network * self.cluster.network_bytes_per_second * together)
        return self.calibration.transfer_seconds + received / rate


class Micro(NamedTuple):
    """A packed micro-batch: its tokens, and the sum of its sequences' squared lengths."""

    tokens: float
    squares: float


@dataclass(frozen=True)
class Task:
    """One role's model as it is laid out, and the micro-batches that a rank runs."""

    hf: HFConfig
    layout: Layout
    micro: Micro
    micro_batches: int
    itemsize: int = 2
    recompute: str = "none"

    @property
    def runs(self) -> int:
        """Micro-batches with the fill-ups: the interleaved schedule takes multiples of the number of stages."""
        return -(-self.micro_batches // self.layout.pp) * self.layout.pp if self.layout.vpp > 1 else self.micro_batches


@dataclass(frozen=True)
class Pass:
    """`seconds` by cause on the busiest stage; `activations` in bytes by pipeline stage, logits among them."""

    causes: Causes
    activations: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.causes.values())


def forward_pass(machine: Machine, task: Task) -> Pass:
    """A pass that keeps nothing: log-probs, values, rewards."""
    layer, head = _layer_forward(machine, task), _head_forward(machine, task)
    return Pass(_pipeline(machine, task, layer, head, transfers=1), _forward_memory(task))


def update_pass(machine: Machine, task: Task, optimizer: bool = True) -> Pass:
    """Forward and backward over all micro-batches, and (`optimizer`) what follows: one optimizer step."""
    layer, head = _layer_forward(machine, task), _head_forward(machine, task)
    layer = _add(layer, _layer_backward(machine, task, layer))
    head = {name: 2 * seconds if name == "loss" else 3 * seconds for name, seconds in head.items()}
    causes = _pipeline(machine, task, layer, head, transfers=2)
    if optimizer:
        causes = _add(causes, _optimizer(machine, task))
    return Pass(causes, _update_memory(task))


def _layer_forward(machine: Machine, task: Task) -> Causes:
    hf, layout, (tokens, squares) = task.hf, task.layout, task.micro
    calibration, rate = machine.calibration, machine.matrix_rate(task.itemsize)
    share = 2 * tokens / layout.tp
    causes = {
        "matrix products": share * (counts.attention_matrices(hf) + (0 if hf.is_moe else counts.mlp_matrices(hf))) / rate,
        # the kernel computes the half under the diagonal: 2 A sum(l^2) of the 4 A sum(l^2) that are counted for MFU
        "attention": 2 * hf.attention_size * squares / layout.tp * calibration.matrix / (calibration.attention * rate),
        # every tensor that is kept was written once and read once
        "element-wise": 2 * tokens * counts.activation_bytes(hf, layout, task.itemsize) / machine.memory_rate,
        "launches": calibration.layer_seconds,
    }
    if hf.is_moe:
        causes["experts"] = share * counts.mlp_matrices(hf) / (rate * calibration.experts)
        causes["matrix products"] += share * counts.router_matrix(hf) / rate
    if layout.tp > 1:
        causes["TP transfers"] = (2 if hf.is_moe else 4) * _gather(machine, task)
    if hf.is_moe and layout.ep * layout.etp > 1:
        causes["EP transfers"] = 2 * _exchange(machine, task)
    return causes


def _gather(machine: Machine, task: Task) -> float:
    """An all-gather or reduce-scatter of a micro-batch's hidden states over tp; without sequence parallelism two of them make
    the all-reduce."""
    tp = task.layout.tp
    return machine.collective(task.micro.tokens * task.hf.hidden_size * task.itemsize * (tp - 1) / tp, tp, 1)


def _exchange(machine: Machine, task: Task) -> float:
    """The tokens of a rank on their way to their experts, or back."""
    layout, hf = task.layout, task.hf
    size = layout.ep * layout.etp
    sent = task.micro.tokens / layout.tp * hf.experts_per_token * hf.hidden_size * task.itemsize
    return machine.collective(sent * (size - 1) / size, size, 1)


def _layer_backward(machine: Machine, task: Task, forward: Causes) -> Causes:
    """Twice the forward pass (gradients of inputs and of weights), flash attention 2.5 times (five products for two), and what
    is computed again. Of transfers over tp only the gathers of the outputs' gradients are waited for: Megatron and TE hide
    the others behind the products of the weights' gradients."""
    causes = {name: 2 * seconds for name, seconds in forward.items()}
    causes["attention"] = 2.5 * forward["attention"]
    causes["element-wise"] += ACCUMULATION_TRAFFIC * _layer_elements(task) / machine.memory_rate
    if task.layout.tp > 1:
        gathers = 0 if not task.layout.sequence_parallel else 1 if task.hf.is_moe else 2
        causes["TP transfers"] = gathers * _gather(machine, task)
    if "EP transfers" in forward:
        causes["EP transfers"] = forward["EP transfers"]
    again: Causes = {}
    if task.recompute == "full":
        again = forward
    elif task.recompute == "selective":
        again = {"attention": forward["attention"]}
    elif task.recompute == "mlp":
        again = _mlp_forward(machine, task, forward)
    return _add(causes, {"recomputation": sum(again.values())} if again else {})


def _mlp_forward(machine: Machine, task: Task, forward: Causes) -> Causes:
    if task.hf.is_moe:
        return {name: forward[name] for name in ("experts", "EP transfers") if name in forward}
    hf, layout = task.hf, task.layout
    kept = counts.mlp_activations(hf, layout) * task.itemsize
    return {
        "matrix products": 2 * task.micro.tokens / layout.tp * counts.mlp_matrices(hf) / machine.matrix_rate(task.itemsize),
        "element-wise": 2 * task.micro.tokens * kept / machine.memory_rate,
        "TP transfers": 2 * _gather(machine, task) if layout.tp > 1 else 0.0,
        "launches": machine.calibration.layer_seconds / 2,
    }


def _layer_elements(task: Task) -> float:
    """Parameters of an average layer on one rank."""
    hf, layout = task.hf, task.layout
    dense = counts.attention_matrices(hf) + (0 if hf.is_moe else counts.mlp_matrices(hf))
    experts = 3 * hf.hidden_size * hf.moe_intermediate_size * hf.num_experts
    return dense / layout.tp + experts / (layout.ep * layout.etp)


def _head_forward(machine: Machine, task: Task) -> Causes:
    """Output layer and log-probs, on the last stage."""
    per_rank = task.layout.tp if task.hf.head == "lm" else 1
    share = task.micro.tokens / per_rank
    logits = share * task.hf.output_weights / task.hf.hidden_size
    return {
        "matrix products": 2 * share * task.hf.output_weights / machine.matrix_rate(task.itemsize),
        "loss": LOGIT_TRAFFIC * logits / machine.memory_rate,
    }


def _pipeline(machine: Machine, task: Task, layer: Causes, head: Causes, transfers: int) -> Causes:
    """All micro-batches through the stages: the busiest stage's work, and the rest of the schedule's span as bubble."""
    layout = task.layout
    layers = counts.stage_layers(task.hf.num_layers, layout.pp, layout.vpp, layout.split)
    per_layer, per_head = sum(layer.values()), sum(head.values())
    between = 0.0
    if layout.pp > 1:
        sent = task.micro.tokens * task.hf.hidden_size * task.itemsize / (layout.tp if layout.sequence_parallel else 1)
        between = transfers * layout.vpp * machine.collective(sent, layout.pp, layout.world_size // layout.pp)
    stages = [n * per_layer + between for n in layers]
    stages[-1] += per_head
    busiest = max(range(layout.pp), key=stages.__getitem__)
    runs = task.runs
    causes = {name: runs * layers[busiest] * seconds for name, seconds in layer.items()}
    if busiest == layout.pp - 1:
        causes = _add(causes, {name: runs * seconds for name, seconds in head.items()})
    if layout.pp > 1:
        causes["PP transfers"] = runs * between
        causes["bubble"] = span(stages, runs, layout.vpp) - runs * stages[busiest]
    return causes


def span(stages: list[float], micro_batches: int, vpp: int = 1) -> float:
    """Seconds of a schedule from every stage's seconds per micro-batch, forward and backward together.

    1F1B with uneven stages: (m - 1) max(T) + sum(T), which for even ones is (m + p - 1) T. Interleaved: what is not the busiest
    stage's own work is v times shorter (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Where the output layer makes
    stages and chunks uneven, within 8% of `schedule.simulate`, which a search has no time for: 1% on average over the sizes of
    tests/planner/test_passes.py.
    """
    busiest = max(stages)
    return micro_batches * busiest + (sum(stages) - busiest) / vpp


def _optimizer(machine: Machine, task: Task) -> Causes:
    """After the last micro-batch: fp32 gradients scattered over the data-parallel ranks, the rank's shard updated, parameters
    gathered. The stage with the most parameters decides."""
    layout = task.layout
    shards, stride = layout.dp * layout.cp, layout.tp
    worst: Causes = {}
    for held in counts.stage_elements(task.hf, layout):
        sent = (4 + task.itemsize) * held.dense * (shards - 1) / shards
        experts = (4 + task.itemsize) * held.experts * (layout.edp - 1) / layout.edp
        share = held.dense / shards + held.experts / layout.edp
        traffic = OPTIMIZER_TRAFFIC * share + LOCAL_TRAFFIC * held.all
        causes = {
            "DP transfers": machine.collective(sent, shards, stride)
            + machine.collective(experts, layout.edp, layout.ep * layout.etp),
            "optimizer": traffic / (machine.calibration.optimizer * machine.cluster.gpu.memory_bytes_per_second),
        }
        worst = max(worst, causes, key=lambda found: sum(found.values()))
    return worst


def _logit_bytes(task: Task) -> float:
    if task.hf.head != "lm":
        return 0.0
    return task.itemsize * task.micro.tokens * task.hf.vocab_size / task.layout.tp


def _update_memory(task: Task) -> tuple[float, ...]:
    """What is kept of the layers in flight, of one layer that is computed again, and on the last stage the logits, over which
    their gradient is written."""
    tokens = task.micro.tokens
    kept = counts.activation_bytes(task.hf, task.layout, task.itemsize, task.recompute)
    whole = counts.activation_bytes(task.hf, task.layout, task.itemsize)
    once = tokens * (whole if task.recompute == "full" else whole - kept)
    found = [tokens * kept * n + once for n in counts.layers_in_flight(task.hf, task.layout, task.runs)]
    found[-1] += _logit_bytes(task)
    return tuple(found)


def _forward_memory(task: Task) -> tuple[float, ...]:
    """One layer's tensors; on the last stage the logits with what they come from, once the last layer's tensors are gone."""
    found = [task.micro.tokens * counts.activation_bytes(task.hf, task.layout, task.itemsize)] * task.layout.pp
    hidden = task.micro.tokens * task.hf.hidden_size * task.itemsize
    found[-1] = max(found[-1], _logit_bytes(task) + hidden)
    return tuple(found)


def _add(*parts: Causes) -> Causes:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
