"""Seconds of a step's phases where all roles share two GPUs, and where the rollout has one of its own; torchrun and Ray.

    python benchmarks/placements.py --model models/smollm2 --out benchmarks/results/placements_h200x2.json [key=value ...]
    python benchmarks/placements.py --model models/smollm2 --dry-run      # the placements, and whether the jobs would start

Each case is a whole `hybridflow train` of a few PPO steps with actor, critic, reference, reward model and rollout. The critic
starts as a copy of the policy, the reward model has its weights under a random head. Written are the medians of `metrics.jsonl`
after warm-up; phases that roles on ranks of their own work at beside each other may add up to more than the step.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

from benchmarks import commands, record  # noqa: E402

RECIPE = """
model: {{path: {model}, dtype: bfloat16}}
cluster: {{ranks_per_node: 2}}
roles:
  actor: {{micro_batch_tokens: 16384, forward_micro_batch_tokens: 32768}}
  rollout: {{gpu_memory_utilization: 0.3}}
  reference: {{forward_micro_batch_tokens: 32768}}
  critic: {{micro_batch_tokens: 16384, forward_micro_batch_tokens: 32768}}
  reward: {{forward_micro_batch_tokens: 32768, model: {{path: {classifier}}}}}
algorithm: {{name: ppo, kl_coefficient: 0.01, kl_in: reward}}
batch: {{prompts: 64, samples_per_prompt: 8, mini_batches: 2}}
sampling: {{max_prompt_tokens: 64, max_response_tokens: 96}}
data:
  task: chain_sum
  options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}}
  prompt_template: "{{expression}}="
reward: {{kind: model}}
evaluation: {{problems: 0}}
run: {{steps: 10, seed: 1}}
"""
TRAINING = ("actor", "critic", "reference", "reward")
PLACEMENTS = {
    "colocated": [],  # every role on both GPUs, data-parallel; two engines of one GPU
    "rollout apart": ["roles.rollout.ranks=[0]", *(f"roles.{role}.ranks=[1]" for role in TRAINING)],
}
CASES = {
    f"{placement}, {launcher}": [f"cluster.launcher={launcher}", *PLACEMENTS[placement]]
    for placement in PLACEMENTS
    for launcher in ("torchrun", "ray")
}
SHOWN = ("time/", "perf/", "memory/peak_bytes/")


def main() -> int:
    arguments, overrides = parser().parse_known_args()
    strangers = [word for word in overrides if "=" not in word or word.startswith("-")]
    if strangers:
        print(f"error: unknown arguments {strangers}: config keys have the form key=value", file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        recipe = write_recipe(arguments.model, Path(temporary))
        for number, case in enumerate(arguments.case or CASES):
            print(f"== {case}", flush=True)
            folder = Path(temporary) / f"run{number}"
            command = [sys.executable, "-m", "hybridflow.cli", "train", "--config", str(recipe), f"run.dir={folder}"]
            command += [*CASES[case], *overrides, *(["--dry-run"] if arguments.dry_run else [])]
            status = commands.run(command)
            if status:
                print(f"error: the job of {case!r} ended with status {status}", file=sys.stderr)
                return status
            if arguments.dry_run:
                continue
            steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            results[case] = summary(steps, arguments.warmup) | {"placement": (folder / "placement.txt").read_text()}
            if arguments.out:  # after each: what follows may fail
                config = {"model": str(arguments.model), "recipe": RECIPE, "overrides": overrides, "warmup": arguments.warmup}
                config["cases"] = {name: CASES[name] for name in results}
                record.write(arguments.out, config, results)
    if results:
        print(table(results))
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", required=True, type=Path, metavar="DIR", help="an HF folder")
    result.add_argument("--case", action="append", choices=CASES, metavar="CASE", help=f"only this: {', or '.join(CASES)}")
    result.add_argument("--warmup", type=int, default=3, help="steps that are left out")
    result.add_argument("--dry-run", action="store_true", help="check the jobs and show where roles would run")
    result.add_argument("--out", type=Path, metavar="FILE.json")
    return result


def write_recipe(model: Path, folder: Path) -> Path:
    """The config of all cases, beside its reward model."""
    write_classifier(model, folder / "classifier")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=model.absolute(), classifier=folder / "classifier"))
    return recipe


def write_classifier(model: Path, folder: Path) -> None:
    """A reward model with the policy's weights and tokenizer under a random head."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would say that the head is new
    logging.disable_progress_bar()
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.bfloat16)
    classifier.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def summary(steps: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Medians over the steps after the warm-up, the steps' own seconds, and whether engine and actor agreed in all of them.

    Raises:
        ValueError: there are no steps behind the warm-up.
    """
    warm = steps[warmup:]
    if not warm:
        raise ValueError(f"--warmup={warmup} leaves none of {len(steps)} steps: raise run.steps or lower it")
    names = [name for name in warm[-1] if name.startswith(SHOWN)]
    medians = {name: statistics.median(step.get(name) or 0 for step in warm) for name in names}
    return {
        "median": medians,
        "steps_seconds": [step["time/step"] for step in steps],
        "reshard_verified": [step["reshard/verified"] for step in steps],
        "reshard_bytes_received": warm[-1]["reshard/bytes_received"],
        "mismatch_log_prob_abs_mean": max(step["mismatch/log_prob_abs_mean"] for step in steps),
        "response_tokens_mean": statistics.mean(step["rollout/response_tokens_mean"] for step in warm),
    }


def table(results: dict[str, Any]) -> str:
    """Seconds by phase, a column for each case."""
    phases = list(dict.fromkeys(name for result in results.values() for name in result["median"] if name.startswith("time/")))
    rows = [["seconds (median)", *results]]
    for phase in phases:
        found = [result["median"].get(phase) for result in results.values()]
        rows.append([phase.removeprefix("time/"), *("-" if value is None else f"{value:.3f}" for value in found)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows
    ]
    return "\n".join("  ".join(line) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
