"""Starts a job's ranks on this node with torchrun, and leaves no process behind however the job ends."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from hybridflow.config.schema import Config, ConfigError
from hybridflow.controller import faults
from hybridflow.processes import adopt_orphans

STOP_SECONDS = 20  # from the first signal until what is left is killed
CLEAN_UP_SECONDS = 3  # for Python's resource trackers to delete what killed ranks left

# How Megatron's warnings begin that every rank would repeat, and that nobody who runs a job can or need do something about.
_USELESS_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "resource_tracker",  # of what a killed rank left in shared memory: it says so when it has cleaned up
)


def launch(config: Config, device: str, config_path: str, overrides: list[str]) -> int:
    """Run `hybridflow.train` under torchrun and wait; returns the exit status, 0 or 1.

    Ctrl-C, SIGTERM and SIGHUP are passed on; a second one, or STOP_SECONDS, kills. Descendants whose parent died are adopted
    and killed as well. The last line of a job that failed says which rank failed, in what and why.
    """
    if config.cluster.nodes > 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}: start torchrun --nnodes {config.cluster.nodes}"
            f" --nproc-per-node {config.cluster.ranks_per_node} -m hybridflow.train --config {config_path} on every node"
        )
    adopt_orphans()
    before = set(psutil.Process().children(recursive=True))
    with _stopped_by_signals() as stop, tempfile.TemporaryDirectory(prefix="hybridflow-") as notes:
        child = subprocess.Popen(
            command(config, config_path, overrides),
            env={**environment(config, device, os.environ), faults.FOLDER: notes},
            start_new_session=True,
        )
        try:
            status = _wait(child, stop)
        finally:
            _kill_descendants(before)
        if status:
            print(f"hybridflow: {_why(child, stop, Path(notes))}", file=sys.stderr, flush=True)
    return status


def command(config: Config, config_path: str, overrides: list[str]) -> list[str]:
    """torchrun's command line: a rendezvous of this job's own on the loopback interface, so that jobs don't meet."""
    return [
        *(sys.executable, "-m", "hybridflow.agent"),
        *("--nnodes", "1", "--nproc-per-node", str(config.cluster.ranks_per_node)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{config.run.port}", "--rdzv-id", uuid.uuid4().hex),
        *("--local-addr", "127.0.0.1", "-m", "hybridflow.train", "--config", config_path, *overrides),
    ]


def environment(config: Config, device: str, outer: dict[str, str] | os._Environ) -> dict[str, str]:
    """The ranks' environment; what the user has set stays."""
    ranks = config.cluster.ranks_per_node
    cores = len(os.sched_getaffinity(0))
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank's own process
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": ",".join(f"ignore:{message}" for message in _USELESS_WARNINGS),
    }
    if Path(config.model.path).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        wanted |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**wanted, **outer, "HYBRIDFLOW_LAUNCHED": "1"}


class _Stop:
    """Signals that came in, counted; `deadline` is when the patience ends."""

    def __init__(self):
        self.signal: int | None = None
        self.count = 0
        self.deadline = float("inf")

    def __call__(self, number: int, frame) -> None:
        self.count += 1
        self.signal = number
        self.deadline = 0 if self.count > 1 else time.monotonic() + STOP_SECONDS


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen, stop: _Stop) -> int:
    told = False
    while child.poll() is None:
        if stop.signal and not told:
            print(f"hybridflow: stopping the ranks ({signal.Signals(stop.signal).name}; once more to kill)", file=sys.stderr)
            child.send_signal(signal.SIGTERM)
            told = True
        if time.monotonic() > stop.deadline:
            break  # the caller kills what is left
        time.sleep(0.1)
    return 0 if child.returncode == 0 and not stop.signal else 1


def _why(child: subprocess.Popen, stop: _Stop, notes: Path) -> str:
    if stop.signal:
        return f"stopped by {signal.Signals(stop.signal).name}; all ranks have ended"
    cause = faults.cause(notes)
    if cause is None and child.returncode < 0:
        cause = f"torchrun's process was ended by {signal.Signals(-child.returncode).name}"
    return f"error: {cause or 'torchrun failed: see its message above'}"


def _kill_descendants(spared: set[psutil.Process]) -> None:
    left = [process for process in psutil.Process().children(recursive=True) if process not in spared]
    # Python's resource trackers delete the shared memory of ranks that died; killed with them, it would stay on the host
    trackers = [process for process in left if _is_tracker(process)]
    _kill([process for process in left if process not in trackers])
    _, stuck = psutil.wait_procs(trackers, timeout=CLEAN_UP_SECONDS)
    _kill(stuck)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False
