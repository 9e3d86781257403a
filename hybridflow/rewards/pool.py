"""Runs scorers in worker processes with a limit of time per item: a user's function may be slow, hang or crash.

Workers are started with a fresh interpreter, not forked: the process that owns the pool has CUDA, gloo and engine threads.
"""

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from hybridflow.rewards.scorers import Item, RewardError, ScorerSpec, load_scorer

_START_SECONDS = 120.0  # a worker's imports on a busy machine


@dataclass(frozen=True)
class Scores:
    """Rewards in the order of the items; one that failed or ran out of time has 0, and its index is in `unscored`."""

    rewards: list[float]
    failed: int
    timed_out: int
    first_failure: str | None
    unscored: frozenset[int] = frozenset()
    cached: int = 0  # items that nobody had to be asked about
    seconds: float = 0.0  # that the scorer was at it


def collect(results: Mapping[int, tuple[float | None, str | None]], timed_out: int) -> Scores:
    """Of (reward, None) or (None, what went wrong) by the item's index; `timed_out` of them ran out of time."""
    failures = {number: why for number, (reward, why) in sorted(results.items()) if reward is None}
    rewards = [results[number][0] or 0.0 for number in range(len(results))]
    first = next(iter(failures.values()), None)
    return Scores(rewards, len(failures) - timed_out, timed_out, first, frozenset(failures))


class DirectScorer:
    """Scores in this process: for scorers of ours that cannot hang."""

    def __init__(self, spec: ScorerSpec):
        self._scorer = load_scorer(spec)

    def score(self, items: Sequence[Item]) -> Scores:
        return Scores([self._scorer(*item) for item in items], 0, 0, None)

    def close(self) -> None:
        pass


class ScorerPool:
    """`concurrency` workers that score items one by one.

    A worker that runs out of time or dies is replaced. Use as a context manager or call `close`.
    """

    def __init__(self, spec: ScorerSpec, concurrency: int = 8, timeout: float = 10.0):
        """Start the workers and load the scorer in each.

        Args:
            concurrency: worker processes (`reward.concurrency`).
            timeout: seconds for one item (`reward.timeout`).

        Raises:
            RewardError: the scorer can't be loaded.
        """
        if concurrency < 1 or timeout <= 0:
            section = spec.section
            raise RewardError(f"{section}.concurrency={concurrency} and {section}.timeout={timeout} must be positive")
        self._spec, self._timeout = spec, timeout
        self._workers: list[_Worker] = []
        try:
            self._workers = [_Worker(spec) for _ in range(concurrency)]
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[Item]) -> Scores:
        """Score all items; returns when the last is done or out of time."""
        results: dict[int, tuple[float | None, str | None]] = {}
        todo = deque(range(len(items)))
        busy: dict[Connection, tuple[_Worker, int, float]] = {}
        timed_out = 0
        idle = list(self._workers)
        while todo or busy:
            while todo and idle:
                worker, number = idle.pop(), todo.popleft()
                if not worker.running:  # it was killed while it had nothing to do
                    worker = self._replace(worker)
                worker.connection.send(items[number])
                busy[worker.connection] = (worker, number, time.monotonic() + self._timeout)
            first_deadline = min(deadline for _, _, deadline in busy.values())
            for connection in wait(list(busy), timeout=max(0.0, first_deadline - time.monotonic())):
                worker, number, _ = busy.pop(connection)
                results[number] = worker.answer()
                idle.append(worker if worker.running else self._replace(worker))
            for worker, number, deadline in list(busy.values()):
                if deadline <= time.monotonic():
                    del busy[worker.connection]
                    results[number] = (None, f"no answer after {self._spec.section}.timeout={self._timeout} s")
                    timed_out += 1
                    idle.append(self._replace(worker))
        return collect(results, timed_out)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self) -> "ScorerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replace(self, worker: "_Worker") -> "_Worker":
        worker.close()
        self._workers.remove(worker)
        fresh = _Worker(self._spec)
        self._workers.append(fresh)
        fresh.wait_until_ready()
        return fresh


def open_scorer(spec: ScorerSpec, concurrency: int = 8, timeout: float = 10.0) -> DirectScorer | ScorerPool:
    """What runs `spec`: processes for a user's function or a task's own scorer, this process for `last_integer`."""
    return DirectScorer(spec) if spec.kind == "last_integer" else ScorerPool(spec, concurrency, timeout)


class _Worker:
    """One child process and the socket to it."""

    def __init__(self, spec: ScorerSpec):
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])  # the child finds this package also when it isn't installed
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybridflow.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.connection.send(spec)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        if not self.connection.poll(_START_SECONDS):
            raise RewardError(
                f"a scorer process did not start within {_START_SECONDS:.0f} s: is reward.function importing much?"
            )
        try:
            error = self.connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            raise RewardError(f"a scorer process died with status {code} while loading the scorer: see its output") from None
        if error is not None:
            raise RewardError(error)

    def answer(self) -> tuple[float | None, str | None]:
        """The reply that is there to be read, or what became of the process."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None, f"the scorer's process died with status {self._process.wait()}"

    def close(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()
