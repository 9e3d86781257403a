"""What GPUs can do at most: peak arithmetic from the vendor's data sheets, bandwidths as measured on real machines."""

import shutil
import subprocess
from dataclasses import dataclass

from hybridflow.config.schema import ConfigError

NETWORK = 50e9  # bytes a second of a GPU's own 400 Gb/s adapter


@dataclass(frozen=True)
class GPU:
    """Attributes:
    bf16_flops: dense bf16 operations a second.
    memory_bytes_per_second: device-to-device copy, bytes read plus bytes written.
    wire_bytes_per_second: NCCL between GPUs of a node, each way.
    memory_bytes: of the device, as nvidia-smi says.
    fp32_flops: operations a second in full fp32.
    """

    name: str
    bf16_flops: float
    memory_bytes_per_second: float
    wire_bytes_per_second: float
    memory_bytes: int
    fp32_flops: float


@dataclass(frozen=True)
class Cluster:
    """`network_bytes_per_second`: of one GPU to other nodes, each way."""

    gpu: GPU
    nodes: int
    gpus_per_node: int
    network_bytes_per_second: float = NETWORK

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def ranks_together(self, size: int, stride: int) -> int:
        """How many of a group's ranks share a node, where the group has `size` ranks at a distance of `stride`."""
        return min(size, max(1, self.gpus_per_node // stride))


_KNOWN = [
    GPU("H200", 989e12, 4.3e12, 355e9, 143771 << 20, 67e12),
    GPU("H100", 989e12, 3.0e12, 355e9, 81559 << 20, 67e12),
    GPU("A100", 312e12, 1.7e12, 230e9, 81920 << 20, 19.5e12),
]


def gpu() -> GPU | None:
    """This machine's GPU, or None on CPU and for GPUs that nobody measured."""
    import torch

    return find(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def find(name: str) -> GPU | None:
    """The GPU that a device's full name, such as "NVIDIA H200", stands for."""
    return next((known for known in _KNOWN if known.name in name), None)


def named(name: str) -> GPU:
    """The GPU of this name.

    Raises:
        ConfigError: it is not among the known ones.
    """
    found = next((known for known in _KNOWN if known.name == name), None)
    if found is None:
        raise ConfigError(f"--gpu {name} is unknown: use one of {', '.join(known.name for known in _KNOWN)}")
    return found


def gpu_names() -> list[str]:
    """The names of this node's GPUs as nvidia-smi says, none without it. Touches no GPU: a context takes memory."""
    return _query("name")


def memory_sizes() -> list[int]:
    """Bytes of this node's GPUs, likewise."""
    return [int(line) << 20 for line in _query("memory.total") if line.isdigit()]


def _query(what: str) -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]
