"""Checks of the section `cluster`: the launcher, and whether the roles fit its processes. Each raises ConfigError."""

import importlib.util
import os
from typing import Any

from hybridflow.config.schema import Config, ConfigError
from hybridflow.controller.placement import place
from hybridflow.processes import inside_torchrun


def check_cluster(config: Config) -> None:
    """The roles fit the processes that the config asks for, and those are the processes that torchrun started."""
    c, world = config.cluster, config.world_size
    started = int(os.environ["WORLD_SIZE"]) if inside_torchrun() else world
    if started != world:
        raise ConfigError(
            f"torchrun started {started} processes, but cluster.nodes={c.nodes} x cluster.ranks_per_node={c.ranks_per_node}"
            f" = {world}: start {world}, or change these keys"
        )
    try:
        place(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for name, role in config.megatron_roles().items():
        if role.vpp > 1 and role.pp == 1:
            raise ConfigError(f"roles.{name}.vpp={role.vpp} needs a pipeline, but roles.{name}.pp=1: use vpp=1 or a larger pp")


def check_launcher(config: Config) -> None:
    """The launcher is there, and the keys are those of this launcher."""
    c = config.cluster
    if c.launcher == "torchrun":
        for key, value in (("address", c.address), ("resources", c.resources)):
            if value:
                raise ConfigError(f"cluster.{key}={value} is for Ray: set cluster.launcher=ray, or leave it out")
        return
    if inside_torchrun():
        raise ConfigError(
            "cluster.launcher=ray, but torchrun or srun has started this process as a rank: start hybridflow train once, or set"
            " cluster.launcher=torchrun"
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("cluster.launcher=ray needs the package ray: pip install ray, or use cluster.launcher=torchrun")
    if not c.address and (c.nodes > 1 or c.resources):
        key = f"nodes={c.nodes}" if c.nodes > 1 else f"resources={c.resources}"
        raise ConfigError(
            f"cluster.{key}, but without cluster.address Ray is started on this machine alone: start a cluster"
            " (ray start --head, and ray start --address=HEAD:6379 on the other nodes) and set cluster.address=HEAD:6379"
        )
    if "://" in c.address:
        raise ConfigError(f"cluster.address={c.address} is of Ray's client protocol: use HOST:PORT of the cluster, or auto")
    for node, amounts in c.resources.items():
        _check_resources(f"cluster.resources.{node}", node, amounts, c.nodes)


def _check_resources(key: str, node: Any, amounts: Any, nodes: int) -> None:
    names = [f"node{number}" for number in range(nodes)]
    if node not in names:
        raise ConfigError(f"{key}: cluster.nodes={nodes} has {', '.join(names)}")
    if not isinstance(amounts, dict):
        raise ConfigError(f"{key}={amounts} is not a section of amounts, such as {{H200: 1}}")
    for name, amount in amounts.items():
        if name in ("CPU", "GPU"):
            raise ConfigError(f"{key}.{name} follows from cluster.ranks_per_node: leave it out")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or amount <= 0:
            raise ConfigError(f"{key}.{name}={amount} is not a number above 0")
