"""The scripts that start a job's nodes, with a stand-in for Python that writes down what it is asked."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
STAND_IN = """#!/bin/bash
echo "$MASTER_ADDR $MASTER_PORT $NODE_RANK ${HYBRIDFLOW_JOB:+named} $*" >> "$LOG"
[ "$NODE_RANK" != "${BAD:-none}" ] || exit 3
"""


@pytest.fixture
def here(tmp_path):
    for name, text in {"python": STAND_IN, "ssh": '#!/bin/bash\necho "to $1" >> "$LOG"\nexec bash -c "$2"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(here: Path, script: str, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    clean = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")}
    ours = {"PYTHON": str(here / "python"), "LOG": str(here / "log"), "SSH": str(here / "ssh"), **environment}
    command = ["bash", str(LAUNCH / "torchrun" / script), *arguments]
    done = subprocess.run(command, env=clean | ours, capture_output=True, text=True, timeout=60)
    log = (here / "log").read_text().splitlines() if (here / "log").exists() else []
    return done, log


def test_a_node_takes_its_place_from_the_environment(here):
    done, log = run(here, "every_node.sh", "--config", "c.yaml", "a=b c", MASTER_ADDR="first", NODE_RANK="1")
    assert done.returncode == 0, done.stderr
    assert log == ["first 29500 1  -m hybridflow.cli train --config c.yaml a=b c"]


def test_a_node_finds_itself_in_the_host_file(here):
    (here / "hosts").write_text(f"# ours\nfirst slots=8\n\n{socket.gethostname()}\n")
    done, log = run(here, "every_node.sh", "--config", "c.yaml", HOSTFILE=str(here / "hosts"), MASTER_PORT="7")
    assert done.returncode == 0, done.stderr
    assert log == ["first 7 1  -m hybridflow.cli train --config c.yaml"]
    (here / "hosts").write_text("first\nsecond\n")
    done, _ = run(here, "every_node.sh", HOSTFILE=str(here / "hosts"))
    assert done.returncode != 0 and "is not in" in done.stderr


def test_one_node(here):
    done, log = run(here, "one_node.sh", "--config", "c.yaml")
    assert done.returncode == 0 and log == ["    -m hybridflow.cli train --config c.yaml"]


def test_all_nodes_over_ssh(here):
    (here / "hosts").write_text("first\nsecond # with a remark\n")
    done, log = run(here, "over_ssh.sh", str(here / "hosts"), "--config", "my file.yaml")
    assert done.returncode == 0, done.stderr
    train = "named -m hybridflow.cli train --config my file.yaml cluster.nodes=2"
    assert sorted(log) == [f"first 29500 0 {train}", f"first 29500 1 {train}", "to first", "to second"]


def test_the_first_bad_status_is_that_of_the_job(here):
    (here / "hosts").write_text("first\nsecond\n")
    done, _ = run(here, "over_ssh.sh", str(here / "hosts"), BAD="1", GRACE="0")
    assert done.returncode == 3
    done, _ = run(here, "over_ssh.sh", os.devnull)
    assert done.returncode == 2 and "names no host" in done.stderr


@pytest.mark.parametrize(
    "script", sorted(path.relative_to(LAUNCH) for end in ("*.sh", "*.sbatch") for path in LAUNCH.rglob(end)), ids=str
)
def test_scripts_are_whole(script):
    assert subprocess.run(["bash", "-n", str(LAUNCH / script)], capture_output=True, timeout=30).stderr == b""
