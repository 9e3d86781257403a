"""Jobs on Ray with toy roles (ray_toy.py): calls and batches, where ranks get their seats, and how jobs end."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridflow.config.load import load
from hybridflow.config.schema import ConfigError
from hybridflow.controller import ray_cluster
from hybridflow.controller.ray_cluster import Seat
from hybridflow.ray_driver import settings
from tests.config.folders import write_config, write_model
from tests.processes import PYTHON_PATH, kill, living
from tests.world import free_port

ROOT = Path(__file__).parents[2]
HOST = socket.gethostname()
START = 300  # seconds, on a machine that is busy with other tests


class Job:
    """`python -m tests.controller.ray_job` with a folder for temporary files of its own."""

    def __init__(self, config: Path, *arguments: str):
        self.folder = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))  # short: sockets live in it
        self._printed, self._said = self.folder.with_suffix(".out"), self.folder.with_suffix(".err")
        with self._printed.open("w") as out, self._said.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.controller.ray_job", str(config), *arguments],
                cwd=ROOT,
                env=os.environ | {"TMPDIR": str(self.folder), "PYTHONPATH": PYTHON_PATH},
                stdout=out,
                stderr=err,
            )
        self.family: list[psutil.Process] = []

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    @property
    def said(self) -> str:
        return self._said.read_text()

    def seen(self) -> dict:
        """What the driver printed; waits for it."""
        wait_for(lambda: "{" in self.printed and self.printed.endswith("\n") or self.process.poll() is not None, START, self)
        line = next((line for line in self.printed.splitlines() if line.startswith("{")), None)
        assert line, self.said
        self.family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        return json.loads(line)

    def left(self) -> list[psutil.Process]:
        """Processes of the job, by descent or by their folder, that are still there."""
        by_folder = [p for p in psutil.process_iter(["cmdline"]) if any(str(self.folder) in w for w in p.info["cmdline"] or [])]
        return by_folder + living(self.family)

    def left_over(self, ranks: list[dict]) -> list:
        """Processes, files of an embedded Ray, shared memory of ranks."""
        memory = [rank["memory"] for rank in ranks if Path("/dev/shm", rank["memory"]).exists()]
        return [*self.left(), *self.folder.glob("hybridflow-*"), *memory]

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        kill((self.process, *self.left()))
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in (self._printed, self._said):
            file.unlink()


def wait_for(condition, seconds: float, job: Job) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened in time: {job.printed} {job.said}"
        time.sleep(0.1)


@contextlib.contextmanager
def started(config: Path, *arguments: str) -> Iterator[Job]:
    job = Job(config, *arguments)
    try:
        yield job
    finally:
        job.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def config(tmp_path, model):
    cluster = {"launcher": "ray", "ranks_per_node": 2, "device": "cpu"}
    return write_config(tmp_path, model, cluster=cluster, roles={"actor": {}, "rollout": {}})


@pytest.mark.timeout(START + 60)
def test_calls_reach_all_ranks_and_nobody_else(config):
    with started(config) as job:
        seen = job.seen()
        assert job.process.wait(60) == 0, job.said
        assert job.left_over(seen["ranks"]) == []
        printed, said = job.printed, job.said
    assert seen["doubled"] == [[0, 2, 4], [0], [0, 2]] and seen["ours"] == [[0, 1, 2], [0], [0, 1]]
    assert seen["counts"] == [1, 1]
    ranks = seen["ranks"]
    assert [rank["RANK"] for rank in ranks] == [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
    assert len({rank["pid"] for rank in ranks}) == 2
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["HYBRIDFLOW_LAUNCHED"]) == ("2", "2", "1")
        assert rank["OMP_NUM_THREADS"] == "1"
        assert rank["PYTHONPATH"].startswith(str(ROOT))
    # without a cluster's address nobody on the network can reach Ray; gloo, which speaks between ranks, has its own address
    own = {address for _, addresses in psutil.net_if_addrs().items() for address in (a.address for a in addresses)}
    assert {"127.0.0.1"} <= {ip.removeprefix("::ffff:") for ip in seen["listening"]} <= own
    assert not {"0.0.0.0", "::"} & set(seen["listening"])
    # what ranks print comes as they print it, and Ray says nothing
    assert sorted(line for line in printed.splitlines() if "speaks" in line) == [f"rank {rank} speaks" for rank in range(2)]
    said = [line for line in said.splitlines() if not line.startswith("waiting for ")]  # on a busy machine
    assert sorted(said) == [f"rank {rank} complains" for rank in range(2)]


@pytest.mark.timeout(START + 60)
def test_the_fault_of_a_rank_ends_the_job_with_its_traceback(config):
    with started(config, "raise") as job:
        ranks = job.seen()["ranks"]
        assert job.process.wait(60) == 1
        assert job.left_over(ranks) == []
        said = job.said
    fault = f"rank 0 on {HOST} failed in toy.fail_on (step 3, rollout):"
    assert f"{fault}\nTraceback" in said and 'raise ValueError("a bad batch")' in said
    assert said.endswith(f"\nhybridflow: error: {fault} ValueError: a bad batch\n")


ENDS = {
    "rank killed": f"hybridflow: error: rank 1 on {HOST} died in toy.meet_for (step 3, rollout): its process was killed or",
    "rank stopped": f"hybridflow: error: rank 1 on {HOST} gave no sign of life for 7 s in toy.meet_for (step 3, rollout): its",
    "driver killed": "hybridflow: error: the driver's process was ended by SIGKILL",
    "hybridflow terminated": "hybridflow: stopped by SIGTERM; all ranks have ended",
    "hybridflow killed": None,
}


@pytest.mark.timeout(START + 120)
@pytest.mark.parametrize("how", ENDS)
def test_whatever_ends_a_job_ends_all_of_it(config, how):
    with started(config, "meet") as job:
        ranks = job.seen()["ranks"]
        driver = next(p for p in job.family if p.ppid() == job.process.pid)
        victim, number = {
            "rank killed": (int(ranks[1]["pid"]), signal.SIGKILL),
            "rank stopped": (int(ranks[1]["pid"]), signal.SIGSTOP),
            "driver killed": (driver.pid, signal.SIGKILL),
            "hybridflow terminated": (job.process.pid, signal.SIGTERM),
            "hybridflow killed": (job.process.pid, signal.SIGKILL),
        }[how]
        time.sleep(0.5)
        os.kill(victim, number)
        assert job.process.wait(60) == (-signal.SIGKILL if how == "hybridflow killed" else 1)
        if how == "hybridflow killed":  # nobody is left to take its own folder away
            wait_for(lambda: job.left() == [], 60, job)
            return
        assert job.left_over(ranks) == []
        last = job.said.splitlines()[-1]
        assert last.startswith(ENDS[how]), job.said
        assert last.endswith("; its roles: actor, rollout") == how.startswith("rank "), last


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray cluster of two nodes, which are both on this machine; yields its address."""
    folder, port = tempfile.mkdtemp(prefix="hf-", dir="/tmp"), free_port()
    command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    head = ["--head", f"--port={port}", '--resources={"small": 1}', "--include-dashboard=false", f"--temp-dir={folder}"]
    other = [f"--address=127.0.0.1:{port}", '--resources={"big": 1}']
    nodes = []
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # of the user's, whom the cluster belongs to
    environment = os.environ | token | {"RAY_enable_metrics_collection": "0"}
    try:
        for arguments in (head, other):
            nodes.append(
                subprocess.Popen(
                    [*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
                )
            )
            for line in nodes[-1].stdout:
                if "Ray runtime started" in line:
                    break
        with pytest.MonkeyPatch.context() as user:
            for name, value in token.items():
                user.setenv(name, value)
            yield f"127.0.0.1:{port}"
    finally:
        kill([p for node in nodes for p in (*psutil.Process(node.pid).children(recursive=True), node)])
        for node in nodes:
            node.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(2 * START)
def test_a_cluster_with_an_address(tmp_path, model, cluster):
    kinds = {"node0": {"big": 1}, "node1": {"small": 1}}
    asked = {"launcher": "ray", "address": cluster, "nodes": 2, "ranks_per_node": 1, "device": "cpu"}
    config = write_config(tmp_path, model, cluster={**asked, "resources": kinds}, roles={"actor": {}, "rollout": {}})
    with started(config) as job:
        ranks = job.seen()["ranks"]
        assert job.process.wait(60) == 0, job.said
        assert f"node0: {HOST}" in job.printed and f"node1: {HOST}" in job.printed
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks] == [
        ("0", "0", "1"),
        ("1", "0", "1"),
    ]

    config = write_config(tmp_path, model, cluster={**asked, "nodes": 4}, roles={"actor": {}, "rollout": {}})
    with started(config) as job:
        assert job.process.wait(START) == 2
        said = job.said
    assert said == (
        f"hybridflow: error: cluster.nodes=4 x cluster.ranks_per_node=1 asks for 4 CPUs, but the Ray cluster at {cluster} has 2"
        f" on 2 nodes ({HOST} has 1 CPU; {HOST} has 1 CPU): lower them, or start more nodes\n"
    )


