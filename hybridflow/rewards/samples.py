"""A response as scorers may see it."""

from dataclasses import dataclass

from hybridflow.batch import Batch
from hybridflow.data.problems import Problem
from hybridflow.data.text import Text


@dataclass(frozen=True)
class Sample:
    problem: Problem
    tokens: list[int]  # prompt and response
    response: str
    ended: bool  # by the policy, not by the length limit


def samples_of(problems: list[Problem], batch: Batch, text: Text) -> list[Sample]:
    """The rows of a batch with tokens, loss_mask, truncated and prompt_index (into `problems`)."""
    rows = zip(batch.rows("tokens"), batch.rows("loss_mask"), batch["truncated"].tolist(), strict=True)
    asked = (problems[index] for index in batch["prompt_index"].tolist())
    return [
        Sample(problem, tokens.tolist(), text.decode(tokens[mask].tolist()), not truncated)
        for problem, (tokens, mask, truncated) in zip(asked, rows, strict=True)
    ]
