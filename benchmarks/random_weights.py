"""Random weights that are the same in every layout."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_ext import device
from megatron_ext.tiles import TileMap, as_index

DEVIATION = 0.02  # of a model's weights


def fill(parameters: Mapping[str, Tensor], tiles: TileMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Random values that depend on the HF tensor alone, so that all ranks that hold a rectangle hold the same."""
    by_tensor: dict[str, list] = {}
    for name, held in tiles.items():
        for tile in held:
            by_tensor.setdefault(tile.hf_name, []).append((parameters[name][as_index(tile.local_slices)], tile))
    for number, (hf_name, shape) in enumerate(shapes.items()):
        if hf_name not in by_tensor:
            continue
        generator = torch.Generator(device.current()).manual_seed(number)
        dtype = next(iter(parameters.values())).dtype
        whole = torch.randn(shape, generator=generator, dtype=dtype, device=device.current())
        for view, tile in by_tensor[hf_name]:
            view.copy_(whole[as_index(tile.hf_slices)])


def fill_model(parameters: Mapping[str, Tensor], tiles: TileMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Likewise, in sizes with which a model computes: norms at one, the rest small."""
    fill(parameters, tiles, shapes)
    for name, parameter in parameters.items():
        parameter.fill_(1.0) if "norm" in name else parameter.mul_(DEVIATION)
