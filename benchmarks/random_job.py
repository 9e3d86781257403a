"""A `hybridflow train` of a model of which there are only shapes, and what its metrics say."""

import json
import statistics
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from benchmarks import commands
from hybridflow.config.model_folder import expected_tensors
from hybridflow.data.tokenizer import ARITHMETIC, character_tokenizer
from megatron_ext.hf_config import HFConfig

# Sums of numbers with two digits: a prompt of n of them has 3 n tokens
RECIPE = """
model: {{path: {model}, dtype: bfloat16}}
cluster: {{ranks_per_node: {ranks}}}
roles: {{actor: {{implementation: "benchmarks.random_actor:RandomActor"}}}}
algorithm: {{name: grpo}}
batch: {{prompts: {prompts}, samples_per_prompt: {samples}, mini_batches: {mini_batches}}}
sampling: {{max_prompt_tokens: {prompt_tokens}, max_response_tokens: {response_tokens}}}
data:
  task: chain_sum
  options: {{min_terms: {terms}, max_terms: {terms}, min_digits: 2, max_digits: 2}}
  prompt_template: "{{expression}}="
reward: {{kind: last_integer, concurrency: 1}}
evaluation: {{problems: 0}}
run: {{dir: {model}/run, steps: {steps}, seed: 1}}
"""


def random_model(fields: dict[str, Any], folder: Path) -> None:
    """A model folder that passes for whole, with a tokenizer that knows digits. Its weights take no room on the disk and are
    never read: `random_actor.RandomActor` makes its own."""
    folder.mkdir()
    tokenizer = character_tokenizer(ARITHMETIC)
    tokenizer.save_pretrained(folder)
    fields = fields | {"eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(fields))
    header, end = {}, 0
    for name, shape in expected_tensors(HFConfig.from_dict(fields)).items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def train(recipe: Path, folder: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of every step."""
    command = [sys.executable, "-m", "hybridflow.cli", "train", "--config", str(recipe), f"run.dir={folder}", *overrides]
    commands.check(command)
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def medians(steps: Sequence[dict[str, Any]], prefix: str) -> dict[str, float]:
    """Of the metrics whose name begins so, by the rest of the name."""
    names = [name for name in steps[-1] if name.startswith(prefix)]
    return {name.removeprefix(prefix): statistics.median(step[name] for step in steps) for name in names}
