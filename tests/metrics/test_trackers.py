"""Trackers against made-up wandb and mlflow modules that note what they are asked; where the real ones are installed, against
those as well: pip install 'wandb>=0.31' 'mlflow>=3.10'"""

import io
import sys
import threading
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from hybridflow.config.load import load
from hybridflow.config.schema import ConfigError
from hybridflow.config.tracker_checks import check_trackers
from hybridflow.controller import faults
from hybridflow.metrics import trackers
from hybridflow.metrics.recorder import Recorder


class FakeWandb(ModuleType):
    """`calls`: name and what was passed. `fails`: raised by every log, once set."""

    def __init__(self):
        super().__init__("wandb")
        self.calls, self.fails, self.id, self.Settings = [], None, "w1", dict

    def init(self, **arguments):
        self.calls.append(("init", arguments))
        return self

    def define_metric(self, name, step_metric):
        self.calls.append(("define_metric", (name, step_metric)))

    def log(self, row):
        if self.fails:
            raise self.fails
        self.calls.append(("log", row))

    def finish(self, exit_code):
        self.calls.append(("finish", exit_code))

    def of(self, name: str) -> list:
        return [passed for call, passed in self.calls if call == name]


class FakeMLflow(FakeWandb):
    """The client is the module itself."""

    def __init__(self):
        super().__init__()
        self.MlflowClient, self.experiments = lambda: self, {}
        self.entities = ModuleType("mlflow.entities")
        self.entities.Param = self.entities.Metric = lambda *values: values

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = SimpleNamespace(experiment_id=f"experiment {name}")
        return self.experiments[name].experiment_id

    def create_run(self, experiment, run_name):
        self.calls.append(("create_run", (experiment, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id="m1"))

    def log_batch(self, run, params=(), metrics=()):
        self.calls.append(("log_batch", (run, params, [(name, value, step) for name, value, _, step in metrics])))

    def update_run(self, run, status):
        self.calls.append(("update_run", (run, status)))

    def set_terminated(self, run, status):
        self.calls.append(("set_terminated", (run, status)))


@pytest.fixture
def fakes(monkeypatch) -> tuple[FakeWandb, FakeMLflow]:
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    wandb, mlflow = FakeWandb(), FakeMLflow()
    for name, module in (("wandb", wandb), ("mlflow", mlflow), ("mlflow.entities", mlflow.entities)):
        monkeypatch.setitem(sys.modules, name, module)
    return wandb, mlflow


def configured(tmp_path, *overrides: str):
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: m}}\nrun: {{dir: '{tmp_path}/run', steps: 9, trackers: [wandb, mlflow]}}\n"
    )
    return load(tmp_path / "c.yaml", list(overrides))


def test_both_get_every_metric_and_the_runs_end(tmp_path, fakes):
    wandb, mlflow = fakes
    with Recorder(tmp_path / "run", configured(tmp_path, "reward.url=http://me:secret@host/score"), io.StringIO()) as recorder:
        recorder.warm_start(1, {"loss": 2.5})
        recorder.evaluation(0, 0.25, 64)
        recorder.log({"step": 1, "reward/mean": 0.5, "reshard/verified": True, "perf/mfu": None, "time/step": 2.0})
    rows = [
        {"warm_start/loss": 2.5},
        {"evaluation/accuracy": 0.25},
        {"reward/mean": 0.5, "reshard/verified": 1.0, "time/step": 2.0},
    ]
    steps = [1, 0, 1]
    assert wandb.of("log") == [{"step": step, **row} for step, row in zip(steps, rows, strict=True)]
    (started,) = wandb.of("init")
    assert (started["project"], started["name"], started["id"]) == ("hybridflow", "run", None)
    assert started["config"]["roles.actor.tp"] == 1
    assert started["config"]["reward.url"] == "http://host/score" and "secret" not in str(wandb.calls + mlflow.calls)
    assert wandb.of("define_metric") == [("*", "step")] and wandb.of("finish") == [0]
    assert mlflow.of("create_run") == [("experiment hybridflow", "run")]
    logged = [(run, metrics) for run, _, metrics in mlflow.of("log_batch") if metrics]
    assert logged == [("m1", [(k, v, step) for k, v in row.items()]) for step, row in zip(steps, rows, strict=True)]
    params = dict(param for _, batch, _ in mlflow.of("log_batch") for param in batch)
    assert params["roles.actor.tp"] == "1" and len(params) > 100
    assert max(len(batch) for _, batch, _ in mlflow.of("log_batch")) == 100
    assert mlflow.of("set_terminated") == [("m1", "FINISHED")]


