"""Measured runs in the JSON that benchmarks write, and the calibration that fits them.

`{"results": {"runs": [...]}}`, where a run is one of

    {"phase": "update", "gpu": "H200", "model": {config.json's fields},
     "layout": {"ranks": 2, "tp": 2, "sequence_parallel": true},
     "micro_batches": 8, "lengths": [2048, 1024, 1024], "seconds": 1.94, "peak_bytes": 79456894976}
    {"phase": "forward", ...}     the same without backward; "head": "value" for a value model
    {"phase": "rollout", "gpu": "H200", "model": {...}, "tp": 2, "samples": 64, "prompts": 16, "prompt_tokens": 6,
     "response_tokens": 64, "memory_bytes": 45097156608, "seconds": 2.29}

`gpu`: a name that `hardware.py` knows, or the fields of its `GPU` for a device that it does not. `lengths`: of the sequences in
each micro-batch of a data-parallel rank. `seconds`: of the whole pass over all micro-batches; an update's with its optimizer
step unless "optimizer": false, which had no optimizer states either. `samples`, `prompts`: of one engine; `memory_bytes`: of a
rank, for weights and KV cache. Optional: "recompute" (none), "dtype" (bfloat16), "gpus_per_node" (all ranks), "max_num_seqs",
"eager", "note" (what was tried, for a reader); of `layout` also pp, vpp, ep, etp and "stages", the layers of every chunk.
"peak_bytes" is the most that torch had allocated, or with "memory": "device" that was in use on the device. Also read: the rows
of benchmarks/reshard.py.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.config.schema import ConfigError
from hybridflow.planner import counts
from hybridflow.planner.calibration import Calibration, fit
from hybridflow.planner.counts import ITEMSIZE
from hybridflow.planner.generation import DEFAULT_SEQUENCES, EngineTask, rollout
from hybridflow.planner.hardware import GPU, Cluster, named
from hybridflow.planner.memory import engine_elements
from hybridflow.planner.passes import Machine, Micro, Pass, Task, forward_pass, update_pass
from megatron_ext.hf_config import HFConfig, UnsupportedModel
from megatron_ext.layout import Layout, Split

# What the runs of a phase say something about.
_FITTED = {
    "update": ("matrix", "layer_seconds", "optimizer"),
    "forward": ("matrix", "layer_seconds"),
    "rollout": ("decode_memory", "decode_seconds"),
    "eager rollout": ("decode_memory", "eager_layer_seconds"),
    "reshard": ("reshard",),
}


@dataclass(frozen=True)
class Run:
    """`predict`: a calibration -> seconds; `memory`: likewise bytes, None where the run measured none. `work`: equal for runs
    that do the same, whatever their layout."""

    name: str
    phase: str
    seconds: float
    predict: Callable[[Calibration], float]
    peak_bytes: float = 0.0
    memory: Callable[[Calibration], float] | None = None
    work: tuple = ()


def calibrate(start: Calibration, runs: Sequence[Run]) -> Calibration:
    """The coefficients that these runs depend on, fitted to their seconds."""
    names = list(dict.fromkeys(name for run in runs for name in _FITTED[run.phase]))

    def predict(calibration: Calibration) -> np.ndarray:
        return np.array([run.predict(calibration) for run in runs])

    return fit(start, names, predict, np.array([run.seconds for run in runs]))


def read_runs(path: str | Path, option: str = "--calibrate") -> list[Run]:
    """The runs of a result file, which the user gave by `option`.

    Raises:
        ConfigError: no such file, no runs in it, or a run that lacks a field; names them.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{option} {path}: no such file")
    try:
        results = json.loads(Path(path).read_text())["results"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{option} {path} is not a benchmark's JSON with `results`: {error!r}") from error
    rows = results.get("runs") or results.get("rows") or [] if isinstance(results, dict) else []
    if not isinstance(rows, list):
        raise ConfigError(f"{option} {path} holds a {type(rows).__name__} of runs: give a list")
    runs = [_read(row, f"{option} {path}: run {number}") for number, row in enumerate(rows)]
    if not runs:
        raise ConfigError(f"{option} {path} has neither results.runs nor benchmarks/reshard.py's results.rows")
    return runs


def _read(row: dict[str, Any], where: str) -> Run:
    readers = {"update": _training, "forward": _training, "rollout": _generation, "reshard": _resharding}
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is {row!r:.60}: give an object with the fields that planner/records.py lists")
    phase = row.get("phase") or ("reshard" if "bound_seconds" in row else None)
    if not isinstance(phase, str) or phase not in readers:
        raise ConfigError(f"{where} has phase={phase!r}: use one of {', '.join(readers)}")
    try:
        run = readers[phase](row)
        seconds = run.seconds, run.predict(Calibration())
        if not all(math.isfinite(value) and value > 0 for value in seconds):
            raise ValueError(f"measured {seconds[0]} s, predicted {seconds[1]} s: both must be above 0")
        return run
    except KeyError as error:
        raise ConfigError(f"{where} lacks the field {error.args[0]}: planner/records.py lists what a run has") from error
    except (UnsupportedModel, ValueError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error


def _training(row: dict[str, Any]) -> Run:
    hf = HFConfig.from_dict(row["model"], head=row.get("head", "lm"))
    fields = {name: value for name, value in row["layout"].items() if name not in ("ranks", "stages")}
    layout = Layout(row["layout"]["ranks"], split=Split(tuple(row["layout"].get("stages", ()))), **fields)
    lengths, itemsize = row["lengths"], ITEMSIZE[row.get("dtype", "bfloat16")]
    micro = Micro(sum(lengths), sum(length * length for length in lengths))
    task = Task(hf, layout, micro, row["micro_batches"], itemsize, row.get("recompute", "none"))
    cluster = _cluster(row, layout.world_size)
    update, optimizer = row["phase"] == "update", row.get("optimizer", True)

    def passed(calibration: Calibration) -> Pass:
        machine = Machine(cluster, calibration)
        return update_pass(machine, task, optimizer) if update else forward_pass(machine, task)

    def memory(calibration: Calibration) -> float:
        fixed = calibration.fixed_bytes if row.get("memory") == "device" else 0.0
        return fixed + peak(task, passed(calibration).activations, update, optimizer)

    name = f"{row['phase']} {layout.describe()} {task.micro_batches} x {micro.tokens}"
    name += f" {task.recompute} recomputed" if task.recompute != "none" else ""
    name += "" if optimizer else " without optimizer"
    name += f", {row['note']}" if row.get("note") else ""
    measured, passes = row.get("peak_bytes", 0.0), layout.dp * task.micro_batches
    device = cluster.gpu.name, layout.world_size
    work = row["phase"], optimizer, hf, itemsize, *device, passes * micro.tokens, passes * micro.squares
    seconds, predicted = row["seconds"], lambda calibration: passed(calibration).seconds
    return Run(name, row["phase"], seconds, predicted, measured, memory if measured else None, work)


def peak(task: Task, activations: Sequence[float], trained: bool, optimizer: bool = True) -> float:
    """Bytes on the fullest stage of a role alone on its GPUs: what torch allocates."""
    layout = task.layout
    found = []
    for held, added in zip(counts.stage_elements(task.hf, layout), activations, strict=True):
        static = task.itemsize * held.all
        if trained:
            shard = held.dense / (layout.dp * layout.cp) + held.experts / layout.edp
            static += 4 * held.all + ((12 if task.itemsize == 2 else 8) * shard if optimizer else 0)
        found.append(static + added)
    return max(found)


def _generation(row: dict[str, Any]) -> Run:
    hf, tp, itemsize = HFConfig.from_dict(row["model"]), row["tp"], ITEMSIZE[row.get("dtype", "bfloat16")]
    eager = bool(row.get("eager", False))
    task = EngineTask(
        hf=hf,
        tp=tp,
        samples=row["samples"],
        prompts=row["prompts"],
        prompt_tokens=row["prompt_tokens"],
        response_tokens=row["response_tokens"],
        memory=row["memory_bytes"],
        weights=itemsize * engine_elements(hf, tp),
        itemsize=itemsize,
        max_sequences=row.get("max_num_seqs", DEFAULT_SEQUENCES),
        eager=eager,
    )
    cluster = _cluster(row, tp)
    return Run(
        f"rollout TP{tp} {task.samples} x {task.response_tokens:g}",
        "eager rollout" if eager else "rollout",
        row["seconds"],
        lambda calibration: sum(rollout(Machine(cluster, calibration), task).values()),
    )


def _resharding(row: dict[str, Any]) -> Run:
    name = f"reshard {row['training']} to {row['rollout']}"
    return Run(name, "reshard", row["seconds"]["median"], lambda calibration: row["bound_seconds"] / calibration.reshard)


def _cluster(row: dict[str, Any], ranks: int) -> Cluster:
    per_node = row.get("gpus_per_node", ranks)
    device = row["gpu"]
    return Cluster(GPU(**device) if isinstance(device, dict) else named(device), -(-ranks // per_node), per_node)
