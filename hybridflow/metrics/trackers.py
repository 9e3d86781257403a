"""Trackers beside JSON lines and TensorBoard, as `run.trackers` asks for them: Weights & Biases and MLflow.

Where they report to, and as whom, is theirs to know: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY, MLFLOW_TRACKING_URI,
MLFLOW_TRACKING_TOKEN and the like in the environment of `hybridflow train`. A tracker never holds a run up and never ends it:
each is fed by a thread of its own, and one that fails is left out from then on, with one line that says why.
"""

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridflow.config.load import flat
from hybridflow.config.schema import Config
from hybridflow.controller import faults
from hybridflow.controller.waiting import waiting

CLOSE_SECONDS = 60.0  # for what is left to be sent at the end of a run ...
CLOSE_AFTER_A_FAULT_SECONDS = 5.0  # ... and where the job is about to be ended
LOGIN_SECONDS = 30.0  # for an answer to wandb's question for a key, where it finds none and there is a terminal
PROJECT = "hybridflow"


@dataclass(frozen=True)
class About:
    """A run as trackers are told of it.

    Attributes:
        folder: for what a tracker wants to keep on disk.
        known_as: the tracker's own name for the run, where it is one that goes on.
        project: run.project, may be empty.
        config: the resolved configuration by key; credentials in URLs are left out.
    """

    folder: Path
    known_as: str
    project: str
    name: str
    config: Mapping[str, Any]


class Tracker(Protocol):
    """`id`: the tracker's own name for the run, by which a later process goes on with it."""

    id: str

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class Wandb:
    """`step` is logged as a metric, and the axis of all others: wandb's own counter would refuse the steps that a resumed run
    does again."""

    def __init__(self, about: About):
        import wandb

        self._run = wandb.init(
            project=about.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or about.name,
            id=about.known_as or None,
            resume="allow" if about.known_as else None,
            dir=None if os.environ.get("WANDB_DIR") else about.folder,
            config=dict(about.config),
            allow_val_change=True,  # a run that goes on may have other settings
            settings=wandb.Settings(console="off", login_timeout=LOGIN_SECONDS, finish_timeout=CLOSE_SECONDS),
        )
        self._run.define_metric("*", step_metric="step")
        self.id = self._run.id

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    PARAMS = 100  # the most that a call may log
    LENGTH = 6000  # of a parameter, at most

    def __init__(self, about: About):
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self.id = about.known_as or self._create(about)
        if about.known_as:
            self._client.update_run(self.id, status="RUNNING")

    def _create(self, about: About) -> str:
        from mlflow.entities import Param

        name = about.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        created = self._client.create_run(experiment, run_name=about.name).info.run_id
        params = [Param(key, str(value)[: self.LENGTH]) for key, value in about.config.items()]
        for first in range(0, len(params), self.PARAMS):
            self._client.log_batch(created, params=params[first : first + self.PARAMS])
        return created

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in scalars.items()])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


KINDS: dict[str, Callable[[About], Tracker]] = {"wandb": Wandb, "mlflow": MLflow}


class Feed:
    """One tracker and its thread.

    Attributes:
        failure: the first line of the error that ended it; empty while it works.
    """

    def __init__(self, name: str, about: About, note: Path):
        """`note`: the file that keeps the tracker's name for the run."""
        self.name, self.failure = name, ""
        self._about, self._note, self._failed = about, note, False
        self._rows: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._rows.put((step, scalars))

    def close(self, failed: bool) -> None:
        """Begin to end; `ended` waits."""
        self._failed = failed
        self._rows.put(None)

    def ended(self, seconds: float) -> bool:
        """Whether all of it is sent, or it failed, within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            tracker = KINDS[self.name](self._about)
            self._note.write_text(tracker.id + "\n")
            while (row := self._rows.get()) is not None:
                tracker.log(*row)
            tracker.close(self._failed)
        except Exception as error:  # whatever another library and its server run into: the run does without
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]


class Trackers:
    """All of a run's. `line`: shows a line to the user, always from the thread that calls."""

    def __init__(self, config: Config, folder: Path, line: Callable[[str], None]):
        """A run that goes on in its `folder` goes on in its trackers as well."""
        self._line = line
        self._feeds: list[Feed] = []
        if not config.run.trackers:
            return
        own = folder / "trackers"
        own.mkdir(exist_ok=True)
        for name in config.run.trackers:
            note = own / f"{name}.txt"
            known_as = note.read_text().strip() if note.exists() else ""
            about = About(own, known_as, config.run.project, config.run.name or folder.resolve().name, _shown(config))
            self._feeds.append(Feed(name, about, note))
        faults.LAST_WORDS.append(self._after_a_fault)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for feed in self._working():
            feed.log(step, scalars)

    def close(self, failed: bool) -> None:
        """End with the run's status, once what is left has been sent, or time is up."""
        seconds = CLOSE_AFTER_A_FAULT_SECONDS if failed else CLOSE_SECONDS
        until = time.monotonic() + seconds
        if self._after_a_fault in faults.LAST_WORDS:
            faults.LAST_WORDS.remove(self._after_a_fault)
        closing = self._working()
        for feed in closing:
            feed.close(failed)
        for feed in closing:
            with waiting(f"{feed.name} to take what is left of the metrics"):
                ended = feed.ended(max(0.0, until - time.monotonic()))
            if not ended:
                self._line(f"warning: {feed.name} did not take all metrics within {seconds:.0f} s: what it lacks is here only")
        self._working()
        self._feeds = []

    def _after_a_fault(self) -> None:
        """Where a fault ends the process without a way through `close`."""
        self.close(failed=True)

    def _working(self) -> list[Feed]:
        """Those that have not failed; of one that has by now, say so."""
        for feed in self._feeds:
            if feed.failure:
                self._line(f"warning: {feed.name} is left out from now on, the run's folder has all metrics: {feed.failure}")
        self._feeds = [feed for feed in self._feeds if not feed.failure]
        return self._feeds


def _shown(config: Config) -> dict[str, Any]:
    """The configuration by key, without user and password in the URL of a server."""
    values = flat(asdict(config))
    return {key: re.sub(r"://[^/@]*@", "://", value) if isinstance(value, str) else value for key, value in values.items()}
