"""The `hybridflow` command. Imports nothing heavy, so that help and configuration errors come at once.

Exit status: 0; 1 for a fault while running; 2 for a wrong configuration or input, found before anything starts.
"""

import argparse
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.config.schema import Config
    from megatron_ext.hf_config import HFConfig

TRAIN_USAGE = "hybridflow train --config FILE [key=value ...] [--dry-run]"
LAUNCHED = "HYBRIDFLOW_LAUNCHED"  # set in the ranks' environment by `hybridflow train`, which has checked the configuration
LET_RANK_0_SPEAK = 30  # seconds


def main(argv: list[str] | None = None) -> int:
    from hybridflow.config.schema import ConfigError

    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    strangers = [word for word in rest if word not in overrides or arguments.command != "train"]
    if strangers:
        parser.error(f"unrecognized arguments: {' '.join(strangers)} (overrides have the form key=value, after `train`)")
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

    check = commands.add_parser("check-env", help="show the installed versions and whether they fit together")
    check.set_defaults(run=_check_env)

    convert = commands.add_parser("convert", help="turn a GGUF model into a folder in HF format")
    convert.add_argument(
        "--from", required=True, dest="source", metavar="X", help="a .gguf file, or an installed package that ships one"
    )
    convert.add_argument("--to", required=True, dest="destination", metavar="DIR", help="the folder to write")
    convert.set_defaults(run=_convert)

    tiny = commands.add_parser("tiny-model", help="make the tiny random model of the quickstart")
    tiny.add_argument("--to", required=True, dest="destination", metavar="DIR", help="the folder to write")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_tiny_model)
    return parser


def _train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if inside_torchrun():
        return _train_rank(arguments, overrides)
    from hybridflow.config.load import load
    from hybridflow.config.preflight import check_devices

    config = load(arguments.config, overrides)
    models = _check_and_show(config)
    if arguments.dry_run:
        _show_memory(config, models, _device_here(config))
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

    end_with_parent(signal.SIGKILL)  # torchrun killed outright could not end its ranks
    try:
        if arguments.dry_run:
            raise ConfigError("--dry-run starts nothing: run it without torchrun")
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


def inside_torchrun() -> bool:
    """Whether this process is one of a job's ranks already, started by torchrun or with the variables that it sets."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _check_and_show(config: "Config") -> "dict[str, HFConfig]":
    from hybridflow.config.ladder import ladder
    from hybridflow.config.preflight import check
    from hybridflow.controller.placement import place

    models = check(config)
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


def _warn_of_untested_versions() -> None:
    from hybridflow.check_env import untested_versions

    for line in untested_versions():
        print(f"hybridflow: warning: {line}", file=sys.stderr)


def _check_env(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from hybridflow.check_env import main as check_env

    return check_env()


def _convert(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from hybridflow.config.schema import ConfigError
    from hybridflow.data.gguf import ConversionError, convert_gguf
    from megatron_ext.hf_config import UnsupportedModel

    try:
        convert_gguf(arguments.source, arguments.destination)
    except (ConversionError, UnsupportedModel) as error:
        raise ConfigError(str(error)) from error
    print(f"wrote {arguments.destination}")
    return 0


def _tiny_model(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from hybridflow.data.tiny_model import make_tiny_model

    make_tiny_model(arguments.destination, arguments.seed)
    print(f"wrote {arguments.destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
