"""Whole RL steps of a model of random weights: seconds and share of every phase, in several layouts, beside the forecast.

    python benchmarks/whole_step.py --model configs/models/qwen2_7b.json --ranks 4 --layout planner \\
        --layout "TP2 x DP2 to TP1: roles.actor.tp=2 roles.actor.sequence_parallel=true" \\
        --layout "PP2 x DP2 to TP2: roles.actor.pp=2 roles.rollout.tp=2" --out benchmarks/results/step_h200x4_qwen2_7b.json

Each layout is a `hybridflow train` of its own, GRPO with two mini-batches a step, on the same prompts; `planner` is what
`hybridflow plan` puts first for this job. Random weights hardly ever end a response, so that all are about `--response-tokens`
long. `key=value` sets any key of a config in all of them. Seconds are medians over the steps behind `--warmup`. The forecast is
the planner's for the same layout, with `--calibration` if one is given, on this machine's GPUs or those of `--gpu`. `--with`
has results of earlier runs take part in the last lines, which say how far the planner's choices are from the fastest; without
`--layout` nothing is run.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

from benchmarks import commands, record  # noqa: E402
from benchmarks.random_job import RECIPE, medians, random_model, train  # noqa: E402
from hybridflow.config.load import load  # noqa: E402
from hybridflow.config.preflight import check_shapes  # noqa: E402
from hybridflow.config.schema import Config, ConfigError  # noqa: E402
from hybridflow.planner.calibration import GIB, Calibration  # noqa: E402
from hybridflow.planner.command import gpu_here  # noqa: E402
from hybridflow.planner.forecast import Forecast, forecast, workload  # noqa: E402
from hybridflow.planner.hardware import GPU, Cluster, named  # noqa: E402
from hybridflow.planner.passes import Machine  # noqa: E402

PLANNER = "planner"
MOVES = ("wake", "reshard", "release", "sleep", "restore")  # what the planner calls reshard as a whole


def main() -> int:
    arguments, overrides = parser().parse_known_args()
    results: list[dict[str, Any]] = []
    try:
        commands.check_out(arguments.out)
        for file in arguments.earlier:
            results += read_layouts(file)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(line for result in results for line in table(result)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            gpu, recipe = _inputs(arguments, overrides, folder)
        except (ConfigError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        for number, layout in enumerate(arguments.layout):
            results.append(measure(arguments, layout, overrides, recipe, gpu, folder / f"run{number}"))
            print("\n".join(table(results[-1])), flush=True)
            if arguments.out:
                options = {name: _text(value) for name, value in vars(arguments).items() if name != "earlier"}
                record.write(arguments.out, {**options, "overrides": overrides, "recipe": RECIPE}, {"layouts": results})
    for line in choices(results):
        print(line)
    return 1 if any("failed" in result for result in results) else 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", type=Path, metavar="FILE", help="a config.json in HF format")
    result.add_argument("--layers", type=commands.at_least(0), default=0, help="so many instead of the model's")
    result.add_argument("--ranks", type=commands.at_least(0), default=0)
    result.add_argument("--layout", action="append", default=[], metavar="'NAME: key=value ...'", help="or planner")
    result.add_argument("--with", nargs="+", default=[], type=Path, dest="earlier", metavar="RESULTS.json")
    result.add_argument("--prompts", type=commands.at_least(1), default=16)
    result.add_argument("--samples", type=commands.at_least(1), default=8, help="of a prompt")
    result.add_argument("--mini-batches", type=commands.at_least(1), default=2)
    result.add_argument("--prompt-tokens", type=commands.at_least(1), default=255, help="a multiple of 3")
    result.add_argument("--response-tokens", type=commands.at_least(1), default=512)
    result.add_argument("--steps", type=commands.at_least(1), default=12)
    result.add_argument("--warmup", type=commands.at_least(0), default=2)
    result.add_argument("--gpu", metavar="KIND", help="to plan and forecast for, such as H200; by default this machine's")
    result.add_argument("--calibration", type=Path, metavar="FILE", help="what `hybridflow plan --save` wrote")
    result.add_argument("--out", type=Path, metavar="FILE.json")
    return result


def _inputs(arguments: argparse.Namespace, overrides: Sequence[str], folder: Path) -> tuple[GPU | None, Path]:
    """What to forecast for, and the recipe beside its model, in `folder`; without a layout nothing of it is needed.

    Raises:
        ConfigError, ValueError: something is wrong with the options or a layout.
    """
    if not arguments.layout and arguments.earlier:
        return None, folder
    if not (arguments.layout and arguments.model and arguments.ranks > 0):
        raise ValueError("--model FILE, --ranks N and at least one --layout are needed, or --with RESULTS.json alone")
    strangers = [word for word in overrides if "=" not in word or word.startswith("-")]
    if strangers:
        raise ValueError(f"unknown arguments {strangers}: config keys have the form key=value")
    if arguments.prompt_tokens % 3 or arguments.prompt_tokens < 6:
        raise ValueError(f"--prompt-tokens={arguments.prompt_tokens} must be a multiple of 3, from 6: 12+34= has six tokens")
    if not 0 <= arguments.warmup < arguments.steps:
        raise ValueError(f"--warmup={arguments.warmup} leaves none of --steps={arguments.steps} to be timed")
    gpu = named(arguments.gpu) if arguments.gpu else gpu_here()
    if gpu is None and PLANNER in arguments.layout:
        raise ValueError("--layout planner: this machine has no GPU that the planner knows: give one, such as --gpu H200")
    if arguments.calibration:
        Calibration.read(arguments.calibration)
    random_model(commands.read_model(arguments.model, arguments.layers), folder / "model")
    sizes = {name: getattr(arguments, name) for name in ("ranks", "prompts", "samples", "mini_batches", "steps")}
    lengths = {name: getattr(arguments, name) for name in ("prompt_tokens", "response_tokens")}
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=folder / "model", terms=arguments.prompt_tokens // 3, **sizes, **lengths))
    for layout in arguments.layout:
        if layout != PLANNER:
            check_shapes(load(recipe, [*_read(layout)[1], *overrides]))
    return gpu, recipe


def read_layouts(file: Path) -> list[dict[str, Any]]:
    """The layouts of an earlier run. Raises ConfigError: it has none."""
    try:
        return commands.read_json(file, "--with")["results"]["layouts"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"--with {file} is not a result of whole_step.py") from error


def _read(layout: str) -> tuple[str, list[str]]:
    """Its name and its keys."""
    name, _, keys = layout.rpartition(": ")
    return name or keys, keys.split()


def measure(
    arguments: argparse.Namespace, layout: str, overrides: Sequence[str], recipe: Path, gpu: GPU | None, run: Path
) -> dict[str, Any]:
    """A layout's figures, or that it failed."""
    name, keys = _read(layout) if layout != PLANNER else (PLANNER, [])
    try:
        if layout == PLANNER:
            recipe = _planned(arguments, recipe, overrides, gpu, run.with_suffix(".yaml"))
        keys = [*keys, *overrides]
        steps = train(recipe, run, keys)
    except subprocess.CalledProcessError as error:
        return {"name": name, "failed": f"exit status {error.returncode} of {' '.join(error.cmd[2:5])}"}
    timed = steps[arguments.warmup :]
    config = load(recipe, [*keys, f"run.dir={run}"])
    seconds = medians(timed, "time/")
    result = {
        "name": name,
        "layout": f"{config.layout('actor').describe()} -> TP{config.roles.rollout.tp}",
        "roles": {"actor": _keys(config, "actor"), "rollout": _keys(config, "rollout")},
        "seconds": seconds,
        "steps": [step["time/step"] for step in timed],
        "perf": medians(timed, "perf/") if timed[-1]["perf/mfu"] is not None else _without_mfu(timed),
        "response_tokens": statistics.mean(step["rollout/response_tokens_mean"] for step in timed),
        "memory_bytes": {
            key: max(step[f"memory/peak_bytes/{key}"] for step in timed) for key in medians(timed, "memory/peak_bytes/")
        },
    }
    if gpu:
        calibration = Calibration.read(arguments.calibration) if arguments.calibration else Calibration()
        machine = Machine(Cluster(gpu, config.cluster.nodes, config.cluster.ranks_per_node), calibration)
        work = workload(config, arguments.prompt_tokens, min(result["response_tokens"], arguments.response_tokens))
        result["forecast"] = beside(forecast(config, check_shapes(config), machine, work), seconds, result["memory_bytes"])
    return result


