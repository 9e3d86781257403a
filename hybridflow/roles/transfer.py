"""Weights from one role to another: the 3D-HybridEngine applied to two roles' tile maps, wherever the two live.

Roles on the same ranks copy what a rank has itself; what it has not comes from its pool, or over a group between pools.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hybridflow.config.schema import Config
from hybridflow.controller import groups
from hybridflow.controller.placement import place
from hybridflow.controller.role import Role
from hybridflow.planner.hardware import gpu
from hybridflow.resharding.execute import Resharder
from hybridflow.resharding.plan import make_plan
from hybridflow.resharding.verify import verify as check_equal
from hybridflow.roles.sides import Side
from megatron_ext import device
from megatron_ext.memory import weights_are_away


class WeightTransfer:
    """Made once for a pair of roles, run whenever the source's weights have changed. Where the two have other heads on the
    last layer, as a policy and its critic, the heads stay what they are."""

    def __init__(self, config: Config, source: str, destination: str, here: Mapping[str, Role]):
        """Collective over the ranks of both roles. Every rank computes its own part of the plan from the tile maps of all.

        Args:
            source, destination: the roles' names.
            here: the roles that live on this rank, by name; one of the two at least.
        """
        sides = [Side(config, name, here.get(name)) for name in (source, destination)]
        if sides[0].head != sides[1].head:
            for side in sides:
                side.leave_out_head()
        self._source, self._destination = (side.parameters() for side in sides)
        self._layouts = tuple(side.describe() for side in sides)
        self._dtype = sides[1].dtype
        placement = place(config)
        pool = placement.pool_with(next(name for name in (source, destination) if name in here))
        rank = pool[dist.get_rank()]
        self._members = members = sorted({*sides[0].ranks, *sides[1].ranks})
        self._group = None if tuple(members) == pool else groups.group_of(members, rank)
        maps = [[side.tile_map(other) for other in range(config.world_size)] for side in sides]
        plan = make_plan(
            rank,
            *maps,
            itemsize=self._dtype.itemsize,
            ranks_per_node=config.cluster.ranks_per_node,
            **({} if sides[0].dtype == self._dtype else {"unpacked_from": None}),
        )
        self.plan = plan.within(members)
        self._tiles = [[maps_of_side[member] for member in members] for maps_of_side in maps]
        budget = config.resharding.bucket_mb << 20
        self._resharder = Resharder(self.plan, self._source, self._destination, budget, self._group, self._dtype)
        if rank == members[0]:
            print(f"{' -> '.join(self._layouts)}: {self.plan.describe()}", flush=True)

    def run(self, verify: bool) -> dict[str, Any]:
        """Returns seconds, bytes_received, wire_bound_fraction (None without known bandwidths), verified (None: unchecked).

        Raises:
            ReshardingMismatch: a checksum differs; names tensor, ranks and layouts.
        """
        if weights_are_away(self._source):
            raise RuntimeError(f"{self._layouts[0]}: the weights have left the device: restore() them before a resharding")
        device.synchronize()
        start = time.perf_counter()
        self._resharder.run()
        device.synchronize()
        seconds = time.perf_counter() - start
        if verify:
            sides = self._tiles[0], self._source, self._tiles[1], self._destination
            named = {"layouts": self._layouts, "numbers": self._members}
            check_equal(*sides, group=self._group, dtype=self._dtype, **named)
        known = gpu()
        bound = known and self.plan.bound_seconds(known.wire_bytes_per_second, known.memory_bytes_per_second)
        return {
            "seconds": seconds,
            "bytes_received": self.plan.received_bytes[self.plan.rank],
            "wire_bound_fraction": bound / seconds if bound else None,
            "verified": True if verify else None,
        }
