"""A run's folder as a report sees it: whatever can be read, and in words what cannot.

A run that was killed in the middle, or that still goes on, is read as far as it has come.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.run_folder import SIGNS_OF_A_RUN
from hybridflow.config.schema import ConfigError
from hybridflow.metrics.summary import Evaluation, History, summarize

SHOWN = 5  # numbers of lines or steps that a note names
_STEP_AND_KIND = re.compile(rb'"step": (\d+), "kind": "(\w+)"')  # of a line as the recorder writes it


@dataclass
class Rows:
    """A JSONL file's lines with their finite numbers, by step. `not_finite`: the steps where a name's was NaN or infinite."""

    rows: list[dict[str, float]] = field(default_factory=list)
    not_finite: dict[str, list[int]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Every name that has a number, in the order of the lines."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(int(row["step"]), row[name]) for row in self.rows if name in row]


@dataclass
class Samples:
    """Responses of the first and of the last step that has some, each with its step, by kind: train, evaluation."""

    first: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    last: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)


@dataclass
class RunRecord:
    """`notes`: what could not be read, or is not what it should be. `values`: as `metrics.summary` has them."""

    folder: Path
    name: str
    state: str
    metrics: Rows
    warm_start: Rows
    evaluations: Rows
    samples: Samples
    config: dict[str, Any]
    texts: dict[str, str]  # config.yaml, placement.txt; empty: not there
    versions: dict[str, Any]
    values: dict[str, Any]
    notes: list[str]

    @property
    def steps(self) -> int:
        return len(self.metrics.rows)


def read_run(folder: Path) -> RunRecord:
    """Raises ConfigError: the folder is not there, or holds no run."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give that of a run, such as runs/quickstart")
    if not any((folder / name).exists() for name in SIGNS_OF_A_RUN):
        within = sorted({str(path.parent) for path in folder.glob("*/config.yaml")})
        hint = f"; {', '.join(within[:SHOWN])} hold one" if within else ""
        raise ConfigError(f"{folder} holds no run (none of {', '.join(SIGNS_OF_A_RUN)} is there){hint}")
    notes: list[str] = []
    metrics, warm_start, evaluations = (
        _rows(folder / f"{name}.jsonl", notes) for name in ("metrics", "warm_start", "evaluation")
    )
    texts = {name: _text(folder / name) for name in ("config.yaml", "placement.txt")}
    config = _mapping("config.yaml", texts["config.yaml"], yaml.safe_load, notes)
    versions = _mapping("versions.json", _text(folder / "versions.json"), json.loads, notes)
    summary = _mapping("summary.json", _text(folder / "summary.json"), json.loads, notes)
    return RunRecord(
        folder=folder,
        name=folder.resolve().name,
        state=_state(summary, len(metrics.rows), config),
        metrics=metrics,
        warm_start=warm_start,
        evaluations=evaluations,
        samples=_samples(folder / "samples.jsonl", notes),
        config=config,
        texts=texts,
        versions=versions,
        values=_values(folder, metrics, evaluations) | {"seconds": summary.get("seconds")},
        notes=notes,
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _mapping(name: str, text: str, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = parse(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{name} cannot be read: {str(error).splitlines()[0]}")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{name} holds a {type(found).__name__} instead of keys and values")
        return {}
    return found


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, bytes]]:
    """The whole lines with their numbers; one that is cut off at the end is noted."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line
            else:
                notes.append(f"{path.name}: the last line (line {number}) is cut off and was left out")


def _object(line: bytes) -> dict[str, Any] | None:
    """A line's object, which must have a step; None where it has none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int else None


def _rows(path: Path, notes: list[str]) -> Rows:
    found, strange = Rows(), []
    for number, line in _lines(path, notes):
        row = _object(line)
        if row is None:
            strange.append(number)
            continue
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        found.rows.append({name: value for name, value in numbers.items() if math.isfinite(value)})
        for name, value in numbers.items():
            if not math.isfinite(value):
                found.not_finite.setdefault(name, []).append(row["step"])
    if strange:
        notes.append(f"{path.name}: {_count(strange, 'line')} that no object with a step can be read from: left out")
    for name, steps in found.not_finite.items():
        notes.append(f"{path.name}: {name} is NaN or infinite in {_count(steps, 'step')}")
    found.rows.sort(key=lambda row: row["step"])
    return found


def _count(numbers: list[int], what: str) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    return f"{len(numbers)} {what}{'s' if len(numbers) > 1 else ''} ({shown})"


def _samples(path: Path, notes: list[str]) -> Samples:
    """One pass over the file, which may be long: of the steps between, only step and kind are read."""
    first: dict[str, tuple[int, list[bytes]]] = {}
    last: dict[str, tuple[int, list[bytes]]] = {}
    strange = []
    for number, line in _lines(path, notes):
        quick = _STEP_AND_KIND.search(line, 0, 80)
        row = None if quick else _object(line)
        if not quick and row is None:
            strange.append(number)
            continue
        step, kind = (int(quick[1]), quick[2].decode()) if quick else (row["step"], str(row.get("kind", "train")))
        if first.setdefault(kind, (step, []))[0] == step:
            first[kind][1].append(line)
        if last.setdefault(kind, (step, []))[0] != step:
            last[kind] = (step, [])
        last[kind][1].append(line)
    if strange:
        notes.append(f"{path.name}: {_count(strange, 'line')} that no object with a step can be read from: left out")
    parsed = (
        {kind: (step, [row for line in lines if (row := _object(line))]) for kind, (step, lines) in ends.items()}
        for ends in (first, last)
    )
    return Samples(*parsed)


def _values(folder: Path, metrics: Rows, evaluations: Rows) -> dict[str, Any]:
    history = History(started=0.0, steps=metrics.rows)
    history.evaluations = [
        Evaluation(int(row["step"]), row["accuracy"], int(row.get("problems", 0)), row.get("seconds", 0.0))
        for row in evaluations.rows
        if "accuracy" in row
    ]
    return summarize(history, folder, 0.0).values


def _state(summary: dict[str, Any], steps: int, config: dict[str, Any]) -> str:
    run = config.get("run")
    asked = run.get("steps") if isinstance(run, dict) else None
    count = f"{steps} steps" if asked is None else f"{steps} of {asked} steps"
    if not summary:
        return f"{count}; no summary.json: the run was killed, or it still goes on"
    if summary.get("steps") != steps:
        return f"{count}; summary.json is of {summary.get('steps')}: the run went on after it, and was killed or still goes on"
    if summary.get("stopped_by"):
        return f"{count}; stopped by {summary['stopped_by']}"
    return f"finished: {count}" if asked in (None, steps) else f"ended without an error after {count}"
