"""Which roles live on which ranks, as the config says; the pools that follow; and a picture of it. Pure: no torch.

A rank is one process, on its node one GPU: rank = node x cluster.ranks_per_node + index of the GPU. Ranks that share roles,
directly or through others, form a pool: their processes share one torch.distributed world.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.config.schema import Config

Ranks = tuple[int, ...]
_FORMS = 'write all, indices such as [0, 1] or ["0-3"], or GPUs of nodes such as ["node0:[0,1]", "node1:[0-3]"]'
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_ON_NODE = re.compile(r"node(\d+):\[(.*)\]")


@dataclass(frozen=True)
class Placement:
    """Attributes:
    roles: the global ranks of every role, ascending: their places in this tuple are the ranks of the role's layout.
    pools: the global ranks of every pool, ascending: their places are the ranks of the pool's torch.distributed world.
    ranks_per_node: rank r is GPU r % ranks_per_node of node r // ranks_per_node.
    """

    roles: Mapping[str, Ranks]
    pools: tuple[Ranks, ...]
    ranks_per_node: int

    def pool_of(self, rank: int) -> int:
        """The number of the pool in which this rank is."""
        return next(number for number, pool in enumerate(self.pools) if rank in pool)

    def pool_with(self, role: str) -> Ranks:
        """The ranks of the pool in which this role lives."""
        return self.pools[self.pool_of(self.roles[role][0])]

    def within_pool(self, role: str) -> Ranks:
        """The role's ranks as the pool's world numbers them."""
        places = {rank: place for place, rank in enumerate(self.pool_with(role))}
        return tuple(places[rank] for rank in self.roles[role])

    def on(self, rank: int) -> list[str]:
        """The roles that live on this rank."""
        return [role for role, ranks in self._members.items() if rank in ranks]

    @cached_property
    def _members(self) -> dict[str, frozenset[int]]:
        return {role: frozenset(ranks) for role, ranks in self.roles.items()}

    def named(self) -> list[str]:
        """The roles of every rank, for messages."""
        return [", ".join(self.on(rank)) for rank in range(sum(map(len, self.pools)))]

    def render(self) -> str:
        """A table of nodes x GPUs with the roles of each rank, and below it the pools where there are several."""
        world = sum(map(len, self.pools))
        columns = min(self.ranks_per_node, world)
        named = self.named()
        cells = [[f"{rank}: {named[rank]}" for rank in range(at, at + columns)] for at in range(0, world, columns)]
        heads = [f"GPU {gpu}" for gpu in range(columns)]
        rows = [["", *heads], *([f"node {node}", *row] for node, row in enumerate(cells))]
        widths = [max(len(row[column]) for row in rows) for column in range(columns + 1)]
        lines = ["where roles run (rank: roles)"]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if len(self.pools) > 1:
            for number, pool in enumerate(self.pools):
                roles = [role for role, ranks in self.roles.items() if ranks[0] in pool]
                lines.append(f"pool {number}: {_ranks(pool)}: {', '.join(roles)}")
        return "\n".join(lines)


def place(config: "Config") -> Placement:
    """The placement of a config's roles.

    Raises:
        ValueError: the ranks can't be had, or the roles can't live on them; one line that names key and both numbers.
    """
    names = [field.name for field in fields(config.roles) if getattr(config.roles, field.name) is not None]
    roles = {name: config.ranks(name) for name in names}
    placement = Placement(roles, _pools(roles, config.world_size), config.cluster.ranks_per_node)
    for name, role in config.megatron_roles().items():
        layout = f"roles.{name}.tp={role.tp} x pp={role.pp} x cp={role.cp}"
        _check_layout(config, name, len(roles[name]), role.tp * role.pp * role.cp, layout)
    _check_rollout(config, placement)
    return placement


def parse_ranks(key: str, value: Any, nodes: int, ranks_per_node: int) -> Ranks:
    """What `roles.X.ranks` stands for: global ranks, ascending.

    Args:
        key: its name, for messages.
        value: `all`; indices `[0, 1]` or spans of them `["0-3", 5]`; or GPUs of nodes `["node0:[0,1]", "node1:[0-3]"]`.

    Raises:
        ValueError: naming the key, what is wrong with it and what there is.
    """
    world = nodes * ranks_per_node
    if value == "all":
        return tuple(range(world))
    items = value if isinstance(value, list) else [value]
    found = [rank for item in items for rank in _item(key, item, nodes, ranks_per_node)]
    if not found:
        raise ValueError(f"{key}={value} names no rank: {_FORMS}")
    twice = sorted(rank for rank, times in Counter(found).items() if times > 1)
    if twice:
        raise ValueError(f"{key}={value} names rank {twice[0]} twice: leave one out")
    return tuple(sorted(found))


def _item(key: str, item: Any, nodes: int, ranks_per_node: int) -> list[int]:
    on_node = _ON_NODE.fullmatch(item.replace(" ", "")) if isinstance(item, str) else None
    if not on_node:
        world, limits = nodes * ranks_per_node, f"cluster.nodes={nodes} x cluster.ranks_per_node={ranks_per_node}"
        return _numbers(key, item, world, f"{limits} = {world} ranks", 0)
    node = int(on_node[1])
    if node >= nodes:
        raise ValueError(f"{key}: node{node} is not one of cluster.nodes={nodes}: the last is node{nodes - 1}")
    limits = f"cluster.ranks_per_node={ranks_per_node} on node{node}"
    parts = on_node[2].split(",")
    return [rank for part in parts for rank in _numbers(key, part, ranks_per_node, limits, node * ranks_per_node)]


def _numbers(key: str, item: Any, count: int, limits: str, first: int) -> list[int]:
    """One number or a span `a-b` of them, all below `count`, counted from `first`."""
    span = None if isinstance(item, bool) else _SPAN.fullmatch(str(item).strip())
    if not span:
        raise ValueError(f"{key} has {item!r}: {_FORMS}")
    start, stop = int(span[1]), int(span[2] or span[1])
    if stop < start:
        raise ValueError(f"{key}: {item!r} ends before it begins")
    if stop >= count:
        raise ValueError(f"{key} asks for rank {stop}, but there are {limits}: 0 to {count - 1}; change it or the cluster")
    return list(range(first + start, first + stop + 1))


def _pools(roles: Mapping[str, Ranks], world: int) -> tuple[Ranks, ...]:
    """Sets of ranks that no role reaches beyond, ordered by their first rank."""
    pool_of = {rank: {rank} for rank in range(world)}
    for ranks in roles.values():
        merged = set().union(*{id(pool_of[rank]): pool_of[rank] for rank in ranks}.values())
        pool_of |= dict.fromkeys(merged, merged)
    used = {rank for ranks in roles.values() for rank in ranks}
    idle = tuple(rank for rank in range(world) if rank not in used)
    if idle:
        raise ValueError(
            f"{_ranks(idle)} of {world} would have no role: name them in some roles.*.ranks, or lower"
            " cluster.ranks_per_node or cluster.nodes"
        )
    return tuple(sorted(tuple(sorted(pool)) for pool in {id(pool): pool for pool in pool_of.values()}.values()))


def _check_layout(config: "Config", name: str, count: int, needed: int, layout: str) -> None:
    if count % needed == 0:
        return
    nodes, per_node, key = config.cluster.nodes, config.cluster.ranks_per_node, f"roles.{name}.ranks"
    have, change = f"{key}={getattr(config.roles, name).ranks} = {count} ranks", key
    if count == config.world_size:
        have = f"cluster.nodes={nodes} x cluster.ranks_per_node={per_node} = {count} processes"
        change = "cluster.ranks_per_node"
    what = "are fewer than" if count < needed else "are not a multiple of"
    raise ValueError(f"{have} {what} {layout} = {needed}: change {change} or the layout")


def _check_rollout(config: "Config", placement: Placement) -> None:
    """The engines have all ranks of a pool, and each its ranks on one node."""
    role, ranks, pool = config.roles.rollout, placement.roles["rollout"], placement.pool_with("rollout")
    missing = sorted(set(pool) - set(ranks))
    if missing:
        others = sorted({name for rank in pool for name in placement.on(rank)} - {"rollout"})
        raise ValueError(
            f"roles.rollout.ranks={role.ranks} leaves out rank {missing[0]}, which is in one pool with it through"
            f" {', '.join(others)} ({_ranks(pool)}): an engine needs a world of its own, so give rollout all ranks of the"
            " pool, or ranks that no other role has"
        )
    by_node: dict[int, int] = {}
    for rank in ranks:
        by_node[rank // placement.ranks_per_node] = by_node.get(rank // placement.ranks_per_node, 0) + 1
    for node, count in by_node.items():
        if count % role.tp:
            fits = either([n for n in range(1, count + 1) if all(other % n == 0 for other in by_node.values())])
            what = f"the {count} ranks on node{node} of roles.rollout.ranks={role.ranks}"
            if len(ranks) == config.world_size:
                what = f"cluster.ranks_per_node={count}"
            raise ValueError(f"roles.rollout.tp={role.tp} does not divide {what}: use {fits}")


def _ranks(ranks: Sequence[int]) -> str:
    """Such as `rank 4` or `ranks 0-3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


def either(numbers: Sequence[int]) -> str:
    """Such as `1, 2 or 4`."""
    words = [str(n) for n in numbers]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
