"""The main job as a benchmark: reward curve, seconds by phase, memory and mismatch of a recipe, over several seeds.

    python benchmarks/learning.py --config configs/smollm2_chain_sum.yaml --seeds 1 2 --plain 30 \\
        --out benchmarks/results/smollm2_1gpu.json [key=value ...]

Each seed is a `hybridflow train` of its own. `--against RESULTS.json` holds the curves against those of another run of this
script, on another number of ranks say. `--plain N` also runs N steps of the plain HF + vLLM loop (plain_loop.py) as
the baseline, on the same GPU right after the last seed. Writes JSON and, beside it, a PNG.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

from benchmarks import commands, record  # noqa: E402

SMOOTHED = 10  # steps
PHASES = ("release", "wake", "reshard", "rollout", "sleep", "restore", "reward", "reference", "log_probs", "update")
MISMATCH = ("log_prob_abs_mean", "log_prob_abs_max", "kl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--plain", type=int, default=0, metavar="STEPS")
    parser.add_argument("--against", type=Path, metavar="RESULTS.json", help="curves to be held against")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--runs", type=Path, help="where the runs' folders go and stay (default: a temporary folder)")
    arguments, overrides = parser.parse_known_args()
    results: dict = {"seeds": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.runs or Path(temporary)
        for seed in arguments.seeds:
            results["seeds"][seed] = train(arguments.config, seed, folder / f"seed{seed}", overrides)
            write(arguments, overrides, results)
        if arguments.plain:
            results["plain_loop"] = plain(arguments, folder / "plain.json", overrides)
            write(arguments, overrides, results)
    if arguments.against:
        other = json.loads(arguments.against.read_text())["results"]["seeds"]
        results["against"] = {"file": str(arguments.against), **against(_curves(results["seeds"]), _curves(other))}
        results["against"]["rewards"] = _curves(other)
        write(arguments, overrides, results)
    draw(results, arguments.out.with_suffix(".png"))
    table(results)


def train(config: str, seed: int, run: Path, overrides: list[str]) -> dict:
    own = [f"run.seed={seed}", f"run.dir={run}"]
    commands.check([sys.executable, "-m", "hybridflow.cli", "train", "--config", config, *overrides, *own], folder=None)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    warm = steps[min(5, len(steps) - 1) :]
    memory = [name for name in steps[-1] if name.startswith("memory/")]
    return {
        "rewards": [step["reward/mean"] for step in steps],
        "accuracy": [evaluation["accuracy"] for evaluation in evaluations],
        "step_seconds": [step["time/step"] for step in steps],
        "step_seconds_median": statistics.median(step["time/step"] for step in warm),
        "phase_seconds_median": {
            name: statistics.median(step[f"time/{name}"] for step in warm) for name in PHASES if f"time/{name}" in warm[0]
        },
        "mismatch": {name: [step[f"mismatch/{name}"] for step in steps] for name in MISMATCH},
        "reshard": {
            name: [step[f"reshard/{name}"] for step in steps] for name in ("bytes_received", "wire_bound_fraction", "verified")
        },
        "mfu": [step["perf/mfu"] for step in steps],
        "memory_bytes": {name.rpartition("/")[2]: [step[name] for step in steps] for name in memory},
    }


def plain(arguments: argparse.Namespace, out: Path, overrides: list[str]) -> dict:
    script = str(ROOT / "benchmarks" / "plain_loop.py")
    options = ["--config", arguments.config, "--steps", str(arguments.plain), "--out", str(out)]
    commands.check([sys.executable, script, *options, *overrides], folder=None)
    return json.loads(out.read_text())["results"]


def against(ours: list[list[float]], others: list[list[float]]) -> dict[str, float]:
    """How far the mean curve of our seeds is from that of others, and how far single seeds are from their own mean.

    Curves are smoothed over `SMOOTHED` steps and cut to the shortest; `apart` and `spread` are the largest differences of the
    mean reward. The same algorithm on the same data is no further apart than seeds are.
    """
    length = min(len(curve) for curve in [*ours, *others])
    means, spread = [], 0.0
    for curves in (ours, others):
        smoothed = [_smoothed(curve[:length]) for curve in curves]
        mean = [statistics.fmean(values) for values in zip(*smoothed, strict=True)]
        spread = max(spread, *(abs(value - m) for curve in smoothed for value, m in zip(curve, mean, strict=True)))
        means.append(mean)
    return {"apart": max(abs(a - b) for a, b in zip(*means, strict=True)), "spread": spread, "steps": length}


def _smoothed(curve: list[float]) -> list[float]:
    """The mean of the last `SMOOTHED` values at every step."""
    return [statistics.fmean(curve[max(0, end - SMOOTHED) : end]) for end in range(1, len(curve) + 1)]


def _curves(seeds: dict) -> list[list[float]]:
    return [result["rewards"] for result in seeds.values()]


def write(arguments: argparse.Namespace, overrides: list[str], results: dict) -> None:
    record.write(arguments.out, {"file": arguments.config, "overrides": overrides}, results)


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, phases) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=[3, 2])
    for seed, result in results["seeds"].items():
        curves.plot(range(1, len(result["rewards"]) + 1), result["rewards"], label=f"seed {seed}")
    for number, rewards in enumerate(results.get("against", {}).get("rewards", [])):
        label = Path(results["against"]["file"]).stem if number == 0 else None
        curves.plot(range(1, len(rewards) + 1), rewards, color="grey", linewidth=0.8, label=label)
    curves.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    curves.legend()
    rows = {f"seed {seed}": result for seed, result in results["seeds"].items()}
    if "plain_loop" in results:
        rows["plain loop"] = results["plain_loop"]
    names = list(dict.fromkeys(name for row in rows.values() for name in row["phase_seconds_median"]))
    left = dict.fromkeys(rows, 0.0)
    for name in names:
        widths = [row["phase_seconds_median"].get(name, 0.0) for row in rows.values()]
        phases.barh(list(rows), widths, left=list(left.values()), label=name)
        left = {row: start + width for (row, start), width in zip(left.items(), widths, strict=True)}
    phases.set(xlabel="seconds a step (median by phase)")
    phases.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def table(results: dict) -> None:
    for seed, result in results["seeds"].items():
        rewards, mismatch = result["rewards"], result["mismatch"]
        memory = {
            name: (round(v[min(4, len(v) - 1)] / 2**30, 2), round(v[-1] / 2**30, 2))
            for name, v in result["memory_bytes"].items()
        }
        print(f"seed {seed}: reward {rewards[0]:.3f} -> {statistics.mean(rewards[-21:]):.3f} (last 21 steps)", end=", ")
        print(f"accuracy {result['accuracy']}, {result['step_seconds_median']:.3f} s a step", end=", ")
        print(f"mismatch mean {max(mismatch['log_prob_abs_mean']):.4f} max {max(mismatch['log_prob_abs_max']):.2f}")
        print("  phases", {name: round(seconds, 3) for name, seconds in result["phase_seconds_median"].items()})
        print("  memory GiB at step 5 and at the end", memory)
    if "against" in results:
        found = results["against"]
        text = f"against {found['file']}: mean curves at most {found['apart']:.3f} apart over {found['steps']} steps"
        print(f"{text}, seeds at most {found['spread']:.3f} from their mean")
    if "plain_loop" in results:
        print(f"plain loop: {results['plain_loop']['step_seconds_median']:.3f} s a step", end=" ")
        print({name: round(seconds, 3) for name, seconds in results["plain_loop"]["phase_seconds_median"].items()})


if __name__ == "__main__":
    main()
