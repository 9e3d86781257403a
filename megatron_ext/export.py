"""Exports the weights that Megatron ranks hold as an HF folder.

File by file and tensor by tensor (of experts: one matrix of one expert at a time), so that no rank ever has the whole model.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.hf_config import HFConfig
from megatron_ext.tiles import Slices, Tile, TileMap, as_index
from megatron_ext.weights import INDEX, WeightsError, check_parameters, hf_shapes

# What makes an HF folder usable besides weights and config.json.
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*.jinja", "*.tiktoken", "*.model", "LICENSE*",
)  # fmt: skip


class _Held(NamedTuple):
    rank: int
    parameter: str
    tile: Tile


def export_hf(
    parameters: Mapping[str, Tensor],
    tiles: Sequence[TileMap],
    model_folder: str | Path,
    destination: str | Path,
    *,
    head: Literal["lm", "value"] = "lm",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write an HF folder that transformers and vLLM load. Collective over `group`; rank 0 writes, one file at a time.

    The folder appears under its name only when it is complete; one that is there before is replaced then.

    Args:
        parameters: this rank's.
        tiles: the tile maps of all ranks of the group, in order.
        model_folder: where config.json, the tokenizer and the generation config are taken from.
        head: what the model has on its last layer; a value model becomes transformers' token classification with one label.
        dtype: of the written tensors; the parameters' own by default.
        max_shard_bytes: of a file, unless one tensor alone is larger; also what rank 0 holds at a time.

    Raises:
        WeightsError: the tiles of all ranks don't make up the model of `model_folder`.
        OSError: rank 0 can't write (raised on every rank).
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    check_parameters(parameters, tiles[rank])
    hf = HFConfig.from_folder(model_folder, head)
    shapes = hf_shapes(hf)
    dtype = dtype or next(iter(parameters.values())).dtype
    holders = _holders(tiles, shapes)
    shards = split_into_files(shapes, dtype.itemsize, max_shard_bytes)
    destination = Path(destination).absolute()
    partial = destination.parent / f".{destination.name}.partial"
    _on_first_rank(lambda: prepare_folder(Path(model_folder), partial, hf, dtype), partial, rank, group)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        tensors = {name: _gather(parameters, holders[name], shapes[name], dtype, rank, group) for name in names}
        _on_first_rank(lambda t=tensors, f=file: save_file(t, partial / f, metadata={"format": "pt"}), partial, rank, group)
        del tensors
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    _on_first_rank(
        lambda: finish_folder(partial, destination, weight_map if len(shards) > 1 else {}, total), partial, rank, group
    )


def _holders(tiles: Sequence[TileMap], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[_Held]]:
    """For each HF tensor, who holds each of its distinct rectangles (the lowest rank that does)."""
    found: dict[str, dict[Slices, _Held]] = {name: {} for name in shapes}
    seen: set[int] = set()  # ranks that hold the same share their map
    for rank, tile_map_ in enumerate(tiles):
        if id(tile_map_) in seen:
            continue
        seen.add(id(tile_map_))
        for parameter, held in tile_map_.items():
            for tile in held:
                if tile.hf_name not in found:
                    raise WeightsError(
                        f"{parameter} on rank {rank} holds {tile.hf_name}, which the model folder's config lacks"
                    )
                found[tile.hf_name].setdefault(tile.hf_slices, _Held(rank, parameter, tile))
    for name, regions in found.items():
        numel = sum(held.tile.numel for held in regions.values())
        if numel != torch.Size(shapes[name]).numel():
            raise WeightsError(f"{name} has shape {shapes[name]}, but the ranks hold {numel} elements of it")
    return {name: list(regions.values()) for name, regions in found.items()}


def split_into_files(shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> list[list[str]]:
    """The tensors of each file, in the model's order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * itemsize
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


@torch.no_grad()
def _gather(
    parameters: Mapping[str, Tensor],
    holders: list[_Held],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rank: int,
    group: dist.ProcessGroup | None,
) -> Tensor | None:
    """One HF tensor on rank 0's host memory (None elsewhere)."""
    operations, arrived = [], []
    whole = torch.empty(shape, dtype=dtype) if rank == 0 else None
    for held in holders:
        if held.rank == rank:
            piece = parameters[held.parameter][as_index(held.tile.local_slices)].to(dtype).contiguous()
        elif rank == 0:
            device = next(iter(parameters.values())).device
            piece = torch.empty(held.tile.shape, dtype=dtype, device=device)
            operations.append(dist.P2POp(dist.irecv, piece, group=group, group_peer=held.rank))
        else:
            continue
        if rank == 0:
            arrived.append((held.tile, piece))
        else:
            operations.append(dist.P2POp(dist.isend, piece, group=group, group_peer=0))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for tile, piece in arrived:
        whole[as_index(tile.hf_slices)].copy_(piece)
    return whole


def _on_first_rank(action: Callable[[], None], partial: Path, rank: int, group: dist.ProcessGroup | None) -> None:
    """Run `action`, which writes into `partial`, on rank 0. If it fails there it fails everywhere, so that no rank waits for
    one that has gone, and what is half-written is deleted."""
    failure: list[str | None] = [None]
    if rank == 0:
        try:
            action()
        except (OSError, SafetensorError) as error:
            failure = [f"{type(error).__name__}: {error}"]
            shutil.rmtree(partial, ignore_errors=True)
    if dist.is_initialized():
        dist.broadcast_object_list(failure, group=group, group_src=0)
    if failure[0]:
        raise OSError(f"{partial} could not be written, the export failed on rank 0: {failure[0]}")


def copy_about(model_folder: Path, destination: Path, hf: HFConfig, dtype: torch.dtype | str) -> None:
    """Make `destination` an HF folder without weights: config.json for weights in `dtype`, tokenizer, generation config."""
    destination.mkdir(parents=True)
    for pattern in _COPIED:
        for file in sorted(model_folder.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, destination / file.name)
    fields = json.loads((model_folder / "config.json").read_text())
    # transformers 5 writes `dtype`, earlier releases `torch_dtype`; each reads the latter
    keys = [key for key in ("torch_dtype", "dtype") if key in fields] or ["torch_dtype"]
    fields |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    fields["tie_word_embeddings"] = hf.tied
    if hf.head == "value":
        fields["architectures"] = [hf.value_architecture]
        fields |= {"id2label": {"0": "value"}, "label2id": {"value": 0}, "classifier_dropout": 0.0}
    (destination / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def prepare_folder(model_folder: Path, partial: Path, hf: HFConfig, dtype: torch.dtype) -> None:
    """Begin to write an HF folder under a name of its own."""
    if partial.exists():  # of an export that was killed
        shutil.rmtree(partial)
    copy_about(model_folder, partial, hf, dtype)


def finish_folder(partial: Path, destination: Path, weight_map: dict[str, str], total: int) -> None:
    """Give it its own name; `weight_map` (tensor -> file) is empty where there is one file."""
    if weight_map:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    previous = destination.parent / f".{destination.name}.previous"
    if previous.exists():
        shutil.rmtree(previous)
    if destination.exists():
        destination.rename(previous)
    partial.rename(destination)
    if previous.exists():
        shutil.rmtree(previous)
