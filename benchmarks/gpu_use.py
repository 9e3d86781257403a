"""Clock and power of the GPUs while something is measured: what else could explain a figure."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hybridflow.metrics.nvml import GpuWatch, find_gpu, gpu_metrics
from megatron_ext import device

INTERVAL = 0.2  # seconds between two readings


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Filled at the end with gpu/* as a run's metrics have them, over all ranks' GPUs; empty where there are none, or no NVML.
    Collective over the default group."""
    use: dict[str, float] = {}
    own = find_gpu("", device.current().index) if torch.cuda.is_available() else None
    watch = GpuWatch([own.gpu], INTERVAL) if own and own.gpu else None
    if watch:
        watch.start()
    try:
        yield use
    finally:
        if watch:
            watch.close()
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, watch.take()[0] if watch else {})
    use |= gpu_metrics(everyones)
