"""The planner's forecast against runs that it was not calibrated on: seconds, memory, and whether it picks the best layout.

    python benchmarks/forecast.py --calibrate tp2.json --compare pp2.json dp2.json --out benchmarks/results/forecast_h200x2.json
    python benchmarks/forecast.py --compare tests/planner/h200_updates.json        # with the calibration that is built in

Reads what throughput.py, bubble.py and reshard.py write. Errors are forecast / measured - 1. Runs that do the same work (the
same phase of the same model on as many of the same GPUs, with as many tokens in sequences of the same lengths) compete, those
of the calibration included: of each such set the planner's first choice is the run with the shortest forecast, and what it
costs to follow it is its measured time over the shortest measured one. `--memory`, `--seconds` and `--choice` are the limits
that the last lines count against.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

from benchmarks import commands, record  # noqa: E402
from hybridflow.config.schema import ConfigError  # noqa: E402
from hybridflow.planner.calibration import GIB, Calibration  # noqa: E402
from hybridflow.planner.records import Run, calibrate, read_runs  # noqa: E402


class Row(NamedTuple):
    """One run beside its forecast; bytes are 0 where none were measured."""

    name: str
    measured_seconds: float
    forecast_seconds: float
    measured_bytes: float
    forecast_bytes: float
    work: tuple

    @property
    def seconds_error(self) -> float:
        return self.forecast_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float | None:
        return self.forecast_bytes / self.measured_bytes - 1 if self.measured_bytes else None


class Choice(NamedTuple):
    """Of runs that do the same work: the one with the shortest forecast, and the fastest."""

    first: Row
    best: Row
    among: int

    @property
    def excess(self) -> float:
        """How much longer the first choice takes than the best one, as a share of the best one's time."""
        return self.first.measured_seconds / self.best.measured_seconds - 1


def main() -> int:
    arguments = parser().parse_args()
    try:
        commands.check_out(arguments.out)
        commands.check_out(arguments.save, "--save")
        start = Calibration.read(arguments.calibration) if arguments.calibration else Calibration()
        seen = [run for path in arguments.calibrate for run in read_runs(path)]
        unseen = [run for path in arguments.compare for run in read_runs(path, "--compare")]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    calibration = calibrate(start, seen) if seen else start
    if arguments.save:
        calibration.write(arguments.save)
    known, rows = compare(seen, calibration), compare(unseen, calibration)
    found = choices([*known, *rows])
    if known:
        show(f"calibrated on {len(known)} runs", known)
    show(f"forecast of {len(rows)} other runs", rows)
    for choice in found:
        print(choice_line(choice))
    for line in verdicts(rows, found, arguments):
        print(line)
    if arguments.out:
        results = {"calibration": dataclasses.asdict(calibration), "calibrated_on": as_json(known), "rows": as_json(rows)}
        results["choices"] = [{"first": c.first.name, "best": c.best.name, "among": c.among, "excess": c.excess} for c in found]
        record.write(arguments.out, {name: _text(value) for name, value in vars(arguments).items()}, results)
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--calibrate", nargs="+", default=[], type=Path, metavar="RESULTS.json", help="runs to fit to")
    result.add_argument("--calibration", type=Path, metavar="FILE", help="where the fit starts (`hybridflow plan --save`)")
    result.add_argument("--compare", nargs="+", required=True, type=Path, metavar="RESULTS.json", help="runs to foretell")
    result.add_argument("--save", type=Path, metavar="FILE", help="write the calibration")
    result.add_argument(
        "--seconds", type=commands.share, default=0.25, metavar="SHARE", help="error that a forecast of time may have"
    )
    result.add_argument("--memory", type=commands.share, default=0.1, metavar="SHARE", help="likewise of memory")
    result.add_argument("--choice", type=commands.share, default=0.05, metavar="SHARE", help="what its first choice may cost")
    result.add_argument("--out", type=Path, metavar="FILE.json")
    return result


def compare(runs: Sequence[Run], calibration: Calibration) -> list[Row]:
    """Each run beside what the calibration foretells of it."""
    return [
        Row(
            run.name,
            run.seconds,
            run.predict(calibration),
            run.peak_bytes if run.memory else 0.0,
            run.memory(calibration) if run.memory else 0.0,
            run.work,
        )
        for run in runs
    ]


def choices(rows: Sequence[Row]) -> list[Choice]:
    """One for every work that at least two runs do."""
    sets: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.work:
            sets.setdefault(row.work, []).append(row)
    return [
        Choice(min(same, key=lambda row: row.forecast_seconds), min(same, key=lambda row: row.measured_seconds), len(same))
        for same in sets.values()
        if len(same) > 1
    ]


def verdicts(rows: Sequence[Row], found: Sequence[Choice], limits: argparse.Namespace) -> list[str]:
    """How many are within the limits."""
    counted = {
        f"seconds within {limits.seconds:.0%}": [abs(row.seconds_error) <= limits.seconds for row in rows],
        f"memory within {limits.memory:.0%}": [
            abs(row.memory_error) <= limits.memory for row in rows if row.memory_error is not None
        ],
        f"first choice within {limits.choice:.0%} of the best": [choice.excess <= limits.choice for choice in found],
    }
    return [f"{what}: {sum(held)} of {len(held)}" for what, held in counted.items() if held]


def show(title: str, rows: Sequence[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print(f"{title}\n  {'run':<{width}} {'measured':>9} {'forecast':>9} {'error':>7} | {'GiB':>7} {'forecast':>9} {'error':>7}")
    for row in rows:
        text = f"  {row.name:<{width}} {row.measured_seconds:>8.3g}s {row.forecast_seconds:>8.3g}s {row.seconds_error:>+7.1%} |"
        if row.memory_error is not None:
            text += f" {row.measured_bytes / GIB:>7.1f} {row.forecast_bytes / GIB:>9.1f} {row.memory_error:>+7.1%}"
        print(text)


def choice_line(choice: Choice) -> str:
    text = (
        f"first choice among {choice.among} that do the same work: {choice.first.name}, {choice.first.measured_seconds:.3g} s"
    )
    if choice.first is choice.best:
        return f"{text}, the best measured"
    return f"{text}, {choice.excess:.1%} over the best, {choice.best.name} with {choice.best.measured_seconds:.3g} s"


def as_json(rows: Sequence[Row]) -> list[dict]:
    return [
        {name: value for name, value in row._asdict().items() if name != "work"}
        | {"seconds_error": row.seconds_error, "memory_error": row.memory_error}
        for row in rows
    ]


def _text(value: object) -> object:
    """An option as JSON takes it."""
    return [str(item) for item in value] if isinstance(value, list) else str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.exit(main())
