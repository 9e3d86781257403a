"""What a step keeps on the device, phase by phase, with and without the release of training's weights during the rollout.

    python benchmarks/memory.py --model configs/models/qwen2_7b.json --ranks 2 \\
        --out benchmarks/results/memory_h200x2_qwen2_7b.json roles.actor.tp=2 roles.rollout.tp=2 [key=value ...]

Each variant is a whole `hybridflow train` of a few GRPO steps with random weights of the model's shapes. Without `--out` only
the table is printed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

from benchmarks import record  # noqa: E402
from benchmarks.random_job import medians, random_model, train  # noqa: E402

VARIANTS = {
    "kept": ["roles.actor.release_weights=never"],
    "released": ["roles.actor.release_weights=always"],
    "released, optimizer offloaded": ["roles.actor.release_weights=always", "roles.actor.offload=[optimizer]"],
}
RECIPE = """
model: {{path: {model}, dtype: bfloat16}}
cluster: {{ranks_per_node: {ranks}}}
roles:
  actor: {{implementation: "benchmarks.random_actor:RandomActor"}}
  rollout: {{gpu_memory_utilization: 0.3, engine_args: {{enforce_eager: true}}}}
algorithm: {{name: grpo}}
batch: {{prompts: 16, samples_per_prompt: 4}}
sampling: {{max_prompt_tokens: 32, max_response_tokens: 64}}
data:
  task: chain_sum
  options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}}
  prompt_template: "{{expression}}="
reward: {{kind: last_integer, concurrency: 1}}
run: {{steps: 5, seed: 1}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, metavar="FILE", help="a config.json in HF format")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    arguments, overrides = parser.parse_known_args()
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        model, recipe = Path(temporary) / "model", Path(temporary) / "recipe.yaml"
        random_model(json.loads(arguments.model.read_text()), model)
        recipe.write_text(RECIPE.format(model=model, ranks=arguments.ranks))
        for number, name in enumerate(arguments.variants):
            results[name] = run(recipe, Path(temporary) / f"run{number}", [*overrides, *VARIANTS[name]])
            print(line(name, results[name]), flush=True)
            if arguments.out:
                config = {"model": str(arguments.model), "ranks": arguments.ranks, "overrides": overrides, "recipe": RECIPE}
                record.write(arguments.out, config, results)


def run(recipe: Path, folder: Path, overrides: list[str]) -> dict:
    """Memory after the calls of each phase (most of any rank, at every step) and the phases' median seconds."""
    steps = train(recipe, folder, overrides)
    prefix = "memory/peak_bytes/"
    names = [name for name in steps[-1] if name.startswith(prefix)]
    return {
        "memory_bytes": {name.removeprefix(prefix): [step[name] for step in steps] for name in names},
        "seconds": medians(steps[min(2, len(steps) - 1) :], "time/"),
    }


def line(name: str, result: dict) -> str:
    memory = ", ".join(f"{phase} {sizes[-1] / 2**30:.2f}" for phase, sizes in result["memory_bytes"].items())
    seconds = ", ".join(f"{phase} {value:.3f}" for phase, value in result["seconds"].items())
    return f"{name}:\n  GiB      {memory}\n  seconds  {seconds}"


if __name__ == "__main__":
    main()
