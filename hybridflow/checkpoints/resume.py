"""What a run starts from: nothing, or a whole checkpoint that its configuration can go on with. No torch."""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridflow.checkpoints.folder import BrokenCheckpoint, Checkpoint, find, inspect, read_state
from hybridflow.config.load import flat
from hybridflow.config.schema import Config, ConfigError, one_line

# Keys that must be what they were, each with the reason. Layouts, ranks, micro-batches, optimizers, batch, clipping, sampling,
# reward, run and the like may differ: what a checkpoint holds does not depend on them.
_FIXED = {
    "algorithm.name": "its state would be another algorithm's",
    "algorithm.kl_target": "the KL coefficient was adapted to it",
    "data.source": "the position in the data would mean nothing",
    "data.task": "the position in the data would mean nothing",
    "data.options": "the position in the data would mean nothing",
    "data.path": "the position in the data would mean nothing",
    "data.seed": "the position in the data would mean nothing",
    "evaluation.problems": "problems that were trained on would be held out now",
}
_MAY_MOVE = ("data.path",)  # a file, which may lie elsewhere as long as its name is the same
_NOT_WORTH_A_LINE = ("run.", "warm_start.")
_MODEL_FILES = ("config.json", "tokenizer.json")


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        checkpoint: None: at the beginning.
        own: the checkpoint is of the run that `run.dir` holds, whose records go on from there.
        restarts: `run.dir` holds a run that ended before its first checkpoint: its files go.
        lines: what to tell the user.
        broken: what is wrong with the checkpoints in `run.dir`, where none is whole.
    """

    checkpoint: Checkpoint | None = None
    own: bool = False
    restarts: bool = False
    lines: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def find_start(config: Config) -> Start:
    """What `run.resume` finds.

    Raises:
        ConfigError: no whole checkpoint where one is asked for, or one that this configuration cannot go on from.
    """
    folder, resume = Path(config.run.dir), config.run.resume
    if resume == "never" or (resume == "auto" and config.run.overwrite):
        return Start()
    if resume == "auto":
        whole, broken = find(folder / "checkpoints")
        lines = [f"skipped: {reason}" for reason in broken]
        if not whole:
            restarts = _ended_before_its_first_checkpoint(folder)
            if restarts:
                lines.append(f"{folder} has no whole checkpoint yet: the run starts again from the beginning")
            return Start(restarts=restarts, lines=lines, broken=broken)
        chosen = whole[0]
    else:
        chosen, lines = _named(Path(resume))
    own = chosen.path.resolve().parent == (folder / "checkpoints").resolve()
    if own and config.run.overwrite:
        raise ConfigError(
            f"run.resume={resume} lies in run.dir={folder}, which run.overwrite=true would delete: drop one of them"
        )
    lines.append(f"resumes after step {chosen.step} from {chosen.path}")
    return Start(chosen, own, lines=lines + _check_changes(config, chosen))


def _ended_before_its_first_checkpoint(folder: Path) -> bool:
    """Of a run that saves: one that does not, has come to its end, or had a whole checkpoint is not thrown away."""
    written = folder / "config.yaml"
    if not written.is_file() or (folder / "hf").exists() or any((folder / "checkpoints").glob("step-*")):
        return False
    saved = _read_yaml(written).get("run")
    return isinstance(saved, dict) and bool(saved.get("save_every"))


def _read_yaml(path: Path) -> dict[str, Any]:
    """What a run wrote with its configuration; ConfigError: it cannot be read."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} of an earlier run cannot be read ({one_line(error)}): restore it, or use another run.dir"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} of an earlier run holds no sections: restore it, or use another run.dir")
    return found


def _named(path: Path) -> tuple[Checkpoint, list[str]]:
    """A checkpoint's folder, or the newest of a run's folder or of its checkpoints."""
    for checkpoints in (path / "checkpoints", path):
        whole, broken = find(checkpoints)
        if whole:
            return whole[0], [f"skipped: {reason}" for reason in broken]
        if broken:
            raise ConfigError(f"run.resume={path}: no whole checkpoint: {broken[-1]}")
    try:
        return inspect(path), []
    except BrokenCheckpoint as error:
        what = error if path.exists() else f"{path} does not exist"
        raise ConfigError(f"run.resume={path} is no whole checkpoint ({what}): use auto, never, or its folder") from error


def model_print(folder: str | Path) -> str:
    """What tells one model folder from another, wherever it lies: a digest of its config and tokenizer."""
    digest = hashlib.sha256()
    for name in _MODEL_FILES:
        path = Path(folder) / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()[:16]


def _check_changes(config: Config, checkpoint: Checkpoint) -> list[str]:
    """Lines about what differs from the configuration that the checkpoint was written with."""
    if not (checkpoint.path / "run.json").is_file():
        raise ConfigError(
            f"run.resume: {checkpoint.path} holds weights only: convert it to an HF folder, and use it as model.path"
        )
    _check_state(checkpoint)
    was = _read_yaml(checkpoint.path / "config.yaml")
    where = f"{checkpoint.path} cannot be resumed with"
    before, now = flat(was), flat(asdict(config))
    saved = {*config.trained_roles(), *(["reference"] if config.roles.reference else [])}
    for name in sorted(saved | set(checkpoint.roles)):
        _check_role(config, checkpoint, name, name in saved, where)
    for key, reason in _FIXED.items():
        old, new = _select(was, key), _select(asdict(config), key)
        same = Path(old).name == Path(new).name if key in _MAY_MOVE and old and new else old == new
        if not same:
            raise ConfigError(f"{where} {key}={new!r}, it was {old!r}: {reason}; set it back, or start a new run")
    changed = [key for key in now if key in before and now[key] != before[key] and not key.startswith(_NOT_WORTH_A_LINE)]
    if not changed:
        return []
    return [f"changed since then: {', '.join(f'{key} {before[key]} -> {now[key]}' for key in changed)}"]


def _check_role(config: Config, checkpoint: Checkpoint, name: str, here: bool, where: str) -> None:
    if here != (name in checkpoint.roles):
        has, lacks = ("this configuration", "it") if here else ("it", "this configuration")
        key = "algorithm.kl_coefficient" if name == "reference" else f"roles.{name}"
        raise ConfigError(f"{where} these roles: {has} has a {name}, {lacks} has none: set {key} as it was, or start a new run")
    stored = _read_yaml(checkpoint.path / "models.yaml").get(name)
    if not isinstance(stored, dict) or not stored.keys() >= {"path", "model", "dtype"}:
        raise ConfigError(
            f"{checkpoint.path / 'models.yaml'} lacks path, model or dtype of the {name}: it is damaged, use another"
        )
    found = {"dtype": config.dtype(name), "model": model_print(config.model_path(name))}
    if stored["model"] != found["model"]:
        raise ConfigError(
            f"{where} the {name}'s model.path={config.model_path(name)}, it was {stored['path']}:"
            " their config.json or tokenizer.json differ"
        )
    if stored["dtype"] != found["dtype"]:
        raise ConfigError(
            f"{where} the {name}'s dtype={found['dtype']}, it was {stored['dtype']}: set it back, or convert the weights"
        )


def _check_state(checkpoint: Checkpoint) -> None:
    """What the driver will go on from is there: it is read once the roles have been built."""
    path = checkpoint.path / "run.json"
    try:
        state = read_state(checkpoint)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({one_line(error)}): use another checkpoint") from error
    missing = [key for key in ("run", "records") if not isinstance(state, dict) or key not in state]
    if missing:
        raise ConfigError(f"{path} lacks {' and '.join(missing)}: it is damaged, use another checkpoint")


def _select(values: dict, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
