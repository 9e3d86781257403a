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

from omegaconf import OmegaConf

from hybridflow.checkpoints.folder import COMPLETE, BrokenCheckpoint, Checkpoint, complete, find, inspect
from hybridflow.checkpoints.resume import model_print
from hybridflow.config.schema import ConfigError
from megatron_ext.hf_config import UnsupportedModel


def convert(source: str, destination: str) -> None:
    """Convert, with a line of progress for every file.

    Raises:
        ConfigError: the source is none of these, incomplete or unsupported, or the destination is there already.
    """
    to = Path(destination)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to {to} exists and is not an empty folder: choose another one, or remove it")
    path = Path(source)
    try:
        role = _role(path)
        if role is not None:
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


def _to_hf(checkpoint: Checkpoint, role: str, to: Path) -> None:
    from megatron_ext.offline import role_to_hf
    from megatron_ext.weights import WeightsError

    print(f"{checkpoint.path}: {role} after step {checkpoint.step} -> {to}", flush=True)
    try:
        role_to_hf(checkpoint.path / role, checkpoint.path / "models" / role, _made(to), _say)
    except WeightsError as error:
        raise ConfigError(str(error)) from error


def _to_checkpoint(model: Path, to: Path) -> None:
    from megatron_ext.offline import hf_to_role, read_config
    from megatron_ext.weights import WeightsError

    role = "critic" if read_config(model).head == "value" else "actor"
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
