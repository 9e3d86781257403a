"""The outer loop that all algorithms share: warm start, steps, evaluation before and after, export."""

from pathlib import Path
from typing import Protocol

from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.ppo import PPO
from hybridflow.algorithms.remax import ReMax
from hybridflow.algorithms.run import Run
from hybridflow.algorithms.safe_rlhf import SafeRLHF
from hybridflow.algorithms.sft import warm_start
from hybridflow.config.own_class import load_class
from hybridflow.config.schema import ALGORITHM_METHODS
from hybridflow.data.problems import Problem


class Algorithm(Protocol):
    """What an algorithm implements over the verbs of a `Run`, with which it is made.

    One of your own is `algorithm.name: package.module:Class`, found in the working directory or where Python finds packages;
    critics, a reference, costs are there when the config has them.
    """

    def prepare(self) -> None:
        """Once, before the first step."""

    def step(self, problems: list[Problem]) -> None:
        """One step; it measures itself into `run.metrics` through the verbs."""


_BUILT_IN = {"grpo": GRPO, "ppo": PPO, "remax": ReMax, "safe_rlhf": SafeRLHF}


def make_algorithm(run: Run) -> Algorithm:
    """The one that the config names."""
    name = run.config.algorithm.name
    chosen = _BUILT_IN[name] if name in _BUILT_IN else load_class("algorithm.name", name, ALGORITHM_METHODS)
    return chosen(run)


def train(run: Run, algorithm: Algorithm) -> None:
    config = run.config
    warm_start(run)
    algorithm.prepare()
    run.evaluate()  # with an optimizer: the weights that may have to leave for the engine are rebuilt from its masters
    for step in range(1, config.run.steps + 1):
        run.begin_step()
        algorithm.step(run.next_problems(config.batch.prompts))
        run.finish_step()
        if step == config.run.steps or (config.evaluation.every and step % config.evaluation.every == 0):
            run.evaluate()
    with run.recorder.phase("save"):
        run.actor.export(str(Path(config.run.dir) / "hf")).result()
