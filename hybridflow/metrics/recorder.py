"""Records a run: one JSON object per step, TensorBoard and other trackers, the console, samples, a plot of the reward, a
closing summary.

    with Recorder(config.run.dir, config) as recorder:
        recorder.evaluation(step=0, accuracy=0.1, problems=64)
        for step in range(1, steps + 1):
            with recorder.phase("rollout"):
                ...
            recorder.log({"step": step, "reward/mean": 0.3})    # adds time/rollout and time/step
            recorder.samples([{"step": step, "prompt": ..., "response": ..., "reward": ...}])

Lives in the driver only.
"""

import contextlib
import io
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from torch.utils.tensorboard import SummaryWriter

from hybridflow.config.load import save
from hybridflow.config.run_folder import prepare_run_folder
from hybridflow.config.schema import Config
from hybridflow.controller.hang import progress
from hybridflow.controller.placement import place
from hybridflow.metrics.console import Console
from hybridflow.metrics.plot import plot_reward
from hybridflow.metrics.summary import Evaluation, History, summarize
from hybridflow.metrics.trackers import Trackers
from hybridflow.metrics.versions import write_versions
from hybridflow.writing import writing

MEMORY_GROWTH = 1.05  # over the third step's peak, above which a run warns ...
MEMORY_GROWTH_BYTES = 256 << 20  # ... unless it is less than this: a process that fills its caches
PLOT_EVERY = 10
RECORDS = ("metrics.jsonl", "samples.jsonl", "warm_start.jsonl", "evaluation.jsonl")


@dataclass
class Phase:
    """What the driver was at, from `start` to `end` in seconds since the epoch. `seconds`: what the work took, where that is
    not the same."""

    name: str
    start: float
    end: float = 0.0
    seconds: float | None = None


