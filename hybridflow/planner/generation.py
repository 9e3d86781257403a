"""Seconds of a rollout, and of the engine's waking, resharding and sleeping around it.

A prompt's tokens are computed once, a matrix product like training's. Then every step adds a token to each running sequence: it
reads all weights and the KV cache so far, and multiplies by as many rows as there are sequences; the longer of the two counts.
Meanwhile Python schedules the next step and launches its kernels: where it takes longer, the GPU waits for it.
"""

from dataclasses import dataclass

from hybridflow.planner import counts
from hybridflow.planner.calibration import GIB
from hybridflow.planner.passes import Causes, Machine
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout

DEFAULT_SEQUENCES = 1024  # vLLM's max_num_seqs of an LLM on GPUs of 70 GiB and more


@dataclass(frozen=True)
class EngineTask:
    """What one engine of `tp` ranks is asked to do.

    `samples` and `prompts` are the engine's own; `memory` are a rank's bytes for weights and KV cache.
    """

    hf: HFConfig
    tp: int
    samples: int
    prompts: int
    prompt_tokens: float
    response_tokens: float
    memory: float
    weights: float  # bytes on a rank
    itemsize: int = 2
    max_sequences: int = DEFAULT_SEQUENCES
    eager: bool = False

    @property
    def kv_memory(self) -> float:
        return self.memory - self.weights

    @property
    def sequence_bytes(self) -> float:
        """KV cache of a finished sequence on one rank."""
        return counts.kv_bytes(self.hf, self.tp, self.itemsize) * (self.prompt_tokens + self.response_tokens)

    @property
    def concurrency(self) -> int:
        """Sequences that run at the same time: they start together and all reach their full length; 0: not even one fits."""
        return min(self.samples, self.max_sequences, int(max(0.0, self.kv_memory) // self.sequence_bytes))


def rollout(machine: Machine, task: EngineTask) -> Causes:
    """Seconds by cause: `prompts`; of decoding `weights`, `KV cache` (both reading memory), `matrix products` where many rows
    make them the longer part, `TP transfers`, and `launches`, for which the GPU waits.

    With continuous batching the steps are response tokens x samples / concurrency, and no fewer than the response's tokens.
    """
    sequences = task.concurrency
    steps = task.response_tokens * max(1.0, task.samples / sequences)
    causes = {name: steps * seconds for name, seconds in _decode_step(machine, task, sequences).items()}
    causes["prompts"] = _prefill(machine, task)
    return causes


def _prefill(machine: Machine, task: EngineTask) -> float:
    """All prompts, each once: samples of a prompt share it through the prefix cache."""
    operations = task.prompts * counts.forward_flops(task.hf, [task.prompt_tokens])
    return operations / task.tp / machine.matrix_rate(task.itemsize)


def _decode_step(machine: Machine, task: EngineTask, sequences: int) -> Causes:
    hf, calibration = task.hf, machine.calibration
    rate = calibration.decode_memory * machine.cluster.gpu.memory_bytes_per_second
    average = task.prompt_tokens + task.response_tokens / 2
    weights = _weights_read(task, sequences) / rate
    cache = sequences * average * counts.kv_bytes(hf, task.tp, task.itemsize) / rate
    products = counts.forward_flops(hf, [1]) * sequences / task.tp / machine.matrix_rate(task.itemsize)
    causes = {"KV cache": cache}
    causes |= {"weights": weights} if weights > products else {"matrix products": products}
    if task.tp > 1:
        received = 2 * sequences * hf.hidden_size * task.itemsize * (task.tp - 1) / task.tp
        wire = calibration.wire * machine.cluster.gpu.wire_bytes_per_second
        causes["TP transfers"] = 2 * hf.num_layers * (calibration.decode_transfer_seconds + received / wire)
    python = calibration.decode_seconds + calibration.decode_sequence_seconds * sequences
    if task.eager:
        python += calibration.eager_layer_seconds * hf.num_layers
    causes["launches"] = max(0.0, python - sum(causes.values()))
    return causes


def _weights_read(task: EngineTask, sequences: int) -> float:
    """Bytes of weights that a step reads on a rank: of E experts those that some token goes to, E (1 - (1 - k/E)^B) when B
    tokens choose k each at random."""
    hf = task.hf
    if not hf.is_moe:
        return task.weights
    dense, experts = counts.weight_shares(hf)
    met = 1 - (1 - hf.experts_per_token / hf.num_experts) ** sequences
    return task.weights * (dense + met * experts) / (dense + experts)


def reshard_seconds(machine: Machine, hf: HFConfig, layout: Layout, tp: int, itemsize: int, expert_parallel: bool) -> float:
    """The longer of the bytes received over the wire and 2 x (received + local) through memory, at the calibrated share.

    Under a pipeline over several nodes a node holds some stages only: what the others hold comes over the network.
    """
    cluster = machine.cluster
    received, local = (itemsize * n for n in counts.received_elements(hf, layout, tp, expert_parallel))
    stages_here = min(layout.pp, max(1, layout.pp * cluster.gpus_per_node // layout.world_size))
    far = itemsize * sum(counts.weight_shares(hf)) / tp * (1 - stages_here / layout.pp)
    far = min(far, received)
    wire = (received - far) / cluster.gpu.wire_bytes_per_second + far / cluster.network_bytes_per_second
    memory = 2 * (received + local) / cluster.gpu.memory_bytes_per_second
    return max(wire, memory) / machine.calibration.reshard


def wake_seconds(machine: Machine, weights: float) -> float:
    return machine.calibration.wake_seconds + machine.calibration.wake_seconds_per_gib * weights / GIB


def release_seconds(machine: Machine, nbytes: float) -> float:
    """Of training's gradients and weights, which leave while the engine is awake, and of making them again."""
    return machine.calibration.release_seconds_per_gib * nbytes / GIB


def broadcast_seconds(machine: Machine, weights: float) -> float:
    """New weights for an engine on GPUs of its own: every rank receives its shard over the network."""
    return weights / (machine.calibration.network * machine.cluster.network_bytes_per_second)
