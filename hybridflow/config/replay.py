"""Whether a run can take the responses of an earlier one in place of generating (`run.replay`); imports no torch."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from safetensors import safe_open

from hybridflow.config.schema import Config, ConfigError

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
    with safe_open(step_file(folder, 1), "numpy") as file:
        theirs = int(file.metadata()["vocab_size"])
    if theirs != vocab_size:
        raise ConfigError(f"{key} has responses in a vocabulary of {theirs}, but the actor's has {vocab_size}: use its model")
    _check_same(key, OmegaConf.load(folder / "config.yaml"), OmegaConf.structured(config))


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