def node(host: str, alive: bool = True, **resources: float) -> dict:
    return {"NodeManagerHostname": host, "Alive": alive, "Resources": resources}


def test_more_than_there_is(config):
    wanted = load(config, ["cluster.nodes=2", "cluster.ranks_per_node=8", "cluster.address=a:1", "cluster.device=cuda"])
    asked = ray_cluster.asked(wanted, "cuda")
    assert asked == [{"CPU": 8.0, "GPU": 8.0}] * 2
    nodes = [node("a", CPU=64, GPU=8), node("b", CPU=64, GPU=4), node("c", False, CPU=64, GPU=8), node("head", CPU=4)]
    with pytest.raises(ConfigError) as caught:
        ray_cluster.check_size(wanted, asked, nodes)
    assert str(caught.value) == (
        "cluster.nodes=2 x cluster.ranks_per_node=8 asks for 16 GPUs, but the Ray cluster at a:1 has 12 on 3 nodes"
        " (a has 8 GPU; b has 4 GPU; head has 0 GPU): lower them, or start more nodes, or cluster.device=cpu"
    )
    ray_cluster.check_size(wanted, asked, [*nodes, node("d", CPU=8, GPU=8)])


def test_others_use_the_cluster(config, monkeypatch):
    class Taken:
        def wait(self, seconds: float) -> bool:
            assert seconds <= 10
            return False

    monkeypatch.setattr(ray_cluster, "placement_group", lambda bundles, strategy: Taken())
    monkeypatch.setattr(ray_cluster.ray, "available_resources", lambda: {"GPU": 3.0, "CPU": 60.0})
    wanted = load(config, ["cluster.nodes=2", "cluster.ranks_per_node=8", "cluster.address=a:1", "cluster.device=cuda"])
    with pytest.raises(ray_cluster.PlacementTimeout, match="a:1 did not give 16 GPUs on 2 nodes within 10 s: 3 GPUs are free"):
        ray_cluster.reserve(wanted, ray_cluster.asked(wanted, "cuda"))


