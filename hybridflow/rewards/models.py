"""Rewards from a model: what a reward or cost role says of sequences, in its own tokens where they aren't the actor's."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.controller.handle import RoleHandle
from hybridflow.data.text import Text
from hybridflow.rewards.pool import Scores, collect
from hybridflow.rewards.samples import Sample


class ModelScorer:
    """The scores of a role with a method `scores`; an item is a sequence's tokens."""

    def __init__(self, role: RoleHandle):
        self._role = role

    def start(self, items: Sequence[list[int]], thread: Executor) -> Callable[[], Scores]:
        """A number that is not finite counts as failed."""
        if not items:
            return lambda: Scores([], 0, 0, None)
        pending = self._role.scores(Batch({"tokens": [torch.tensor(tokens) for tokens in items]}))

        def finish() -> Scores:
            scores = pending.result()["scores"]
            pairs = enumerate(zip(scores.tolist(), scores.isfinite().tolist(), strict=True))
            results = {n: (s, None) if finite else (None, f"the model scores {s}") for n, (s, finite) in pairs}
            return replace(collect(results, 0), seconds=pending.seconds)

        return finish

    def close(self) -> None:
        pass


class Retokenizer:
    """Sequences in a model's own tokens.

    With a chat template: the problem's messages and the response as the assistant's. Without: the prompt as the actor saw it
    and the response, followed by the end-of-text token where the actor ended it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, actors: Text, longest: int):
        """`longest`: tokens that the model holds; of a longer sequence the last ones are taken, since the score is said at the
        end, and the first time that happens a line says so."""
        self._tokenizer, self._actors, self._longest = tokenizer, actors, longest
        self._told = False

    def __call__(self, sample: Sample) -> list[int]:
        tokens = self._templated(sample) if self._tokenizer.chat_template else self._plain(sample)
        if len(tokens) > self._longest and not self._told:
            self._told = True
            print(f"warning: of {len(tokens)} tokens for the scoring model the last {self._longest} are taken", flush=True)
        return tokens[-self._longest :]

    def _templated(self, sample: Sample) -> list[int]:
        messages = [*sample.problem.messages, {"role": "assistant", "content": sample.response}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _plain(self, sample: Sample) -> list[int]:
        tokens = self._tokenizer(self._actors.decode(sample.problem.prompt_tokens) + sample.response)["input_ids"]
        end = self._tokenizer.eos_token_id
        return [*tokens, end] if sample.ended and end is not None and tokens[-1:] != [end] else tokens
