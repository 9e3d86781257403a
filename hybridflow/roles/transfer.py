"""Weights from one role to another in the same processes: the 3D-HybridEngine applied to two roles' tile maps."""

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config.schema import Config
from hybridflow.planner.hardware import gpu
from hybridflow.resharding.execute import Resharder
from hybridflow.resharding.plan import Plan, make_plan
from hybridflow.resharding.verify import verify
from megatron_ext import device
from megatron_ext.tiles import TileMap


class HoldsWeights(Protocol):
    """A role whose weights can be sent or received."""

    name: str

    def tile_map(self, rank: int) -> TileMap:
        """Pure: the tile map of any rank of the world."""

    def parameters(self) -> dict[str, Tensor]:
        """This rank's tensors under the names of its tile map; their addresses never change."""


class WeightTransfer:
    """Made once for a pair of roles, run whenever the source's weights have changed."""

    def __init__(self, plan: Plan, source: HoldsWeights, destination: HoldsWeights, bucket_bytes: int):
        self.plan, self._source, self._destination = plan, source, destination
        self._resharder = Resharder(plan, source.parameters(), destination.parameters(), bucket_bytes)

    @classmethod
    def between(cls, source: HoldsWeights, destination: HoldsWeights, config: Config) -> "WeightTransfer":
        """Every rank computes its own part of the plan from the tile maps of all ranks."""
        ranks = range(dist.get_world_size())
        plan = make_plan(
            dist.get_rank(),
            [source.tile_map(rank) for rank in ranks],
            [destination.tile_map(rank) for rank in ranks],
            itemsize=next(iter(destination.parameters().values())).element_size(),
            ranks_per_node=config.cluster.ranks_per_node,
        )
        return cls(plan, source, destination, config.resharding.bucket_mb << 20)

    def run(self, verify: bool) -> dict[str, Any]:
        """Returns seconds, bytes_received, wire_bound_fraction (None without known bandwidths), verified (None: unchecked).

        Raises:
            ReshardingMismatch: a checksum differs; names tensor, ranks and layouts.
        """
        device.synchronize()
        start = time.perf_counter()
        self._resharder.run()
        device.synchronize()
        seconds = time.perf_counter() - start
        if verify:
            self._verify()
        known = gpu()
        bound = known and self.plan.bound_seconds(known.wire_bytes_per_second, known.memory_bytes_per_second)
        return {
            "seconds": seconds,
            "bytes_received": self.plan.bytes_received,
            "wire_bound_fraction": bound / seconds if bound else None,
            "verified": True if verify else None,
        }

    def _verify(self) -> None:
        rank = dist.get_rank()
        with torch.no_grad():
            verify(
                self._source.tile_map(rank),
                self._source.parameters(),
                self._destination.tile_map(rank),
                self._destination.parameters(),
            )
