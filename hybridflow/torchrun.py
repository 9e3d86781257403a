"""Starts a job's ranks on this node with torchrun: all of them, or this node's share of a job over several nodes."""

import os
import shutil
import socket
import sys
import uuid
from pathlib import Path

import psutil

from hybridflow.config.schema import Config, ConfigError
from hybridflow.controller import rank_log
from hybridflow.controller.hang import Watch
from hybridflow.controller.placement import place
from hybridflow.machine import try_port
from hybridflow.quiet import PYTHON_WARNINGS
from hybridflow.rendezvous import Rendezvous, rendezvous
from hybridflow.supervise import Job, supervise

MEET_SECONDS = 1800  # for all nodes to start


def launch(config: Config, device: str, config_path: str, overrides: list[str]) -> int:
    """Run this node's share of `hybridflow.train` under torchrun and wait; returns the exit status: 0, 1, or 99 (stopping.py).

    Raises:
        ConfigError: there are several nodes, and the environment does not say where they meet; or the port is taken.
    """
    meeting = rendezvous(config.cluster.nodes, config.run.port, os.environ)
    _check_port(meeting)
    if meeting.node == 0 and config.run.overwrite:
        for name in ("logs", "hang"):
            shutil.rmtree(Path(config.run.dir) / name, ignore_errors=True)
    job = describe(config, meeting)
    ours = environment(config, device, os.environ) | {rank_log.FOLDER: str(job.logs)}
    return supervise(command(config, meeting, config_path, overrides), ours, "torchrun", job)


def _check_port(meeting: Rendezvous) -> None:
    """Node 0 can listen where the ranks are to meet."""
    if meeting.node > 0 or not meeting.port:
        return
    fault = try_port(meeting.port)
    if fault:
        raise ConfigError(
            f"the ranks cannot meet on this machine: {fault}: set run.port (MASTER_PORT) to another, on one node to 0 for a"
            " free one"
        )


def describe(config: Config, meeting: Rendezvous) -> Job:
    """What to watch over, and where it is noted: several nodes meet in the run's folder, which they share."""
    folder = Path(config.run.dir).absolute()
    logs = folder / "logs" / meeting.job
    several = config.cluster.nodes > 1
    watch = Watch(
        config.run.hang_minutes, range(config.world_size), folder / "hang", meeting.node == 0, 30.0 if several else 10.0
    )
    return Job(logs / "notes" if several else None, logs, meeting.node == 0, watch, place(config).named())


def command(config: Config, meeting: Rendezvous, config_path: str, overrides: list[str]) -> list[str]:
    """torchrun's command line. On one node with a rendezvous of this job's own on the loopback interface, so that jobs don't
    meet; on several nodes they are numbered as the environment says, so that `node0` of the config is the one it names."""
    agent = agent_command(config.cluster.nodes, config.cluster.ranks_per_node, meeting)
    return [*agent, "-m", "hybridflow.train", "--config", config_path, *overrides]


def agent_command(nodes: int, ranks: int, meeting: Rendezvous) -> list[str]:
    """`command` without what the ranks run."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{meeting.port}", "--rdzv-id", uuid.uuid4().hex]
    meet += ["--local-addr", "127.0.0.1"]
    if nodes > 1:
        meet = ["--rdzv-backend", "static", "--rdzv-endpoint", f"{meeting.address}:{meeting.port}", "--rdzv-id", meeting.job]
        meet += ["--node-rank", str(meeting.node), "--rdzv-conf", f"timeout={MEET_SECONDS}"]
    return [sys.executable, "-m", "hybridflow.agent", "--nnodes", str(nodes), "--nproc-per-node", str(ranks), *meet]


def plan(config: Config, config_path: str, overrides: list[str]) -> str:
    """How the job would be started, for a dry run; the environment need not say yet where several nodes meet."""
    where = "here"
    if config.cluster.nodes > 1 and config.cluster.launcher == "torchrun":
        where = "on every node, with MASTER_ADDR, MASTER_PORT and NODE_RANK set (launch/torchrun, launch/slurm)"
    lines = [f"started {where}: hybridflow train --config {' '.join([config_path, *overrides])}"]
    folder = Path(config.run.dir)
    if config.cluster.launcher == "torchrun":
        lines.append(f"output of rank N: {folder / 'logs'}/START/rank-N.log")
    hang = (
        f"{config.run.hang_minutes:g} minutes without progress end it" if config.run.hang_minutes else "a hang does not end it"
    )
    lines.append(f"SIGTERM or SIGUSR1 end the job after a step, with status 99; {hang}")
    return "\n".join(lines)


def environment(config: Config, device: str, outer: dict[str, str] | os._Environ) -> dict[str, str]:
    """The ranks' environment; what the user has set stays."""
    ranks = config.cluster.ranks_per_node
    cores = len(os.sched_getaffinity(0))
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank's own process
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": PYTHON_WARNINGS,
    }
    if Path(config.model.path).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        wanted |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if config.cluster.nodes > 1:
        wanted |= reachable_interface(socket.gethostname())
    return {**wanted, **outer, "HYBRIDFLOW_LAUNCHED": "1"}


def reachable_interface(host: str) -> dict[str, str]:
    """gloo listens where the machine's own name points to. Debian points it to 127.0.1.1, which other nodes cannot reach: then
    the interface by which this node reaches node 0 is named instead."""
    try:
        own = socket.gethostbyname(host)
    except OSError:
        own = "127.0.0.1"  # the name stands for nothing
    if not own.startswith("127."):
        return {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", host), 9))  # sends nothing: asks for the way
        address = probe.getsockname()[0]
    names = [name for name, has in psutil.net_if_addrs().items() if any(each.address == address for each in has)]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names and not address.startswith("127.") else {}
