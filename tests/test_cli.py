"""The command: exit statuses, what it starts and with which environment, and that it leaves no process behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hybridflow import cli, ray_driver, torchrun
from hybridflow.config.load import load
from hybridflow.config.schema import ConfigError
from hybridflow.controller import rank_log
from hybridflow.rendezvous import JOB, rendezvous
from tests import processes
from tests.config.folders import write_config, write_model
from tests.processes import PYTHON_PATH

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def path(tmp_path, model):
    return write_config(tmp_path, model)


@pytest.fixture
def started(monkeypatch):
    """Jobs that would have been started, instead of starting them."""
    jobs = []
    monkeypatch.setattr(torchrun, "launch", lambda *arguments: jobs.append(arguments) or 0)
    return jobs


def run(*arguments, timeout=60, **kwargs):
    command = [sys.executable, "-m", "hybridflow.cli", *map(str, arguments)]
    return processes.run(command, timeout, cwd=ROOT, **kwargs)


@pytest.mark.parametrize(
    "override,message",
    [
        ("roles.actr.tp=1", "unknown key roles.actr: did you mean roles.actor?"),
        ("roles.actor.tp=two", "roles.actor.tp='two' is not an integer"),
        ("roles.actor={tp: 4, pp: 1}", "roles.actor.tp=4 does not divide the model's num_key_value_heads=2: use 1 or 2"),
        ("roles.actor.pp=4", "4 processes are fewer than roles.actor.tp=2 x pp=4 x cp=1 = 8"),
        ("roles.actor.vpp=3", "roles.actor: num_hidden_layers=4 is too few for the 6 chunks of pp=2 x vpp=3"),
        ("roles.rollout.tp=3", "roles.rollout.tp=3 does not divide cluster.ranks_per_node=4: use 1, 2 or 4"),
        ("model.path=nowhere", "model folder nowhere does not exist"),
        ("run.dir=/proc/x/y", "run.dir=/proc/x/y cannot be written"),
        ("cluster.address=auto", "cluster.address=auto is for Ray"),
        ("data.task=nothing_like_it", "data.task='nothing_like_it' is no task of reasoning_gym"),
    ],
)
def test_bad_input_is_one_line_and_status_2(path, started, capfd, override, message):
    assert cli.main(["train", "--config", str(path), override]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("hybridflow: error: ") and err.count("\n") == 1 and message in err
    assert out == "" and not started
    assert not (path.parent / "run").exists()


def test_a_folder_that_holds_a_run(path, started, capfd):
    (path.parent / "run").mkdir()
    (path.parent / "run/config.yaml").write_text("")
    assert cli.main(["train", "--config", str(path)]) == 2
    assert "holds a run already (config.yaml): set run.overwrite=true" in capfd.readouterr().err
    assert not started
    assert cli.main(["train", "--config", str(path), "run.overwrite=true"]) == 0
    assert len(started) == 1


def test_train_prints_the_ladder_then_starts(path, started, capfd):
    assert cli.main(["train", "--config", str(path), "run.steps=3", "run.seed=7"]) == 0
    config, device, config_path, overrides = started[0]
    assert (config.run.steps, config.run.seed, device) == (3, 7, "cpu")
    assert (config_path, overrides) == (str(path), ["run.steps=3", "run.seed=7"])
    assert "TP2 x PP2" in capfd.readouterr().out


def test_ray_is_another_launcher(path, started, monkeypatch, capfd):
    jobs = []
    monkeypatch.setattr(ray_driver, "launch", lambda *arguments: jobs.append(arguments) or 0)
    assert cli.main(["train", "--config", str(path), "cluster.launcher=ray"]) == 0
    assert not started and jobs[0][1:] == ("cpu", str(path), ["cluster.launcher=ray"])
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--config", str(path), "cluster.launcher=ray"]) == 2
    assert "cluster.launcher=ray, but torchrun or srun has started this process as a rank" in capfd.readouterr().err


def test_dry_run_starts_nothing(path, started, capfd):
    assert cli.main(["train", "--config", str(path), "run.steps=3", "--dry-run", "run.seed=7"]) == 0
    out = capfd.readouterr().out
    assert "mini-batches" in out and out.endswith("dry run: nothing was started\n")
    assert not started and not (path.parent / "run").exists()


def test_dry_run_predicts_the_memory_of_a_gpu(path, started, monkeypatch, capfd):
    arguments = ["train", "--config", str(path), "--dry-run", "cluster.device=cuda"]
    monkeypatch.setattr("hybridflow.planner.memory.gpu_total", lambda: None)
    assert cli.main(arguments) == 0
    assert "on the fullest GPU (size unknown" in capfd.readouterr().out
    monkeypatch.setattr("hybridflow.planner.memory.gpu_total", lambda: 100 << 30)
    assert cli.main(arguments) == 0
    assert "on the fullest GPU (100.0 GiB)" in capfd.readouterr().out
    monkeypatch.setattr("hybridflow.planner.memory.gpu_total", lambda: 1 << 20)
    assert cli.main(arguments) == 2
    out, err = capfd.readouterr()
    assert err.startswith("hybridflow: error: out of memory at ") and err.count("\n") == 1
    assert "dry run" not in out and not started


def test_under_torchrun_rank_0_speaks(path, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["train", "--config", str(path), "--dry-run"]) == 2
    assert capfd.readouterr().err == (
        "hybridflow: error: RANK=0 and WORLD_SIZE=4 are set as for a rank of torchrun or srun, but LOCAL_RANK, MASTER_PORT,"
        " MASTER_ADDR not: unset RANK and WORLD_SIZE, or start this with torchrun\n"
    )
    for name, value in {"LOCAL_RANK": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--config", str(path)]) == 2
    assert "but LOCAL_RANK=x, which is no number: unset" in capfd.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["train", "--config", str(path), "roles.rollout.tp=3"]) == 2
    assert "roles.rollout.tp=3 does not divide" in capfd.readouterr().err
    assert cli.main(["train", "--config", str(path), "--dry-run"]) == 2
    assert "--dry-run starts nothing: run it without torchrun" in capfd.readouterr().err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(cli, "LET_RANK_0_SPEAK", 0)
    assert cli.main(["train", "--config", str(path), "roles.nothing=3"]) == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["train", "--config", "x", "--nonsense"],
        ["train", "--config", "x", "word"],
        ["nonsense"],
        [],
        ["check-env", "a=b"],
    ],
)
def test_wrong_usage_is_status_2(arguments, capfd):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "error:" in capfd.readouterr().err


def test_errors_and_help_come_without_torch(path):
    code = """
