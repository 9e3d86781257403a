"""Checks of `run.trackers`: known, and installed in a version that works. Raises ConfigError."""

import difflib
from importlib import metadata

from packaging.requirements import Requirement

from hybridflow.config.schema import TRACKERS, Config, ConfigError


def check_trackers(config: Config) -> None:
    names = config.run.trackers
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {' or '.join(TRACKERS)}"
            raise ConfigError(f"run.trackers={names}: {name!r} is unknown: {hint} (JSONL and TensorBoard are always there)")
        if names.count(name) > 1:
            raise ConfigError(f"run.trackers={names} has {name} more than once: leave one")
        lacks = _lacks(Requirement(TRACKERS[name]))
        if lacks:
            raise ConfigError(f"run.trackers={names}: {lacks}: pip install '{TRACKERS[name]}', or leave {name} out")


def _lacks(wanted: Requirement) -> str:
    try:
        # not find_spec: a folder `wandb`, which wandb leaves where it ran, would pass for the package
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"the package {wanted.name} is not installed"
    return "" if wanted.specifier.contains(found, prereleases=True) else f"{wanted.name} {found} is too old"
