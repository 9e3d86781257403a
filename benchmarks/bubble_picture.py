"""Schedules as they ran: a row per stage, a bar per step, the micro-batch's number in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.intervals import Interval

FORWARD, BACKWARD = ("#1f5fa8", "#5b95d6", "#93bdea", "#c9dff5"), ("#2b7a2b", "#62ad5f", "#9bd096", "#cfeaca")  # by chunk
NARROWEST = 0.012  # share of the width that holds a number


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """`rows`: of the benchmark, each with what it has `drawn`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [row["stages"] for row in rows]
    figure = Figure(figsize=(14, 0.7 * len(rows) + 0.3 * sum(heights) + 0.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: forward blue, backward green, a chunk's shade, micro-batches numbered")
    panels = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": [1 + h for h in heights]})
    for (axes,), row in zip(panels, rows, strict=True):
        _panel(axes, row)
    panels[-1][0].set_xlabel("milliseconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(axes: Any, row: dict[str, Any]) -> None:
    stages = [[Interval(*values) for values in stage] for stage in row["drawn"]]
    width = max(interval.end_s for stage in stages for interval in stage)
    for number, stage in enumerate(stages):
        for interval in stage:
            shades = FORWARD if interval.kind == "forward" else BACKWARD
            shade = interval.chunk % len(shades)
            start, length = 1e3 * interval.start_s, 1e3 * (interval.end_s - interval.start_s)
            axes.barh(number, length, left=start, height=0.9, color=shades[shade], edgecolor="white", linewidth=0.4)
            if length > NARROWEST * 1e3 * width:
                colour = "white" if shade < 2 else "black"
                where = {"ha": "center", "va": "center", "fontsize": 6, "color": colour, "clip_on": True}
                axes.text(start + length / 2, number, str(interval.micro_batch), **where)
    axes.set_yticks(range(len(stages)), [f"stage {number}" for number in range(len(stages))], fontsize=7)
    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.set_xlim(0, 1e3 * width)
    axes.tick_params(axis="x", labelsize=7)
    shares = (row["measured"]["mean"], row["simulated"]["mean"], row["closed_form_of_step"])
    numbers = "bubble {:.1%} measured, {:.1%} simulated, {:.1%} closed form".format(*shares)
    axes.set_title(
        f"{row['layout']}, {row['micro_batches']} micro-batches, {row['schedule']}: {numbers}", fontsize=8, loc="left"
    )
