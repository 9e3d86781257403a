"""What a report draws, as plain data for its script: which metrics share a chart, their units, and few enough points.

A point is [step, value], or where steps are many [first step, last step, mean, least, greatest] of a handful of them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.report.folder import RunRecord

POINTS = 400  # of a curve: a page of 10,000 steps stays as fast as one of 400
SMALLEST_SHARE = 0.005  # of the time of all steps, below which phases are drawn as one
COLOURS = (  # every phase has its own in all reports; others take those that are free, and two greys follow
    "update_critic", "wake", "reshard", "rollout", "values", "log_probs", "update", "reference", "reward", "release", "sleep",
    "restore",
)  # fmt: skip
OTHER, OUTSIDE = "smaller phases", "outside of phases"
GIB = 1 << 30


@dataclass(frozen=True)
class Chart:
    """`metrics`: name and label. `scale`: what values are multiplied with for `unit`. `smooth`: a moving mean is drawn over it.
    `zero`: the axis begins at 0. `log`: it is logarithmic where all values are positive."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    scale: float = 1.0
    smooth: bool = False
    zero: bool = False
    log: bool = False


ACCURACY = "greedy accuracy"
REWARD = Chart("Reward", "mean reward of a step", (("reward/mean", "mean reward"),), smooth=True, zero=True)
LEARNING = (
    REWARD,
    Chart("Loss of the actor", "loss", (("actor/loss", "loss"),), smooth=True),
    Chart("Loss of the critic", "loss", (("critic/loss", "critic"), ("cost_critic/loss", "cost critic")), smooth=True),
    Chart("Explained variance of the critic", "share", (("critic/explained_variance", "critic"),), smooth=True),
    Chart("Cost", "mean cost of a step", (("cost/mean", "mean cost"),), smooth=True),
    Chart("Multiplier of the cost", "λ", (("cost/lambda", "λ"),)),
    Chart(
        "Gradient's norm, before clipping", "norm", (("actor/grad_norm", "actor"), ("critic/grad_norm", "critic")), smooth=True
    ),
    Chart("Entropy of the policy", "nats per token", (("actor/entropy", "entropy"),), smooth=True),
    Chart(
        "KL divergence",
        "nats per token",
        (("actor/kl_old", "from the old policy"), ("actor/kl_reference", "from the reference")),
    ),
    Chart("Ratios that were clipped", "% of tokens", (("actor/clip_fraction", "clipped"),), scale=100, zero=True),
    Chart("Length of responses", "tokens, mean", (("rollout/response_tokens_mean", "mean"),), smooth=True, zero=True),
    Chart(
        "Responses cut off", "% of responses", (("rollout/truncated_fraction", "cut off"),), scale=100, smooth=True, zero=True
    ),
    Chart("Learning rate", "learning rate", (("actor/lr", "actor"), ("critic/lr", "critic")), zero=True),
)
SPEED = (
    Chart(
        "Tokens per second",
        "tokens/s per GPU (rank)",
        (
            ("perf/step_tokens_per_second_per_gpu", "whole step"),
            ("perf/rollout_tokens_per_second_per_gpu", "rollout"),
            ("perf/update_tokens_per_second_per_gpu", "update"),
        ),
        zero=True,
    ),
    Chart("Model FLOPs utilisation of the update", "% of the GPU's peak", (("perf/mfu", "update"),), scale=100, zero=True),
)
PIPELINE = (
    Chart(
        "Pipeline bubble of the actor's updates",
        "% of the update a stage idles",
        (("pipeline/bubble_mean", "mean stage"), ("pipeline/bubble_max", "idlest stage")),
        scale=100,
        zero=True,
    ),
)
MISMATCH = (
    Chart(
        "Log-probs, vLLM against Megatron",
        "difference in nats",
        (("mismatch/log_prob_abs_mean", "mean of tokens"), ("mismatch/log_prob_abs_max", "worst token")),
        log=True,
    ),
    Chart("KL, vLLM against Megatron", "nats per token", (("mismatch/kl", "KL"),)),
)
WARM_START = (Chart("Loss of the warm start", "loss per token", (("loss", "loss"),)),)
MEMORY = "memory/peak_bytes/"
KNOWN = {name for chart in (*LEARNING, *SPEED, *PIPELINE, *MISMATCH) for name, _ in chart.metrics}


def lines(charts: Sequence[Chart], runs: Sequence[RunRecord], rows: str = "metrics") -> list[dict[str, Any]]:
    """Those of the charts that a run has numbers for. `rows`: metrics or warm_start."""
    found = [_lines(chart, runs, rows) for chart in charts]
    return [chart for chart in found if chart["series"]]


def _lines(chart: Chart, runs: Sequence[RunRecord], rows: str) -> dict[str, Any]:
    width = bin_width(runs, rows)
    series = []
    for number, run in enumerate(runs):
        table = getattr(run, rows)
        for metric, (name, label) in enumerate(chart.metrics):
            points = [(step, value * chart.scale) for step, value in table.points(name)]
            bad = table.not_finite.get(name, [])[:POINTS]
            if points or bad:
                style = "smooth" if chart.smooth else "line"
                series.append(_series(number, metric, label, thin(points, width), style, bad))
        if chart is REWARD:
            accuracy = [(step, value * chart.scale) for step, value in run.evaluations.points("accuracy")]
            if accuracy:
                series.append(_series(number, len(chart.metrics), ACCURACY, [list(p) for p in accuracy], "dots", []))
    x = "step" if rows == "metrics" else "step of the warm start"
    looks = {"title": chart.title, "unit": chart.unit, "zero": chart.zero, "log": chart.log}
    return {"kind": "lines", "x": x, "width": width, "series": series} | looks