class Recorder:
    """The driver's notebook of a run; every line is on disk when a call returns."""

    def __init__(self, run_dir: str | Path, config: Config, stream: TextIO | None = None, restarts: bool = False):
        """`stream`: where the console output goes (stdout). Deletes an earlier run's files when it `restarts` or
        `run.overwrite` is set."""
        self.folder = Path(run_dir)
        if config.run.overwrite or restarts:
            prepare_run_folder(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing(self.folder):
            save(config, self.folder / "config.yaml")
            (self.folder / "placement.txt").write_text(place(config).render() + "\n")
            write_versions(self.folder)
            self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"))
        self.history = History(started=time.monotonic())
        self._files: dict[str, io.FileIO] = {}
        self._console = Console(config.run.steps, stream)
        self._trackers = Trackers(config, self.folder, self.line)
        self.latest_phase = ""
        self._phases: dict[str, float] = {}
        self.spans: list[Phase] = []  # of the step that is logged next
        self._step_started: float | None = None
        self._steps_here = 0  # since this process began
        self._memory_at_third: dict[str, float] = {}
        self._memory_warned: set[str] = set()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close(error)

    @contextlib.contextmanager
    def phase(self, name: str) -> "Iterator[Phase]":
        """Time the block as `time/NAME` of the step that is logged next; times of one name add up.

        The block may set the phase's `seconds` itself: where several are at work at the same time, what it waits is not what
        the work takes.
        """
        phase, start = Phase(name, time.time()), time.monotonic()
        self.latest_phase = name
        progress(f"phase {name} after {len(self.history.steps)} steps")
        if self._step_started is None:
            self._step_started = start
        try:
            yield phase
        finally:
            progress(f"what follows phase {name} after {len(self.history.steps)} steps")
            waited = time.monotonic() - start
            phase.end = time.time()  # not start + waited: a process that is held up between the two clocks would overlap
            self.spans.append(phase)
            self._phases[name] = self._phases.get(name, 0.0) + (waited if phase.seconds is None else phase.seconds)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last step that was logged, and `step`: from the first of them until now."""
        if self._step_started is None:
            return {}
        return {**self._phases, "step": time.monotonic() - self._step_started}

    def take_phases(self) -> dict[str, float]:
        """Seconds by phase since the last step that was logged; they won't be part of the next step."""
        phases, self._phases, self._step_started, self.spans = self._phases, {}, None, []
        return phases

    def log(self, step: dict[str, Any]) -> None:
        """Record one step: `step["step"]` and metrics (numbers, booleans, one-element tensors; None: not measured).

        Adds `time/NAME` of the phases since the last call and `time/step`, from the first of them until now.
        """
        metrics = {name: _plain(value) for name, value in step.items()}
        for name, seconds in self.seconds().items():
            metrics.setdefault(f"time/{name}", seconds)
        self.take_phases()
        self.history.steps.append(metrics)
        self._steps_here += 1
        self._write("metrics.jsonl", metrics)
        self._scalars(metrics["step"], metrics)
        self._console.step(metrics)
        self._watch_memory(metrics)
        if len(self.history.steps) % PLOT_EVERY == 0:
            plot_reward(self.history, self.folder / "plots" / "reward.png")

    def samples(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows, such as {"step", "prompt", "response", "answer", "reward"}, to samples.jsonl."""
        self._write("samples.jsonl", *({name: _plain(value) for name, value in row.items()} for row in rows))

    def warm_start(self, step: int, metrics: dict[str, Any]) -> None:
        """Record a supervised step of the warm start (warm_start.jsonl)."""
        metrics = {"step": step, **{name: _plain(value) for name, value in metrics.items()}}
        self.history.warm_start.append(metrics)
        self._write("warm_start.jsonl", metrics)
        self._scalars(step, {f"warm_start/{name}": value for name, value in metrics.items()})
        self._console.warm_start(metrics)

    def evaluation(self, step: int, accuracy: float, problems: int, seconds: float = 0.0) -> None:
        """Record the greedy accuracy on the fixed problems after `step` steps (0: before the first)."""
        self.history.evaluations.append(Evaluation(step, float(accuracy), problems, seconds))
        self._write("evaluation.jsonl", {"step": step, "accuracy": float(accuracy), "problems": problems, "seconds": seconds})
        self._scalars(step, {"evaluation/accuracy": float(accuracy)})
        self._console.line(f"greedy accuracy on {problems} problems after {step} steps: {accuracy:.3f}")

    def position(self) -> dict[str, int]:
        """How far the records have come, for a checkpoint: the bytes of each file."""
        return {name: (self.folder / name).stat().st_size for name in RECORDS if (self.folder / name).exists()}

    def go_on(self, position: dict[str, int], step: int) -> None:
        """Go on after `step` from a checkpoint's `position`: what was recorded after it is cut off, so that no step is there
        twice, and what came before is known again.

        Raises:
            ValueError: a file is shorter than it was: its lines are lost.
        """
        for name in RECORDS:
            path, size = self.folder / name, position.get(name, 0)
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise ValueError(f"{path} has {found} bytes, the checkpoint of step {step} says {size}: it was cut or replaced")
            if found:
                os.truncate(path, size)
        self.history.steps = self._rows("metrics.jsonl")
        self.history.warm_start = self._rows("warm_start.jsonl")
        self.history.evaluations = [Evaluation(**row) for row in self._rows("evaluation.jsonl")]
        self._tensorboard.close()
        with writing(self.folder / "tensorboard"):
            self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def line(self, text: str) -> None:
        """Show a line on the console, above the live table where there is one."""
        self._console.line(text)

    def close(self, error: BaseException | None = None) -> str:
        """Write the plot and the summary, show the summary, and return it. `error`: what ended the run early."""
        # a full disk that ended the run would fail these as well, and hide what was lost and what is there
        what_can_be = contextlib.nullcontext() if error is None else contextlib.suppress(OSError)
        with what_can_be:
            if self.history.steps:
                plot_reward(self.history, self.folder / "plots" / "reward.png")
        for file in self._files.values():
            file.close()
        with what_can_be, writing(self.folder / "tensorboard"):
            self._tensorboard.close()
        self._console.close()
        self._trackers.close(failed=error is not None)
        summary = summarize(self.history, self.folder, time.monotonic(), error)
        with what_can_be, writing(self.folder / "summary.json"):
            (self.folder / "summary.json").write_text(json.dumps(summary.values, indent=2) + "\n")
        self._console.line(summary.text)
        return summary.text

    def _write(self, name: str, *rows: dict[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("ab", buffering=0)
        _append(self._files[name], "".join(json.dumps(row) + "\n" for row in rows).encode())

    def _scalars(self, step: int, metrics: dict[str, Any]) -> None:
        """`step` itself is no metric, of a warm start neither."""
        names = (name for name in metrics if name.rpartition("/")[2] != "step" or name == "time/step")
        scalars = {name: float(metrics[name]) for name in names if isinstance(metrics[name], bool | int | float)}
        with writing(self.folder / "tensorboard"):
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        self._trackers.log(step, scalars)

    def _watch_memory(self, metrics: dict[str, Any]) -> None:
        """The first steps fill caches; what grows after the third is a leak until shown otherwise."""
        peaks = {name: value for name, value in metrics.items() if name.startswith("memory/peak_bytes/") and value}
        if self._steps_here == 3:
            self._memory_at_third = peaks
        grown = {name: value - self._memory_at_third.get(name, value) for name, value in peaks.items()}
        least = {name: max((MEMORY_GROWTH - 1) * (peaks[name] - more), MEMORY_GROWTH_BYTES) for name, more in grown.items()}
        new = [name for name, more in grown.items() if more > least[name] and name not in self._memory_warned]
        if new:
            self._memory_warned.update(new)
            most = max(new, key=grown.get)
            others = f" (and that of {len(new) - 1} other phases)" if len(new) > 1 else ""
            self._console.line(
                f"warning: memory of phase {most.rpartition('/')[2]} grew from {(peaks[most] - grown[most]) / 2**30:.2f} GiB"
                f" at the third step to {peaks[most] / 2**30:.2f} GiB{others}"
            )


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python's own."""
    return value.item() if hasattr(value, "item") else value


def _append(file: io.FileIO, lines: bytes) -> None:
    """All of the lines or nothing of them.

    Raises:
        OSError: naming the file.
    """
    start = file.seek(0, io.SEEK_END)
    try:
        while lines:
            lines = lines[file.write(lines) :]
    except OSError as error:
        file.truncate(start)
        raise OSError(error.errno, error.strerror, file.name) from error
