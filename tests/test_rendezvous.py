"""Where nodes meet, from the environment."""

import pytest

from hybridflow.config.schema import ConfigError
from hybridflow.rendezvous import JOB, rendezvous

TWO = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500", "NODE_RANK": "1"}


def test_one_node_needs_nothing():
    found = rendezvous(1, 7, {"MASTER_ADDR": "elsewhere", "NODE_RANK": "3"})
    assert (found.address, found.port, found.node) == ("127.0.0.1", 7, 0) and found.job


@pytest.mark.parametrize(
    "environment,job",
    [
        (TWO, "gpu1-29500"),
        (TWO | {JOB: "mine"}, "mine"),
        (TWO | {"SLURM_JOB_ID": "12"}, "slurm-12-0"),
        (TWO | {"NODE_RANK": "", "SLURM_NODEID": "1", "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"}, "slurm-12-2"),
    ],
)
def test_several_nodes(environment, job):
    found = rendezvous(2, 0, environment)
    assert (found.address, found.port, found.node, found.job) == ("gpu1", 29500, 1, job)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"MASTER_ADDR": ""}, "cluster.nodes=2: MASTER_ADDR not set"),
        ({"MASTER_PORT": "", "NODE_RANK": ""}, "MASTER_PORT, NODE_RANK not set"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2, but cluster.nodes=2: number the nodes 0 to 1"),
    ],
)
def test_what_is_missing_or_wrong(change, message):
    with pytest.raises(ConfigError, match=message):
        rendezvous(2, 0, TWO | change)


def test_the_configs_port_will_do():
    assert rendezvous(2, 4444, TWO | {"MASTER_PORT": ""}).port == 4444
