"""The closing summary of a run: what was learned, where the time went, what the memory held, where everything is."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.metrics.console import duration
from hybridflow.metrics.stragglers import often_slow

FIRST, LAST = 3, 10  # steps over which the first and the last reward are averaged
PEAKS = 5  # phases whose memory is shown
FILES = (
    ("metrics", "metrics.jsonl"),
    ("samples", "samples.jsonl"),
    ("responses", "rollouts"),
    ("timeline", "timeline"),
    ("plot", "plots/reward.png"),
    ("TensorBoard", "tensorboard"),
    ("trained model", "hf"),
    ("checkpoints", "checkpoints"),
    ("configuration", "config.yaml"),
)


class Evaluation(NamedTuple):
    step: int
    accuracy: float
    problems: int
    seconds: float


@dataclass
class History:
    """What a run has recorded so far."""

    started: float  # time.monotonic()
    steps: list[dict[str, Any]] = field(default_factory=list)
    warm_start: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def rewards(self) -> list[tuple[int, float]]:
        return [(s["step"], s["reward/mean"]) for s in self.steps if s.get("reward/mean") is not None]


class Summary(NamedTuple):
    values: dict[str, Any]
    text: str


def summarize(history: History, folder: Path, now: float, error: BaseException | None = None) -> Summary:
    """`values` for machines (seconds, bytes, shares of the step time) and `text` for people."""
    values = {
        "steps": len(history.steps),
        "seconds": now - history.started,
        "stopped_by": None if error is None else f"{type(error).__name__}: {error}".splitlines()[0],
        **_learned(history),
        **_times(history),
        "memory_peak_bytes": _peaks(history),
        "stragglers": often_slow(history.steps),
    }
    how = f"stopped by {values['stopped_by']}" if error is not None else "finished"
    lines = [f"{how} after {values['steps']} steps in {duration(values['seconds'])}"]
    lines += [f"{name:<14} {text}" for name, text in _facts(values) if text]
    lines += [f"{name:<14} {folder / file}" for name, file in FILES if (folder / file).exists()]
    return Summary(values, "\n".join(lines))


def _learned(history: History) -> dict[str, Any]:
    rewards = [reward for _, reward in history.rewards()]
    evaluations = history.evaluations
    return {
        "reward_first": statistics.fmean(rewards[:FIRST]) if rewards else None,
        "reward_last": statistics.fmean(rewards[-LAST:]) if rewards else None,
        "accuracy_before": evaluations[0].accuracy if evaluations else None,
        "accuracy_after": evaluations[-1].accuracy if len(evaluations) > 1 else None,
        "evaluation_problems": evaluations[0].problems if evaluations else None,
    }


def _times(history: History) -> dict[str, Any]:
    """Median step time and every phase's share of all steps' time and of the saves between them; `other` is what no phase
    covers."""
    total = sum((step.get("time/step") or 0.0) + (step.get("time/save") or 0.0) for step in history.steps)
    whole = [step["time/step"] for step in history.steps if step.get("time/step")]
    if not whole:
        return {"step_seconds_median": None, "time_shares": {}}
    names = sorted({name for step in history.steps for name in step if name.startswith("time/") and name != "time/step"})
    shares = {name[5:]: sum(step.get(name) or 0.0 for step in history.steps) / total for name in names}
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return {"step_seconds_median": statistics.median(whole), "time_shares": shares}


def _peaks(history: History) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for step in history.steps:
        for name, value in step.items():
            if name.startswith("memory/peak_bytes/") and value:
                phase = name.removeprefix("memory/peak_bytes/")
                peaks[phase] = max(value, peaks.get(phase, 0))
    return peaks


def _facts(values: dict[str, Any]) -> list[tuple[str, str]]:
    reward = accuracy = time = memory = ""
    if values["reward_first"] is not None:
        first, last = min(FIRST, values["steps"]), min(LAST, values["steps"])
        reward = f"{values['reward_first']:.3f} (first {first} steps) -> {values['reward_last']:.3f} (last {last})"
    if values["accuracy_before"] is not None:
        after = "" if values["accuracy_after"] is None else f" -> {values['accuracy_after']:.3f}"
        accuracy = f"{values['accuracy_before']:.3f}{after} (greedy, {values['evaluation_problems']} held-out problems)"
    if values["step_seconds_median"] is not None:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in values["time_shares"].items() if share >= 0.005)
        time = f"{values['step_seconds_median']:.2f} s a step (median): {shares}"
    if values["memory_peak_bytes"]:
        highest = sorted(values["memory_peak_bytes"].items(), key=lambda item: -item[1])[:PEAKS]
        memory = "peak " + ", ".join(f"{name} {peak / 2**30:.2f} GiB" for name, peak in highest)
    facts = {"reward": reward, "accuracy": accuracy, "time": time, "memory": memory, "often slow": values["stragglers"]}
    return list(facts.items())
