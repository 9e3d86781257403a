"""The job on every rank: `torchrun --nproc-per-node 4 -m hybridflow.train --config configs/quickstart.yaml [key=value ...]`.

`hybridflow train` starts exactly this, after it has checked the config. Rank 0 also runs the driver: the algorithm.
"""

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from hybridflow import cli, garbage
from hybridflow.config.load import load
from hybridflow.config.schema import Config
from hybridflow.controller import hang

if TYPE_CHECKING:
    from hybridflow.controller.torchrun import TorchrunTransport


def run_rank(config: Config) -> None:
    """This rank's part, from joining the world to leaving it. A fault on any rank ends all of them (status 1)."""
    with garbage.none_yet():
        from hybridflow.controller.process import Process
        from hybridflow.controller.torchrun import TorchrunTransport, faults_end_rank, job_store

    rank = int(os.environ["RANK"])
    with faults_end_rank(rank, lambda: "joining the job"):
        store, rank, world_size = job_store()
        process = Process(config, rank, store, int(os.environ["LOCAL_RANK"]))
        process.join()
        transport = TorchrunTransport(store, rank, world_size)
        process.build()
        transport.meet("to build their roles")
    transport.attach(process)
    if rank == 0:
        with faults_end_rank(rank, lambda: f"the driver ({transport.phase() or 'start'})"):
            drive(config, transport)
            transport.close()
    else:
        transport.serve()
    with faults_end_rank(rank, lambda: "leaving the job"):
        process.close()
        transport.meet("to leave")  # rank 0 may be the one that holds the store, which the others need until then


def drive(config: Config, transport: "TorchrunTransport") -> None:
    """The one program that describes the run: data and rewards, the algorithm over the roles, the trained model."""
    with garbage.none_yet():
        from hybridflow.algorithms.loop import make_algorithm, train
        from hybridflow.algorithms.run import Run
        from hybridflow.checkpoints.resume import find_start
        from hybridflow.data.sources import open_source
        from hybridflow.data.text import Text
        from hybridflow.metrics.recorder import Recorder
        from hybridflow.rewards.scoring import open_scoring
        from hybridflow.roles.registry import handles

        hang.starting("opening data and rewards")
        text = Text(config.model_path("actor"))
        source = open_source(
            config.data,
            text.tokenizer,
            config.sampling.max_prompt_tokens,
            config.evaluation.problems,
            config.warm_start.correct_fraction,
        )
    roles = handles(config, transport)
    start = find_start(config)
    with contextlib.ExitStack() as opened:
        scorings = [
            opened.enter_context(contextlib.closing(open_scoring(name, config, roles, text))) for name in config.scores()
        ]
        recorder = opened.enter_context(Recorder(config.run.dir, config, restarts=start.restarts))
        run = Run(config, roles, text, source, scorings, recorder)
        transport.phase = run.where
        train(run, make_algorithm(run), start)


def main(config_path: str, overrides: list[str]) -> int:
    """The job on a rank that torchrun or srun started."""
    from hybridflow.controller import rank_log

    rank = int(os.environ["RANK"])
    rank_log.to_file(rank)
    hang.register(rank)
    hang.starting("meeting the other ranks")
    with garbage.none_yet():
        from hybridflow.controller.torchrun import quiet

    quiet()
    run_rank(load(config_path, overrides))
    return 0


if __name__ == "__main__":
    sys.exit(cli.main(["train", *sys.argv[1:]]))
