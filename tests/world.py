"""A world of processes that is launched once and runs many test functions: importing Megatron and vLLM takes 10 s a rank.

    def scenario(rank, tp): ...            # a module-level function; runs on every rank
    results = world.run(scenario, tp=2)    # one result per rank; an exception on any rank fails the test with its traceback

The processes have torchrun's environment variables and an initialised gloo world, or NCCL with a GPU for each rank. They die
with the test session.
"""

import itertools
import os
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable

import psutil
import torch.multiprocessing as mp

from hybridflow import garbage
from hybridflow.processes import end_with_parent
from hybridflow.supervise import end

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class World:
    """`size` ranks. `run` raises on a failure or a timeout and kills the world then: its state is unknown."""

    def __init__(self, size: int, cuda: bool = False):
        context = mp.get_context("spawn")
        self.size = size
        self._calls = [context.Queue() for _ in range(size)]
        self._results = context.Queue()
        environment = ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        self._processes = [
            context.Process(target=_serve, args=(rank, environment, self._calls[rank], self._results, cuda), daemon=True)
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable, *args, timeout: float = 240, **kwargs) -> list:
        """Call `function(*args, **kwargs)` on every rank; returns the results in rank order."""
        for calls in self._calls:
            calls.put((function, args, kwargs))
        results, deadline = {}, time.monotonic() + timeout
        while len(results) < self.size:
            try:
                rank, result, error = self._results.get(timeout=1)
            except queue.Empty:
                if time.monotonic() < deadline and self.alive:
                    continue
                missing = sorted(set(range(self.size)) - set(results))
                dead = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
                self.close()
                raise TimeoutError(
                    f"{function.__name__}: no result from ranks {missing} after {timeout} s; dead: {dead}"
                ) from None
            if error is not None:
                self.close()
                raise AssertionError(f"{function.__name__} failed on rank {rank}:\n{error}")
            results[rank] = result
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Ends the ranks and what they have started, such as Megatron's writers of checkpoints, which would wait for ever."""
        started = []
        for process in self._processes:
            if process.is_alive():  # of one that has died nobody knows any more what it had started
                started += psutil.Process(process.pid).children(recursive=True)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        end(started)


def _serve(rank: int, environment: dict, calls, results, cuda: bool) -> None:
    end_with_parent(signal.SIGKILL)  # a test session that is ended by a signal closes nothing
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=environment["WORLD_SIZE"])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=torch.device("cuda", rank) if cuda else None)
    with garbage.none_yet():
        call = calls.get()  # imports what the function needs
    while True:
        function, args, kwargs = call
        try:
            results.put((rank, function(*args, **kwargs), None))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
        call = calls.get()


_transports = itertools.count()


def make_transport():
    """A driver's transport over all ranks of this world; to be called on each of them."""
    import torch.distributed as dist

    from hybridflow.controller.torchrun import TorchrunTransport

    store = dist.PrefixStore(f"transport {next(_transports)}", dist.distributed_c10d._get_default_store())
    return TorchrunTransport(store, dist.get_rank(), dist.get_world_size())
