"""A world ends what its ranks have started."""

import subprocess
import sys

import psutil
import pytest

from tests.processes import living
from tests.world import World

WRITER = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"


def start_a_writer() -> list[int]:
    """As Megatron does: a process that starts another one, both of which nobody ends."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
    return [writer.pid, int(writer.stdout.readline())]


@pytest.mark.timeout(300)
def test_closing_ends_what_the_ranks_have_started():
    world = World(1)
    [pids] = world.run(start_a_writer)
    started = [psutil.Process(pid) for pid in pids]
    assert living(started) == started
    world.close()
    assert not world.alive and not living(started)
