"""A run whose roles only write down what they are asked, and answer with made-up numbers."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from hybridflow.algorithms.run import Run
from hybridflow.batch import Batch
from hybridflow.config.load import load
from hybridflow.controller.kept import Courier
from hybridflow.controller.worker import Measured
from hybridflow.data.problems import Problem
from hybridflow.metrics.nvml import Place
from hybridflow.metrics.recorder import Recorder
from hybridflow.rewards.pool import Scores
from hybridflow.rewards.scoring import Scoring, Term
from megatron_ext.layout import Layout
from tests.config.folders import write_config, write_model

RESPONSE = 3  # tokens


class Answered:
    """A call's answer, which is waited for by `result`; that is written down among the calls as the wait for `name`."""

    seconds = 250.0

    def __init__(self, value, wait: Callable[[], None] = lambda: None):
        self._value, self._wait = value, wait

    def result(self):
        self._wait()
        return self._value


class FakeRole:
    """Every method can be called; `answers` has what some return. `waits`: where the waits for answers are noted as well."""

    def __init__(self, name: str, calls: list, answers: dict[str, Callable]):
        self._name, self._calls, self._answers = name, calls, answers
        self.waits: list | None = None
        self.courier, self.ranks, self.layout = Courier(), (0,), Layout(1)

    def __getattr__(self, method: str):
        def call(*args, **kwargs):
            self._calls.append((f"{self._name}.{method}", args))
            answer = self._answers.get(method, lambda *args, **kwargs: None)(*args, **kwargs)
            return Answered(answer, lambda: self.waits is not None and self.waits.append((f"wait {self._name}.{method}", ())))

        return call


class FakeScorer:
    """Rewards 1, 2, 3, ... in the order of the samples, starting anew with each call."""

    def score(self, asked: list) -> Scores:
        return Scores([float(n + 1) for n in range(len(asked))], 0, 0, None)

    def close(self) -> None:
        pass


class FakeText:
    stop_token_ids = ()

    def decode(self, tokens: list[int]) -> str:
        return str(tokens)


def problems(count: int) -> list[Problem]:
    return [Problem(i, f"q{i}", f"q{i}", list(range(1, i + 2)), "0", {}) for i in range(count)]


def fake_run(folder: Path, *overrides: str) -> tuple[Run, list[tuple[str, tuple]]]:
    """The run, and the calls of its roles so far."""
    model = folder / "model"
    if not model.exists():
        write_model(model)
    config = load(write_config(folder, model), list(overrides))
    calls: list[tuple[str, tuple]] = []
    updated = [{"tokens": 4, "loss_count": 4, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "skipped": False}]
    report = {"seconds": 0.1, "bytes_received": 7, "wire_bound_fraction": None, "verified": None}
    answers = {
        "rollout": {"generate": _generate, "receive": lambda *args: [report]},
        "actor": {"update": lambda *args: updated, "log_probs": lambda batch: _like(batch, "log_probs", -1.5)},
        "critic": {"update": lambda *args: updated, "values": lambda batch: _like(batch, "values", 0.5)},
        "reference": {"log_probs": lambda batch: _like(batch, "log_probs", -2.0)},
        "worker": {
            "measured": lambda: [Measured()],
            "place": lambda: [Place("host")],
            "clock": lambda: [("host", time.time())],
            "calls": lambda: [[]],
        },
    }
    answers["cost_critic"] = {**answers["critic"], "values": lambda batch: _like(batch, "values", 0.25)}
    absent = {name for name in ("critic", "cost_critic", "reference") if getattr(config.roles, name) is None}
    roles = {name: FakeRole(name, calls, found) for name, found in answers.items() if name not in absent}
    scorings = [Scoring(name, {"made up": Term(FakeScorer(), lambda sample: sample)}) for name in config.scores()]
    return Run(config, roles, FakeText(), None, scorings, Recorder(config.run.dir, config)), calls


def _generate(prompts: Batch, sampling, seed: int) -> Batch:
    rows = prompts.rows("prompt")
    masks = [torch.arange(len(row) + RESPONSE) >= len(row) for row in rows]
    return Batch(
        {
            "tokens": [torch.cat([row, torch.full((RESPONSE,), 9)]) for row in rows],
            "loss_mask": masks,
            "rollout_log_probs": [torch.where(mask, -1.5, 0.0) for mask in masks],
            "truncated": torch.zeros(len(rows), dtype=torch.bool),
        }
    )


def _like(batch: Batch, name: str, value: float) -> Batch:
    return Batch({name: [torch.full((int(length),), value) for length in batch.lengths()]})