import sys
from hybridflow.cli import main
status = main(sys.argv[1:])
sys.exit("torch was imported" if "torch" in sys.modules else status)
"""
    command = [sys.executable, "-c", code, "train", "--config", str(path), "batch.prompt=3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "hybridflow: error: unknown key batch.prompt: did you mean batch.prompts?\n"
    result = run("--help")
    assert result.returncode == 0
    for command in ("train", "check-env", "convert", "tiny-model"):
        assert command in result.stdout


def test_check_env():
    result = run("check-env", "--smoke-seconds", "0.3", timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"gloo, 2 ranks: to the next rank [\d.]+ GB/s", result.stdout)
    assert "megatron-core" in result.stdout and result.stdout.endswith("ready to run\n")


def test_convert_refuses_in_one_line(tmp_path, capfd):
    assert cli.main(["convert", "--from", "no-such-package", "--to", str(tmp_path / "m")]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("hybridflow: error: no-such-package is neither a file")


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ("", "m", "--from is empty: give"),
        ("empty.gguf", "m", "empty.gguf cannot be read (error: unpack_from requires"),
        ("model", "model", "model exists and is not an empty folder: choose another one, or remove it"),
        ("model", "empty.gguf/m", "empty.gguf is a file: choose another folder"),
        ("model", "dangling", "dangling is a link to /nowhere/at/all, which is not there: choose another folder"),
        ("model", "x" * 300, "cannot be had (File name too long): choose another folder"),
        ("model", "m", "model.safetensors is not a complete safetensors file (3 bytes): copy it again"),
        ("listed", "m", "config.json holds a list: give the config.json of a model"),
        ("model/config.json", "m", "config.json is not a GGUF file"),
    ],
)
def test_convert_writes_nothing_of_what_is_broken(tmp_path, capfd, source, destination, message):
    (tmp_path / "empty.gguf").write_bytes(b"GGUF")
    (tmp_path / "dangling").symlink_to("/nowhere/at/all")
    write_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"abc")
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "config.json").write_text("[]")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["convert", "--from", source and str(tmp_path / source), "--to", str(tmp_path / destination)]) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_convert_of_a_checkpoint_with_other_contents(tmp_path, model, capfd):
    checkpoint = tmp_path / "step-1"
    assert cli.main(["convert", "--from", str(model), "--to", str(checkpoint)]) == 0
    assert cli.main(["convert", "--from", str(checkpoint), "--to", str(checkpoint / "actor" / "hf")]) == 2
    assert "lies in the checkpoint" in capfd.readouterr().err
    metadata = checkpoint / "actor" / ".metadata"
    metadata.write_bytes(bytes(metadata.stat().st_size))
    assert cli.main(["convert", "--from", str(checkpoint), "--to", str(tmp_path / "hf")]) == 2
    assert "step-1/actor is damaged (UnpicklingError while reading it): use another" in capfd.readouterr().err
    (checkpoint / "complete.json").write_text('{"step": 1, "roles": ["actor"], "score": null, "score_of": "", "files": {}}')
    metadata.unlink()
    assert cli.main(["convert", "--from", str(checkpoint), "--to", str(tmp_path / "hf")]) == 2
    assert "actor/.metadata is missing: use another checkpoint" in capfd.readouterr().err


def test_tiny_model_replaces_nothing(tmp_path, capfd):
    (tmp_path / "thesis.txt").write_text("")
    assert cli.main(["tiny-model", "--to", str(tmp_path)]) == 2
    assert "exists and is not an empty folder: choose another one" in capfd.readouterr().err
    assert cli.main(["tiny-model", "--to", str(tmp_path / "thesis.txt")]) == 2
    assert cli.main(["tiny-model", "--to", str(tmp_path / "m"), "--seed", "-1"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_tiny_model_runs_the_quickstarts_checks(tmp_path, capfd):
    assert cli.main(["tiny-model", "--to", str(tmp_path / "tiny")]) == 0
    overrides = [f"model.path={tmp_path}/tiny", f"run.dir={tmp_path}/run"]
    assert cli.main(["train", "--config", str(ROOT / "configs/quickstart.yaml"), "--dry-run", *overrides]) == 0
    assert "TP2 x PP2" in capfd.readouterr().out


def test_a_port_that_is_taken(path, monkeypatch, capfd):
    monkeypatch.setattr(torchrun, "supervise", lambda *arguments: pytest.fail("started"))
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert cli.main(["train", "--config", str(path), f"run.port={port}"]) == 2
    expected = f"the ranks cannot meet on this machine: port {port} cannot be listened at (Address already in use): set"
    assert expected in capfd.readouterr().err


def test_command_and_environment(path):
    config = load(path, ["cluster.ranks_per_node=64"])
    command = torchrun.command(config, rendezvous(1, 0, {}), "c.yaml", ["a=b"])
    assert command[:3] == [sys.executable, "-m", "hybridflow.agent"]
    assert command[-5:] == ["-m", "hybridflow.train", "--config", "c.yaml", "a=b"]
    assert command[command.index("--nproc-per-node") + 1] == "64"
    assert command[command.index("--rdzv-endpoint") + 1] == "127.0.0.1:0"
    cpu = torchrun.environment(config, "cpu", {"HF_HUB_OFFLINE": "0", "HOME": "/h"})
    assert cpu["OMP_NUM_THREADS"] == "1" and cpu["TORCHDYNAMO_DISABLE"] == "1" and cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert cpu["HF_HUB_OFFLINE"] == "0" and cpu["HOME"] == "/h"  # the user's own wins
    assert cli.LAUNCHED in cpu
    cuda = torchrun.environment(config, "cuda", {})
    assert "TORCHDYNAMO_DISABLE" not in cuda and "CUDA_VISIBLE_DEVICES" not in cuda and cuda["HF_HUB_OFFLINE"] == "1"


def test_each_of_several_nodes_starts_its_share(path, monkeypatch):
    config = load(path, ["cluster.nodes=2"])
    with pytest.raises(
        ConfigError, match="MASTER_ADDR, MASTER_PORT, NODE_RANK not set in the environment: start this command on"
    ):
        torchrun.launch(config, "cpu", "c.yaml", [])
    for name, value in {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "NODE_RANK": "1", JOB: "job7"}.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(torchrun, "supervise", lambda *arguments: started.append(arguments) or 0)
    monkeypatch.setattr(torchrun, "reachable_interface", lambda host: {"GLOO_SOCKET_IFNAME": "eth7"})
    assert torchrun.launch(config, "cpu", "c.yaml", []) == 0
    command, environment, _, job = started[0]
    text = " ".join(command)
    assert (
        "--nnodes 2 --nproc-per-node 4 --rdzv-backend static --rdzv-endpoint first:29500 --rdzv-id job7 --node-rank 1" in text
    )
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"
    run_dir = path.parent / "run"
    assert job.notes == run_dir / "logs/job7/notes" and job.logs == run_dir / "logs/job7" and not job.leader
    assert environment[rank_log.FOLDER] == str(job.logs)


def test_other_nodes_check_silently(path, started, monkeypatch, capfd):
    for name, value in {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    (path.parent / "run").mkdir()
    (path.parent / "run/config.yaml").write_text("")  # node 0 has begun
    assert cli.main(["train", "--config", str(path), "cluster.nodes=2"]) == 0
    assert capfd.readouterr() == ("", "") and len(started) == 1
    assert cli.main(["train", "--config", str(path), "cluster.nodes=2", "model.path=nowhere"]) == 2
    assert "model folder nowhere does not exist" in capfd.readouterr().err


def test_a_dry_run_says_what_would_run_where(path, started, capfd):
    assert cli.main(["train", "--config", str(path), "--dry-run", "cluster.nodes=2", "run.hang_minutes=5"]) == 0
    out = capfd.readouterr().out
    assert "node 1  4: actor, rollout  5: actor, rollout" in out
    assert f"hybridflow train --config {path} cluster.nodes=2 run.hang_minutes=5\n" in out
    assert "with MASTER_ADDR, MASTER_PORT and NODE_RANK set" in out and "5 minutes without progress end it" in out
    assert not started


@pytest.fixture
def job(path, tmp_path):
    """Start `launch` for two ranks that run a given body instead of hybridflow.train; yields a function."""
    package = tmp_path / "code/stand_in"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    processes = []

    def start(body: str) -> subprocess.Popen:
        start = "import os, signal, subprocess, sys, time\nfrom hybridflow.controller import stopping\n"
        (package / "train.py").write_text(start + textwrap.dedent(body))
        code = f"""
            import sys
            from hybridflow import torchrun
            from hybridflow.config.load import load
            config = load({str(path)!r}, ["cluster.ranks_per_node=2", "roles.actor.pp=1"])
            original = torchrun.command
            torchrun.command = lambda *a: [w.replace("hybridflow.train", "stand_in.train") for w in original(*a)]
            sys.exit(torchrun.launch(config, "cpu", "c.yaml", ["mark={tmp_path}"]))
        """
        environment = {**os.environ, "PYTHONPATH": f"{PYTHON_PATH}{os.pathsep}{package.parent}", "TMPDIR": str(temporary)}
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=environment, text=True, stderr=said
            )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
    assert list(temporary.glob("torchelastic*")) == []


def left_over(mark: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if process.pid != os.getpid() and process.info["cwd"] == str(mark):
            found.append(process)
    return found


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.1)


@pytest.mark.timeout(120)
def test_status_of_the_ranks(job, tmp_path):
    body = """
        open(os.environ["RANK"], "w").write(" ".join(sys.argv[1:]))
        open(os.path.join(os.environ["VLLM_RPC_BASE_PATH"], os.environ["RANK"]), "w").close()
    """
    assert job(body).wait(60) == 0
    assert list((tmp_path / "tmp").iterdir()) == []
    expected = f"--config c.yaml mark={tmp_path}"
    assert [(tmp_path / rank).read_text() for rank in "01"] == [expected, expected]
    assert (tmp_path / "said").read_text() == ""
    assert job("sys.exit(2) if os.environ['RANK'] == '1' else time.sleep(600)").wait(60) == 1  # the other is ended
    assert left_over(tmp_path) == []
    said = (tmp_path / "said").read_text()
    assert said.count("\n") == 1 and re.fullmatch(r"hybridflow: error: rank 1 on \S+ ended with status 2\n", said)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(job, tmp_path, number):
    # every rank has a child of its own that ignores the signal, in a session of its own: nothing reaches it but a search
    process = job("""
        child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
        open("started" + os.environ["RANK"], "w").close()
        time.sleep(600)
    """)
    wait_for(lambda: all((tmp_path / f"started{rank}").exists() for rank in (0, 1)))
    assert len(left_over(tmp_path)) >= 6
    process.send_signal(number)
    assert process.wait(40) == 1
    assert left_over(tmp_path) == []
    assert (tmp_path / "said").read_text().endswith(f"hybridflow: stopped by {number.name}; all ranks have ended\n")


@pytest.mark.timeout(120)
def test_a_polite_signal_to_every_process_lets_the_step_end(job, tmp_path):
    """Slurm sends SIGTERM to all processes of a job at once."""
    process = job("""
        if os.environ["RANK"] == "0":
            run = stopping.Stopping()
            open("started", "w").close()
            while not run.asked():
                time.sleep(0.1)
            time.sleep(1)  # the rest of the step
            open("step", "w").write(run.asked())
            run.left()
        else:
            while not os.path.exists("step"):
                time.sleep(0.1)
    """)
    wait_for(lambda: (tmp_path / "started").exists())
    for each in [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]:
        os.kill(each, signal.SIGTERM)
    assert process.wait(40) == 99
    assert (tmp_path / "step").read_text() == "SIGTERM"
    assert left_over(tmp_path) == []
    said = (tmp_path / "said").read_text()
    assert said == (
        "hybridflow: SIGTERM: the job ends after this step (Ctrl-C: now)\n"
        "hybridflow: stopped after a step; all ranks have ended\n"
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["hybridflow", "torchrun", "rank"])
def test_whoever_is_killed_takes_all_along(job, tmp_path, victim):
    process = job("""
        from multiprocessing.shared_memory import SharedMemory
        memory = SharedMemory(create=True, size=1)
        open("memory" + os.environ["RANK"], "w").write(memory.name)
        open("started" + os.environ["RANK"], "w").write(f"{os.getppid()} {os.getpid()}")
        time.sleep(600)
    """)
    wait_for(lambda: all((tmp_path / f"started{rank}").exists() for rank in (0, 1)))
    time.sleep(0.5)
    torchrun_pid, rank_pid = map(int, (tmp_path / "started1").read_text().split())
    os.kill({"hybridflow": process.pid, "torchrun": torchrun_pid, "rank": rank_pid}[victim], signal.SIGKILL)
    assert process.wait(40) == (-signal.SIGKILL if victim == "hybridflow" else 1)
    wait_for(lambda: left_over(tmp_path) == [], seconds=40)
    assert not [rank for rank in (0, 1) if Path("/dev/shm", (tmp_path / f"memory{rank}").read_text()).exists()]
    last = {
        "hybridflow": "",
        "torchrun": "hybridflow: error: torchrun's process was ended by SIGKILL\n",
        "rank": f"hybridflow: error: rank 1 on {socket.gethostname()} was ended by SIGKILL:"
        " the machine may have run out of memory; its roles: actor, rollout\n",
    }[victim]
    assert (tmp_path / "said").read_text() == last
