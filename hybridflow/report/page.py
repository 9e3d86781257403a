"""The page of a report: sections from a run's record, put into page.html with its style, script and data inline.

Everything that a run wrote is escaped, and the page's Content-Security-Policy allows its own script and style by their hash and
nothing else: what a model answered is shown and never run, and nothing is loaded from anywhere.
"""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from hybridflow.config.schema import ConfigError
from hybridflow.report import charts, tables
from hybridflow.report.folder import RunRecord, read_run

HERE = files("hybridflow.report")


def report(folders: Sequence[Path], out: Path | None) -> Path:
    """Write the page of one run, or of two; returns where. `out`: by default in the first run's folder, report.html or, of two
    runs, report-with-OTHER.html: either page keeps its place.

    Raises:
        ConfigError: a folder holds no run, or `out` cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    path = out or folders[0] / (f"report-with-{runs[1].name}.html" if len(runs) > 1 else "report.html")
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.folder)
    page = render(runs).encode(errors="replace")  # half of a surrogate pair, which a JSON file can hold
    try:
        path.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written ({error.strerror}): give a file in another folder") from error
    return path


def render(runs: Sequence[RunRecord]) -> str:
    drawn = _Drawn()
    shown = charts.shown_phases(runs)
    other, constant = charts.others(runs)
    script, style = ((HERE / name).read_text() for name in ("charts.js", "page.css"))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((HERE / "page.html").read_text())
    return template.render(
        runs=runs,
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        made=datetime.now(UTC).isoformat(sep=" ", timespec="minutes").removesuffix("+00:00"),
        origins=[tables.origin(run) for run in runs],
        facts=tables.facts(runs),
        learning=drawn.add(charts.lines(charts.LEARNING, runs)),
        warm_start=drawn.add(charts.lines(charts.WARM_START, runs, "warm_start")),
        phases=drawn.add(charts.phases(runs)),
        speed=drawn.add(charts.lines(charts.SPEED, runs)),
        pipeline=drawn.add(charts.lines(charts.PIPELINE, runs)),
        mismatch=drawn.add(charts.lines(charts.MISMATCH, runs)),
        memory=drawn.add(charts.most_memory(runs)),
        others=drawn.add(other),
        constant=constant,
        phase_rows=tables.phase_rows(runs, shown),
        memory_rows=tables.memory_rows(runs),
        responses=[tables.responses(run) for run in runs],
        config_rows=tables.config_rows(runs),
        version_rows=tables.version_rows(runs),
        width=charts.bin_width(runs),
        data={"runs": [run.name for run in runs], "charts": drawn.charts},
    )


class _Drawn:
    """The charts in the order of the page; a place for one names its number."""

    def __init__(self):
        self.charts: list[dict[str, Any]] = []

    def add(self, found: Sequence[dict[str, Any]]) -> range:
        self.charts += found
        return range(len(self.charts) - len(found), len(self.charts))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
