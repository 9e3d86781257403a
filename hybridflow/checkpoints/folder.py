"""Folders of checkpoints: when one is whole, which are there, which go. No torch: `hybridflow train` looks before it starts.

A checkpoint is written under a name of its own that begins with a dot (`.step-20.partial`), and renamed when it is complete and
on disk. `complete.json` is written last: the size of every file, and what the checkpoint is worth.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPLETE = "complete.json"
_MARKER = {"step": int, "roles": list, "score": int | float | None, "score_of": str, "files": dict}
_NAME = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"\.step-\d+\.partial")


class BrokenCheckpoint(ValueError):
    """A folder is no whole checkpoint; the message says what is missing."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole one. `score`: what it was judged by (`score_of`: reward/mean of its step, or the accuracy of its evaluation)."""

    path: Path
    step: int
    score: float | None
    score_of: str
    roles: tuple[str, ...]


def partial_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step is written."""
    return checkpoints / f".step-{step}.partial"


def whole_folder(checkpoints: Path, step: int) -> Path:
    """Its name once it is whole."""
    return checkpoints / f"step-{step}"


def complete(partial: Path, whole: Path, step: int, roles: list[str], score: float | None, score_of: str) -> Checkpoint:
    """Make a folder that holds everything a whole checkpoint, down to the disk. Tensor files were synced by their writers."""
    files = {str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()}
    about = {"step": step, "roles": roles, "score": score, "score_of": score_of, "files": files}
    (partial / COMPLETE).write_text(json.dumps(about, indent=2) + "\n")
    for path in [*partial.rglob("*"), partial]:
        if path.suffix != ".distcp":
            _sync(path)
    partial.rename(whole)
    _sync(whole.parent)
    return inspect(whole)


def inspect(path: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        BrokenCheckpoint: the marker is missing or damaged, or a file is missing or has another size.
    """
    try:
        about = json.loads((path / COMPLETE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenCheckpoint(f"{path} has no {COMPLETE}: it was not written to its end") from None
    except ValueError as error:
        raise BrokenCheckpoint(f"{path / COMPLETE} is not valid JSON: {error}") from error
    for key, kind in _MARKER.items():
        if not isinstance(about, dict) or not isinstance(about.get(key), kind):
            raise BrokenCheckpoint(f"{path / COMPLETE} says nothing of {key}: it is damaged")
    if not about["roles"]:
        raise BrokenCheckpoint(f"{path / COMPLETE} names no role: it is damaged")
    for name, size in about["files"].items():
        file = path / name
        if not file.is_file():
            raise BrokenCheckpoint(f"{path}: {name} is missing")
        if file.stat().st_size != size:
            raise BrokenCheckpoint(f"{path}: {name} has {file.stat().st_size} bytes, not {size}")
    return Checkpoint(path, about["step"], about["score"], about["score_of"], tuple(about["roles"]))


def find(checkpoints: Path) -> tuple[list[Checkpoint], list[str]]:
    """The whole checkpoints of a run, newest first, and what is wrong with the other folders there."""
    whole, broken = [], []
    for path in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else ():
        if _PARTIAL.fullmatch(path.name):
            broken.append(f"{path} was not written to its end")
        elif _NAME.fullmatch(path.name):
            try:
                whole.append(inspect(path))
            except BrokenCheckpoint as error:
                broken.append(str(error))
    return sorted(whole, key=lambda checkpoint: -checkpoint.step), broken


def remove_others(checkpoints: Path, step: int) -> None:
    """Before a run goes on from the checkpoint of `step`: what is half-written, and what lies after that step."""
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        number = _NAME.fullmatch(path.name)
        if _PARTIAL.fullmatch(path.name) or (number and int(number[1]) > step):
            shutil.rmtree(path)


def prune(checkpoints: Path, keep: int, keep_best: bool) -> None:
    """Delete all but the newest `keep` (0: none is deleted) and, with `keep_best`, the one with the highest score of the kind
    that the newest has."""
    whole, _ = find(checkpoints)
    if not keep or not whole:
        return
    kept = {checkpoint.path for checkpoint in whole[:keep]}
    best = best_of(whole)
    if keep_best and best:
        kept.add(best.path)
    for checkpoint in whole:
        if checkpoint.path not in kept:
            # first its marker, so that one that is half deleted is not taken for whole
            (checkpoint.path / COMPLETE).unlink()
            shutil.rmtree(checkpoint.path)


def best_of(whole: list[Checkpoint]) -> Checkpoint | None:
    """The one with the highest score, the newest of equals; `whole` is newest first."""
    judged = [c for c in whole if c.score is not None and c.score_of == whole[0].score_of]
    return max(judged, key=lambda checkpoint: checkpoint.score, default=None)


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the driver knew: `run.json`."""
    return json.loads((checkpoint.path / "run.json").read_text())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
