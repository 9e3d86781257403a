"""Updates that were skipped since loss or gradient was NaN or infinite: too many in a row end the run, their batch kept.

batch = load_batch("runs/example/skipped/step-3-actor.safetensors")         # to look at it, or to update on it again
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hybridflow.batch import Batch
from hybridflow.writing import writing

_LENGTHS = ".lengths"  # of a ragged field, beside its values


class TooManySkipped(RuntimeError):
    """Nothing is learnt any more."""


class Skipped:
    """Counts the skipped updates in a row of each role; `limit` of them end the run, 0: never."""

    def __init__(self, limit: int, folder: Path):
        self._limit, self._folder = limit, folder
        self._in_a_row: dict[str, int] = {}

    def look(self, role: str, skipped: bool, grad_norm: float, batch: Batch, step: int) -> None:
        """After every update.

        Raises:
            TooManySkipped: naming the file that holds the batch.
        """
        self._in_a_row[role] = self._in_a_row.get(role, 0) + 1 if skipped else 0
        if not self._limit or self._in_a_row[role] < self._limit:
            return
        path = self._folder / f"step-{step}-{role}.safetensors"
        save_batch(batch, path)
        raise TooManySkipped(
            f"{self._in_a_row[role]} updates of the {role} in a row were skipped (run.max_skipped={self._limit}), the last with"
            f" a gradient norm of {grad_norm}; its batch is in {path}: lower roles.{role}.optimizer.lr, or look at rewards and"
            " log-probs in that batch"
        )


def save_batch(batch: Batch, path: Path) -> None:
    """All fields as they are; a ragged one as its values and, under NAME.lengths, the elements of each sequence."""
    tensors: dict[str, torch.Tensor] = {}
    for name in batch.names:
        if batch[name].is_nested:
            tensors |= {name: batch.values(name).contiguous(), name + _LENGTHS: batch.lengths(name)}
        else:
            tensors[name] = batch[name].contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        save_file(tensors, path)


def load_batch(path: str | Path) -> Batch:
    """What `save_batch` wrote."""
    tensors = load_file(path)
    names = [name for name in tensors if not name.endswith(_LENGTHS)]
    lengths = {name: tensors[name + _LENGTHS].tolist() for name in names if name + _LENGTHS in tensors}
    return Batch({name: tensors[name].split(lengths[name]) if name in lengths else tensors[name] for name in names})
