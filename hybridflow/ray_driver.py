"""Runs a job on Ray: the driver in a process of its own, an actor for every rank, and `hybridflow train` watching over them.

python -m hybridflow.ray_driver --config FILE [key=value ...]    # the driver, as `hybridflow train` starts it
"""

import argparse
import functools
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config.load import load
from hybridflow.config.preflight import chosen_device
from hybridflow.config.schema import Config, ConfigError
from hybridflow.controller import faults, hang
from hybridflow.controller.hang import Watch
from hybridflow.controller.placement import place
from hybridflow.processes import END, adopt_orphans, end_with_parent, ignore_polite_signals
from hybridflow.supervise import Job, kill_descendants, supervise
from hybridflow.torchrun import environment

if TYPE_CHECKING:
    from hybridflow.controller.ray import RayTransport

FOLDER = "HYBRIDFLOW_RAY"  # in the driver's environment: where an embedded Ray keeps sockets and logs
# of 107 characters of a socket's path Ray takes 64: /session_2026-11-30_09-16-05_123456_1234567/sockets/plasma_store
_LONGEST_FOLDER = 107 - 64

# For the driver's process, before Ray is imported, and by inheritance for everything that an embedded Ray starts.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # a line that two ranks print is two lines
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
}
EMBEDDED_SETTINGS = {
    "RAY_AUTH_MODE": "token",  # whoever can talk to Ray can run code as this user
    # as under torchrun a job may fill the host's memory, and its ranks are neither less urgent than other processes nor the
    # first that the kernel ends when memory runs out
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    # Python's resource trackers, which delete a dead rank's shared memory, are the supervisor's to end
    "RAY_kill_child_processes_on_worker_exit": "0",
    "RAY_process_group_cleanup_enabled": "0",
}
# For every rank: all GPUs of the node stay visible, numbered as Ray numbers them, so that peers can reach each other's.
RANK_SETTINGS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def settings(config: Config) -> dict[str, str]:
    """Environment variables of the driver's process."""
    if config.cluster.address:
        return SETTINGS | RANK_SETTINGS
    return SETTINGS | RANK_SETTINGS | EMBEDDED_SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def launch(config: Config, device: str, config_path: str, overrides: list[str]) -> int:
    """Run the driver and wait; returns the exit status: 0, 1, or 2 where the cluster has not what the config asks for."""
    with tempfile.TemporaryDirectory(prefix="hybridflow-", ignore_cleanup_errors=True) as folder:
        if len(folder) > _LONGEST_FOLDER:
            raise ConfigError(
                f"Ray's sockets cannot be in {folder}, whose name is too long: set TMPDIR to a shorter one, such as /tmp"
            )
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = settings(config) | {FOLDER: folder, "PYTHONPATH": os.pathsep.join(paths)}
        outer = environment(config, device, os.environ) | ours
        asked = [faults.DRIVER, *range(config.world_size)]  # the ranks by the driver, which hears of it in time
        watch = Watch(config.run.hang_minutes, asked, Path(config.run.dir).absolute() / "hang", patience=30.0)
        return supervise(command(config_path, overrides), outer, "the driver", Job(watch=watch))


def command(config_path: str, overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", "hybridflow.ray_driver", "--config", config_path, *overrides]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hybridflow.ray_driver")
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_args(arguments)
    adopt_orphans()
    end_with_parent(END)
    signal.signal(END, _stop)
    hang.register(faults.DRIVER)
    try:
        run(load(parsed.config, parsed.overrides))
    except ConfigError as error:
        print(f"hybridflow: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        faults.report(faults.describe(faults.DRIVER, "starting the job on Ray", error))
        return 1
    return 0


def run(config: Config) -> None:
    """The job, from joining Ray to leaving it.

    Raises:
        ConfigError: the cluster is smaller than what is asked for; nothing was started there.
    """
    from hybridflow.controller.process import Process
    from hybridflow.controller.ray_cluster import connected
    from hybridflow.controller.torchrun import quiet

    quiet()
    device = chosen_device(config)
    hang.starting("joining Ray")
    with connected(config, device, os.environ[FOLDER], rank_environment(config, device)):
        ignore_polite_signals()  # Ray has set a handler of its own, which would not let the step end
        hang.starting("asking Ray for the ranks' processes")
        transport = open_transport(config, device)
        hang.starting("waiting for the ranks")
        built = transport.start(functools.partial(Process, config))
        try:
            from hybridflow.train import drive  # imports the roles' libraries, while the ranks do

            built()
            drive(config, transport)
            transport.close()
        except Exception as error:
            transport.end([faults.describe(faults.DRIVER, transport.phase() or "the start", error)])


def open_transport(config: Config, device: str) -> "RayTransport":
    """Actors for all ranks on their seats.

    Raises:
        ConfigError: the cluster is too small.
        PlacementTimeout: it is busy.
    """
    import ray

    from hybridflow.controller import ray_cluster
    from hybridflow.controller.ray import RankActor, RayTransport

    wanted = ray_cluster.asked(config, device)
    ray_cluster.check_size(config, wanted, ray.nodes())
    actors, seats = ray_cluster.seated(RankActor, ray_cluster.reserve(config, wanted), wanted, device)
    if config.cluster.address:
        print(ray_cluster.describe(seats, config.cluster.ranks_per_node), flush=True)
    host = ray.util.get_node_ip_address()
    return RayTransport(actors, seats, host, config.run.port, placed=place(config).named())


def rank_environment(config: Config, device: str) -> dict[str, str]:
    """What the ranks' environment has from this process: what the launcher adds, and where Python finds this checkout."""
    names = [*environment(config, device, {}), *RANK_SETTINGS]
    return {name: os.environ[name] for name in names} | {"PYTHONPATH": os.environ["PYTHONPATH"]}


def _stop(number: int, frame: Any) -> None:
    """Nothing of an embedded Ray outlives this process, even where nobody watches any more; a cluster ends its part itself."""
    kill_descendants(set())
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
