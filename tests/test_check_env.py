"""What is said about versions and machines that are not at hand here."""

import dataclasses
import resource

import pytest

from hybridflow import check_env, machine
from hybridflow.check_env import Report, judge_versions
from hybridflow.machine import GIB, Machine

GOOD = Machine(
    gpus=("NVIDIA H200",) * 8,
    driver="570.1",
    links=("NV18",),
    shared_memory=64 * GIB,
    memory=2000 * GIB,
    cores=192,
    open_files=(65536, 1048576),
    processes=resource.RLIM_INFINITY,
    port="",
    own_address="10.0.0.1",
    folder="/runs",
    folder_free=10**12,
)
GPU_STACK = {
    "python": "3.12.4", "torch": "2.11.0", "megatron-core": "0.19.2", "vllm": "0.26.0", "transformers": "5.17.0",
    "omegaconf": "2.4.0", "tensordict": "0.15", "safetensors": "0.8", "rich": "15", "tensorboard": "2.21",
    "transformer-engine": "2.12.0", "flash-attn": "2.8", "ray": "2.60", "reasoning-gym": "0.1.25", "math-verify": "0.9",
    "nvidia-ml-py": "13.0", "apex": "NVIDIA's",
}  # fmt: skip


def judged(stack: str = "gpu", here: Machine = GOOD, **changes: str | None) -> Report:
    versions = GPU_STACK | {name.replace("_", "-"): value for name, value in changes.items()}
    report = Report(stack, versions, here)
    judge_versions(report, "vllm")
    return report


def test_a_good_machine_has_nothing_to_be_said():
    report = judged()
    assert (report.problems, report.warnings, report.missing) == ([], [], [])
    assert machine.judge(GOOD, 8, 2) == ([], [])
    shown = report.render()
    assert "8 x NVIDIA H200" in shown and "NV18" in shown and "64.0 GiB free" in shown and "65536 (at most 1048576)" in shown


@pytest.mark.parametrize(
    "changes,kind,message",
    [
        ({"torch": "2.5.0"}, "problems", "torch 2.5.0 is not supported: torch must be >=2.11: pip install 'torch==2.11.0'"),
        ({"torch": "2.12.0"}, "warnings", "torch 2.12.0 is not the tested version 2.11.0"),
        ({"apex": check_env.WRONG_APEX}, "problems", "not NVIDIA's Apex but an unrelated one from PyPI: pip uninstall apex"),
        ({"megatron_core": None}, "problems", "not installed: megatron-core"),
        ({"ray": None}, "missing", "ray, for cluster.launcher=ray: pip install ray"),
        ({"nvidia_ml_py": None}, "missing", "nvidia-ml-py, for GPU utilisation, power and traffic"),
        ({"transformer_engine": None}, "missing", "transformer-engine, for fast training"),
    ],
)
def test_versions(changes, kind, message):
    assert any(message in line for line in getattr(judged(**changes), kind))


def test_the_wrong_stack_for_the_machine():
    assert any("there are GPUs, but this is the CPU stack" in line for line in judged(stack="cpu").warnings)
    report = judged(here=dataclasses.replace(GOOD, gpus=(), driver=""))
    assert any("nvidia-smi sees no GPU" in line for line in report.warnings)
    assert not judged(stack="cpu", transformer_engine=None).missing


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"shared_memory": 64 << 20}, "/dev/shm has 64 MiB free, 8 ranks need about 512: mount"),
        ({"open_files": (256, 4096)}, "a process may open 256 files, a rank needs up to 1024: ulimit -n 65536"),
        ({"open_files": (256, 256)}, "have the administrator raise nofile"),
        ({"port": "port 29500 cannot be listened at (Address already in use)"}, "take another MASTER_PORT"),
        ({"folder_free": -1}, "the run's folder cannot be written: /runs"),
        ({"gpus": ("NVIDIA H200",) * 4}, "8 ranks, but 4 GPUs: lower cluster.ranks_per_node"),
    ],
)
def test_machines_on_which_a_job_cannot_run(changes, message):
    problems, _ = machine.judge(dataclasses.replace(GOOD, **changes), 8, 1)
    assert len(problems) == 1 and message in problems[0]


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"folder_free": 5 << 20}, "only 5 MiB are free in /runs"),
        ({"own_address": "127.0.1.1"}, "this machine's name stands for 127.0.1.1, which other nodes cannot reach"),
        ({"links": ("NV18", "SYS")}, "some GPUs reach each other only through the CPU"),
    ],
)
def test_machines_to_be_warned_of(changes, message):
    problems, warnings = machine.judge(dataclasses.replace(GOOD, **changes), 8, 2)
    assert problems == [] and len(warnings) == 1 and message in warnings[0]


def test_links_of_a_topology():
    topology = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1
NIC0\tPIX\tNODE\tSYS\t X

Legend:
  SYS  = Connection traversing PCIe"""
    assert machine.links(topology.splitlines()) == ("NV18", "SYS")
    assert machine.links([]) == ()


def test_this_machine(tmp_path):
    here = machine.look(tmp_path / "not yet there")
    assert here.folder == str(tmp_path) and here.folder_free > 0 and here.cores > 0 and here.memory > GIB and here.port == ""
