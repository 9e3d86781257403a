"""A run's responses on disk (`run.save_rollouts`), and a later run that takes them in place of generating (`run.replay`).

One file a step, `rollouts/step-N.safetensors`, with the step's samplings (ReMax has two) numbered from 0:

    0/lengths    [N] int32      tokens of each sequence
    0/tokens     [T] int32      prompts and responses, one sequence after the other
    0/loss_mask  [T] bool       what the policy sampled
    0/log_probs  [T] float32    the rollout engine's
    0/truncated  [N] bool
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hybridflow.batch import Batch
from hybridflow.config.replay import step_file
from hybridflow.config.schema import Config
from hybridflow.writing import writing

_RAGGED = {"tokens": "tokens", "loss_mask": "loss_mask", "log_probs": "rollout_log_probs"}


class ReplayError(RuntimeError):
    """The responses of an earlier run are not answers to this run's prompts."""


class Samplings:
    """What a step's rollout gave, sampling by sampling, kept and replayed as the config says. Samplings outside of a step
    (evaluations) are no part of it: they are neither kept nor replayed."""

    def __init__(self, config: Config):
        self._config = config
        self._step: int | None = None
        self._of_step: list[Batch] = []

    def begin(self, step: int) -> None:
        self._step, self._of_step = step, []

    def replayed(self, prompts: Batch) -> Batch | None:
        """The replayed run's responses to the next sampling; None: generate them. Raises as `load_rollout`."""
        if not self._config.run.replay or self._step is None:
            return None
        return load_rollout(Path(self._config.run.replay), self._step, len(self._of_step), prompts)

    def note(self, samples: Batch) -> None:
        if self._step is not None:
            self._of_step.append(samples)

    def finish(self) -> None:
        if self._config.run.save_rollouts:
            vocab_size = self._config.read_model("actor").vocab_size
            save_rollouts(Path(self._config.run.dir), self._step, self._of_step, vocab_size)
        self._step, self._of_step = None, []


def save_rollouts(run: Path, step: int, samplings: list[Batch], vocab_size: int) -> None:
    """Write what a step's rollout gave, as `Rollout.generate` returns it."""
    tensors = {}
    for number, samples in enumerate(samplings):
        tensors[f"{number}/lengths"] = samples.lengths().int()
        tensors |= {f"{number}/{name}": samples.values(column) for name, column in _RAGGED.items()}
        tensors[f"{number}/tokens"] = tensors[f"{number}/tokens"].int()
        tensors[f"{number}/truncated"] = samples["truncated"]
    path = step_file(run, step)
    path.parent.mkdir(exist_ok=True)
    with writing(path):
        save_file(tensors, path, metadata={"vocab_size": str(vocab_size), "samplings": str(len(samplings))})


def load_rollout(run: Path, step: int, number: int, prompts: Batch) -> Batch:
    """The responses of sampling `number` in a step of an earlier run, to `prompts` (field `prompt`), as `Rollout.generate`
    returns them.

    Raises:
        ReplayError: they are responses to other prompts, or there are none.
    """
    path = step_file(run, step)
    with safe_open(path, "pt") as file:
        count = int(file.metadata()["samplings"])
        if number >= count:
            raise ReplayError(
                f"{path} has {count} samplings, and this run's step takes more: was it another algorithm (run.replay)?"
            )
        found = {name: file.get_tensor(f"{number}/{name}") for name in ("lengths", "truncated", *_RAGGED)}
    lengths = found["lengths"].tolist()
    found["tokens"] = found["tokens"].long()
    rows = {column: list(found[name].split(lengths)) for name, column in _RAGGED.items()}
    _check_prompts(path, prompts.rows("prompt"), rows["tokens"])
    return Batch({**rows, "truncated": found["truncated"]})


def _check_prompts(path: Path, prompts: list[torch.Tensor], tokens: list[torch.Tensor]) -> None:
    if len(prompts) != len(tokens):
        raise ReplayError(f"{path} has {len(tokens)} responses, but this run's step {len(prompts)} prompts (run.replay)")
    for row, (prompt, sequence) in enumerate(zip(prompts, tokens, strict=True)):
        if not torch.equal(sequence[: len(prompt)], prompt):
            raise ReplayError(
                f"response {row} in {path} answers the tokens {sequence[: len(prompt)].tolist()}, but this run's prompt is"
                f" {prompt.tolist()}: has the data changed since (run.replay)?"
            )
