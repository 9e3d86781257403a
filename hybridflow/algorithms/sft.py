"""Supervised fine-tuning through the actor: the warm start of a run."""

import torch

from hybridflow.algorithms.objectives import LikelihoodObjective
from hybridflow.algorithms.run import Run
from hybridflow.batch import Batch
from hybridflow.data.problems import Problem


def warm_start(run: Run) -> list[float]:
    """`warm_start.steps` steps on demonstrations from the run's own source. Returns the loss of every step."""
    settings = run.config.warm_start
    if settings.steps:
        run.start_training(settings.optimizer)
    losses = []
    for step in range(settings.steps):
        batch = demonstrations(run, run.next_problems(settings.batch_size))
        losses.append(run.update(batch, LikelihoodObjective())["loss"])
        run.recorder.progress("warm start", step + 1, settings.steps, {"loss": losses[-1]})
    run.forget_updates()
    return losses


def demonstrations(run: Run, problems: list[Problem]) -> Batch:
    """Prompt and shown response; the loss is on the response."""
    tokens, masks = [], []
    for problem in problems:
        response = run.source.demonstration(problem)
        tokens.append(torch.tensor([*problem.prompt_tokens, *response]))
        masks.append(torch.arange(len(tokens[-1])) >= len(problem.prompt_tokens))
    return Batch({"tokens": tokens, "loss_mask": masks})
