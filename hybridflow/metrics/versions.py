"""What a run ran with: versions of the libraries, commit, host and hardware, as versions.json in the run's folder."""

import json
import os
import shutil
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from hybridflow.check_env import versions_here
from hybridflow.machine import nvidia_smi

ROOT = Path(__file__).parents[2]


def write_versions(folder: Path) -> None:
    """Of the driver's node, at the latest start: a run that is resumed may go on with others."""
    record = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "hardware": nvidia_smi("--query-gpu=name", "--format=csv,noheader") or [f"CPU, {len(os.sched_getaffinity(0))} cores"],
        "commit": os.environ.get("HYBRIDFLOW_COMMIT") or _commit(),
        "versions": versions_here(),
    }
    (folder / "versions.json").write_text(json.dumps(record, indent=1) + "\n")


def _commit() -> str | None:
    """The checkout's, with `-dirty` where files differ from it; None where the code is no checkout or git isn't there."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or None
