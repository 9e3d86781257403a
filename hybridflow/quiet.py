"""Warnings of libraries that nobody who runs a job can or need do something about, and that every rank would repeat."""

import re
import warnings

# How they begin.
_USELESS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Detected a Jax installation but could not find the shared object file",  # of a Transformer Engine that is there for torch
    "MimoModelConfig is experimental",  # which no model here is, megatron-core 0.19
    "full scope is deprecated",
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "resource_tracker",  # of what a killed rank left in shared memory: it says so when it has cleaned up
)

PYTHON_WARNINGS = ",".join(f"ignore:{message}" for message in _USELESS)  # the variable PYTHONWARNINGS, for ranks


def ignore() -> None:
    """In this process."""
    for message in _USELESS:
        warnings.filterwarnings("ignore", message=re.escape(message))
