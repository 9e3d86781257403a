"""The driver in rank 0 calls toy roles on all ranks of a real gloo world."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hybridflow.batch import Batch
from hybridflow.config.schema import ActorConfig, ClusterConfig, Config, RolesConfig, RolloutConfig
from hybridflow.controller import process
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, remote
from hybridflow.controller.role import Role
from hybridflow.controller.waiting import waiting
from hybridflow.controller.worker import Worker
from megatron_ext.layout import Layout
from tests.world import make_transport


class Toy(Role):
    def __init__(self, name: str, layout: Layout):
        self.name, self.layout, self.entered = name, layout, 0

    @contextlib.contextmanager
    def context(self):
        self.entered += 1
        yield

    @remote(THREE_D)
    def double(self, batch: Batch, plus: int = 0) -> Batch:
        dist.barrier()  # every rank takes part
        return Batch(
            {"doubled": [2 * row + plus for row in batch.rows("tokens")], "rows": torch.full((len(batch),), len(batch))}
        )

    @remote(ONE_TO_ALL)
    def where(self) -> tuple[str, int, int]:
        return self.name, dist.get_rank(), self.entered

    @remote(ONE_TO_ALL)
    def hear(self) -> float:
        """From the rank two further on, whose own call comes later."""
        heard = torch.zeros(1)
        dist.recv(heard, dist.get_rank() + 2)
        return heard.item()

    @remote(ONE_TO_ALL)
    def tell(self) -> None:
        dist.send(torch.full((1,), float(dist.get_rank())), dist.get_rank() - 2)

    def hidden(self) -> None: ...


def drive(layout: Layout) -> dict | None:
    transport = make_transport()
    roles = {name: Toy(name, layout) for name in ("a", "b")}
    transport.attach(Worker(dist.get_rank(), roles))
    if dist.get_rank() != 0:
        transport.serve()
        return None
    a, b = (RoleHandle(name, Toy, layout, transport) for name in roles)
    batch = Batch({"tokens": [torch.arange(n) for n in (5, 1, 3, 2, 4)]})
    first, second = a.double(batch, plus=1), b.where()  # both in flight
    late, early = a.where(), b.double(batch)
    found = {
        "early": [row.tolist() for row in early.result().rows("doubled")],
        "first": [row.tolist() for row in first.result().rows("doubled")],
        "shards": first.result()["rows"].tolist(),
        "b": second.result(),
        "a": late.result(),
        "memory": sorted(RoleHandle("worker", Worker, layout, transport).measured().result()[3].memory),
    }
    with pytest.raises(AttributeError, match="no remote method 'hidden'"):
        a.hidden()
    placed = {"a": (0, 1), "b": (2, 3)}
    first, second = (RoleHandle(name, Toy, Layout(2), transport, placed) for name in placed)
    heard, told = first.hear(), second.tell()  # run at once, rank 0's share would wait for a call that is not submitted yet
    found |= {"heard": heard.result(), "told": told.result()}
    transport.close()
    return found


def test_calls_reach_all_ranks_and_results_keep_the_callers_order(worlds):
    found = worlds(4).run(drive, Layout(world_size=4, tp=1, pp=2), timeout=120)[0]
    lengths = (5, 1, 3, 2, 4)
    assert found["first"] == [[2 * i + 1 for i in range(n)] for n in lengths]
    assert found["early"] == [[2 * i for i in range(n)] for n in lengths]
    assert sorted(found["shards"]) == [2, 2, 3, 3, 3]
    assert found["b"] == [("b", rank, 1) for rank in range(4)]
    assert found["a"] == [("a", rank, 2) for rank in range(4)]
    assert found["heard"] == [2.0, 3.0] and found["told"] == [None, None]
    assert found["memory"] == ["a.double", "a.where", "b.double", "b.where"]


def test_a_long_wait_says_what_it_waits_for(capfd):
    with waiting("a friend", interval=0.05):
        time.sleep(0.2)
    assert "waiting for a friend since" in capfd.readouterr().err
    with waiting("nobody", interval=5):
        pass
    assert capfd.readouterr().err == ""


def test_a_rank_on_gpus_takes_its_own(monkeypatch):
    """Seen on two GPUs: both ranks joined on device 0, and NCCL refused them."""
    joined = {}
    current = [0]
    monkeypatch.setattr(process.device, "install", lambda: None)
    monkeypatch.setattr(process.device, "backend", lambda: "nccl")
    monkeypatch.setattr(process.device, "current", lambda: torch.device("cuda", current[0]))
    monkeypatch.setattr(process.device, "world_arguments", lambda: {"device_id": process.device.current()})
    monkeypatch.setattr(process, "os", SimpleNamespace(environ={}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: joined.update(kwargs, backend=backend))
    roles = RolesConfig(actor=ActorConfig(ranks=[1, 2]), rollout=RolloutConfig(ranks=[0]))
    config = Config(cluster=ClusterConfig(ranks_per_node=3), roles=roles)
    process.Process(config, rank=1, store=dist.HashStore(), local_rank=1).join()
    assert (joined["backend"], joined["device_id"]) == ("nccl", torch.device("cuda", 1))
    assert (joined["rank"], joined["world_size"]) == (0, 2)
    assert process.os.environ == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