def test_a_run_that_goes_on_goes_on_there(tmp_path, fakes):
    wandb, mlflow = fakes
    with Recorder(tmp_path / "run", configured(tmp_path), io.StringIO()) as recorder:
        recorder.log({"step": 1})
        position = recorder.position()
    with Recorder(tmp_path / "run", configured(tmp_path, "run.project=sums", "run.name=mine"), io.StringIO()) as recorder:
        recorder.go_on(position, 1)
    first, second = wandb.of("init")
    assert (first["id"], first["resume"]) == (None, None) and (second["id"], second["resume"]) == ("w1", "allow")
    assert (second["project"], second["name"]) == ("sums", "mine")
    assert len(mlflow.of("create_run")) == 1 and mlflow.of("update_run") == [("m1", "RUNNING")]
    with Recorder(tmp_path / "run", configured(tmp_path, "run.overwrite=true"), io.StringIO()):
        pass
    assert wandb.of("init")[2]["id"] is None and len(mlflow.of("create_run")) == 2  # another run


def test_the_trackers_own_variables_name_the_project(tmp_path, fakes, monkeypatch):
    wandb, mlflow = fakes
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_DIR", "/somewhere")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs too")
    with Recorder(tmp_path / "run", configured(tmp_path), io.StringIO()):
        pass
    assert (wandb.of("init")[0]["project"], wandb.of("init")[0]["dir"]) == ("theirs", None)
    assert mlflow.of("create_run")[0][0] == "experiment theirs too"


def test_one_that_fails_in_the_middle_is_left_out_with_one_line(tmp_path, fakes):
    wandb, mlflow = fakes
    stream = io.StringIO()
    with Recorder(tmp_path / "run", configured(tmp_path), stream) as recorder:
        recorder.log({"step": 1, "reward/mean": 0.1})
        wandb.fails = ConnectionError("the network is down\nand more")
        for step in (2, 3, 4):
            recorder.log({"step": step, "reward/mean": 0.1})
    warnings = [line for line in stream.getvalue().splitlines() if "warning" in line]
    left_out = "warning: wandb is left out from now on, the run's folder has all metrics: ConnectionError: the network is down"
    assert warnings == [left_out]
    assert wandb.of("finish") == [] and mlflow.of("set_terminated") == [("m1", "FINISHED")]
    assert [metrics[0][2] for _, _, metrics in mlflow.of("log_batch") if metrics] == [1, 2, 3, 4]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_that_fails_is_known_as_failed(tmp_path, fakes):
    wandb, mlflow = fakes
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path / "run", configured(tmp_path), io.StringIO()):
        1 / 0  # noqa: B018
    assert wandb.of("finish") == [1] and mlflow.of("set_terminated") == [("m1", "FAILED")]


def test_a_fault_that_ends_the_process_at_once_is_told_before(tmp_path, fakes):
    wandb, mlflow = fakes
    with Recorder(tmp_path / "run", configured(tmp_path), io.StringIO()) as recorder:
        recorder.log({"step": 1, "reward/mean": 0.5})
        faults.say_last_words()  # as controller.torchrun.end_rank does
        assert wandb.of("finish") == [1] and mlflow.of("set_terminated") == [("m1", "FAILED")]
    assert wandb.of("finish") == [1] and faults.LAST_WORDS == []


