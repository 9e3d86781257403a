"""The baseline of resharding, the way the field moves weights: every rank gets every HF tensor in full and takes its slice.

Tensor by tensor, a training parameter is broadcast over PP and all-gathered over TP, or that of an expert over EP and ETP; the
HF tensors in it are put together and handed on, to copies into the rollout's parameters (`GatheredCopy`) or to vLLM's own
loader. Which parameter comes next and of what shape is worked out once, as the fastest of the field do; what lies in a
gathered buffer as a whole HF tensor already is not copied.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout
from megatron_ext.tiles import Tile, TileMap, as_index

# torch 2.13 deprecates the old name, torch 2.11 lacks the new one
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Parameter(NamedTuple):
    name: str
    stage: int
    shape: tuple[int, ...]  # of a shard
    shards: list[list[Tile]]  # by rank of the group that has them; one where all its ranks hold the same
    of_expert: bool  # the group is over EP and ETP, not over TP


class GatheredStream:
    """An iterable of (HF name, whole tensor) on every rank; going through it is collective over the default group.

    Attributes:
        received_bytes: what this rank receives in one pass.
    """

    def __init__(self, hf: HFConfig, layout: Layout, source: Mapping[str, Tensor], dtype: torch.dtype):
        self._layout, self._source, self._dtype = layout, source, dtype
        self._me = layout.coordinates(dist.get_rank())
        self._shapes = weights.hf_shapes(hf)
        self._parameters = _parameters(hf, layout)
        self._pp_group = _own_group(layout, lambda rank: layout.coordinates(rank)._replace(pp=0))
        self._tp_group = _own_group(layout, lambda rank: layout.coordinates(rank)._replace(tp=0))
        self._expert_group = _own_group(layout, lambda rank: (layout.coordinates(rank).pp, layout.expert_coordinates(rank).edp))
        sizes = [self._bytes(parameter) for parameter in self._parameters]
        self.received_bytes = sum(received for received, _ in sizes)
        self._most_held = max(held for _, held in sizes)

    def buffer_bytes(self) -> int:
        """The most that the buffers of one parameter take on this rank."""
        return self._most_held

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for parameter in self._parameters:
            yield from self._assemble(parameter, self._gather(parameter))

    def _gather(self, parameter: _Parameter) -> Tensor:
        """All distinct shards of a parameter: a tensor of (shards, *shape)."""
        device = next(iter(self._source.values())).device
        if parameter.stage == self._me.pp:
            shard = self._source[parameter.name].to(self._dtype)
        else:
            shard = torch.empty(parameter.shape, dtype=self._dtype, device=device)
        if self._layout.pp > 1:
            owner = self._layout.rank(*self._me._replace(pp=parameter.stage))
            dist.broadcast(shard, owner, group=self._pp_group)
        if len(parameter.shards) == 1:
            return shard.unsqueeze(0)
        gathered = torch.empty(len(parameter.shards), *parameter.shape, dtype=self._dtype, device=device)
        _all_gather(gathered.view(-1), shard.view(-1), group=self._expert_group if parameter.of_expert else self._tp_group)
        return gathered

    def _assemble(self, parameter: _Parameter, gathered: Tensor) -> Iterator[tuple[str, Tensor]]:
        if _is_whole(parameter, self._shapes):
            name = parameter.shards[0][0].hf_name
            yield name, gathered.flatten(0, 1)[: self._shapes[name][0]]
            return
        whole: dict[str, Tensor] = {}
        for shard, tiles in zip(gathered, parameter.shards, strict=True):
            for tile in tiles:
                if tile.shape == self._shapes[tile.hf_name]:
                    yield tile.hf_name, shard[as_index(tile.local_slices)]
                    continue
                if tile.hf_name not in whole:
                    whole[tile.hf_name] = gathered.new_empty(self._shapes[tile.hf_name])
                whole[tile.hf_name][as_index(tile.hf_slices)] = shard[as_index(tile.local_slices)]
        yield from whole.items()

    def _bytes(self, parameter: _Parameter) -> tuple[int, int]:
        """Received by this rank for a parameter, and held at a time beyond the weights."""
        shard, count = torch.Size(parameter.shape).numel() * self._dtype.itemsize, len(parameter.shards)
        broadcast = shard if parameter.stage != self._me.pp else 0
        gathered = count * shard if count > 1 else 0
        tiles = [tile for tiles in parameter.shards for tile in tiles]
        names = {tile.hf_name for tile in tiles if tile.shape != self._shapes[tile.hf_name]}
        assembled = 0 if _is_whole(parameter, self._shapes) else sum(torch.Size(self._shapes[name]).numel() for name in names)
        return broadcast + (count - 1) * shard, broadcast + gathered + assembled * self._dtype.itemsize


class GatheredCopy:
    """Takes this rank's slices out of a stream's tensors and copies them into the rollout's parameters."""

    def __init__(self, stream: GatheredStream, tiles: TileMap, destination: Mapping[str, Tensor]):
        self._stream = stream
        self._targets: dict[str, list[tuple[Tensor, tuple[slice, ...]]]] = defaultdict(list)
        for name, held in tiles.items():
            for tile in held:
                view = destination[name][as_index(tile.local_slices)]
                self._targets[tile.hf_name].append((view, as_index(tile.hf_slices)))

    @torch.no_grad()
    def run(self) -> None:
        for name, tensor in self._stream:
            for view, index in self._targets[name]:
                view.copy_(tensor[index])


def _parameters(hf: HFConfig, layout: Layout) -> list[_Parameter]:
    """Stage by stage; a tied output layer is left out, as its tensor has come with the embedding."""
    parameters, seen = [], set()
    for stage in range(layout.pp):
        first = layout.rank(pp=stage)
        maps = [weights.tile_map(hf, layout, first + n) for n in range(max(layout.tp, layout.ep * layout.etp))]
        for name, shape in weights.local_shapes(hf, layout, first).items():
            of_expert = ".mlp.experts." in name
            shards = [tiles[name] for tiles in maps[: layout.ep * layout.etp if of_expert else layout.tp]]
            names = {tile.hf_name for tiles in shards for tile in tiles}
            if not names <= seen:
                parameters.append(_Parameter(name, stage, shape, shards[:1] if _all_equal(shards) else shards, of_expert))
                seen |= names
    return parameters


def _all_equal(shards: Sequence[list[Tile]]) -> bool:
    return all(tiles == shards[0] for tiles in shards)


def _is_whole(parameter: _Parameter, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the shards below one another are one HF tensor, with nothing but padding behind it."""
    names = {tile.hf_name for tiles in parameter.shards for tile in tiles}
    if len(names) > 1 or any(len(tiles) > 1 for tiles in parameter.shards):
        return False
    whole, rows = shapes[names.pop()], parameter.shape[0]
    return all(
        tile.hf_slices == ((number * rows, min((number + 1) * rows, whole[0])), *((0, size) for size in whole[1:]))
        for number, tiles in enumerate(parameter.shards)
        for tile in tiles
    )


def _own_group(layout: Layout, key: Callable[[int], Hashable]) -> dist.ProcessGroup | None:
    """The group of this rank among those of ranks with equal keys; None where it is the default one, or nobody has a peer.

    Every rank makes all groups, in the same order.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank in range(layout.world_size):
        members[key(rank)].append(rank)
    if len(members) in (1, layout.world_size):
        return None
    groups = {name: dist.new_group(group) for name, group in members.items()}
    return groups[key(dist.get_rank())]
