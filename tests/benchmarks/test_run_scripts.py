"""The scripts that run many figures: every command that they list has files and options that exist."""

import functools
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import bubble, forecast, reshard, throughput, whole_step
from tests.processes import living

ROOT = Path(__file__).parents[2]
PARSERS = {module.__name__.rpartition(".")[2]: module.parser for module in (bubble, forecast, reshard, throughput, whole_step)}


def listed(*options: str) -> list[list[str]]:
    done = subprocess.run(["bash", *options, "--list"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    "script",
    [["run_one_gpu.sh"], ["run_two_gpus.sh"], ["run_many_gpus.sh", "--ranks", "4"], ["run_many_gpus.sh", "--ranks", "8"]],
)
def test_listed_commands_are_taken(script, dry, monkeypatch):
    ranks = {"run_one_gpu.sh": "1", "run_two_gpus.sh": "2"}
    monkeypatch.setenv("WORLD_SIZE", ranks.get(script[0], script[-1]))
    found = listed(f"benchmarks/{script[0]}", *script[1:], *dry, "--out", "OUT")
    assert len(found) >= 7
    for words in found:
        (at,) = [number for number, word in enumerate(words) if word.startswith("benchmarks/") and word.endswith(".py")]
        name, rest = Path(words[at]).stem, words[at + 1 :]
        for word in rest:
            if word.startswith(("benchmarks/", "configs/")):
                assert (ROOT / word).is_file(), word
        if name in PARSERS and name != "forecast":  # which lists the files that are there
            _, left = PARSERS[name]().parse_known_args(rest)
            assert all("=" in word and not word.startswith("-") for word in left), left
        assert "--with" not in rest  # without results there is nothing to compare
    outs = [words[words.index("--out") + 1] for words in found]
    assert len(set(outs)) == len(outs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["run_many_gpus.sh", "--ranks", "3", "--out", "x"], "error: --ranks=3 must be 4 or 8"),
        (["run_many_gpus.sh", "--ranks", "4"], "error: --out is missing"),
        (["run_two_gpus.sh", "--out", "x", "--parts", "lunch"], "error: --parts: there is no lunch"),
    ],
)
def test_bad_input_is_status_2(options, message):
    command = ["bash", f"benchmarks/{options[0]}", *options[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.startswith(message)


def test_a_job_that_fails_or_takes_too_long_is_in_the_table(tmp_path):
    script = f"source benchmarks/jobs.sh; OUT={tmp_path}; job good 60 echo fine; job bad 60 false; job slow 1 sleep 60; finish"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    table = done.stdout.partition("=== what ran\n")[2].splitlines()
    assert [line.split()[0] for line in table] == ["good", "bad", "slow"]
    assert [line.partition(" s  ")[2] for line in table] == ["ok", "FAILED, status 1", "OUT OF TIME"]
    assert (tmp_path / "jobs.txt").read_text().splitlines() == table and (
        tmp_path / "logs" / "good.log"
    ).read_text() == "fine\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_script_leaves_nothing_running(tmp_path, number):
    """A job of two processes, neither of them in the script's own process group."""
    command = f"sleep 300 & echo $! > {tmp_path}/inner; echo $$ > {tmp_path}/outer; wait"
    script = f"source benchmarks/jobs.sh; OUT={tmp_path}; job long 300 bash -c '{command}'; job next 60 touch {tmp_path}/next"
    options = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    # a shell cannot heed what it was started to ignore, as tests under nohup are
    heeding = functools.partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(["bash", "-c", script], preexec_fn=heeding, **options) as started:
        jobs = [process(tmp_path / name) for name in ("inner", "outer")]
        started.send_signal(number)
        assert "stopped by a signal" in started.communicate(timeout=60)[1]
    assert started.returncode == 128 + number
    assert_gone(jobs)
    assert not (tmp_path / "next").exists()


def test_a_stopped_benchmark_ends_its_job(tmp_path):
    command = f"echo $$ > {tmp_path}/job; exec sleep 300"
    code = f"from benchmarks import commands; commands.run(['bash', '-c', {command!r}])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as started:
        job = process(tmp_path / "job")
        started.terminate()
        assert started.wait(60) == 128 + signal.SIGTERM
    assert_gone([job])


def process(file: Path) -> psutil.Process:
    """The one that wrote its number into `file`, once it has."""
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return psutil.Process(int(file.read_text()))


def assert_gone(processes: list[psutil.Process]) -> None:
    """They were told to end before the one that told them ended; on a busy machine that takes a moment."""
    deadline = time.monotonic() + 30
    while living(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(processes) == []
