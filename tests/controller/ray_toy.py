"""`python -m tests.controller.ray_toy CONFIG [raise|meet]`: a driver over toy roles on Ray, as ray_job.py starts it.

It prints what it sees as one line of JSON; its ranks join a gloo world and build neither Megatron nor an engine.
"""

import functools
import json
import os
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from unittest import mock

import psutil
import torch
import torch.distributed as dist

from hybridflow import ray_driver
from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.controller.faults import as_rank_failed
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.process import Process
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, remote
from hybridflow.controller.role import Role
from hybridflow.controller.worker import Worker
from megatron_ext.layout import Layout

SILENCE = 7.0  # above the time between two beats
SHOWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "HYBRIDFLOW_LAUNCHED", "PYTHONPATH")


class Toy(Role):
    name = "toy"

    def __init__(self, layout: Layout):
        self.layout, self.calls = layout, 0

    @remote(THREE_D)
    def double(self, batch: Batch) -> Batch:
        dist.barrier()  # every rank takes part
        tokens = batch.values("tokens")
        tokens *= 2  # as the role's own memory
        return batch

    @remote(ONE_TO_ALL)
    def count(self) -> int:
        self.calls += 1
        return self.calls

    @remote(ONE_TO_ALL)
    def environment(self) -> dict[str, str]:
        print(f"rank {dist.get_rank()} speaks")
        print(f"rank {dist.get_rank()} complains", file=sys.stderr)
        self.memory = SharedMemory(create=True, size=1)
        return {name: os.environ.get(name, "") for name in SHOWN} | {"pid": str(os.getpid()), "memory": self.memory.name}

    @remote(THREE_D)
    def fail_on(self, batch: Batch) -> Batch:
        if 2 in batch.values("tokens"):
            raise ValueError("a bad batch")
        dist.barrier()
        return batch

    @remote(ONE_TO_ALL)
    def meet_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            dist.barrier()
            time.sleep(0.01)


class ToyProcess(Process):
    """A rank of a gloo world that every device has."""

    def join(self) -> None:
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(len(self.pool)), "LOCAL_RANK": str(self._local_rank)}
        with as_rank_failed(self.rank, "joining"):
            dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=len(self.pool))

    def build(self) -> None:
        layout = Layout(world_size=len(self.pool))
        self._worker = Worker(self.rank, {"toy": Toy(layout)})


def drive(config: Config, transport) -> None:
    toy = RoleHandle("toy", Toy, Layout(config.world_size), transport)
    ranks = toy.environment().result()
    batch = Batch({"tokens": [torch.arange(n) for n in (3, 1, 2)]})
    pending, counts = toy.double(batch), toy.count()  # both in flight
    doubled = [row.tolist() for row in pending.result().rows("tokens")]
    ours = [row.tolist() for row in batch.rows("tokens")]
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {c.laddr.ip for process in family for c in process.net_connections("inet") if c.status == "LISTEN"}
    seen = {"ranks": ranks, "doubled": doubled, "ours": ours, "counts": counts.result(), "listening": sorted(listening)}
    print(json.dumps(seen), flush=True)
    transport.phase = lambda: "step 3, rollout"
    if "raise" in sys.argv:
        toy.fail_on(batch).result()
    if "meet" in sys.argv:
        toy.meet_for(600.0).result()


def main() -> int:
    """The driver's process: `ray_driver.main` with toys in the place of what a job builds."""
    from hybridflow import train
    from hybridflow.controller import process, ray

    transport = functools.partial(ray.RayTransport, silence=SILENCE)
    with (
        mock.patch.object(process, "Process", ToyProcess),
        mock.patch.object(train, "drive", drive),
        mock.patch.object(ray, "RayTransport", transport),
    ):
        return ray_driver.main(["--config", sys.argv[1]])


if __name__ == "__main__":
    from tests.controller import ray_toy  # by its name, which the ranks can import as well

    sys.exit(ray_toy.main())