def test_nodes_of_different_kinds(config):
    overrides = ["cluster.nodes=2", "cluster.ranks_per_node=2", "cluster.address=a:1", "cluster.resources={node0: {H200: 2}}"]
    wanted = load(config, overrides)
    asked = ray_cluster.asked(wanted, "cuda")
    assert asked == [{"CPU": 2.0, "GPU": 2.0, "H200": 2}, {"CPU": 2.0, "GPU": 2.0}]
    fast, slow = node("fast", CPU=8, GPU=2, H200=2), node("slow", CPU=8, GPU=2)
    ray_cluster.check_size(wanted, list(reversed(asked)), [fast, slow])  # the plain one does not take the fast node away
    with pytest.raises(
        ConfigError, match=r"asks for 4 GPUs, on node0 2 H200, but .* has 4 on 2 nodes .slow has 2 GPU, 0 H200;"
    ):
        ray_cluster.check_size(wanted, asked, [slow, slow])


def test_seats_are_in_the_order_of_addresses_and_gpus(monkeypatch):
    seats = [Seat("h", "10.0.0.10", "n2", 0), Seat("h", "10.0.0.9", "n1", 10), Seat("h", "10.0.0.9", "n1", 2)]
    assert sorted(seats, key=lambda seat: seat.order) == list(reversed(seats))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,2")
    assert [ray_cluster.gpu_index(gpu) for gpu in ("2", "4", "7")] == [2, 0, 1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert ray_cluster.gpu_index("3") == 3


def test_settings_of_ray(config):
    own, joined = settings(load(config)), settings(load(config, ["cluster.address=auto"]))
    assert own["RAY_AUTH_MODE"] == "token" and len(own["RAY_AUTH_TOKEN"]) == 64
    assert settings(load(config))["RAY_AUTH_TOKEN"] != own["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_MODE" not in joined and joined["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
