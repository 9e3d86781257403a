"""Where the nodes of a job meet and which of them this is, from the environment that a launcher sets. Imports nothing heavy.

Every node runs the same `hybridflow train`, with MASTER_ADDR (a name or address of node 0), MASTER_PORT (a port free there) and
NODE_RANK (this node's number; under srun SLURM_NODEID). `launch/torchrun/` and `launch/slurm/` set them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.config.schema import ConfigError

JOB = "HYBRIDFLOW_JOB"  # names one start of a job, the same on all of its nodes
_NODE_RANK = ("NODE_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Rendezvous:
    """Attributes:
    address, port: where node 0 listens; port 0 on a single node: a free one.
    node: this node's number.
    job: a name for this start of the job, the same on all nodes; a folder is named so.
    """

    address: str
    port: int
    node: int
    job: str


def rendezvous(nodes: int, port: int, environment: Mapping[str, str]) -> Rendezvous:
    """`port`: where MASTER_PORT says nothing.

    Raises:
        ConfigError: several nodes, and the environment does not say where they meet.
    """
    if nodes == 1:
        return Rendezvous("127.0.0.1", port, 0, _job(environment) or time.strftime("%Y%m%d-%H%M%S"))
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT") or str(port)
    node = next((environment[name] for name in _NODE_RANK if environment.get(name)), "")
    if not address or port == "0" or not node:
        found = {"MASTER_ADDR": address, "MASTER_PORT": port != "0", "NODE_RANK": node}
        missing = [name for name, there in found.items() if not there]
        raise ConfigError(
            f"cluster.nodes={nodes}: {', '.join(missing)} not set in the environment: start this command on every node with"
            f" MASTER_ADDR (a name or address of node 0), MASTER_PORT (a port free there) and NODE_RANK (0 to {nodes - 1}), as"
            " launch/torchrun/ and launch/slurm/ do"
        )
    if not _is_number(port) or not 0 < int(port) <= 65535:
        raise ConfigError(f"MASTER_PORT={port} is not a port: use 1 to 65535")
    if not _is_number(node) or int(node) >= nodes:
        raise ConfigError(f"NODE_RANK={node}, but cluster.nodes={nodes}: number the nodes 0 to {nodes - 1}")
    return Rendezvous(address, int(port), int(node), _job(environment) or f"{address}-{port}".replace("/", "_"))


def check_rank(environment: Mapping[str, str]) -> None:
    """Raises ConfigError: RANK and WORLD_SIZE are set, but not with all else that torchrun or srun sets for a rank; some
    schedulers set them for their own jobs, and a shell may have kept them."""
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    missing = [name for name in (*numbers, "MASTER_ADDR") if not environment.get(name)]
    wrong = [f"{name}={environment[name]}" for name in numbers if environment.get(name) and not _is_number(environment[name])]
    if missing or wrong:
        what = f"{', '.join(missing)} not" if missing else f"{', '.join(wrong)}, which is no number"
        raise ConfigError(
            f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} are set as for a rank of torchrun or srun,"
            f" but {what}: unset RANK and WORLD_SIZE, or start this with torchrun"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _job(environment: Mapping[str, str]) -> str:
    if environment.get(JOB):
        return environment[JOB]
    if environment.get("SLURM_JOB_ID"):  # unique within an array as well
        return f"slurm-{environment['SLURM_JOB_ID']}-{environment.get('SLURM_RESTART_COUNT', '0')}"
    return ""
