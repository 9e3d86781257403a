"""`hybridflow convert`: what is asked for follows from what `--from` is.

| `--from`                                                             | `--to`                          |
|----------------------------------------------------------------------|---------------------------------|
| a checkpoint (`runs/x/checkpoints/step-20`), a role in it            | an HF folder                    |
| (`.../step-20/critic`), or a run (`runs/x`: its newest whole one)    |                                 |
| an HF folder                                                         | a checkpoint with weights only  |
| a `.gguf` file, or an installed package that ships one               | an HF folder                    |
"""

import os
import shutil
from pathlib import Path
from pickle import UnpicklingError

from omegaconf import OmegaConf

from hybridflow.checkpoints.folder import COMPLETE, BrokenCheckpoint, Checkpoint, complete, find, inspect
from hybridflow.checkpoints.resume import model_print
from hybridflow.config.folders import check_new
from hybridflow.config.model_folder import tensor_shapes
from hybridflow.config.schema import ConfigError
from megatron_ext.hf_config import UnsupportedModel


def convert(source: str, destination: str) -> None:
    """Convert, with a line of progress for every file.

    Raises:
        ConfigError: the source is none of these, incomplete or unsupported; the destination is there already or cannot be made.
    """
    to, path = Path(destination), Path(source)
    check_new(f"--to {destination}", to)
    if not source:
        raise ConfigError("--from is empty: give a checkpoint, a run, an HF folder, a .gguf file or a package that ships one")
    try:
        role = _role(path)
        if role is not None:
            _check_role(*role, to)
            _to_hf(*role, to)
        elif (path / "config.json").is_file():
            _to_checkpoint(path, to)
        else:
            _from_gguf(source, to)
    except (UnsupportedModel, BrokenCheckpoint) as error:
        raise ConfigError(str(error)) from error


def _role(path: Path) -> tuple[Checkpoint, str] | None:
    """The checkpoint and the role in it that `path` names; None: it names no checkpoint."""
    if (path / COMPLETE).is_file():
        checkpoint = inspect(path)
        return checkpoint, "actor" if "actor" in checkpoint.roles else checkpoint.roles[0]
    if (path.parent / COMPLETE).is_file():
        checkpoint = inspect(path.parent)
        if path.name not in checkpoint.roles:
            raise ConfigError(f"--from {path}: {path.parent} has the roles {', '.join(checkpoint.roles)}, not {path.name}")
        return checkpoint, path.name
    for folder in (path / "checkpoints", path):
        whole, broken = find(folder)
        if whole:
            return whole[0], "actor"
        if broken:
            raise BrokenCheckpoint(broken[-1])
    if path.is_dir() and path.name.startswith(("step-", ".step-")):
        inspect(path)  # says what is missing
    return None


def _check_role(checkpoint: Checkpoint, role: str, to: Path) -> None:
    """Raises ConfigError: the checkpoint has no weights of the role, or would hold what is made of it."""
    for name in (f"{role}/.metadata", f"models/{role}/config.json"):
        if not (checkpoint.path / name).is_file():
            raise ConfigError(f"{checkpoint.path}: {name} is missing: use another checkpoint")
    if checkpoint.path.resolve() in to.resolve().parents:
        raise ConfigError(f"--to {to} lies in the checkpoint {checkpoint.path}: choose a folder outside of it")


def _to_hf(checkpoint: Checkpoint, role: str, to: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_ext.offline import role_to_hf
    from megatron_ext.weights import WeightsError

    print(f"{checkpoint.path}: {role} after step {checkpoint.step} -> {to}", flush=True)
    try:
        role_to_hf(checkpoint.path / role, checkpoint.path / "models" / role, _made(to), _say)
    except WeightsError as error:
        raise ConfigError(str(error)) from error
    except (UnpicklingError, EOFError, CheckpointException) as error:  # of the right sizes, but not what was written
        raise ConfigError(
            f"{checkpoint.path / role} is damaged ({type(error).__name__} while reading it): use another checkpoint"
        ) from error


def _to_checkpoint(model: Path, to: Path) -> None:
    from megatron_ext.offline import hf_to_role, read_config
    from megatron_ext.weights import WeightsError

    role = "critic" if read_config(model).head == "value" else "actor"
    tensor_shapes(model)  # says which file is broken before anything is written
    print(f"{model} -> {to}: a checkpoint with the weights of the {role}", flush=True)
    partial = _made(to).parent / f".{to.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        dtype = hf_to_role(model, partial / role, partial / "models" / role, _say)
    except WeightsError as error:
        shutil.rmtree(partial)
        raise ConfigError(str(error)) from error
    name = str(dtype).removeprefix("torch.")
    models = {role: {"path": str(model), "model": model_print(model), "dtype": name}}
    OmegaConf.save(OmegaConf.create(models), partial / "models.yaml")
    complete(partial, to, 0, [role], None, "")


def _from_gguf(source: str, to: Path) -> None:
    from hybridflow.data.gguf import ConversionError, convert_gguf

    try:
        convert_gguf(source, to)
    except ConversionError as error:
        if Path(source).is_dir():
            raise ConfigError(
                f"--from {source} is neither a checkpoint, a run with one, nor an HF folder (config.json)"
            ) from error
        raise ConfigError(str(error)) from error
    print(f"wrote {to}")


def _made(to: Path) -> Path:
    """The destination with its parents made, itself not there yet."""
    to = Path(os.path.abspath(to))
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.exists():
        to.rmdir()
    return to


def _say(line: str) -> None:
    print(line, flush=True)
