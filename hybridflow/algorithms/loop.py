"""The outer loop that all algorithms share: warm start, steps, evaluation before and after, export."""

from pathlib import Path
from typing import Protocol

from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.remax import ReMax
from hybridflow.algorithms.run import Run
from hybridflow.algorithms.sft import warm_start
from hybridflow.data.problems import Problem


class Algorithm(Protocol):
    """What an algorithm implements over the verbs of a `Run`."""

    def prepare(self) -> None:
        """Once, before the first step."""

    def step(self, problems: list[Problem]) -> None:
        """One step; it measures itself into `run.metrics` through the verbs."""


ALGORITHMS = {"grpo": GRPO, "remax": ReMax}


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
