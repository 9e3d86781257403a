"""A large model to a checkpoint and back: bit for bit, and how much memory each way takes.

    python -m tests.drills.convert [--model configs/models/qwen2_7b.json] [--layers N]

Random weights in bf16, 15 GB of the default shape; needs three times that on the disk of the temporary folder (TMPDIR).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.data.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
GIB = 2**30
MOST = 4 * GIB  # what a conversion may take


def make_model(shape: Path, layers: int, to: Path) -> int:
    """An HF folder of random weights, a file for every GiB; returns their bytes."""
    make_tiny_model(to)  # for its tokenizer
    (to / "model.safetensors").unlink()
    fields = json.loads(shape.read_text())
    fields |= {"num_hidden_layers": layers} if layers else {}
    (to / "config.json").write_text(json.dumps(fields))
    with init_empty_weights():
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(to)).state_dict()
    draw, held, total, names = torch.Generator().manual_seed(1), {}, 0, {}
    for name, meta in shapes.items():
        held[name] = torch.empty(meta.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=draw)
        total += held[name].nbytes
        if sum(tensor.nbytes for tensor in held.values()) >= GIB or name == list(shapes)[-1]:
            file = f"model-{len(set(names.values())):05}.safetensors"
            save_file(held, to / file, {"format": "pt"})
            names |= dict.fromkeys(held, file)
            held = {}
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (to / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def convert(source: Path, to: Path) -> None:
    """In a process of its own, whose largest resident set counts, mapped files included."""
    began = time.monotonic()
    command = [sys.executable, "-m", "hybridflow.cli", "convert", "--from", str(source), "--to", str(to)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, lines[-20:]
    peak = usage.ru_maxrss * 1024
    print(f"{source.name} to {to.name}: {time.monotonic() - began:.0f} s, at most {peak / GIB:.2f} GiB, {len(lines)} lines:")
    print("\n".join(f"    {line.replace(str(to.parent) + '/', '')}" for line in (*lines[:3], "...", *lines[-2:])), flush=True)
    assert peak <= MOST, f"{peak} bytes of memory"


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name in sorted(names):
        with safe_open(folder / names[name], "pt") as file:
            yield name, file.get_tensor(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/models/qwen2_7b.json", help="a config.json")
    parser.add_argument("--layers", type=int, default=0, help="so many instead of the model's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        folder = Path(name)
        total = make_model(arguments.model, arguments.layers, folder / "model")
        free = shutil.disk_usage(folder).free
        assert free > 2.1 * total, f"{free / GIB:.1f} GiB are free in {folder}, two more copies of {total / GIB:.1f} are needed"
        print(f"{total / 1e9:.1f} GB of weights", flush=True)
        convert(folder / "model", folder / "checkpoint")
        convert(folder / "checkpoint", folder / "exported")
        pairs = zip(tensors(folder / "model"), tensors(folder / "exported"), strict=True)
        count = 0
        for (expected, ours), (found, theirs) in pairs:
            assert expected == found and ours.dtype == theirs.dtype, (expected, found)
            assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), expected
            count += 1
        print(f"{count} tensors are there and back, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
