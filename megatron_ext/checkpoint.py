"""Saves and loads a role's weights and optimizer through Megatron's dist_checkpointing, in HF's coordinates.

What a rank holds is cut into rectangles of HF tensors by the tile map, and stored under HF's names with a prefix: `weights.`,
and of the optimizer `master.` (fp32, beside 16-bit weights), `exp_avg.` and `exp_avg_sq.`. So a checkpoint knows no layout: any
TP x PP x VPP x EP x DP loads what any other has saved, with either layer spec, and converting it needs no Megatron. Megatron's
own sharded state dicts of models and optimizers are not used, nor what they get wrong without Transformer Engine (an Adam step
shared by all parameters, formats that a fresh optimizer cannot load).

All functions are collective over the role's ranks, and called inside `ParallelState.current()`.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext import compat
from megatron_ext.layout import Layout
from megatron_ext.optimizer import Optimizer
from megatron_ext.parallel import ParallelState
from megatron_ext.stored import ABOUT, WEIGHTS, CheckpointError, read_about
from megatron_ext.tiles import Slices, Tile, TileMap, as_index, intersect
from megatron_ext.weights import check_parameters

ALMOST_FULL = 64 << 20  # bytes
FAILURES = (Exception, CheckpointException)  # torch's is no Exception


@dataclass(frozen=True)
class Saved:
    """What of a role is saved and loaded.

    Attributes:
        parameters: this rank's, under the names of its tile map.
        state: the role's groups, and which of its ranks this one is.
        tiles: the tile maps of all its ranks, in order.
        shapes: of the HF tensors.
        optimizer: None: the role is not trained, or its optimizer is left out.
    """

    state: ParallelState
    parameters: Mapping[str, torch.nn.Parameter]
    tiles: Sequence[TileMap]
    shapes: Mapping[str, tuple[int, ...]]
    optimizer: Optimizer | None = None


class PendingSave:
    """A save that is under way; `finished` says when all of it is on disk."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None, queue):
        self._folder, self._group, self._queue = folder, group, queue

    def finished(self, wait: bool) -> bool:
        """Whether all ranks have written everything, down to the disk. The same answer on all ranks.

        Raises:
            CheckpointError: a rank could not write.
        """
        try:
            with compat.as_world(self._group):
                return not self._queue.get_num_unfinalized_calls() or bool(
                    self._queue.maybe_finalize_async_calls(blocking=wait)
                )
        except FAILURES as error:
            raise _failed(self._folder, error) from error


def save(saved: Saved, folder: str | Path, background: bool = False) -> PendingSave | None:
    """Write the role into `folder`, which rank 0 makes.

    Args:
        background: return once the ranks have a copy on the host, which forked processes write; the files are whole when the
            `PendingSave` says so. Otherwise everything is on disk on return.

    Raises:
        CheckpointError: a rank could not write.
    """
    with compat.as_world(saved.state.group):
        return _save(saved, Path(folder), background)


