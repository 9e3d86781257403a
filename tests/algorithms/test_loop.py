"""The loop of steps, and how it ends early."""

import contextlib
from types import SimpleNamespace

import pytest

from hybridflow.algorithms import loop
from hybridflow.controller import faults, stopping
from tests.algorithms.fakes import Answered


class Steps:
    """A run and its algorithm that only count; after step `ask` the batch system wants the machine back."""

    def __init__(self, notes, steps: int, ask: int):
        self.config = SimpleNamespace(
            run=SimpleNamespace(steps=steps, dir="run"),
            warm_start=SimpleNamespace(steps=0),
            evaluation=SimpleNamespace(every=0),
            batch=SimpleNamespace(prompts=1),
        )
        self.notes, self.ask, self.done, self.exported, self.lines, self.saved = notes, ask, 0, False, [], []
        self.step_index = 0
        self.recorder = SimpleNamespace(line=self.lines.append, phase=lambda name: contextlib.nullcontext())
        self.actor = SimpleNamespace(export=self.export)

    def export(self, folder):
        self.exported = True
        return Answered(None)

    def next_problems(self, count):
        return []

    def prepare(self): ...

    def evaluate(self): ...

    def begin_step(self):
        self.step_index += 1

    def step(self, problems):
        self.done += 1
        if self.done == self.ask:
            assert stopping.ask(self.notes, "SIGTERM")

    def finish_step(self): ...


class Keeper:
    """Checkpoints that are only counted."""

    def __init__(self, run: Steps, algorithm: Steps, start: None):
        self.run = run

    def restore(self) -> bool:
        return False

    def after_step(self): ...

    def save_before_leaving(self) -> None:
        self.run.saved.append(self.run.step_index)

    def finish(self, wait: bool): ...


@pytest.fixture(autouse=True)
def counted_checkpoints(monkeypatch):
    monkeypatch.setattr(loop, "CheckpointKeeper", Keeper)


def test_a_signal_ends_the_loop_after_its_step(tmp_path, monkeypatch):
    monkeypatch.setenv(faults.FOLDER, str(tmp_path))
    assert not stopping.ask(tmp_path, "SIGTERM")  # before the first step there is nothing to wait for
    run = Steps(tmp_path, steps=5, ask=2)
    loop.train(run, run, None)
    assert run.done == 2 and not run.exported and stopping.has_left(tmp_path)
    assert run.lines == ["SIGTERM: ending after step 2 of 5; run.resume=auto goes on from there"] and run.saved == [2]


def test_in_the_last_step_it_comes_too_late(tmp_path, monkeypatch):
    monkeypatch.setenv(faults.FOLDER, str(tmp_path))
    run = Steps(tmp_path, steps=2, ask=2)
    loop.train(run, run, None)
    assert run.done == 2 and run.exported and not stopping.has_left(tmp_path)


def test_under_the_users_own_torchrun_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.delenv(faults.FOLDER, raising=False)
    run = Steps(tmp_path, steps=2, ask=0)
    loop.train(run, run, None)
    assert run.exported
