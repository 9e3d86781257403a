"""Weights from one role to another in the same processes: the 3D-HybridEngine applied to two roles' tile maps."""

import time
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from hybridflow.config.schema import Config
from hybridflow.planner.hardware import gpu
from hybridflow.resharding.execute import Resharder
from hybridflow.resharding.plan import make_plan
from hybridflow.resharding.verify import verify as check_equal
from megatron_ext import device
from megatron_ext.layout import Layout
from megatron_ext.memory import weights_are_away
from megatron_ext.tiles import TileMap
from megatron_ext.weights import without_head


class HoldsWeights(Protocol):
    """A role whose weights can be sent or received."""

    name: str
    layout: Layout

    def tile_map(self, rank: int) -> TileMap:
        """Pure: the tile map of any rank of the world."""

    def parameters(self) -> dict[str, Tensor]:
        """This rank's tensors under the names of its tile map; their addresses never change."""


class WithoutHead:
    """A Megatron role but for what stands on its last layer: what a policy and its critic have in common."""

    def __init__(self, role: HoldsWeights):
        self.name, self.layout, self._role = role.name, role.layout, role
        self._cut: dict[int, tuple[TileMap, TileMap]] = {}  # ranks that hold the same share one map, and go on to

    def tile_map(self, rank: int) -> TileMap:
        whole = self._role.tile_map(rank)
        if id(whole) not in self._cut:
            self._cut[id(whole)] = whole, without_head(whole)
        return self._cut[id(whole)][1]

    def parameters(self) -> dict[str, Tensor]:
        return without_head(self._role.parameters())


class WeightTransfer:
    """Made once for a pair of roles, run whenever the source's weights have changed."""

    def __init__(self, source: HoldsWeights, destination: HoldsWeights, config: Config):
        """Collective. Every rank computes its own part of the plan from the tile maps of all ranks."""
        self._source, self._destination = source.parameters(), destination.parameters()
        ranks = range(dist.get_world_size())
        self._tiles = [source.tile_map(rank) for rank in ranks], [destination.tile_map(rank) for rank in ranks]
        self._layouts = tuple(f"{role.name} {role.layout.describe()}" for role in (source, destination))
        self.plan = make_plan(
            dist.get_rank(),
            *self._tiles,
            itemsize=next(iter(self._destination.values())).element_size(),
            ranks_per_node=config.cluster.ranks_per_node,
            **({} if config.dtype(source.name) == config.dtype(destination.name) else {"unpacked_from": None}),
        )
        self._resharder = Resharder(self.plan, self._source, self._destination, config.resharding.bucket_mb << 20)
        if dist.get_rank() == 0:
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
            check_equal(self._tiles[0], self._source, self._tiles[1], self._destination, layouts=self._layouts)
        known = gpu()
        bound = known and self.plan.bound_seconds(known.wire_bytes_per_second, known.memory_bytes_per_second)
        return {
            "seconds": seconds,
            "bytes_received": self.plan.received_bytes[dist.get_rank()],
            "wire_bound_fraction": bound / seconds if bound else None,
            "verified": True if verify else None,
        }
