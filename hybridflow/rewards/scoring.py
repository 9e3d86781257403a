"""What a reward, or a cost, is made of: one scorer, or a scorer and a model whose scores add up."""

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from hybridflow.config.schema import Config, RewardConfig
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.waiting import waiting
from hybridflow.data.text import Text
from hybridflow.rewards.cache import BatchScorer, CachedScorer, begin
from hybridflow.rewards.http import HttpScorer
from hybridflow.rewards.models import ModelScorer, Retokenizer
from hybridflow.rewards.pool import Scores, open_scorer
from hybridflow.rewards.samples import Sample
from hybridflow.rewards.scorers import Item, ScorerSpec


@dataclass(frozen=True)
class Term:
    """One scorer's part of a sum. `item` makes of a sample what the scorer takes."""

    scorer: BatchScorer
    item: Callable[[Sample], Any]
    weight: float = 1.0


@dataclass(frozen=True)
class Scored:
    """`total` [N] float32, and `metrics` of these samples: NAME/mean, and of a sum of several terms each one's mean before its
    weight. `counts` add up over the calls of a step: failed, timed_out, cached, asked. `seconds`: until the last term was
    there."""

    total: Tensor
    metrics: dict[str, float]
    counts: Counter[str]
    first_failure: str | None
    seconds: float


class Scoring:
    """The terms of a reward (`name` reward) or a cost (cost), by name; they are at work at the same time."""

    def __init__(self, name: str, terms: Mapping[str, Term]):
        self.name, self._terms = name, terms
        self._threads = {term: ThreadPoolExecutor(1, f"{name} {term}") for term in terms}  # a scorer takes one call at a time

    def score(self, samples: list[Sample]) -> Scored:
        return self.start(samples)()

    def start(self, samples: list[Sample]) -> Callable[[], Scored]:
        """Begin to score; what is returned waits. Where a scorer fails or is too slow its part is 0, and counted."""
        pending = {
            name: begin(term.scorer, [term.item(sample) for sample in samples], self._threads[name])
            for name, term in self._terms.items()
        }
        return lambda: self._finish(samples, pending)

    def _finish(self, samples: list[Sample], pending: Mapping[str, Callable[[], Scores]]) -> Scored:
        total, metrics, counts, failure, seconds = torch.zeros(len(samples)), {}, Counter(), None, 0.0
        for name, term in self._terms.items():
            with waiting(f"the {self.name} of {len(samples)} responses ({name})"):
                found = pending[name]()
            seconds = max(seconds, found.seconds)
            scores = torch.tensor(found.rewards, dtype=torch.float32)
            total += term.weight * scores
            metrics[f"{self.name}/{name}"] = scores.mean().item()
            counts.update(failed=found.failed, timed_out=found.timed_out, cached=found.cached, asked=len(samples))
            failure = failure or found.first_failure
        metrics = {f"{self.name}/mean": total.mean().item()} | (metrics if len(metrics) > 1 else {})
        return Scored(total, metrics, counts, failure, seconds)

    def close(self) -> None:
        for term in self._terms.values():
            term.scorer.close()


def open_scoring(name: str, config: Config, roles: Mapping[str, RoleHandle], text: Text) -> Scoring:
    """The scorers that the section `name` of the config asks for."""
    settings = config.scores()[name]
    terms = {}
    if settings.kind != "model":
        terms[settings.kind] = Term(_cached(_scorer(name, settings, config), settings), _as_text)
    if settings.kind == "model" or settings.model_weight:
        weight = 1.0 if settings.kind == "model" else settings.model_weight
        terms["model"] = Term(_cached(ModelScorer(roles[name]), settings), _as_tokens(name, config, text), weight)
    return Scoring(name, terms)


def _cached(scorer: BatchScorer, settings: RewardConfig) -> BatchScorer:
    return CachedScorer(scorer, settings.cache_size) if settings.cache_size else scorer


def _scorer(name: str, settings: RewardConfig, config: Config) -> BatchScorer:
    if settings.kind == "http":
        return HttpScorer(settings.url, settings.concurrency, settings.timeout, settings.retries)
    spec = ScorerSpec(settings.kind, settings.function, config.data.task, dict(config.data.options), name)
    return open_scorer(spec, settings.concurrency, settings.timeout)


def _as_text(sample: Sample) -> Item:
    return sample.problem.question, sample.response, sample.problem.answer, sample.problem.metadata


def _as_tokens(name: str, config: Config, text: Text) -> Callable[[Sample], list[int]]:
    """The actor's own tokens, or the model's where they differ (`retokenize`)."""
    role, folder = config.scoring_roles()[name], config.model_path(name)
    trust = {"trust_remote_code": role.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    same = tokenizer.get_vocab() == text.tokenizer.get_vocab()
    if role.retokenize == "never" or (role.retokenize == "auto" and same):
        return lambda sample: sample.tokens
    model = AutoConfig.from_pretrained(folder, **trust).get_text_config()
    budget = role.forward_micro_batch_tokens // role.tp * role.tp
    longest = getattr(model, "max_position_embeddings", budget)  # not all architectures have a limit
    return Retokenizer(tokenizer, text, min(longest, tokenizer.model_max_length, budget))
