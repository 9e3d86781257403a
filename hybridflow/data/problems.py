"""Problems to train on: reasoning_gym's task generators and parquet or jsonl files, in a deterministic order.

A source has `size` entries. Epoch e visits all of them in an order drawn from (seed, e), so that one integer, the
position, says where a run is; `take(position, count)` returns the next problems and the position after them. The evaluation
split is drawn first and every entry with the same question is left out of training. Prompts that are too long are dropped
and counted.
"""

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybridflow.data.tokenizer import encode, without_token

OVERSHOOT = "+1"  # what a weak teacher adds to a right answer
_EVALUATION = 2**32 - 1  # the "epoch" of the evaluation split's order


class DataError(ValueError):
    """The data cannot be used; the message names the file or key and what to change."""


@dataclass(frozen=True)
class Entry:
    """What a source holds, before any tokenizer: either `question` or whole chat `messages` that end with the user's."""

    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] | None = None


class Entries(Protocol):
    """A finite, indexable collection of entries. Reading one twice gives the same."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Entry: ...


@dataclass(frozen=True)
class Problem:
    """A prompt as the model sees it, and what its scorer needs.

    `index` is the position in the training order, or the number within the evaluation split.
    """

    index: int
    question: str
    prompt: str
    prompt_tokens: list[int]
    answer: str
    metadata: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)  # what `prompt` was made of


@dataclass(frozen=True)
class Templates:
    """How an entry becomes text. The templates are format strings over `question`, `answer` and the metadata's fields."""

    prompt: str = "{question}"
    response: str = "{answer}"
    system: str = ""


