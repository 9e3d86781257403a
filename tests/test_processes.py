"""What a test has started is gone when its time is up."""

import subprocess
import sys

import psutil
import pytest

from tests.processes import run

NESTED = "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"


def test_the_children_of_a_command_that_takes_too_long_are_ended(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", NESTED], timeout=5, cwd=tmp_path)
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]


def test_output_and_status():
    done = run([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
