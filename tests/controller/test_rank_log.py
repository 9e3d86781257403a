"""Where a rank's output goes."""

import os
import subprocess
import sys

from hybridflow.controller import rank_log


def say(folder, rank: int) -> subprocess.CompletedProcess:
    code = f"""
import os, sys
from hybridflow.controller import rank_log
rank_log.to_file({rank})
print("out")
sys.stdout.flush()
os.write(2, b"from C\\n")
os._exit(3)
"""
    environment = os.environ | {rank_log.FOLDER: str(folder / "logs")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)


def test_rank_0_speaks_twice_and_the_others_to_their_file_only(tmp_path):
    first, other = say(tmp_path, 0), say(tmp_path, 12)
    assert (first.stdout, first.stderr, first.returncode) == ("out\n", "from C\n", 3)
    assert (other.stdout, other.stderr, other.returncode) == ("", "", 3)
    for rank in (0, 12):
        assert sorted(rank_log.log_file(tmp_path / "logs", rank).read_text().splitlines()) == ["from C", "out"]


def test_tail(tmp_path):
    path = tmp_path / "log"
    assert rank_log.tail(path) == ""
    path.write_text("".join(f"{n}\n" for n in range(10_000)))
    assert rank_log.tail(path, 2) == "9998\n9999"
