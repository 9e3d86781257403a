"""The two ends of a transfer of weights: what each rank of a role holds, which all know, and this rank's own part of it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hybridflow.config.schema import Config
from hybridflow.controller.role import Role
from hybridflow.rollout import tiles as rollout
from hybridflow.rollout.grouping import choose_layout
from megatron_ext import layers, weights
from megatron_ext.layout import Layout
from megatron_ext.tiles import TileMap


def layout_of(config: Config, name: str) -> Layout:
    """A role's layout, for those who don't have the role."""
    return choose_layout(config).layout if name == "rollout" else config.layout(name)


def tile_maps(config: Config, name: str, layout: Layout) -> Callable[[int], TileMap]:
    """The tile map of any rank of the layout of a role that holds weights."""
    hf = config.read_model(name)
    if name == "rollout":
        return lambda rank: rollout.tile_map(hf, layout.tp, layout.coordinates(rank).tp, config.roles.rollout.expert_parallel)
    spec = layers.default_spec(getattr(torch, config.dtype(name)))
    return lambda rank: weights.tile_map(hf, layout, rank, spec)


class Side:
    """Attributes:
    ranks: the role's global ranks; their places are the ranks of its layout.
    head: what stands on its model's last layer.
    """

    def __init__(self, config: Config, name: str, role: Role | None):
        """`role`: this rank's part of it, None where it does not live."""
        self.name, self.ranks, self.layout = name, config.ranks(name), layout_of(config, name)
        self.dtype, self.head = getattr(torch, config.dtype(name)), config.read_model(name).head
        self._role, self._tile_map = role, tile_maps(config, name, self.layout)
        self._places = {rank: place for place, rank in enumerate(self.ranks)}
        self._without_head = False
        self._cut: dict[int, tuple[TileMap, TileMap]] = {}  # ranks that hold the same share one map, and go on to

    def leave_out_head(self) -> None:
        """From here on the side is without what stands on the last layer: what a policy and its critic have in common."""
        self._without_head = True

    def tile_map(self, rank: int) -> TileMap:
        """Of any global rank; empty where the role does not live."""
        if rank not in self._places:
            return _NOTHING
        whole = self._tile_map(self._places[rank])
        if not self._without_head:
            return whole
        if id(whole) not in self._cut:
            self._cut[id(whole)] = whole, weights.without_head(whole)
        return self._cut[id(whole)][1]

    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's tensors under the names of its tile map; their addresses never change."""
        if self._role is None:
            return {}
        whole = self._role.parameters()
        return weights.without_head(whole) if self._without_head else whole

    def describe(self) -> str:
        return f"{self.name} {self.layout.describe()}"


_NOTHING: TileMap = {}
