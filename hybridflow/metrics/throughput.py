"""Tokens per second and model FLOPs utilisation (MFU) of a step."""

from collections.abc import Sequence

from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.planner.counts import forward_flops
from hybridflow.planner.hardware import gpu
from megatron_ext.hf_config import HFConfig


def training_flops(hf: HFConfig, lengths: Sequence[int]) -> float:
    """Operations of one forward and backward pass over sequences of these lengths; recomputation is not counted."""
    return 3.0 * forward_flops(hf, lengths)


class Throughput:
    """Adds up the work of a step; `finish` relates it to the time of the phases."""

    def __init__(self, config: Config):
        self._ranks = config.world_size
        self._hf = HFConfig.from_folder(config.model_path("actor"))
        self.reset()

    def reset(self) -> None:
        """Forget the work so far."""
        self._sampled = self._trained = 0
        self._flops = 0.0

    def rollout(self, samples: Batch) -> None:
        self._sampled += int(samples.values("loss_mask").sum())

    def update(self, batch: Batch) -> None:
        lengths = batch.lengths().tolist()
        self._trained += sum(lengths)
        self._flops += training_flops(self._hf, lengths)

    def finish(self, seconds: dict[str, float]) -> dict[str, float | None]:
        """perf/* of the step from the phases' seconds: sampled tokens for the rollout, prompt and response for the update."""
        known = gpu()
        metrics: dict[str, float | None] = {"perf/mfu": None}
        for name, phase, tokens in (("rollout", "rollout", self._sampled), ("update", "update", self._trained)):
            if seconds.get(phase):
                metrics[f"perf/{name}_tokens_per_second_per_gpu"] = tokens / seconds[phase] / self._ranks
        if seconds.get("step"):
            metrics["perf/step_tokens_per_second_per_gpu"] = self._trained / seconds["step"] / self._ranks
        if known and seconds.get("update"):
            metrics["perf/mfu"] = self._flops / seconds["update"] / self._ranks / known.bf16_flops
        self.reset()
        return metrics
