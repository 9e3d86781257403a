"""The outer loop that all algorithms share: warm start, steps, evaluation before and after, export."""

from pathlib import Path
from typing import Protocol

from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.ppo import PPO
from hybridflow.algorithms.remax import ReMax
from hybridflow.algorithms.run import Run
from hybridflow.algorithms.safe_rlhf import SafeRLHF
from hybridflow.algorithms.sft import warm_start
from hybridflow.checkpoints.keeper import CheckpointKeeper
from hybridflow.checkpoints.resume import Start
from hybridflow.config.own_class import load_class
from hybridflow.config.schema import ALGORITHM_METHODS
from hybridflow.controller.stopping import Stopping
from hybridflow.data.problems import Problem


class Algorithm(Protocol):
    """What an algorithm implements over the verbs of a `Run`, with which it is made.

    One of your own is `algorithm.name: package.module:Class`, found in the working directory or where Python finds packages;
    critics, a reference, costs are there when the config has them.

    An algorithm that keeps something from step to step (a Lagrange multiplier, a running mean) also has `state()`, what JSON
    can hold, and `load_state(state)`: a checkpoint has the first, and a run that resumes calls the second. Weights, optimizers,
    the KL coefficient of `run.kl` and the position in the data are saved without its help.
    """

    def prepare(self) -> None:
        """Once, before the first step; a run that resumes does not call it."""

    def step(self, problems: list[Problem]) -> None:
        """One step; it measures itself into `run.metrics` through the verbs."""


_BUILT_IN = {"grpo": GRPO, "ppo": PPO, "remax": ReMax, "safe_rlhf": SafeRLHF}


def make_algorithm(run: Run) -> Algorithm:
    """The one that the config names."""
    name = run.config.algorithm.name
    chosen = _BUILT_IN[name] if name in _BUILT_IN else load_class("algorithm.name", name, ALGORITHM_METHODS)
    return chosen(run)


def train(run: Run, algorithm: Algorithm, start: Start) -> None:
    config = run.config
    checkpoints = CheckpointKeeper(run, algorithm, start)
    if not checkpoints.restore():
        warm_start(run)
        algorithm.prepare()
        run.evaluate()  # with an optimizer: the weights that may have to leave for the engine are rebuilt from its masters
    stopping = Stopping()
    for step in range(run.step_index + 1, config.run.steps + 1):
        run.begin_step()
        algorithm.step(run.next_problems(config.batch.prompts))
        run.finish_step()
        if step == config.run.steps or (config.evaluation.every and step % config.evaluation.every == 0):
            run.evaluate()
        checkpoints.after_step()
        if step < config.run.steps and (signal := stopping.asked()):
            checkpoints.save_before_leaving()
            run.recorder.line(f"{signal}: ending after step {step} of {config.run.steps}; run.resume=auto goes on from there")
            stopping.left()
            return
    checkpoints.finish(wait=True)
    with run.recorder.phase("save"):
        run.actor.export(str(Path(config.run.dir) / "hf")).result()
