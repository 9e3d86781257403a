"""What a device gives at most: known GPUs from the planner's table, anything else measured on the spot."""

import functools
import os
import time
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from hybridflow.planner.hardware import GPU, gpu
from megatron_ext import device

PROBE_BYTES = 64 << 20  # beyond the caches
PROBE_SIZE = 512  # rows and columns of the matrices
ATTEMPTS = 7


class Bandwidths(NamedTuple):
    """Bytes a second: of one rank's wire each way while all ranks send, and of its memory, read plus written.

    `wire` is None on a single rank of an unknown device: there is nothing to send to.
    """

    wire: float | None
    memory: float
    origin: str


def bandwidths() -> Bandwidths:
    """Collective over the default group."""
    known = gpu()
    if known:
        return Bandwidths(known.wire_bytes_per_second, known.memory_bytes_per_second, f"known for {known.name}")
    return Bandwidths(_measure_wire(), _measure_memory(), "measured in this run, all ranks at once")


def device_here() -> GPU:
    """This rank's device as the planner describes one. Collective over the default group."""
    known = gpu()
    if known:
        return known
    found, ranks = bandwidths(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    rates = {dtype: _measure_products(dtype) for dtype in (torch.bfloat16, torch.float32)}
    if torch.cuda.is_available():
        name, size = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    else:
        name, size = f"one of {ranks} ranks on {os.cpu_count()} cores", psutil.virtual_memory().total // ranks
    return GPU(name, rates[torch.bfloat16], found.memory, found.wire or found.memory, size, rates[torch.float32])


def _measure_products(dtype: torch.dtype) -> float:
    """Operations a second of matrix products, all ranks at once."""
    left, right = (torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype, device=device.current()) for _ in range(2))
    return 2 * PROBE_SIZE**3 / min(seconds_of(functools.partial(torch.mm, left, right), ATTEMPTS))


def _measure_wire() -> float | None:
    """Every rank sends to the next one and receives from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return None
    sent, received = (torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device.current()) for _ in range(2))

    def exchange() -> None:
        sending = dist.P2POp(dist.isend, sent, (rank + 1) % size)
        receiving = dist.P2POp(dist.irecv, received, (rank - 1) % size)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()

    return PROBE_BYTES / min(seconds_of(exchange, ATTEMPTS))


def _measure_memory() -> float:
    source, target = (torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device.current()) for _ in range(2))
    return 2 * PROBE_BYTES / min(seconds_of(lambda: target.copy_(source), ATTEMPTS))


def seconds_of(action, repeat: int, warm_up: int = 1) -> list[float]:
    """Seconds of each of `repeat` calls on the slowest rank: a barrier before, the device synchronised on both ends."""
    seconds = []
    for _ in range(warm_up + repeat):
        dist.barrier()
        device.synchronize()
        start = time.perf_counter()
        action()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds[warm_up:], dtype=torch.float64, device=device.current())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def most(value: float) -> float:
    """The largest of any rank."""
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device.current())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