def _save(saved: Saved, folder: Path, background: bool) -> PendingSave | None:
    try:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        pieces = {f"{number}": piece for number, piece in enumerate([*_weights_to_write(saved), *_states(saved, writing=True)])}
        pieces["rng"] = _rng(saved.state, _rng_states())
        request = compat.start_save(pieces, folder, background)
        if dist.get_rank() == 0:
            about = {"updates": saved.optimizer and saved.optimizer.updates, "layout": _layout(saved.state.layout)}
            (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        if not background:
            compat.write_here(request)
            return None
        queue = compat.async_calls_queue()
        queue.schedule_async_request(request)
    except FAILURES as error:
        raise _failed(folder, error) from error
    return PendingSave(folder, saved.state.group, queue)


@torch.no_grad()
def load(saved: Saved, folder: str | Path) -> None:
    """Read what `save` wrote, whatever the layout was; the RNG states too where it is the same. A fresh optimizer gets moments,
    masters and the number of updates, from which Adam's step and the learning rate follow.

    Raises:
        CheckpointError: the folder lacks a tensor, has one of another shape, or has no optimizer.
    """
    folder = Path(folder)
    about = read_about(folder)
    if saved.optimizer is not None:
        if about["updates"] is None:
            raise CheckpointError(f"{folder} holds weights only, no optimizer: give it as a model (hybridflow convert)")
        saved.optimizer.prime(about["updates"])
    rank = saved.state.rank
    check_parameters(saved.parameters, saved.tiles[rank])
    for name, tiles in saved.tiles[rank].items():
        if sum(tile.numel for tile in tiles) < saved.parameters[name].numel():
            saved.parameters[name].zero_()  # rows that pad the vocabulary are in no checkpoint
    pieces = {f"{number}": piece for number, piece in enumerate([*_weights(saved), *_states(saved, writing=False)])}
    same_layout = about["layout"] == _layout(saved.state.layout)
    if same_layout:
        pieces["rng"] = _rng(saved.state, None)
    try:
        with compat.as_world(saved.state.group):
            found = compat.load_pieces(pieces, folder)
    except FAILURES as error:
        raise CheckpointError(f"{folder} could not be loaded on rank {rank}: {_reason(error)}") from error
    if same_layout:
        _set_rng_states(found["rng"])
    if saved.optimizer is not None:
        saved.optimizer.check_masters()


def _layout(layout: Layout) -> dict:
    return json.loads(json.dumps(asdict(layout)))  # as it is read back


def _failed(folder: Path, error: BaseException) -> CheckpointError:
    """Names the folder and what room there was; torch's writer says of a full disk only that writing failed. What is there of
    the checkpoint goes: it is of no use, and fills the disk."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    hint = ": the disk is full, make room or choose another run.dir" if free < ALMOST_FULL else ""
    return CheckpointError(f"{folder} could not be written ({free / 2**30:.2f} GiB were free there){hint}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """One line. torch tells the first rank alone what failed on which."""
    if isinstance(error, CheckpointException):
        failures = (f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        return " ".join("; ".join(failures).split())[:300] or "another rank says why"
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# ---------------------------------------------------------------------------------------------------------------- pieces


def _piece(kind: str, tile: Tile, hf_slices: Slices, data: Tensor, saved: Saved):
    return compat.sharded_tensor(f"{kind}.{tile.hf_name}", data, saved.shapes[tile.hf_name], [start for start, _ in hf_slices])


def _weights(saved: Saved) -> Iterator:
    """Everything that this rank holds."""
    for name, tiles in saved.tiles[saved.state.rank].items():
        for tile in tiles:
            data = saved.parameters[name].detach()[as_index(tile.local_slices)]
            yield _piece(WEIGHTS, tile, tile.hf_slices, data, saved)


def _weights_to_write(saved: Saved) -> Iterator:
    """What of it this rank writes: of the ranks that hold the same, the one that has the least to write so far."""
    for name, tile in writers(saved.tiles)[saved.state.rank]:
        yield _piece(WEIGHTS, tile, tile.hf_slices, saved.parameters[name].detach()[as_index(tile.local_slices)], saved)


def writers(tiles: Sequence[TileMap]) -> list[list[tuple[str, Tile]]]:
    """For each rank the parameters' tiles that it writes: every rectangle of the model once. Pure."""
    shared: dict[int, list[int]] = {}  # ranks that hold the same share their map
    for rank, tile_map in enumerate(tiles):
        shared.setdefault(id(tile_map), []).append(rank)
    load = [0] * len(tiles)
    found: list[list[tuple[str, Tile]]] = [[] for _ in tiles]
    taken: set[tuple[str, Slices]] = set()
    for ranks in shared.values():
        for name, held in tiles[ranks[0]].items():
            for tile in held:
                if (tile.hf_name, tile.hf_slices) in taken:
                    continue
                taken.add((tile.hf_name, tile.hf_slices))
                rank = min(ranks, key=load.__getitem__)
                load[rank] += tile.numel
                found[rank].append((name, tile))
    return found


def _states(saved: Saved, writing: bool) -> Iterator:
    """The optimizer's states of this rank; `writing`: of equal ones, which TP ranks and the last stage's copy of a tied
    embedding keep, those of the first rank's group only."""
    if saved.optimizer is None:
        return
    names = {id(parameter): name for name, parameter in saved.parameters.items()}
    first = _first_holders(saved.tiles) if writing else {}
    for share in saved.optimizer.shares():
        name = names[id(share.parameter)]
        group = {saved.state.ranks.index(rank) for rank in dist.get_process_group_ranks(share.group)}
        for rectangle, start in rectangles(tuple(share.parameter.shape), share.start, share.stop):
            shape = [stop - start for start, stop in rectangle]
            for tile in saved.tiles[saved.state.rank][name]:
                common = intersect(rectangle, tile.local_slices)
                if common is None:
                    continue
                if writing:
                    rank, holder = first[tile.hf_name, tile.hf_slices]
                    if rank not in group or holder != name:
                        continue
                inside = tuple((a - low, b - low) for (a, b), (low, _) in zip(common, rectangle, strict=True))
                hf_slices = tuple(
                    (a - low + to, b - low + to)
                    for (a, b), (low, _), (to, _) in zip(common, tile.local_slices, tile.hf_slices, strict=True)
                )
                for kind, tensor in share.tensors.items():
                    flat = tensor.detach()[start : start + math.prod(shape)]
                    yield _piece(kind, tile, hf_slices, flat.view(shape)[as_index(inside)], saved)


def _first_holders(tiles: Sequence[TileMap]) -> dict[tuple[str, Slices], tuple[int, str]]:
    """The lowest rank that holds a rectangle of the model, and as which parameter."""
    found: dict[tuple[str, Slices], tuple[int, str]] = {}
    seen: set[int] = set()
    for rank, tile_map in enumerate(tiles):
        if id(tile_map) not in seen:
            seen.add(id(tile_map))
            for name, held in tile_map.items():
                for tile in held:
                    found.setdefault((tile.hf_name, tile.hf_slices), (rank, name))
    return found


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Slices, int]]:
    """The elements [start, stop) of a flattened tensor as rectangles of it, in order, each with its first element's number,
    counted from `start`: at most 2 x dimensions - 1 of them."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),), 0
        return
    inner = math.prod(shape[1:])
    row, at = divmod(start, inner)
    first_whole, last_whole = -(-start // inner), stop // inner
    if at:  # the end of a row, or a part of one
        end = min(stop, (row + 1) * inner)
        for rectangle, offset in rectangles(shape[1:], at, end - row * inner):
            yield ((row, row + 1), *rectangle), offset
        yield from ((rectangle, offset + end - start) for rectangle, offset in rectangles(shape, end, stop))
        return
    if first_whole < last_whole:
        yield ((first_whole, last_whole), *((0, size) for size in shape[1:])), 0
    for rectangle, offset in rectangles(shape[1:], 0, stop - last_whole * inner):
        yield ((last_whole, last_whole + 1), *rectangle), offset + last_whole * inner - start


# ------------------------------------------------------------------------------------------------------------------- RNG


def _rng(state: ParallelState, data: dict | None):
    return compat.sharded_object("rng", data, (len(state.ranks),), (state.rank,))


def _rng_states() -> dict[str, object]:
    """Those of the current role: torch's own, and Megatron's named ones (which on a CPU are forks of torch's)."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "tracker": get_cuda_rng_tracker().get_states()}


def _set_rng_states(states: dict) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
