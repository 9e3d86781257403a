"""Supervised fine-tuning through the actor: the warm start of a run."""

import torch

from hybridflow.algorithms.objectives import LikelihoodObjective
from hybridflow.algorithms.run import Run
from hybridflow.batch import Batch
from hybridflow.data.problems import Problem


def warm_start(run: Run) -> None:
    """`warm_start.steps` steps on demonstrations from the run's own source."""
    settings = run.config.warm_start
    if settings.steps:
        run.start_training(settings.optimizer)
    for step in range(settings.steps):
        batch = demonstrations(run, run.next_problems(settings.batch_size))
        run.recorder.warm_start(step + 1, run.update(batch, LikelihoodObjective(), temperature=1.0))


def demonstrations(run: Run, problems: list[Problem]) -> Batch:
    """Prompt and shown response; the loss is on the response."""
    tokens, masks = [], []
    for problem in problems:
        response = run.source.demonstration(problem)
        tokens.append(torch.tensor([*problem.prompt_tokens, *response]))
        masks.append(torch.arange(len(tokens[-1])) >= len(problem.prompt_tokens))
    return Batch({"tokens": tokens, "loss_mask": masks})
