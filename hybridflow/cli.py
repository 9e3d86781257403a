"""The `hybridflow` command. Imports nothing heavy, so that help and configuration errors come at once.

Exit status: 0; 1 for a fault while running; 2 for a wrong configuration or input, found before anything starts.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow import quiet
from hybridflow.planner.arguments import USAGE as PLAN_USAGE
from hybridflow.planner.arguments import add_arguments as add_plan_arguments
from hybridflow.processes import inside_torchrun

if TYPE_CHECKING:
    from hybridflow.config.schema import Config
    from megatron_ext.hf_config import HFConfig

TRAIN_USAGE = "hybridflow train --config FILE [key=value ...] [--dry-run]"
LAUNCHED = "HYBRIDFLOW_LAUNCHED"  # set in the ranks' environment by `hybridflow train`, which has checked the configuration
LET_RANK_0_SPEAK = 30  # seconds


def main(argv: list[str] | None = None) -> int:
    from hybridflow.config.schema import ConfigError

    quiet.ignore()
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    strangers = [word for word in rest if word not in overrides or arguments.command not in ("train", "plan")]
    if strangers:
        parser.error(f"unrecognized arguments: {' '.join(strangers)} (overrides have the form key=value, of train and plan)")
    try:
        return arguments.run(arguments, overrides)
    except ConfigError as error:
        print(f"hybridflow: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridflow", description="Reinforcement learning of language models.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", usage=TRAIN_USAGE, allow_abbrev=False, help="run a job")
    train.add_argument("--config", required=True, metavar="FILE", help="YAML file; key=value arguments override its keys")
    train.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    train.set_defaults(run=_train)

    plan = commands.add_parser("plan", usage=PLAN_USAGE, allow_abbrev=False, help="what a job will cost, and where to place it")
    add_plan_arguments(plan)
    plan.set_defaults(run=_plan)

    check = commands.add_parser("check-env", help="show versions and this machine, and whether a job could run on it")
    check.add_argument("--run-dir", default=".", metavar="DIR", help="the run's folder, whose disk is looked at")
    check.add_argument("--ranks", type=int, default=0, metavar="N", help="ranks of a node; by default its GPUs, else 2")
    check.add_argument("--nodes", type=int, default=1, metavar="N", help="started on so many nodes, as a job is")
    check.add_argument("--smoke-seconds", type=float, default=10.0, metavar="S", help="of the ranks' test; 0: none")
    check.set_defaults(run=_check_env)

    convert = commands.add_parser("convert", help="checkpoints and GGUF models to HF folders, HF folders to checkpoints")
    convert.add_argument(
        "--from",
        required=True,
        dest="source",
        metavar="X",
        help="a checkpoint, a role in it (step-20/critic) or a run; an HF folder; a .gguf file, or a package that ships one",
    )
    convert.add_argument("--to", required=True, dest="destination", metavar="DIR", help="the folder to write")
    convert.set_defaults(run=_convert)

    report = commands.add_parser("report", help="one HTML page about a run, or two runs compared")
    report.add_argument("run_folder", metavar="RUN", type=Path, help="a run's folder")
    report.add_argument("other", metavar="RUN2", nargs="?", type=Path, help="another run, to be shown beside it")
    report.add_argument("--out", metavar="FILE", type=Path, help="by default RUN/report.html, or RUN/report-with-RUN2.html")
    report.set_defaults(run=_report)

    tiny = commands.add_parser("tiny-model", help="make the tiny random model of the quickstart")
    tiny.add_argument("--to", required=True, dest="destination", metavar="DIR", help="the folder to write")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_tiny_model)
    return parser


def _train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if inside_torchrun():
        return _train_rank(arguments, overrides)
    from hybridflow import garbage
    from hybridflow.config.load import load
    from hybridflow.config.preflight import check, check_devices
    from hybridflow.rendezvous import rendezvous

    config = load(arguments.config, overrides)
    several = config.cluster.launcher == "torchrun" and config.cluster.nodes > 1
    if several and not arguments.dry_run and rendezvous(config.cluster.nodes, config.run.port, os.environ).node > 0:
        check(config, run_folder=False)  # node 0 speaks, and has perhaps begun to write there
        from hybridflow.torchrun import launch

        return launch(config, check_devices(config), arguments.config, overrides)
    with garbage.none_yet():  # the checks import torch and transformers
        models = _check_and_show(config)
    if arguments.dry_run:
        from hybridflow.torchrun import plan

        device = _device_here(config)
        if config.cluster.device == "cpu":
            check_devices(config)
        _show_memory(config, models, device)
        if device == "cuda":
            _show_forecast(config, models)
        print(plan(config, arguments.config, overrides))
        print("dry run: nothing was started")
        return 0
    device = check_devices(config)
    _show_memory(config, models, device)
    _warn_of_untested_versions()

    if config.cluster.launcher == "ray":
        from hybridflow.ray_driver import launch
    else:
        from hybridflow.torchrun import launch
    return launch(config, device, arguments.config, overrides)


def _train_rank(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """One rank of a job that torchrun or srun started. Rank 0 checks and speaks, unless `hybridflow train` has done it."""
    from hybridflow.config.load import load
    from hybridflow.config.preflight import check_devices
    from hybridflow.config.schema import ConfigError
    from hybridflow.processes import end_with_parent
    from hybridflow.rendezvous import check_rank

    check_rank(os.environ)
    end_with_parent(signal.SIGKILL)  # torchrun killed outright could not end its ranks
    try:
        if arguments.dry_run:
            raise ConfigError("--dry-run starts nothing: run it without torchrun, and without RANK in the environment")
        config = load(arguments.config, overrides)
        if os.environ["RANK"] == "0" and LAUNCHED not in os.environ:
            models = _check_and_show(config)
            _show_memory(config, models, check_devices(config))
    except ConfigError:
        if os.environ["RANK"] != "0":
            time.sleep(LET_RANK_0_SPEAK)  # torchrun ends all ranks when one has ended
            return 2
        raise
    from hybridflow.train import main as train

    return train(arguments.config, overrides)


def _check_and_show(config: "Config") -> "dict[str, HFConfig]":
    from hybridflow.checkpoints.resume import find_start
    from hybridflow.config.ladder import ladder
    from hybridflow.config.preflight import check
    from hybridflow.controller.placement import place

    models = check(config)
    for line in find_start(config).lines:
        print(line)
    print(place(config).render(), flush=True)
    print(ladder(config, {role: hf.num_layers for role, hf in models.items()}).render(), flush=True)
    return models


def _device_here(config: "Config") -> str:
    """Where a dry run's memory is looked at: a node with GPUs may be described on one without."""
    if config.cluster.device != "auto":
        return config.cluster.device
    from hybridflow.planner.memory import gpu_total

    return "cuda" if gpu_total() else "cpu"


