"""What a run notes down of the software and the machine that it ran with."""

import json
import subprocess
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

from hybridflow.metrics import versions
from hybridflow.metrics.versions import ROOT, write_versions


def git(folder, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@e")
    return subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def written(folder) -> dict:
    write_versions(folder)
    return json.loads((folder / "versions.json").read_text())


def test_versions_commit_and_hardware(tmp_path, monkeypatch):
    monkeypatch.delenv("HYBRIDFLOW_COMMIT", raising=False)
    (tmp_path / "checkout").mkdir()
    monkeypatch.setattr(versions, "ROOT", tmp_path / "checkout")
    found = written(tmp_path)
    assert found["commit"] is None  # no checkout
    assert found["versions"]["torch"] == version("torch") and found["versions"]["megatron-core"] == version("megatron-core")
    assert abs(datetime.now(UTC) - datetime.fromisoformat(found["started"])) < timedelta(minutes=5)
    assert found["hardware"] and all(isinstance(name, str) for name in found["hardware"])


def test_a_commit_says_where_files_differ_from_it(tmp_path, monkeypatch):
    monkeypatch.delenv("HYBRIDFLOW_COMMIT", raising=False)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text("1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert written(tmp_path)["commit"] == commit
    (tmp_path / "code.py").write_text("2\n")
    assert written(tmp_path)["commit"] == f"{commit}-dirty"
    monkeypatch.setenv("HYBRIDFLOW_COMMIT", "0123")
    assert written(tmp_path)["commit"] == "0123"


def test_the_root_is_that_of_the_checkout():
    assert (ROOT / "setup.py").is_file()
