"""Starts a job's ranks on this node with torchrun."""

import os
import sys
import uuid
from pathlib import Path

from hybridflow.config.schema import Config, ConfigError
from hybridflow.supervise import supervise

# How Megatron's warnings begin that every rank would repeat, and that nobody who runs a job can or need do something about.
_USELESS_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "resource_tracker",  # of what a killed rank left in shared memory: it says so when it has cleaned up
)


def launch(config: Config, device: str, config_path: str, overrides: list[str]) -> int:
    """Run `hybridflow.train` under torchrun and wait; returns the exit status, 0 or 1."""
    if config.cluster.nodes > 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}: start torchrun --nnodes {config.cluster.nodes}"
            f" --nproc-per-node {config.cluster.ranks_per_node} -m hybridflow.train --config {config_path} on every node"
        )
    return supervise(command(config, config_path, overrides), environment(config, device, os.environ), "torchrun")


def command(config: Config, config_path: str, overrides: list[str]) -> list[str]:
    """torchrun's command line: a rendezvous of this job's own on the loopback interface, so that jobs don't meet."""
    return [
        *(sys.executable, "-m", "hybridflow.agent"),
        *("--nnodes", "1", "--nproc-per-node", str(config.cluster.ranks_per_node)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{config.run.port}", "--rdzv-id", uuid.uuid4().hex),
        *("--local-addr", "127.0.0.1", "-m", "hybridflow.train", "--config", config_path, *overrides),
    ]


def environment(config: Config, device: str, outer: dict[str, str] | os._Environ) -> dict[str, str]:
    """The ranks' environment; what the user has set stays."""
    ranks = config.cluster.ranks_per_node
    cores = len(os.sched_getaffinity(0))
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank's own process
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": ",".join(f"ignore:{message}" for message in _USELESS_WARNINGS),
    }
    if Path(config.model.path).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        wanted |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**wanted, **outer, "HYBRIDFLOW_LAUNCHED": "1"}
