"""Timed passes and rollouts in the form that the planner is calibrated on (hybridflow/planner/records.py)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hybridflow.planner.hardware import GPU
from hybridflow.planner.hardware import find as known_gpu
from megatron_ext.layout import Layout


def training_run(
    phase: str,
    device: GPU,
    fields: dict[str, Any],
    layout: Layout,
    micro_batches: int,
    lengths: Sequence[int],
    seconds: float,
    *,
    dtype: str,
    recompute: str = "none",
    optimizer: bool = True,
    peak_bytes: float = 0.0,
    note: str = "",
) -> dict[str, Any]:
    """An update, or with `phase` forward a pass without backward.

    Args:
        fields: of the model's config.json.
        micro_batches: of a data-parallel rank, all of them with sequences of these `lengths`.
        peak_bytes: that torch had allocated for weights, gradients, activations and with `optimizer` its states; of a forward
            pass for weights and activations. 0: not measured.
    """
    names = ("tp", "pp", "vpp", "ep", "etp")
    sizes: dict[str, Any] = {"ranks": layout.world_size} | {n: getattr(layout, n) for n in names if getattr(layout, n) > 1}
    if layout.sequence_parallel:
        sizes["sequence_parallel"] = True
    if layout.pp > 1:
        stages = layout.stage_layers(fields["num_hidden_layers"])
        sizes["stages"] = [len(stage[chunk]) for chunk in range(layout.vpp) for stage in stages]
    row = {"phase": phase, "gpu": _device(device), "model": fields, "layout": sizes, "micro_batches": micro_batches}
    row |= {"lengths": list(lengths), "seconds": seconds, "dtype": dtype, "recompute": recompute}
    row |= {} if optimizer or phase != "update" else {"optimizer": False}
    row |= {"peak_bytes": peak_bytes} if peak_bytes else {}
    return row | ({"note": note} if note else {})


def rollout_run(
    device: GPU, fields: dict[str, Any], tp: int, samples: int, prompt_tokens: int, response_tokens: int, **measured: Any
) -> dict[str, Any]:
    """One engine's rollout of `samples` prompts, each answered once; `measured`: seconds, memory_bytes, dtype, ..."""
    row = {"phase": "rollout", "gpu": _device(device), "model": fields, "tp": tp, "samples": samples, "prompts": samples}
    return row | {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens} | measured


def _device(device: GPU) -> str | dict[str, Any]:
    known = known_gpu(device.name)
    return known.name if known else asdict(device)
