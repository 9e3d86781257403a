"""A role's part of a checkpoint to an HF folder and back, in one process on a CPU, a file at a time.

Checkpoints are in HF's coordinates (checkpoint.py), so that no layout, no rank and no Megatron model is needed: each tensor is
put together from the rectangles in which it was written. At most one file's tensors are in memory, and one rectangle besides.
"""

import contextlib
import dataclasses
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ext.export import copy_about, finish_folder, prepare_folder, split_into_files
from megatron_ext.hf_config import HFConfig, named_architecture, read_fields
from megatron_ext.stored import ABOUT, WEIGHTS
from megatron_ext.weights import WeightsError, hf_shapes, weight_files

FILE_BYTES = 1 << 30
Say = Callable[[str], None]


def read_config(folder: Path) -> HFConfig:
    """The config of an HF folder, of a language model or with the head that its architecture names."""
    valued = named_architecture(read_fields(folder)).endswith("ForTokenClassification")
    return HFConfig.from_folder(folder, "value" if valued else "lm")


def role_to_hf(role: Path, about: Path, destination: Path, say: Say, file_bytes: int = FILE_BYTES) -> None:
    """Write the weights of a role's folder as an HF folder, in the dtype in which they are stored.

    Args:
        about: an HF folder without weights: config.json, tokenizer, generation config.
        say: takes a line for every file.

    Raises:
        WeightsError: the checkpoint lacks a tensor of the model, or has one of another shape.
    """
    hf = read_config(about)
    shapes = hf_shapes(hf)
    stored = FileSystemReader(role).read_metadata().state_dict_metadata
    for name, shape in shapes.items():
        found = stored.get(f"{WEIGHTS}.{name}")
        if found is None or tuple(found.size) != shape:
            has = f"has it in shape {tuple(found.size)}" if found is not None else "lacks it"
            raise WeightsError(f"{role}: {about}/config.json asks for {name} of shape {shape}, the checkpoint {has}")
    dtype = stored[f"{WEIGHTS}.{next(iter(shapes))}"].properties.dtype
    files = split_into_files(shapes, dtype.itemsize, file_bytes)
    partial = destination.parent / f".{destination.name}.partial"
    prepare_folder(about, partial, hf, dtype)
    progress = _Progress(say, sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize)
    weight_map = {}
    for number, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {f"{WEIGHTS}.{name}": torch.empty(shapes[name], dtype=dtype) for name in names}
        with _alone():
            dcp.load(tensors, storage_reader=FileSystemReader(role), no_dist=True)
        tensors = {name: tensors.pop(f"{WEIGHTS}.{name}") for name in names}
        save_file(tensors, partial / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        progress.add(sum(tensor.nbytes for tensor in tensors.values()), file)
        del tensors
    finish_folder(partial, destination, weight_map if len(files) > 1 else {}, progress.total)


def hf_to_role(model: Path, role: Path, about: Path, say: Say, file_bytes: int = FILE_BYTES) -> torch.dtype:
    """Write an HF folder's weights as a role's folder that any layout loads, without an optimizer, and its config, tokenizer
    and generation config as `about`. Returns the weights' dtype.

    Raises:
        WeightsError: the folder lacks a tensor, or has one of another shape or dtype than the rest.
    """
    hf = read_config(model)
    shapes, files = hf_shapes(hf), weight_files(model)
    if not hf.head_stored:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("score.")}
    missing = [name for name in shapes if name not in files]
    if missing:
        raise WeightsError(f"{model}: tensor {missing[0]} is missing: was the folder copied or converted completely?")
    with safe_open(files[next(iter(shapes))], framework="pt") as opened:
        dtype = opened.get_tensor(next(iter(shapes))).dtype
    copy_about(model, about, hf, dtype)
    role.mkdir(parents=True)
    progress = _Progress(say, sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize)
    whole = Metadata(state_dict_metadata={}, planner_data=None, storage_data={})
    for number, names in enumerate(split_into_files(shapes, dtype.itemsize, file_bytes)):
        part = role / f"part-{number:05d}"
        tensors = {f"{WEIGHTS}.{name}": _read(files[name], name, shapes[name], dtype) for name in names}
        with _alone():
            dcp.save(tensors, storage_writer=FileSystemWriter(part, sync_files=True), no_dist=True)
        written = FileSystemReader(part).read_metadata()
        whole.state_dict_metadata |= written.state_dict_metadata
        for index, info in written.storage_data.items():
            whole.storage_data[index] = dataclasses.replace(info, relative_path=f"{part.name}/{info.relative_path}")
        (part / ".metadata").unlink()
        progress.add(sum(tensor.nbytes for tensor in tensors.values()), part.name)
        del tensors
    _finish_role(role, whole)
    return dtype


def _finish_role(role: Path, metadata: Metadata) -> None:
    """What makes the parts a folder that Megatron's dist_checkpointing opens, in the form that 0.16 and 0.19 read."""
    with (role / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    torch.save({}, role / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (role / "metadata.json").write_text(json.dumps(backends | {"common_backend": "torch", "common_backend_version": 1}))
    (role / ABOUT).write_text(json.dumps({"updates": None, "layout": None}, indent=2) + "\n")


def _read(file: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with safe_open(file, framework="pt", device="cpu") as opened:
        tensor = opened.get_tensor(name)
    if tuple(tensor.shape) != shape:
        raise WeightsError(f"{file}: {name} has shape {tuple(tensor.shape)}, the model's config wants {shape}")
    if tensor.dtype != dtype:
        raise WeightsError(f"{file}: {name} is {tensor.dtype}, others are {dtype}: a checkpoint has weights of one dtype")
    return tensor


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """torch assumes, and says each time, that a single process is meant: it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Progress:
    """Says after each file how far it is; `total`: bytes of all weights."""

    def __init__(self, say: Say, total: int):
        self._say, self.total, self._done = say, total, 0

    def add(self, count: int, what: str) -> None:
        self._done += count
        self._say(f"{what}: {self._done / 1e9:.2f} of {self.total / 1e9:.2f} GB ({self._done / self.total:.0%})")
