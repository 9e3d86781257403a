"""What hardware and libraries make of their peaks: a few coefficients, measured on H200s by default, and fitting them to runs.

The file of `hybridflow plan --calibration FILE` is a JSON object of `Calibration`'s fields; what is left out keeps its default.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridflow.config.schema import ConfigError

GIB = 1 << 30
MOST = 1e15  # of a coefficient: no forecast overflows


@dataclass(frozen=True)
class Calibration:
    """Shares are of the peaks in hardware.py.

    A matrix product's share of the peak falls with its size. That is modelled as `matrix`, the share of large ones, and a
    constant time per layer, `layer_seconds`, in which kernels are launched, fill the GPU and drain.

    `matrix`, `layer_seconds` and `optimizer` are fitted to the TP2 runs, and to them only, of a 7.6B model on two H200s
    (benchmarks/results/h200x2/update_tp2.json); the wire's to NCCL all-gathers of 16 MiB to 2 GiB there; `decode_memory` to 128
    sequences of that model on one of them (h200x2/rollout_one_gpu.json), Python's seconds of decoding to 512 of a small one
    (smollm2_h200_step.json); those of waking, releasing, resharding, eager decoding, `engine_bytes` and `fixed_bytes` to whole
    jobs in benchmarks/results/. `experts`, `attention`, `memory`, `network`, `host_link` and `decode_transfer_seconds` are
    assumptions as yet.
    """

    matrix: float = 0.887  # share of bf16 peak of matrix products
    experts: float = 0.6  # share of it that products grouped by expert reach
    attention: float = 0.5  # share of bf16 peak of flash attention, whose causal half alone is computed
    memory: float = 0.85  # share of the memory bandwidth that element-wise kernels reach
    layer_seconds: float = 0.84e-3  # of a layer's forward pass beside its work; a backward pass has twice that
    optimizer: float = 0.757  # share of the memory bandwidth of an optimizer step
    wire: float = 0.82  # share of the wire of a collective between GPUs of a node
    network: float = 0.8  # share of the network of one between nodes
    transfer_seconds: float = 50e-6  # of a transfer or collective, beside its bytes
    decode_memory: float = 0.56  # share of the memory bandwidth at which decoding reads weights and KV cache
    decode_seconds: float = 3.2e-3  # of Python in a decode step with CUDA graphs: scheduling, the results of the step before
    decode_sequence_seconds: float = 4e-6  # of Python for each sequence in it
    decode_transfer_seconds: float = 15e-6  # of one of its all-reduces
    eager_layer_seconds: float = 1.1e-3  # of Python for a layer in a decode step without CUDA graphs
    reshard: float = 0.65  # share of the bound's speed
    wake_seconds: float = 0.17  # of mapping weights and KV cache
    wake_seconds_per_gib: float = 4.4e-3  # of weights
    sleep_seconds: float = 0.07
    release_seconds_per_gib: float = 4.8e-3  # of training's memory that leaves for the engine and comes back
    host_link: float = 45e9  # bytes a second between a GPU and page-locked host memory
    engine_bytes: float = 2.5 * GIB  # of an engine's share of a GPU, for activations and CUDA graphs: not for its KV cache
    fixed_bytes: float = 7.8 * GIB  # CUDA contexts, communicators, workspaces, what a sleeping engine keeps

    @classmethod
    def read(cls, path: str | Path) -> "Calibration":
        """The calibration that `write` wrote.

        Raises:
            ConfigError: no such file, or not a calibration; names the key.
        """
        if not Path(path).is_file():
            raise ConfigError(f"--calibration {path}: no such file: write one with --calibrate RESULTS.json --save FILE")
        try:
            values = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--calibration {path} is not valid JSON: {error}") from error
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict):
            raise ConfigError(f"--calibration {path} holds a {type(values).__name__}: give an object with {', '.join(names)}")
        for name, value in values.items():
            if name not in names:
                raise ConfigError(
                    f"--calibration {path}: unknown key {name}, of another version perhaps, which is to be fitted again: use"
                    f" {', '.join(names)}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST:
                raise ConfigError(f"--calibration {path}: {name}={value!r:.40} is not a number above 0 and below {MOST:g}")
        return cls(**values)

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


# How far the fit trusts the coefficients that it starts from, against a run's error of 100%: what runs say nothing of stays.
TRUST = 0.03
ROUNDS = 30


def fit(
    start: Calibration, names: Sequence[str], predict: Callable[[Calibration], np.ndarray], measured: np.ndarray
) -> Calibration:
    """The coefficients `names` for which predictions come closest to what was measured, all others as in `start`.

    Least squares in logarithms by Gauss-Newton steps: sum of log(predicted / measured)^2 + TRUST^2 log(coefficient / start)^2,
    so that an error of 10% counts alike in all runs and a coefficient that no run depends on stays as it was.

    Args:
        predict: a calibration -> seconds or bytes of every run [R], above 0.
        measured: [R].
    """
    begin = np.log([getattr(start, name) for name in names])
    point = begin.copy()

    def residuals(at: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(at).tolist(), strict=True))
        found = predict(dataclasses.replace(start, **values))
        return np.concatenate([np.log(found / measured), TRUST * (at - begin)])

    now = residuals(point)
    for _ in range(ROUNDS):
        step = 1e-4
        columns = [(residuals(point + step * unit) - now) / step for unit in np.eye(len(names))]
        move = np.linalg.lstsq(np.stack(columns, 1), -now, rcond=None)[0]
        move *= min(1.0, 1.0 / max(1e-12, float(np.abs(move).max())))  # at most a factor of e at once
        while (after := residuals(point + move)) @ after > now @ now and np.abs(move).max() > 1e-6:
            move /= 2
        point, now = point + move, after
        if np.abs(move).max() < 1e-5:
            break
    return dataclasses.replace(start, **dict(zip(names, np.exp(point).tolist(), strict=True)))
