"""Ray as a job's machines: starts one of this job's own or joins a running cluster, and finds a place for every rank.

The map from ranks to GPUs is the same in every run on the same machines: nodes by address, GPUs of a node by their number.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from ray._private import ray_constants, worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.config.schema import Config, ConfigError
from hybridflow.controller.waiting import waiting
from hybridflow.supervise import end

PATIENCE = 10  # seconds for a placement that the cluster could hold
STARTS = 3  # of a Ray of the job's own, which gives up after 30 s: on a busy host it may take longer


@dataclass(frozen=True)
class Seat:
    """Where a rank lives. `device`: the number of its GPU among those of its node, or its own number on the node on a CPU."""

    host: str
    ip: str
    node: str  # Ray's id of it
    device: int

    @property
    def order(self) -> tuple:
        """By address as a number: 10.0.0.9 comes before 10.0.0.10."""
        return [int(part) if part.isdigit() else part for part in self.ip.split(".")], self.host, self.node, self.device


@contextlib.contextmanager
def connected(config: Config, device: str, folder: str, environment: dict[str, str]) -> Iterator[None]:
    """Within, this process is a driver on Ray.

    Args:
        device: cuda or cpu.
        folder: of an embedded Ray's sockets and logs.
        environment: of the ranks; an embedded Ray inherits it from this process.
    """
    common = {"logging_level": "ERROR", "log_to_driver": True}
    address = config.cluster.address
    try:
        if address:
            _check_somebody_listens(address)
            with waiting(f"the Ray cluster at {address} to answer"):
                ray.init(address=address, runtime_env={"env_vars": environment}, **common)
        else:
            _keep_to_this_host()
            ranks = config.cluster.ranks_per_node
            gpus = ranks if device == "cuda" else 0
            own = {"address": "local", "include_dashboard": False, "_temp_dir": folder, "_node_ip_address": "127.0.0.1"}
            _start(num_cpus=ranks, num_gpus=gpus, **own, **common)
    except (OSError, ray.exceptions.AuthenticationError) as error:
        if not address:
            raise
        raise ConfigError(f"cluster.address={address}: this Ray cluster cannot be joined: {_first_line(error)}") from error
    worker._worker_logs_enabled = False  # Ray's own printer, which also has remarks of the raylet
    global_worker_stdstream_dispatcher.add_handler("hybridflow", _show)
    try:
        yield
    finally:
        ray.shutdown()


def _start(**arguments: Any) -> None:
    own = set(psutil.Process().children(recursive=True))
    for left in reversed(range(STARTS)):
        try:
            ray.init(**arguments)
            return
        except Exception as error:  # Ray has no class of its own for this one
            if "timed out during startup" not in str(error) or not left:
                raise
            ray.shutdown()
            end([process for process in psutil.Process().children(recursive=True) if process not in own])
            print("Ray did not start within 30 s, as on a busy machine: it is started again", file=sys.stderr, flush=True)


def _check_somebody_listens(address: str) -> None:
    """Ray itself tries for minutes.

    Raises:
        OSError: nobody does.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


def _keep_to_this_host() -> None:
    """By the switch with which Ray keeps to the loopback interface on macOS and Windows; without it every interface listens."""
    ray_constants.ENABLE_RAY_CLUSTER = False


