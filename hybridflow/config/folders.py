"""Checks of the paths in a config, and of folders that a command is about to write; each raises ConfigError."""

import os
import tempfile
from pathlib import Path

from hybridflow.config.schema import Config, ConfigError


def check_paths(config: Config) -> None:
    """Raises ConfigError: a path is empty, begins with a shell's `~`, or is none that this machine can look at."""
    paths = {"model.path": config.model.path, "run.dir": config.run.dir}
    paths |= {"data.path": config.data.path} if config.data.source == "file" else {}
    for key, path in paths.items():
        if not path:
            raise ConfigError(f"{key} is empty: give a path")
    paths |= {"data.path": config.data.path, "run.resume": config.run.resume, "run.replay": config.run.replay}
    paths |= {f"roles.{role}.model.path": config.model_path(role) for role in config.megatron_roles() | config.scoring_roles()}
    for key, path in paths.items():
        if path.startswith("~"):
            raise ConfigError(f"{key}={path}: only a shell knows what ~ stands for: write {os.path.expanduser(path)}")
        try:
            Path(path).exists()
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise ConfigError(f"{key}={path[:100]} cannot be looked at ({error.strerror}): give another path") from error


def check_new(key: str, folder: Path) -> None:
    """Raises ConfigError: the folder is there already and not empty, or cannot be made."""
    check_writable(key, folder, "another folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{key} exists and is not an empty folder: choose another one, or remove it")


def check_writable(key: str, folder: Path, instead: str) -> None:
    """Raises ConfigError: it is a file, or nothing can be made in it or the one above it; says to choose `instead`."""
    if not folder.name:  # what is left of an empty text, of . and /
        raise ConfigError(f"{key} names no folder of its own: choose {instead}")
    try:
        if folder.is_symlink() and not folder.exists():
            raise ConfigError(f"{key} is a link to {folder.readlink()}, which is not there: choose {instead}")
        parent = existing(folder)
    except OSError as error:  # a name that is too long, links in a circle, a folder that may not be looked into
        raise ConfigError(f"{key:.200} cannot be had ({error.strerror}): choose {instead}") from error
    if not parent.is_dir():
        raise ConfigError(f"{key}: {parent} is a file: choose {instead}")
    try:
        tempfile.TemporaryDirectory(dir=parent).cleanup()  # permission bits do not tell for root or read-only mounts
    except OSError as error:
        raise ConfigError(f"{key} cannot be written ({parent}: {error.strerror}): choose {instead}") from error


def check_file(key: str, path: Path) -> None:
    """Raises ConfigError: it is a folder, or the folder that it would be in is not there or cannot be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{key} is no file in a folder that is there: choose another")
    check_writable(key, path.absolute().parent, "a file in another folder")


def existing(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder
