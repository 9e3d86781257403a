"""The numbers and texts of a report beside its curves: facts, phases, memory, responses, configuration, versions."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from hybridflow.config.load import flat
from hybridflow.config.schema import Config
from hybridflow.metrics.console import duration
from hybridflow.metrics.summary import FIRST, LAST
from hybridflow.report.charts import GIB, MEMORY
from hybridflow.report.folder import RunRecord

MOST_PROBLEMS, MOST_PROMPTS = 8, 4  # of an evaluation and of a step that are shown
MOST_CHARACTERS = 2000  # of a prompt or response
ABSENT = "–"


@dataclass
class Fact:
    """A row of numbers by run. `change`: from the first to the second, where there are two."""

    label: str
    values: list[str]
    details: list[str]
    change: str = ""


def origin(run: RunRecord) -> list[str]:
    """How the run ended, when and where it ran, and what it is, as far as it is known."""
    versions, config = run.versions, flat(run.config)
    commit = versions.get("commit")
    started = str(versions.get("started") or "")[:16].replace("T", " ")
    known = [f"started {started} UTC" if started else None, _hardware(versions)]
    known += [config.get("algorithm.name"), config.get("model.path")]
    known.append(f"commit {str(commit)[:12]}" if commit else None)
    return [run.state, *(str(fact) for fact in known if fact)]


def facts(runs: Sequence[RunRecord]) -> list[Fact]:
    found = [
        _fact(runs, "Reward", _reward, _difference),
        _fact(runs, "Greedy accuracy", _accuracy, _difference),
        _fact(runs, "Seconds a step", _step_seconds, _ratio),
        _fact(runs, "Tokens/s per GPU (rank)", _speed, _ratio),
        _fact(runs, "Pipeline bubble", _bubble, _points),
        _fact(runs, "vLLM against Megatron", _mismatch, _ratio),
        _fact(runs, "Most memory of a rank", _memory, _ratio),
        _fact(runs, "Resharding, bit by bit", _verified, None),
    ]
    return [fact for fact in found if any(value != ABSENT for value in fact.values)]


Measured = tuple[float | None, str, str]  # a number to compare, how it is shown, what it is


def _fact(
    runs: Sequence[RunRecord],
    label: str,
    measure: Callable[[RunRecord], Measured],
    change: Callable[[float, float], str] | None,
) -> Fact:
    measured = [measure(run) for run in runs]
    numbers = [number for number, _, _ in measured]
    told = change(*numbers) if change and len(runs) == 2 and None not in numbers else ""
    return Fact(label, [value for _, value, _ in measured], [detail for _, _, detail in measured], told)


def _difference(first: float, second: float) -> str:
    return f"{second - first:+.3f}"


def _points(first: float, second: float) -> str:
    return f"{100 * (second - first):+.1f} points"


def _ratio(first: float, second: float) -> str:
    return f"× {second / first:.3g}" if first else ""


NOTHING = (None, ABSENT, "not measured")


def _reward(run: RunRecord) -> Measured:
    first, last = run.values["reward_first"], run.values["reward_last"]
    if first is None:
        return NOTHING
    return last, f"{first:.3f} → {last:.3f}", f"first {min(FIRST, run.steps)}, last {min(LAST, run.steps)} steps"


def _accuracy(run: RunRecord) -> Measured:
    before, after = run.values["accuracy_before"], run.values["accuracy_after"]
    if before is None:
        return NOTHING
    problems = f"{run.values['evaluation_problems']} held-out problems"
    if after is None:
        return before, f"{before:.3f}", f"{problems}, measured once"
    return after, f"{before:.3f} → {after:.3f}", problems


def _step_seconds(run: RunRecord) -> Measured:
    seconds = run.values["step_seconds_median"]
    if seconds is None:
        return NOTHING
    whole = run.values["seconds"]  # as summary.json has it
    in_all = f"; {duration(whole)} in all" if isinstance(whole, int | float) and math.isfinite(whole) else ""
    return seconds, f"{seconds:.3g} s", "median" + in_all


def _speed(run: RunRecord) -> Measured:
    found = [value for _, value in run.metrics.points("perf/step_tokens_per_second_per_gpu")]
    if not found:
        return NOTHING
    return statistics.median(found), f"{statistics.median(found):,.0f}", "prompt and response, median of whole steps"


def _bubble(run: RunRecord) -> Measured:
    found = [value for _, value in run.metrics.points("pipeline/bubble_mean")]
    if not found:
        return None, ABSENT, "run.profile=true measures it"
    return statistics.median(found), f"{statistics.median(found):.1%}", "mean stage, median of steps"


def _mismatch(run: RunRecord) -> Measured:
    found = [value for _, value in run.metrics.points("mismatch/log_prob_abs_mean")]
    return (max(found), f"{max(found):.2g}", "nats a token, worst step's mean") if found else NOTHING


def _memory(run: RunRecord) -> Measured:
    peaks = run.values["memory_peak_bytes"]
    if not peaks:
        return NOTHING
    phase = max(peaks, key=peaks.get)
    return peaks[phase], f"{peaks[phase] / GIB:.2f} GiB", f"phase {phase}"


def _verified(run: RunRecord) -> Measured:
    found = run.metrics.points("reshard/verified")
    if not found:
        return NOTHING
    equal = sum(bool(value) for _, value in found)
    return equal, f"{equal} of {len(found)} equal", "resharded weights against their source"


@dataclass
class Row:
    """Cells by run, each a text, and for a bar its share of the longest."""

    name: str
    cells: list[list[str]]
    bars: list[float] = field(default_factory=list)


def phase_rows(runs: Sequence[RunRecord], shown: Sequence[str]) -> list[Row]:
    """Median seconds and share of all steps' time by phase."""
    rows = []
    for name in [*shown, "step"]:
        cells = []
        for run in runs:
            found = [value for _, value in run.metrics.points(f"time/{name}")]
            share = run.values["time_shares"].get(name)
            cells.append([f"{statistics.median(found):.3g}" if found else ABSENT, "" if share is None else f"{share:.1%}"])
        rows.append(Row("whole step" if name == "step" else name, cells))
    return rows