def _show(data: dict[str, Any]) -> None:
    """What ranks print, as they print it; what Ray's processes say (pid `raylet`, `autoscaler`) is left to its log files."""
    if str(data["pid"]).isdigit():
        print("\n".join(data["lines"]), file=sys.stderr if data["is_err"] else sys.stdout, flush=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def asked(config: Config, device: str) -> list[dict[str, float]]:
    """What each node is asked for, in Ray's resources: a GPU and a CPU for each rank, and `cluster.resources` of the node."""
    ranks = config.cluster.ranks_per_node
    each = {"CPU": float(ranks)} | ({"GPU": float(ranks)} if device == "cuda" else {})
    return [each | config.cluster.resources.get(f"node{node}", {}) for node in range(config.cluster.nodes)]


def check_size(config: Config, wanted: Sequence[dict[str, float]], nodes: Sequence[dict[str, Any]]) -> None:
    """`nodes`: as `ray.nodes()` gives them.

    Raises:
        ConfigError: the cluster has fewer nodes of the kind that is asked for, busy ones included.
    """
    free = [node["Resources"] for node in nodes if node["Alive"]]
    # those that ask for the most kinds of resources first, so that they don't find their nodes taken
    for want in sorted(wanted, key=lambda want: (-len(want), -sum(want.values()))):
        fits = [have for have in free if all(have.get(name, 0) >= amount for name, amount in want.items())]
        if not fits:
            raise ConfigError(_too_much(config, wanted, [node for node in nodes if node["Alive"]]))
        free.remove(min(fits, key=len))


def _too_much(config: Config, wanted: Sequence[dict[str, float]], nodes: Sequence[dict[str, Any]]) -> str:
    unit = "GPU" if "GPU" in wanted[0] else "CPU"
    names = [name for name in dict.fromkeys(name for want in wanted for name in want) if name == unit or name != "CPU"]
    have = "; ".join(f"{node['NodeManagerHostname']} has {_amounts(node['Resources'], names)}" for node in nodes)
    total = sum(node["Resources"].get(unit, 0) for node in nodes)
    extra = "".join(
        f", on node{i} {_amounts(want, [name for name in names if name != unit])}"
        for i, want in enumerate(wanted)
        if len(set(want) - {"CPU", "GPU"})
    )
    c = config.cluster
    hint = ", or cluster.device=cpu" if unit == "GPU" else ""
    return (
        f"cluster.nodes={c.nodes} x cluster.ranks_per_node={c.ranks_per_node} asks for {c.nodes * c.ranks_per_node} {unit}s"
        f"{extra}, but the Ray cluster at {c.address or 'this machine'} has {total:g} on {len(nodes)} nodes ({have}):"
        f" lower them, or start more nodes{hint}"
    )


def _amounts(resources: dict[str, float], names: Sequence[str]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


class PlacementTimeout(RuntimeError):
    """The cluster is large enough, but others use it."""


def reserve(config: Config, wanted: Sequence[dict[str, float]]) -> PlacementGroup:
    """A placement group with one bundle for each node, all on nodes of their own.

    Raises:
        PlacementTimeout: not within PATIENCE.
    """
    group = placement_group(list(wanted), strategy="STRICT_SPREAD")
    if not group.wait(PATIENCE):
        unit = "GPU" if "GPU" in wanted[0] else "CPU"
        needed, free = sum(want[unit] for want in wanted), ray.available_resources().get(unit, 0)
        raise PlacementTimeout(
            f"the Ray cluster at {config.cluster.address} did not give {needed:g} {unit}s on {len(wanted)} nodes within"
            f" {PATIENCE} s: {free:g} {unit}s are free, other jobs have the rest"
        )
    return group


def seated(actor: type, group: PlacementGroup, wanted: Sequence[dict[str, float]], device: str) -> tuple[list, list[Seat]]:
    """An actor of this class on every seat of the placement group, in the order of the ranks, and the seats.

    Bundles that ask for the same are handed to the nodes in the order of the machines' addresses, whatever Ray chose.
    """
    make = ray.remote(actor).options
    bundles: list[list[tuple[Any, Seat]]] = []
    for number, want in enumerate(wanted):
        ranks = int(want["CPU"])
        here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        each = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "scheduling_strategy": here, "max_restarts": 0}
        bundles.append([(one, one.seat.remote(device)) for one in (make(**each).remote() for _ in range(ranks))])
    with waiting("Ray to start the ranks' processes"):
        found = [[(one, ray.get(seat)) for one, seat in bundle] for bundle in bundles]
    found = [_in_order(bundle) for bundle in found]
    alike: dict[str, list] = {}
    for want, bundle in zip(wanted, found, strict=True):
        alike.setdefault(str(want), []).append(bundle)
    for kind in alike.values():
        kind.sort(key=lambda bundle: bundle[0][1].order)
    ordered = [pair for want in wanted for pair in alike[str(want)].pop(0)]
    return [one for one, _ in ordered], [seat for _, seat in ordered]


def describe(seats: Sequence[Seat], ranks_per_node: int) -> str:
    """Which machine is which node, a line for each: `node0: gpu-a (10.0.0.9), devices 0, 1`."""
    lines = []
    for number, start in enumerate(range(0, len(seats), ranks_per_node)):
        here = seats[start : start + ranks_per_node]
        devices = ", ".join(str(seat.device) for seat in here)
        lines.append(f"node{number}: {here[0].host} ({here[0].ip}), devices {devices}")
    return "\n".join(lines)


def _in_order(bundle: list[tuple[Any, Seat]]) -> list[tuple[Any, Seat]]:
    """A node's actors by their GPU; on a CPU they get numbers."""
    if bundle[0][1].device < 0:
        return [(one, replace(seat, device=number)) for number, (one, seat) in enumerate(bundle)]
    return sorted(bundle, key=lambda pair: pair[1].device)


def seat_here(device: str) -> Seat:
    """The seat of the actor that calls this; its device is -1 on a CPU, where an actor has no number of its own."""
    context = ray.get_runtime_context()
    number = gpu_index(context.get_accelerator_ids()["GPU"][0]) if device == "cuda" else -1
    return Seat(socket.gethostname(), ray.util.get_node_ip_address(), context.get_node_id(), number)


def gpu_index(gpu: str) -> int:
    """Ray numbers GPUs as CUDA_VISIBLE_DEVICES of its node does; CUDA counts the visible ones from 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu) if visible else int(gpu)
