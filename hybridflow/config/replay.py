"""Whether a run can take the responses of an earlier one in place of generating (`run.replay`); imports no torch."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from yaml import YAMLError

from hybridflow.config.schema import Config, ConfigError, one_line

# What decides which prompts a step has and what its responses are.
_SAME = (
    *("data", "sampling", "batch.prompts", "batch.samples_per_prompt", "warm_start.steps", "warm_start.batch_size"),
    *("warm_start.correct_fraction", "evaluation.problems"),
)


def step_file(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step-{step}.safetensors"


def check_replay(config: Config, vocab_size: int) -> None:
    """Raises ConfigError: the earlier run has no responses for this one's steps, or not to its prompts; names both values."""
    folder, key = Path(config.run.replay), f"run.replay={config.run.replay}"
    if folder.resolve() == Path(config.run.dir).resolve():
        raise ConfigError(f"{key} is this run's own folder: choose another run.dir")
    missing = [step for step in range(1, config.run.steps + 1) if not step_file(folder, step).is_file()]
    if missing[:1] == [1]:
        raise ConfigError(f"{key} holds no responses ({step_file(folder, 1)}): was it run with run.save_rollouts=true?")
    if missing:
        has = missing[0] - 1
        raise ConfigError(f"{key} has the responses of {has} steps, but run.steps={config.run.steps}: use at most {has}")
    samplings = [_samplings(key, step_file(folder, step), vocab_size) for step in range(1, config.run.steps + 1)]
    try:
        theirs = OmegaConf.load(folder / "config.yaml")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}: its config.yaml cannot be read ({one_line(error)}): is it a run's folder?") from error
    if not isinstance(theirs, DictConfig):
        raise ConfigError(f"{key}: its config.yaml holds no sections: is it a run's folder?")
    _check_same(key, theirs, OmegaConf.structured(config))
    if ":" not in config.algorithm.name:  # one of the user's own samples as it likes
        for step, found in enumerate(samplings, start=1):
            _check_samplings(f"{key}: {step_file(folder, step)}", found, config)


def _samplings(key: str, path: Path, vocab_size: int) -> list[int]:
    """How many responses each sampling of a step has, in a file that is whole and of the model's tokens."""
    try:
        with safe_open(path, "numpy") as file:
            about = file.metadata()
            theirs, count = int(about["vocab_size"]), int(about["samplings"])
            found = [file.get_slice(f"{number}/lengths").get_shape()[0] for number in range(count)]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: {path} is damaged ({type(error).__name__}: {one_line(error)}): run it again") from error
    if theirs != vocab_size:
        raise ConfigError(f"{key} has responses in a vocabulary of {theirs}, but the actor's has {vocab_size}: use its model")
    return found


def _check_samplings(where: str, found: list[int], config: Config) -> None:
    name, rows = config.algorithm.name, config.batch.prompts * config.batch.samples_per_prompt
    asked = 2 if name == "remax" else 1  # the greedy answers are a sampling of their own
    if len(found) < asked:
        raise ConfigError(
            f"{where} has {len(found)} samplings, but algorithm.name={name} takes {asked}: replay one of its own runs"
        )
    if found[0] != rows:
        raise ConfigError(f"{where} has {found[0]} responses, but a step here has {rows}: is it damaged?")


def _check_same(key: str, theirs: Any, ours: Any) -> None:
    for name in _SAME:
        then, now = ({"": v} if not OmegaConf.is_config(v) else dict(v) for v in (_select(theirs, name), _select(ours, name)))
        for part in {**now, **then}:
            if then.get(part) != now.get(part):
                full = f"{name}.{part}" if part else name
                raise ConfigError(
                    f"{key} has responses to other prompts or by other rules: there {full}={then.get(part)}, here"
                    f" {now.get(part)}: make them equal"
                )


def _select(config: Any, name: str) -> Any:
    return OmegaConf.select(config, name, default=None)
