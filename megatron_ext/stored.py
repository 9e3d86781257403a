"""Names in a role's part of a checkpoint, for those who write it (checkpoint.py) and for those who only read (offline.py)."""

import json
from pathlib import Path

ABOUT = "role.json"  # beside the tensors: how many updates, which layout
WEIGHTS = "weights"  # prefix of the weights' HF names


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the folder."""


def read_about(folder: str | Path) -> dict:
    """Of a role's folder: `updates` of its optimizer (None: weights only) and its `layout`."""
    path = Path(folder) / ABOUT
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a role's part of a checkpoint: it has no {ABOUT}")
    return json.loads(path.read_text())