def _series(run: int, metric: int, label: str, points: list, style: str, bad: list[int]) -> dict[str, Any]:
    return {"run": run, "metric": metric, "label": label, "points": points, "style": style, "bad": bad}


def most_memory(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """A chart of the most bytes that a rank had in use in each step; none without them."""
    series = []
    for number, run in enumerate(runs):
        points = []
        for row in run.metrics.rows:
            peaks = [value for name, value in row.items() if name.startswith(MEMORY)]
            if peaks:
                points.append((int(row["step"]), max(peaks) / GIB))
        if points:
            series.append(_series(number, 0, "highest phase", thin(points, bin_width(runs)), "line", []))
    chart = {"kind": "lines", "title": "Memory in use, most of a step", "unit": "GiB on the fullest rank", "x": "step"}
    return [chart | {"width": bin_width(runs), "series": series, "zero": True, "log": False}] if series else []


def phases(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """A chart for each run that has times: seconds of its phases, stacked. All share their phases' order and the axis."""
    shown, width = shown_phases(runs), bin_width(runs)
    charts = []
    for number, run in enumerate(runs):
        stacks = [(int(row["step"]), _stack(row, shown)) for row in run.metrics.rows if "time/step" in row]
        layers = [
            {"label": name, "colour": colour, "points": thin([(step, stack[name]) for step, stack in stacks], width)}
            for name, colour in _colours(shown).items()
        ]
        layers = [layer for layer in layers if any(_value(point) for point in layer["points"])]
        looks = {"title": "Seconds by phase", "unit": "seconds a step"}
        if layers:
            charts.append({"kind": "stack", "x": "step", "run": number, "width": width, "layers": layers} | looks)
    return charts


def _colours(shown: Sequence[str]) -> dict[str, int]:
    """The number of every layer's colour, in the order of the layers."""
    free = itertools.cycle([n for n, name in enumerate(COLOURS) if name not in shown] or range(len(COLOURS)))
    own = {name: COLOURS.index(name) if name in COLOURS else next(free) for name in shown}
    return own | {OTHER: len(COLOURS), OUTSIDE: len(COLOURS) + 1}


def shown_phases(runs: Sequence[RunRecord]) -> list[str]:
    """The phases that take a share worth drawing, in the order of a step."""
    names = dict.fromkeys(name for run in runs for name in run.metrics.names() if name.startswith("time/"))
    shares = [run.values["time_shares"] for run in runs]
    return [n[5:] for n in names if n != "time/step" and any(s.get(n[5:], 0) >= SMALLEST_SHARE for s in shares)]


def _stack(row: dict[str, float], shown: Sequence[str]) -> dict[str, float]:
    """A step's seconds by phase. A save lies between two steps and counts for the second one, besides `time/step`."""
    seconds = {name[5:]: value for name, value in row.items() if name.startswith("time/") and name != "time/step"}
    outside = row["time/step"] - sum(value for name, value in seconds.items() if name != "save")
    stack = {name: seconds.pop(name, 0.0) for name in shown}
    return stack | {OTHER: sum(seconds.values()), OUTSIDE: max(outside, 0.0)}


def others(runs: Sequence[RunRecord]) -> tuple[list[dict[str, Any]], list[tuple[str, list[float | None]]]]:
    """Charts of the metrics that no other part of the page shows, and those that never change with their value by run."""
    names = dict.fromkeys(name for run in runs for name in (*run.metrics.names(), *run.metrics.not_finite))
    charts, constant = [], []
    for name in names:
        if name in KNOWN or name.startswith(("time/", MEMORY)):
            continue
        values = [{value for _, value in run.metrics.points(name)} for run in runs]
        if all(len(found) <= 1 for found in values) and not any(name in run.metrics.not_finite for run in runs):
            constant.append((name, [next(iter(found), None) for found in values]))
        else:
            charts.append(Chart(name, "", ((name, name),)))
    return lines(charts, runs), constant


def bin_width(runs: Sequence[RunRecord], rows: str = "metrics") -> int:
    """How many steps are one point, the same for both runs."""
    steps = [int(row["step"]) for run in runs for row in getattr(run, rows).rows]
    return math.ceil((max(steps) - min(steps) + 1) / POINTS) if steps else 1


def thin(points: Sequence[tuple[int, float]], width: int) -> list[list[float]]:
    """The points as they are, or of every `width` steps one: [first step, last step, mean, least, greatest]."""
    if width == 1:
        return [[step, _short(value)] for step, value in points]
    bins: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        bins.setdefault((step - 1) // width, []).append((step, value))
    found = []
    for held in bins.values():
        values = [value for _, value in held]
        numbers = (sum(values) / len(values), min(values), max(values))
        found.append([held[0][0], held[-1][0], *(_short(number) for number in numbers)])
    return found


def _value(point: list[float]) -> float:
    return point[1] if len(point) == 2 else point[2]


def _short(value: float) -> float:
    """Six digits: what a curve shows, in half the bytes."""
    return float(f"{value:.6g}")
