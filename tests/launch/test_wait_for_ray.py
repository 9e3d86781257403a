"""launch/slurm/wait_for_ray.py, with a stand-in for a cluster that comes up slowly."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch/slurm/wait_for_ray.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("wait_for_ray", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return module


def start(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "10.0.0.1:6379", "--nodes", "2", "--cpus", "2", *arguments])


def test_waits_for_the_head_and_then_for_all_nodes(script, monkeypatch, capsys):
    attempts, views = [], [1, 1, 2]

    def init(**settings) -> None:
        attempts.append(settings["address"])
        if len(attempts) < 3:
            raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    node = {"Alive": True, "Resources": {"CPU": 1.0}}
    monkeypatch.setattr(script.ray, "init", init)
    monkeypatch.setattr(script.ray, "nodes", lambda: [node] * views.pop(0))
    start(monkeypatch)
    assert script.main() == 0
    assert attempts == ["10.0.0.1:6379"] * 3 and not views
    assert capsys.readouterr().out == "Ray at 10.0.0.1:6379 has 2 nodes, 2 CPUs, 0 GPUs\n"


def test_does_not_wait_for_ever(script, monkeypatch):
    def init(**settings) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    monkeypatch.setattr(script.ray, "init", init)
    start(monkeypatch, "--minutes", "0")
    with pytest.raises(ConnectionError):
        script.main()
