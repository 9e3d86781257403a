"""Roles on ranks, pools, and the picture; pure."""

from pathlib import Path

import pytest

from hybridflow.config.schema import (
    ActorConfig,
    ClusterConfig,
    Config,
    CriticConfig,
    ReferenceConfig,
    RolesConfig,
    RolloutConfig,
)
from hybridflow.controller.placement import parse_ranks, place

ALL, FIRST, LAST = "all", [0, 1], [2, 3]


def config(nodes: int = 1, ranks_per_node: int = 4, **roles) -> Config:
    kinds = {"actor": ActorConfig, "rollout": RolloutConfig, "critic": CriticConfig, "reference": ReferenceConfig}
    made = {name: kinds[name](**keys) for name, keys in roles.items()}
    return Config(cluster=ClusterConfig(nodes=nodes, ranks_per_node=ranks_per_node), roles=RolesConfig(**made))


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        ("all", tuple(range(8))),
        ([0, 1], (0, 1)),
        ([5, 0], (0, 5)),
        ("0-3", (0, 1, 2, 3)),
        (["0-2", 5], (0, 1, 2, 5)),
        (3, (3,)),
        (["node0:[0,1]", "node1:[0,1]"], (0, 1, 4, 5)),
        (["node1: [0-2]", 0], (0, 4, 5, 6)),
    ],
)
def test_ways_to_say_which_ranks(value, ranks):
    assert parse_ranks("roles.actor.ranks", value, 2, 4) == ranks


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0, 8], "roles.x.ranks asks for rank 8, but there are cluster.nodes=2 x cluster.ranks_per_node=4 = 8 ranks: 0 to 7"),
        (["node1:[4]"], "roles.x.ranks asks for rank 4, but there are cluster.ranks_per_node=4 on node1: 0 to 3"),
        (["node2:[0]"], "roles.x.ranks: node2 is not one of cluster.nodes=2: the last is node1"),
        ([1, "0-1"], "roles.x.ranks=[1, '0-1'] names rank 1 twice"),
        ([], "roles.x.ranks=[] names no rank: write all"),
        (["3-1"], "roles.x.ranks: '3-1' ends before it begins"),
        ("some", "roles.x.ranks has 'some': write all"),
        ([True], "roles.x.ranks has True: write all"),
        ([-1], "roles.x.ranks has -1: write all"),
        ([1.5], "roles.x.ranks has 1.5: write all"),
        (["node0:[]"], "roles.x.ranks has '': write all"),
        (None, "roles.x.ranks has None: write all"),
    ],
)
def test_ranks_that_are_not_there(value, message):
    with pytest.raises(ValueError) as error:
        parse_ranks("roles.x.ranks", value, 2, 4)
    assert str(error.value).startswith(message)


def test_pools_are_what_roles_connect():
    split = place(config(actor={"ranks": [0, 1], "tp": 2}, rollout={"ranks": [0, 1]}, critic={"ranks": [2, 3]}))
    assert split.pools == ((0, 1), (2, 3))
    assert [split.pool_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert split.pool_with("critic") == (2, 3) and split.within_pool("critic") == (0, 1)
    chained = place(
        config(1, 6, actor={"ranks": [1, 5]}, rollout={"ranks": [0, 4]}, critic={"ranks": [2, 3, 5]}, reference={"ranks": [1]})
    )
    assert chained.pools == ((0, 4), (1, 2, 3, 5))
    assert chained.within_pool("critic") == (1, 2, 3)
    assert chained.on(1) == ["actor", "reference"] and chained.on(4) == ["rollout"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (config(actor={"ranks": [0]}, rollout={"ranks": [1]}), "ranks 2-3 of 4 would have no role: name them in"),
        (
            config(actor={"tp": 3}),
            "cluster.nodes=1 x cluster.ranks_per_node=4 = 4 processes are not a multiple of roles.act",
        ),
        (
            config(critic={"ranks": [0, 1], "tp": 2, "pp": 2}),
            "roles.critic.ranks=[0, 1] = 2 ranks are fewer than roles.critic.tp=2 x pp=2 x cp=1 = 4: change roles.critic.ranks",
        ),
        (
            config(rollout={"ranks": [0, 1]}),
            "roles.rollout.ranks=[0, 1] leaves out rank 2, which is in one pool with it through actor (ranks 0-3): an engine"
            " needs a world of its own, so give rollout all ranks of the pool",
        ),
        (
            config(2, 2, actor={"ranks": [0, 3]}, rollout={"ranks": [1, 2], "tp": 2}),
            "roles.rollout.tp=2 does not divide the 1 ranks on node0 of roles.rollout.ranks=[1, 2]: use 1",
        ),
        (
            config(rollout={"tp": 3}),
            "roles.rollout.tp=3 does not divide cluster.ranks_per_node=4: use 1, 2 or 4",
        ),
    ],
)
def test_placements_that_cannot_be(wanted, message):
    with pytest.raises(ValueError) as error:
        place(wanted)
    assert str(error.value).startswith(message)


def test_layouts_span_the_roles_ranks():
    chosen = config(actor={"ranks": [0, 1], "tp": 2}, rollout={"ranks": [0, 1]}, critic={"ranks": [2, 3], "pp": 2})
    assert [chosen.layout(role).world_size for role in ("actor", "rollout", "critic")] == [2, 2, 2]
    assert chosen.layout("critic").dp == 1


def test_the_picture():
    found = place(config(2, 2, actor={"ranks": ["node0:[0,1]"]}, rollout={"ranks": ["node0:[0,1]"]}, critic={"ranks": [2, 3]}))
    assert found.render().splitlines() == [
        "where roles run (rank: roles)",
        "        GPU 0              GPU 1",
        "node 0  0: actor, rollout  1: actor, rollout",
        "node 1  2: critic          3: critic",
        "pool 0: ranks 0-1: actor, rollout",
        "pool 1: ranks 2-3: critic",
    ]


@pytest.mark.parametrize(
    "roles",
    [
        {"actor": ALL, "rollout": ALL, "reference": ALL, "critic": FIRST},
        {"actor": FIRST, "rollout": FIRST, "reference": LAST, "critic": LAST},
        {"actor": FIRST, "rollout": LAST, "reference": FIRST, "critic": FIRST},
    ],
)
def test_the_pictures_that_the_readme_shows(roles):
    placed = {name: {"ranks": ranks, "tp": 2} for name, ranks in roles.items()}
    assert f"```\n{place(config(**placed)).render()}\n```" in (Path(__file__).parents[2] / "README.md").read_text()
