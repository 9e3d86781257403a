"""The job on every rank: `torchrun --nproc-per-node 4 -m hybridflow.train --config configs/quickstart.yaml [key=value ...]`.

`hybridflow train` starts exactly this, after it has checked the config. Rank 0 also runs the driver: the algorithm.
"""

import contextlib
import sys
from typing import TYPE_CHECKING

from hybridflow import cli
from hybridflow.config.load import load
from hybridflow.config.schema import Config

if TYPE_CHECKING:
    from hybridflow.controller.torchrun import TorchrunTransport


def run_rank(config: Config) -> None:
    """This rank's part, from joining the world to leaving it. A fault on any rank ends all of them (status 1)."""
    from hybridflow.controller.torchrun import TorchrunTransport, faults_end_rank, init_world, leave_world
    from hybridflow.controller.waiting import waiting
    from hybridflow.controller.worker import Worker
    from hybridflow.roles.registry import build_roles

    with faults_end_rank(lambda: "joining the world"):
        init_world()
        transport = TorchrunTransport()
    first = transport.rank == 0  # the others wait for the same, and need not say so too
    speaking = waiting("the roles to be built (engine start, model load)") if first else contextlib.nullcontext()
    with faults_end_rank(lambda: "building the roles (engine start, model load)"), speaking:
        worker = Worker(transport.rank, build_roles(config))
    transport.attach(worker)
    if first:
        with faults_end_rank(lambda: f"the driver ({transport.phase() or 'start'})"):
            drive(config, transport)
            transport.close()
    else:
        transport.serve()
    with faults_end_rank(lambda: "leaving the world"):
        worker.close()
        leave_world()


def drive(config: Config, transport: "TorchrunTransport") -> None:
    """The one program that describes the run: data and rewards, the algorithm over the roles, the trained model."""
    from hybridflow.algorithms.loop import make_algorithm, train
    from hybridflow.algorithms.run import Run
    from hybridflow.checkpoints.resume import find_start
    from hybridflow.data.sources import open_source
    from hybridflow.data.text import Text
    from hybridflow.metrics.recorder import Recorder
    from hybridflow.rewards.pool import open_scorer
    from hybridflow.rewards.scorers import ScorerSpec
    from hybridflow.roles.registry import handles

    text = Text(config.model_path("actor"))
    source = open_source(
        config.data,
        text.tokenizer,
        config.sampling.max_prompt_tokens,
        config.evaluation.problems,
        config.warm_start.correct_fraction,
    )
    spec = ScorerSpec(config.reward.kind, config.reward.function, config.data.task, dict(config.data.options))
    start = find_start(config)
    opened = open_scorer(spec, config.reward.concurrency, config.reward.timeout)
    with contextlib.closing(opened) as scorer, Recorder(config.run.dir, config, restarts=start.restarts) as recorder:
        run = Run(config, handles(config, transport), text, source, scorer, recorder)
        transport.phase = run.where
        train(run, make_algorithm(run), start)


def main(config_path: str, overrides: list[str]) -> int:
    """The job on a rank that torchrun or srun started."""
    from hybridflow.controller.torchrun import quiet

    quiet()
    run_rank(load(config_path, overrides))
    return 0


if __name__ == "__main__":
    sys.exit(cli.main(["train", *sys.argv[1:]]))
