"""A response as scorers may see it, and as a run writes it down."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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


def rows_of(samples: list[Sample], batch: Batch, scores: Mapping[str, Tensor], **about: Any) -> list[dict[str, Any]]:
    """The samples of a batch (`samples_of`) as rows for samples.jsonl, each with `about`. `scores` [N]: rewards, and costs
    where there are any; a row has its own under the singular."""
    responses = (tokens[mask].tolist() for tokens, mask in zip(batch.rows("tokens"), batch.rows("loss_mask"), strict=True))
    return [
        {
            **about,
            "prompt": sample.problem.question,
            "answer": sample.problem.answer,
            "response": sample.response,
            **{name.removesuffix("s"): score[row].item() for name, score in scores.items()},
            "tokens": response,
            "prompt_tokens": sample.problem.prompt_tokens,
        }
        for row, (sample, response) in enumerate(zip(samples, responses, strict=True))
    ]