def memory_rows(runs: Sequence[RunRecord]) -> list[Row]:
    """GiB by phase, in the order of a step: the most of all steps, step 3's (or the first after it), the last one's."""
    names = dict.fromkeys(name for run in runs for name in run.metrics.names() if name.startswith(MEMORY))
    longest = max((peak for run in runs for peak in run.values["memory_peak_bytes"].values()), default=0)
    rows = []
    for name in names:
        cells, bars = [], []
        for run in runs:
            points = run.metrics.points(name)
            most = max((value for _, value in points), default=0)
            third = next((value for step, value in points if step >= 3), None)
            shown = [most, third, points[-1][1]] if points else [None] * 3
            cells.append([ABSENT if value is None else f"{value / GIB:.2f}" for value in shown])
            bars.append(most / longest if longest else 0.0)
        rows.append(Row(name.removeprefix(MEMORY), cells, bars))
    return rows


@dataclass
class Answered:
    """A problem of the evaluation, and the run's greedy answers to it."""

    prompt: str
    answer: str
    before: tuple[str, float | None]
    after: tuple[str, float | None]


@dataclass
class Responses:
    """What a run said first and last. `better`, `worse`, `same`: problems of the evaluation by their reward's change."""

    evaluation_steps: tuple[int, int] | None
    answered: list[Answered]
    better: int
    worse: int
    same: int
    train: list[tuple[int, list[dict[str, Any]]]]


def responses(run: RunRecord) -> Responses:
    first, last = run.samples.first.get("evaluation"), run.samples.last.get("evaluation")
    pairs = []
    if first and last and first[0] != last[0]:
        before = {_key(row): row for row in first[1]}
        pairs = [(before[_key(row)], row) for row in last[1] if _key(row) in before]
    changes = [(_number(b.get("reward")) or 0.0) - (_number(a.get("reward")) or 0.0) for a, b in pairs]
    answered = [Answered(_clip(b.get("prompt")), _clip(b.get("answer")), _said(a), _said(b)) for a, b in pairs[:MOST_PROBLEMS]]
    train = [ends["train"] for ends in (run.samples.first, run.samples.last) if "train" in ends]
    if len(train) == 2 and train[0][0] == train[1][0]:
        train = train[:1]
    return Responses(
        (first[0], last[0]) if pairs else None,
        answered,
        sum(change > 0 for change in changes),
        sum(change < 0 for change in changes),
        sum(change == 0 for change in changes),
        [(step, _of_several_prompts(rows)) for step, rows in train],
    )


def _of_several_prompts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first response to each of the first prompts."""
    by_prompt: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_prompt.setdefault(_key(row), row)
    chosen = list(by_prompt.values())[:MOST_PROMPTS]
    return [{"prompt": _clip(row.get("prompt")), "answer": _clip(row.get("answer")), "said": _said(row)} for row in chosen]


def _key(row: dict[str, Any]) -> str:
    return str(row.get("prompt_tokens") or row.get("prompt"))


def _said(row: dict[str, Any]) -> tuple[str, float | None]:
    return _clip(row.get("response")), _number(row.get("reward"))


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _clip(value: Any) -> str:
    text = "" if value is None else str(value)
    over = len(text) - MOST_CHARACTERS
    return text if over <= 0 else f"{text[:MOST_CHARACTERS]} … ({over:,} more characters)"


def config_rows(runs: Sequence[RunRecord]) -> list[Row]:
    """Of one run the keys that are not at their default, with it; of two those that differ."""
    configs = [flat(run.config) for run in runs]
    if len(runs) == 1:
        configs.append(flat(OmegaConf.to_container(OmegaConf.structured(Config))))
    keys = dict.fromkeys(key for one in configs for key in one)
    chosen = [key for key in keys if configs[0].get(key, ABSENT) != configs[1].get(key, ABSENT)]
    if len(runs) == 1:
        chosen = [key for key in chosen if key in configs[0]]
    return [Row(key, [[_value(one.get(key, ABSENT))] for one in configs]) for key in chosen]


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return {"???": "(none)", "": '""'}.get(value, str(value)) if isinstance(value, str) else str(value)


def version_rows(runs: Sequence[RunRecord]) -> list[Row]:
    """Commit, hardware and libraries; those that no run has are left out."""
    tables = []
    for run in runs:
        versions = run.versions.get("versions")
        own = {name: run.versions.get(name) for name in ("started", "host", "commit")}
        own["hardware"] = _hardware(run.versions)
        tables.append(own | (versions if isinstance(versions, dict) else {}))
    names = dict.fromkeys(name for table in tables for name, value in table.items() if value)
    return [Row(name, [[str(table.get(name) or ABSENT)] for table in tables]) for name in names]


def _hardware(versions: dict[str, Any]) -> str:
    found = versions.get("hardware")
    names = [str(name) for name in found] if isinstance(found, list) else []
    return ", ".join(f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names))
