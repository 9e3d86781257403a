"""Warnings of libraries that are of no use to who runs a job; all others are shown."""

import os
import subprocess
import sys

import pytest

from hybridflow.quiet import PYTHON_WARNINGS

WARN = """
import warnings
warnings.warn("Apex is not installed. Falling back to Torch Norm")
warnings.warn("the weights are not what they were")
"""


@pytest.mark.parametrize(
    ("before", "environment"), [("from hybridflow import quiet; quiet.ignore()", {}), ("", {"PYTHONWARNINGS": PYTHON_WARNINGS})]
)
def test_useless_warnings_are_not_shown(before, environment):
    done = subprocess.run(
        [sys.executable, "-c", before + WARN],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "the weights are not what they were" in done.stderr and "Apex" not in done.stderr
    assert "Invalid -W option" not in done.stderr
