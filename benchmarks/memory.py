"""What a step keeps on the device, phase by phase, with and without the release of training's weights during the rollout.

    python benchmarks/memory.py --model configs/models/qwen2_7b.json --ranks 2 \\
        --out benchmarks/results/memory_h200x2_qwen2_7b.json roles.actor.tp=2 roles.rollout.tp=2 [key=value ...]

Each variant is a whole `hybridflow train` of a few GRPO steps with random weights of the model's shapes. Without `--out` only
the table is printed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks import record  # noqa: E402
from hybridflow.data.tokenizer import ARITHMETIC, character_tokenizer  # noqa: E402
from megatron_ext import device, weights  # noqa: E402
from megatron_ext.hf_config import HFConfig  # noqa: E402

VARIANTS = {
    "kept": ["roles.actor.release_weights=never"],
    "released": ["roles.actor.release_weights=always"],
    "released, optimizer offloaded": ["roles.actor.release_weights=always", "roles.actor.offload=[optimizer]"],
}
FILE_BYTES = 4 << 30
RECIPE = """
model: {{path: {model}, dtype: bfloat16}}
cluster: {{ranks_per_node: {ranks}}}
roles:
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


def random_model(fields: dict, folder: Path) -> None:
    """An HF folder of random bf16 weights, with a tokenizer that knows digits; made file by file."""
    folder.mkdir()
    tokenizer = character_tokenizer(ARITHMETIC)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields | {"eos_token_id": tokenizer.eos_token_id}))
    torch.manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}]
    index: dict[str, str] = {}
    for name, shape in weights.hf_shapes(HFConfig.from_dict(fields)).items():
        if sum(tensor.nbytes for tensor in files[-1].values()) > FILE_BYTES:
            save_file(files[-1], folder / f"{len(files)}.safetensors")
            files[-1] = {}
            files.append({})
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device.current()).normal_(0, 0.02)
        files[-1][name] = torch.ones_like(tensor).cpu() if len(shape) == 1 and "norm" in name else tensor.cpu()
        index[name] = f"{len(files)}.safetensors"
    save_file(files[-1], folder / f"{len(files)}.safetensors")
    (folder / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def run(recipe: Path, folder: Path, overrides: list[str]) -> dict:
    """Memory after the calls of each phase (most of any rank, at the last step) and the phases' median seconds."""
    command = [sys.executable, "-m", "hybridflow.cli", "train", "--config", str(recipe), f"run.dir={folder}", *overrides]
    subprocess.run(command, check=True)
    steps = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    warm = steps[min(2, len(steps) - 1) :]
    prefix = "memory/peak_bytes/"
    return {
        "memory_bytes": {
            name.removeprefix(prefix): [step[name] for step in steps] for name in steps[-1] if name.startswith(prefix)
        },
        "seconds": {
            name.removeprefix("time/"): statistics.median(step[name] for step in warm)
            for name in steps[-1]
            if name.startswith("time/")
        },
    }


def line(name: str, result: dict) -> str:
    memory = ", ".join(f"{phase} {sizes[-1] / 2**30:.2f}" for phase, sizes in result["memory_bytes"].items())
    seconds = ", ".join(f"{phase} {value:.3f}" for phase, value in result["seconds"].items())
    return f"{name}:\n  GiB      {memory}\n  seconds  {seconds}"


if __name__ == "__main__":
    main()
