"""What GPUs can do at most: peak arithmetic from the vendor's data sheets, bandwidths as measured on real machines."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GPU:
    """Attributes:
    bf16_flops: dense bf16 operations a second.
    memory_bytes_per_second: device-to-device copy, bytes read plus bytes written.
    wire_bytes_per_second: NCCL between GPUs of a node, each way.
    """

    name: str
    bf16_flops: float
    memory_bytes_per_second: float
    wire_bytes_per_second: float


_KNOWN = [
    GPU("H200", 989e12, 4.3e12, 355e9),
    GPU("H100", 989e12, 3.0e12, 355e9),
    GPU("A100", 312e12, 1.7e12, 230e9),
]


def gpu() -> GPU | None:
    """This machine's GPU, or None on CPU and for GPUs that nobody measured."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((known for known in _KNOWN if known.name in name), None)
