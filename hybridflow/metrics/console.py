"""Shows a run's progress: a live table on a terminal, aligned plain lines elsewhere (log files, CI)."""

import math
import sys
from collections import deque
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.table import Table

ROWS = 12  # of the live table
HEADER_EVERY = 25  # plain lines

# title, metric, format
COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward/mean", ".3f"),
    ("tokens", "rollout/response_tokens_mean", ".1f"),
    ("cut off", "rollout/truncated_fraction", ".1%"),
    ("entropy", "actor/entropy", ".3f"),
    ("grad norm", "actor/grad_norm", ".3f"),
    ("mismatch", "mismatch/log_prob_abs_max", ".1e"),
    ("reshard s", "time/reshard", ".2f"),
    ("rollout s", "time/rollout", ".2f"),
    ("update s", "time/update", ".2f"),
    ("step s", "time/step", ".2f"),
)


class Console:
    """`steps`: how many the run will have. `stream`: stdout unless given."""

    def __init__(self, steps: int, stream: TextIO | None = None):
        self._steps = steps
        self._rich = rich.console.Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._rows: deque[list[str]] = deque(maxlen=ROWS)
        self._seconds: deque[float] = deque(maxlen=20)
        self._printed = 0
        self._live: Live | None = None

    def step(self, metrics: dict[str, Any]) -> None:
        cells = [_cell(metrics.get(name), form) for _, name, form in COLUMNS]
        self._rows.append(cells)
        if self._rich.is_terminal:
            self._seconds.append(metrics.get("time/step") or 0.0)
            self._show(metrics["step"])
            return
        if self._printed % HEADER_EVERY == 0:
            self._print("  ".join(f"{title:>{_width(title)}}" for title, _, _ in COLUMNS))
        self._print("  ".join(f"{cell:>{_width(title)}}" for cell, (title, _, _) in zip(cells, COLUMNS, strict=True)))
        self._printed += 1

    def warm_start(self, metrics: dict[str, Any]) -> None:
        """A line at steps 1, 10, 20, ...: a warm start is many small steps."""
        if metrics["step"] == 1 or metrics["step"] % 10 == 0:
            numbers = "  ".join(f"{n} {_cell(v, '.4g')}" for n, v in metrics.items() if n != "step")
            self.line(f"warm start {metrics['step']:>5}  {numbers}")

    def line(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        self._rich.print(text, markup=False)
        self._rich.file.flush()

    def _show(self, step: int) -> None:
        left = sum(self._seconds) / len(self._seconds) * (self._steps - step)
        table = Table(title=f"step {step} of {self._steps}, {duration(left)} left", title_justify="left")
        for title, _, _ in COLUMNS:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        if self._live is None:
            self._live = Live(console=self._rich, auto_refresh=False)
            self._live.start()
        self._live.update(table, refresh=True)


def duration(seconds: float) -> str:
    """1 h 02 min, 3 min 05 s or 7.1 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _width(title: str) -> int:
    return max(len(title), 7)


def _cell(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return str(value) if isinstance(value, float) and not math.isfinite(value) else format(value, form)