class Source:
    """Problems of `entries` for one tokenizer, split into evaluation and training."""

    def __init__(
        self,
        entries: Entries,
        tokenizer: PreTrainedTokenizerBase,
        templates: Templates,
        max_prompt_tokens: int,
        evaluation_problems: int = 0,
        correct_fraction: float = 1.0,
        seed: int = 0,
    ):
        """Draw the evaluation split.

        Args:
            max_prompt_tokens: longer prompts are dropped (`sampling.max_prompt_tokens`).
            evaluation_problems: distinct questions to hold out (`evaluation.problems`).
            correct_fraction: how often a demonstration is right (`warm_start.correct_fraction`), see `demonstration`.

        Raises:
            DataError: no entries, or too few distinct questions for the split and for training.
        """
        if not len(entries):
            raise DataError(f"{entries.name} holds no problems")
        if not 0 <= correct_fraction <= 1:
            raise DataError(f"warm_start.correct_fraction={correct_fraction} must lie between 0 and 1")
        self.dropped = 0  # prompts that `take` found too long, or without a token, each time it met one
        self._entries, self._tokenizer, self._templates = entries, tokenizer, templates
        self._max_prompt_tokens, self._correct_fraction, self._seed = max_prompt_tokens, correct_fraction, seed
        self._orders: dict[int, np.ndarray] = {}
        self._held_out: set[str] = set()
        self.evaluation = self._draw_evaluation(evaluation_problems)

    @property
    def size(self) -> int:
        """Entries per epoch, the evaluation split's and too long ones included."""
        return len(self._entries)

    def take(self, position: int, count: int) -> tuple[list[Problem], int]:
        """The next `count` training problems from `position` on, and the position after the last of them.

        Raises:
            DataError: a whole epoch has no problem that can be trained on.
        """
        problems: list[Problem] = []
        barren = 0
        while len(problems) < count:
            problem = self._problem(position)
            position += 1
            barren = 0 if problem else barren + 1
            if problem:
                problems.append(problem)
            elif barren >= 2 * self.size:
                raise DataError(
                    f"{self._entries.name}: none of {self.size} problems is left for training: {len(self.evaluation)} questions"
                    f" are held out (evaluation.problems), prompts over sampling.max_prompt_tokens={self._max_prompt_tokens}"
                    " tokens are dropped"
                )
        return problems, position

    def check(self, demonstrated: bool) -> None:
        """Whether every entry can be rendered, without encoding all of them: of each order of roles one entry goes through the
        chat template, and all characters that occur through the tokenizer.

        Args:
            demonstrated: responses are taught as well (`demonstration`).

        Raises:
            DataError: one can't; names the row, the field or the characters.
        """
        orders, characters = set(), set()
        for number in range(self.size):
            entry = self._entries[number]
            fields = entry.question, entry.answer, entry.metadata
            try:
                if entry.messages is None:
                    characters |= set(_fill(self._templates.prompt, "data.prompt_template", *fields))
                if demonstrated:
                    characters |= set(_fill(self._templates.response, "data.response_template", *fields))
            except DataError as error:
                raise DataError(f"{self._entries.name}, row {number + 1}: {error}") from error
            order = tuple(message["role"] for message in entry.messages or ())
            characters |= {c for message in entry.messages or () for c in message["content"]}
            if order not in orders:
                orders.add(order)
                self._render(entry, number)
        missing = without_token(self._tokenizer, characters)
        if missing:
            raise DataError(
                f"{self._entries.name}: the tokenizer has no token for {missing[:10]}: change data.prompt_template or"
                " data.response_template, or use a model whose tokenizer has them"
            )

    def demonstration(self, problem: Problem) -> list[int]:
        """Tokens of a response to learn from, the end-of-text token included.

        The teacher is right in `correct_fraction` of the cases, drawn from the seed and the problem's index. Otherwise it
        knows the answer but doesn't stop there: it goes on with "+1", so that its last integer is wrong (unless the answer
        is 1). A policy that learns from it knows how to answer and mostly doesn't.
        """
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                "the model's tokenizer has no end-of-text token, with which a taught response ends: name its eos_token in"
                " tokenizer_config.json, or set warm_start.steps=0"
            )
        text = _fill(self._templates.response, "data.response_template", problem.question, problem.answer, problem.metadata)
        if random.Random(f"{self._seed} {problem.index} {problem.prompt}").random() >= self._correct_fraction:
            text += OVERSHOOT
        return [*_encode(self._tokenizer, text), self._tokenizer.eos_token_id]

    def _problem(self, position: int) -> Problem | None:
        epoch, place = divmod(position, self.size)
        entry = self._entries[int(self._order(epoch)[place])]
        problem = self._render(entry, position)
        if problem.question in self._held_out or problem.prompt in self._held_out:
            return None
        if not 0 < len(problem.prompt_tokens) <= self._max_prompt_tokens:
            self.dropped += 1
            return None
        return problem

    def _draw_evaluation(self, count: int) -> list[Problem]:
        problems: list[Problem] = []
        for place in range(self.size if count else 0):
            problem = self._render(self._entries[int(self._order(_EVALUATION)[place])], len(problems))
            seen = problem.question in self._held_out or problem.prompt in self._held_out
            if not seen and 0 < len(problem.prompt_tokens) <= self._max_prompt_tokens:
                problems.append(problem)
                self._held_out |= {problem.question, problem.prompt}
            if len(problems) == count:
                return problems
        if count:
            raise DataError(
                f"{self._entries.name} has {len(problems)} distinct questions within sampling.max_prompt_tokens="
                f"{self._max_prompt_tokens}, fewer than evaluation.problems={count}"
            )
        return problems

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            kept = {e: order for e, order in self._orders.items() if e == epoch - 1}  # what a batch may straddle
            kept[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self.size)
            self._orders = kept
        return self._orders[epoch]

    def _render(self, entry: Entry, index: int) -> Problem:
        templates, tokenizer = self._templates, self._tokenizer
        if entry.messages is None:
            text = _fill(templates.prompt, "data.prompt_template", entry.question, entry.answer, entry.metadata)
            messages = [{"role": "user", "content": text}]
        else:
            messages = entry.messages
        if templates.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": templates.system}, *messages]
        if tokenizer.chat_template:
            prompt = self._in_chat(messages)
            tokens = _encode(tokenizer, prompt)
        else:
            prompt = _plain(messages, entry.messages is not None)
            tokens = _encode(tokenizer, prompt, special=True)
        return Problem(index, entry.question, prompt, tokens, entry.answer, entry.metadata, messages)

    def _in_chat(self, messages: list[dict[str, str]]) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes, such as for a system prompt that it does not take
            roles, what = ", ".join(message["role"] for message in messages), " ".join(str(error).split())
            raise DataError(
                f"{self._entries.name}: the model's chat template refuses messages of {roles} ({what}): change the data,"
                " data.system_prompt, or the template in the model's folder"
            ) from error


def _plain(messages: list[dict[str, str]], from_file: bool) -> str:
    if len(messages) > 1:
        key = "a file of `messages`" if from_file else "data.system_prompt"
        raise DataError(f"{key} needs a chat template, and the model's tokenizer has none: use data.prompt_template")
    return messages[0]["content"]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    try:
        return encode(tokenizer, text, special)
    except ValueError as error:
        raise DataError(str(error)) from error


def _fill(template: str, key: str, question: str, answer: str, metadata: dict[str, Any]) -> str:
    fields = {**metadata, "question": question, "answer": answer}
    try:
        return template.format_map(fields)
    except KeyError as error:
        raise DataError(f"{key}={template!r} has no field {error.args[0]!r} to fill in: there are {sorted(fields)}") from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(f"{key}={template!r} is not a valid format string: {error}") from error
