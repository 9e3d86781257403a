"""One rank of a job, whoever started it: it joins its pool's world, builds its roles, runs the calls that reach it, and leaves.

    process = Process(config, rank=5, store=store, local_rank=1)   # store: one that all ranks of the job reach
    process.join()
    process.build()
    result = process.execute(call)      # as often as the driver says
    process.close()

All of it on one thread, the process's main one. A fault in any of it is a `RankFailed`, which can be pickled; the launcher
decides what becomes of the process.
"""

import contextlib
import datetime
import gc
import os
from typing import Any

import torch
import torch.distributed as dist

from hybridflow import garbage
from hybridflow.config.schema import Config
from hybridflow.controller import groups, hang
from hybridflow.controller.faults import as_rank_failed
from hybridflow.controller.placement import place
from hybridflow.controller.waiting import waiting
from hybridflow.controller.worker import Call, Worker
from megatron_ext import device


class Process:
    """Attributes:
    rank: among all ranks of the job.
    pool: the global ranks that share a torch.distributed world with it, itself included.
    """

    def __init__(self, config: Config, rank: int, store: dist.Store, local_rank: int, timeout_minutes: float = 10):
        """`local_rank`: the number of this rank's device on its node. `timeout_minutes`: of the pool's collectives."""
        self.config, self.rank = config, rank
        placement = place(config)
        self._number = placement.pool_of(rank)
        self.pool = placement.pools[self._number]
        self._store, self._local_rank, self._timeout = store, local_rank, datetime.timedelta(minutes=timeout_minutes)
        self._worker: Worker | None = None

    def join(self) -> None:
        """Join the pool's world, the default one of this process: NCCL on CUDA, gloo on a CPU."""
        size = len(self.pool)
        hang.starting("joining the world")
        with as_rank_failed(self.rank, "joining the world"), waiting(f"the other ranks of the pool of {size} to join"):
            device.install()
            if device.backend() == "nccl":
                # srun may show each rank its own GPU only, which is number 0 then
                torch.cuda.set_device(self._local_rank % torch.cuda.device_count())
            at = self.pool.index(self.rank)
            # what Megatron and vLLM find in their environment is the world that they are in
            os.environ |= {"RANK": str(at), "WORLD_SIZE": str(size), "LOCAL_RANK": str(self._local_rank)}
            os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.config.cluster.ranks_per_node))
            groups.use_store(dist.PrefixStore("groups", self._store))
            store = dist.PrefixStore(f"pool {self._number}", self._store)
            arguments = {"timeout": self._timeout, **device.world_arguments()}
            dist.init_process_group(device.backend(), store=store, rank=at, world_size=size, **arguments)

    def build(self) -> None:
        """Build this rank's roles. Collective over the pool."""
        with garbage.none_yet():
            from hybridflow.roles.registry import build_roles

        first = self.rank == self.pool[0]  # the others wait for the same, and need not say so too
        speaking = waiting("the roles to be built (engine start, model load)") if first else contextlib.nullcontext()
        with as_rank_failed(self.rank, "building the roles (engine start, model load)"), speaking:
            self._worker = Worker(self.rank, build_roles(self.config, self.rank))
        hang.starting("roles made")

    def execute(self, call: Call) -> Any:
        """Run a call of the driver on this rank; returns its result."""
        with as_rank_failed(self.rank, call.where):
            return self._worker.execute(call)

    def close(self) -> None:
        """After the last call: close the roles and leave the world. Collective over the pool."""
        with as_rank_failed(self.rank, "leaving the world"):
            if self._worker:
                self._worker.close()
            dist.barrier()
            dist.destroy_process_group()
        gc.freeze()  # closing the engine has undone it: as it ends Python would walk everything once more, for 2 s