def _show_memory(config: "Config", models: "dict[str, HFConfig]", device: str) -> None:
    from hybridflow.config.preflight import check_memory

    text = check_memory(config, models, device)
    if text:
        print(text, flush=True)


def _show_forecast(config: "Config", models: "dict[str, HFConfig]") -> None:
    """What `hybridflow plan` says of the job as configured, where this node's GPUs are known."""
    from hybridflow.planner.command import Shown, as_configured, gpu_here
    from hybridflow.planner.forecast import workload
    from hybridflow.planner.hardware import Cluster
    from hybridflow.planner.passes import Machine

    gpu = gpu_here()
    if gpu:
        cluster = Cluster(gpu, config.cluster.nodes, config.cluster.ranks_per_node)
        as_configured(Shown(), config, models, Machine(cluster), workload(config))


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from hybridflow.planner.command import plan

    return plan(arguments, overrides)


def _warn_of_untested_versions() -> None:
    from hybridflow.check_env import untested_versions

    for line in untested_versions():
        print(f"hybridflow: warning: {line}", file=sys.stderr)


def _check_env(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from hybridflow.check_env import main as check_env

    return check_env(Path(arguments.run_dir), arguments.ranks, arguments.nodes, arguments.smoke_seconds)


def _convert(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from hybridflow.convert import convert

    convert(arguments.source, arguments.destination)
    return 0


def _report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from hybridflow.report.page import report

    folders = [folder for folder in (arguments.run_folder, arguments.other) if folder is not None]
    print(f"wrote {report(folders, arguments.out)}")
    return 0


def _tiny_model(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from hybridflow.config.folders import check_new
    from hybridflow.config.schema import ConfigError

    check_new(f"--to {arguments.destination}", Path(arguments.destination))
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed {arguments.seed} is not from 0 to 2^63 - 1")
    from hybridflow.data.tiny_model import make_tiny_model

    make_tiny_model(arguments.destination, arguments.seed)
    print(f"wrote {arguments.destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
