"""Scorers: functions of (prompt, response, answer, metadata) that return a reward.

Light on imports: the pool's worker processes import this module and no torch.
"""

import importlib.util
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INTEGER = r"\s*[-+]?\d+\s*"
Item = tuple[str, str, str, dict[str, Any]]  # prompt, response, answer, metadata
Scorer = Callable[[str, str, str, dict[str, Any]], float]


class RewardError(ValueError):
    """The scorer that the config names cannot be used; the message says why."""


@dataclass(frozen=True)
class ScorerSpec:
    """Which scorer: `task` (reasoning_gym's own, of `task` with `options`), `last_integer`, or `function` ("file.py:name").

    `section` of the config names it in messages: reward or cost.
    """

    kind: str
    function: str = ""
    task: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    section: str = "reward"


def load_scorer(spec: ScorerSpec) -> Scorer:
    """
    Raises:
        RewardError: an unknown kind, or a function that can't be loaded.
    """
    match spec.kind:
        case "last_integer":
            return last_integer
        case "task":
            return _task_scorer(spec)
        case "function":
            return _load_function(spec.function, f"{spec.section}.function")
    raise RewardError(f"{spec.section}.kind={spec.kind!r} is unknown: use task, last_integer or function")


def last_integer(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 when the last integer of the response is the answer, else 0; "1,234" counts as 1234.

    A minus right before the digits is their sign, unless a term stands before it: "9-3", "9 -3" and "x-3" end with 3.
    """
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", response)
    found = re.findall(r"(?<![\w)\]])(?<![\d)\]] )-\d+|\d+", text)
    if not re.fullmatch(INTEGER, answer):
        raise RewardError(f"reward.kind=last_integer needs integer answers, not {answer!r}: use reward.kind=task or function")
    return float(bool(found) and int(found[-1]) == int(answer))


def checked_reward(value: Any) -> float:
    """`value` as a finite float; anything else is the scorer's failure."""
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the scorer returned {reward}")
    return reward


def _task_scorer(spec: ScorerSpec) -> Scorer:
    # 2 s of imports that the other scorers don't need
    from hybridflow.data.reasoning import create_dataset

    try:
        dataset = create_dataset(spec.task, spec.options, seed=0)
    except ValueError as error:
        raise RewardError(f"{spec.section}.kind=task: {error}") from error

    def score(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
        entry = {"question": prompt, "answer": answer, "metadata": metadata}
        return dataset.score_answer(response.strip(), entry)

    return score


def _load_function(path: str, key: str) -> Scorer:
    file, separator, name = path.rpartition(":")
    if not separator or not file.endswith(".py"):
        raise RewardError(f"{key}={path!r} must look like path/to/file.py:name")
    if not Path(file).is_file():
        raise RewardError(f"{key}={path!r}: the file {file} does not exist")
    spec = importlib.util.spec_from_file_location(f"hybridflow_user_reward_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that ends itself would end the command without a word
        raise RewardError(f"{key}={path!r}: importing {file} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        raise RewardError(f"{key}={path!r}: {file} has no function {name}: there are {', '.join(names) or 'none'}")
    why = _not_callable_so(function)
    if why:
        raise RewardError(f"{key}={path!r}: {name} cannot be called as {name}(prompt, response, answer, metadata): {why}")
    return function


def _not_callable_so(function: Callable) -> str:
    """Why a call would fail every time; empty where it need not."""
    if inspect.iscoroutinefunction(function):
        return "it is async, and what it returns is no number"
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of Python's own have none
        return ""
    try:
        signature.bind("prompt", "response", "answer", {})
    except TypeError as error:
        return f"it takes {signature} ({error})"
    return ""
