"""The outer loop that all algorithms share: warm start, steps, evaluation before and after, export."""

from pathlib import Path
from typing import Protocol

from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.run import Run
from hybridflow.algorithms.sft import warm_start
from hybridflow.data.problems import Problem


class Algorithm(Protocol):
    """What an algorithm implements over the verbs of a `Run`."""

    def prepare(self) -> None:
        """Once, before the first step."""

    def step(self, problems: list[Problem]) -> None:
        """One step; it measures itself into `run.metrics` through the verbs."""


ALGORITHMS = {"grpo": GRPO}


def train(run: Run, algorithm: Algorithm) -> None:
    config, recorder = run.config, run.recorder
    warm_start(run)
    accuracy = {"before": run.evaluate()}
    algorithm.prepare()
    for step in range(config.run.steps):
        with recorder.phase("step"):
            algorithm.step(run.next_problems(config.batch.prompts))
        every = config.evaluation.every
        if every and (step + 1) % every == 0 and step + 1 < config.run.steps:
            run.metrics["evaluation/accuracy"] = run.evaluate()
        run.finish_step()
    accuracy["after"] = run.evaluate()
    run.actor.export(str(Path(config.run.dir) / "hf")).result()
    recorder.finish(accuracy)