def _planned(arguments: argparse.Namespace, recipe: Path, overrides: Sequence[str], gpu: GPU | None, best: Path) -> Path:
    """The config of the planner's first choice."""
    command = [sys.executable, "-m", "hybridflow.cli", "plan", "--config", str(recipe), "--write", str(best), "--top", "3"]
    command += ["--gpu", gpu.name, "--gpu-memory", str(gpu.memory_bytes / GIB)]
    command += ["--calibration", str(arguments.calibration)] if arguments.calibration else []
    commands.check([*command, *overrides])
    return best


def beside(found: Forecast, seconds: Mapping[str, float], memory: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Forecast and measured seconds of the phases and of the step, and bytes of those where both are known."""
    measured = {name: seconds.get(name, 0.0) for name in ("rollout", "log_probs", "update")}
    measured["reshard"] = sum(seconds.get(name, 0.0) for name in MOVES)
    rows = {}
    for phase in found.phases:
        if measured.get(phase.name):
            rows[phase.name] = {"measured": measured[phase.name], "forecast": phase.seconds}
            if phase.name in memory and phase.name != "reshard":  # at its end; the forecast has it at its fullest
                rows[phase.name] |= {"measured_bytes": memory[phase.name], "forecast_bytes": float(phase.nbytes)}
    return rows | {"step": {"measured": seconds["step"], "forecast": found.seconds}}


def table(result: Mapping[str, Any]) -> list[str]:
    """Lines of one layout."""
    if "failed" in result:
        return [f"{result['name']}: FAILED, {result['failed']}"]
    seconds, steps = result["seconds"], result["steps"]
    step = seconds["step"]
    lines = [f"{result['name']} ({result['layout']}): {step:.3f} s a step ({min(steps):.3f} to {max(steps):.3f})"]
    lines[0] += f", {result['perf']['step_tokens_per_second_per_gpu']:,.0f} tokens/s per GPU"
    phases = sorted((value, name) for name, value in seconds.items() if name != "step")
    lines.append("  " + ", ".join(f"{name} {value:.3f} s {value / step:.0%}" for value, name in reversed(phases)))
    for name, row in result.get("forecast", {}).items():
        error = row["forecast"] / row["measured"] - 1
        text = f"  {name:<10} {row['measured']:>8.3f} s, forecast {row['forecast']:>8.3f} ({error:+.0%})"
        if "measured_bytes" in row:
            error = row["forecast_bytes"] / row["measured_bytes"] - 1
            text += f"; {row['measured_bytes'] / GIB:.1f} GiB, forecast {row['forecast_bytes'] / GIB:.1f} ({error:+.0%})"
        lines.append(text)
    return lines


def choices(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the planner's own layout, and the one with the shortest forecast of those that ran, stand to the fastest."""
    ran = [result for result in results if "failed" not in result]
    chosen = {"the planner's layout": [result for result in ran if result["name"] == PLANNER]}
    foretold = [result for result in ran if "forecast" in result]
    chosen["the shortest forecast"] = sorted(foretold, key=lambda r: r["forecast"]["step"]["forecast"])[:1]
    if len(ran) < 2:
        return []
    best = min(ran, key=lambda result: result["seconds"]["step"])
    lines = []
    for what, found in chosen.items():
        if found:
            excess = found[0]["seconds"]["step"] / best["seconds"]["step"] - 1
            lines.append(f"{what}: {found[0]['name']}, {excess:+.1%} to the best, {best['name']}")
    return lines


def _keys(config: Config, role: str) -> dict[str, Any]:
    names = ("tp", "pp", "vpp", "ep", "micro_batch_tokens", "recompute", "offload", "gpu_memory_utilization", "sleep")
    section = getattr(config.roles, role)
    return {name: getattr(section, name) for name in names if hasattr(section, name)}


def _without_mfu(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return medians([{name: value for name, value in step.items() if name != "perf/mfu"} for step in steps], "perf/")


def _text(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.exit(main())
