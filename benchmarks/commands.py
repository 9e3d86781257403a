"""Commands that a benchmark runs, and what it asks of its options before anything is measured."""

import argparse
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.folders import check_file
from hybridflow.config.schema import ConfigError

ROOT = Path(__file__).parents[1]
ENDS_WITHIN = 60  # seconds, that a command has for its end before it is killed


def run(command: Sequence[str], folder: Path | None = ROOT) -> int:
    """The exit status of a command in `folder`, None being this process's own. Asked to end meanwhile (SIGTERM, Ctrl-C), this
    process ends the command first."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with subprocess.Popen(command, cwd=folder) as started:
            try:
                return started.wait()
            except BaseException:
                started.terminate()
                try:
                    started.wait(ENDS_WITHIN)
                except subprocess.TimeoutExpired:
                    started.kill()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


def check(command: Sequence[str], folder: Path | None = ROOT) -> None:
    """`run`, for a command that must succeed.

    Raises:
        CalledProcessError: its exit status was not 0.
    """
    status = run(command, folder)
    if status:
        raise subprocess.CalledProcessError(status, list(command))


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that counts something."""

    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return count


def share(text: str) -> float:
    """The type of an option that is a share of something, 0 or more."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a share, such as 0.25")
    return value


def check_out(path: Path | None, option: str = "--out") -> None:
    """Makes the folder of a result, so that nothing is measured that cannot be written.

    Raises:
        ConfigError: it cannot be had, or `path` is a folder.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}: choose another file") from error
    check_file(f"{option} {path}", path)


def read_json(path: str | Path, option: str) -> dict[str, Any]:
    """Raises ConfigError: `path` is no file with an object in it."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{option} {path}: {reason}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{option} {path} holds a {type(found).__name__}, not an object")
    return found


def read_model(path: str | Path, layers: int = 0) -> dict[str, Any]:
    """The fields of a model's config.json, with another number of layers if one is given. Raises as `read_json`."""
    fields = read_json(path, "--model")
    return fields | {"num_hidden_layers": layers} if layers else fields