def test_one_that_does_not_answer_holds_nothing_up(tmp_path, fakes, monkeypatch):
    wandb, _ = fakes
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    answers, stream = threading.Event(), io.StringIO()
    wandb.log = lambda row: answers.wait(30)
    with Recorder(tmp_path / "run", configured(tmp_path, "run.trackers=[wandb]"), stream) as recorder:
        for step in (1, 2):
            recorder.log({"step": step})
    assert "warning: wandb did not take all metrics within 0 s: what it lacks is here only" in stream.getvalue()
    assert not answers.is_set() and stream.getvalue().splitlines()[-1].startswith("configuration")
    answers.set()


def test_without_trackers_there_is_nothing_of_them(tmp_path, fakes):
    with Recorder(tmp_path / "run", configured(tmp_path, "run.trackers=[]"), io.StringIO()) as recorder:
        recorder.log({"step": 1})
    assert fakes[0].calls == fakes[1].calls == [] and not (tmp_path / "run/trackers").exists()


def test_what_is_refused_before_the_start(tmp_path, monkeypatch):
    installed = {"wandb": "0.31.0"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)

    def refused(named: str) -> str:
        with pytest.raises(ConfigError) as error:
            check_trackers(configured(tmp_path, f"run.trackers={named}"))
        return str(error.value)

    check_trackers(configured(tmp_path, "run.trackers=[wandb]"))
    assert refused("[wanbd]").startswith("run.trackers=['wanbd']: 'wanbd' is unknown: did you mean wandb?")
    assert "'comet' is unknown: use wandb or mlflow" in refused("[comet]")
    assert refused("[wandb, wandb]") == "run.trackers=['wandb', 'wandb'] has wandb more than once: leave one"
    missing = "run.trackers=['mlflow']: the package mlflow is not installed: pip install 'mlflow>=3.10', or leave mlflow out"
    assert refused("[mlflow]") == missing
    installed["wandb"] = "0.19.1"
    assert "wandb 0.19.1 is too old: pip install 'wandb>=0.31', or" in refused("[wandb]")


def test_the_real_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'mlflow>=3.10'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    for name in ("CLOSE_SECONDS", "CLOSE_AFTER_A_FAULT_SECONDS"):
        monkeypatch.setattr(trackers, name, 240)  # it makes its database first
    config = configured(tmp_path, "run.trackers=[mlflow]")
    stream = io.StringIO()
    with Recorder(tmp_path / "run", config, stream) as recorder:
        recorder.log({"step": 1, "reward/mean": 0.25, "actor/grad_norm": float("nan"), "memory/peak_bytes/actor.export": 7})
        position = recorder.position()
    with pytest.raises(KeyError), Recorder(tmp_path / "run", config, stream) as recorder:
        recorder.go_on(position, 1)
        recorder.log({"step": 2, "reward/mean": 0.5})
        raise KeyError("a fault")
    assert "warning" not in stream.getvalue()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("hybridflow").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FAILED" and run.data.params["run.steps"] == "9"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]


def test_the_real_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install 'wandb>=0.31'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    config, stream = configured(tmp_path, "run.trackers=[wandb]"), io.StringIO()
    with Recorder(tmp_path / "run", config, stream) as recorder:
        recorder.log({"step": 1, "reward/mean": 0.25})
        position = recorder.position()
    with Recorder(tmp_path / "run", config, stream) as recorder:
        recorder.go_on(position, 1)
        recorder.log({"step": 2, "reward/mean": 0.5})
    assert "warning" not in stream.getvalue()
    name = (tmp_path / "run/trackers/wandb.txt").read_text().strip()
    kept = sorted((tmp_path / "run/trackers/wandb").glob("offline-run-*"))
    assert len(kept) == 2  # one run, in two parts
    for folder, value in zip(kept, (b"0.25", b"0.5"), strict=True):
        written = (folder / f"run-{name}.wandb").read_bytes()
        assert b"reward/mean" in written and value in written and b"roles.actor.tp" in written
