"""Drills of checkpoints: a job killed at random moments, some of them in a save, and a disk that fills up (faults.py)."""

import random
import re
import subprocess
import time
from pathlib import Path

from hybridflow.checkpoints.folder import find
from tests.checkpoints.test_killed_job import assert_same_run, finish, kill_all, start

PATIENCE = 1200  # seconds for a job, on a busy machine
STEPS = ["run.steps=24", "run.save_every=1"]


def kills(folder: Path, count: int, seed: int) -> None:
    """As many kills; after each the checkpoint that was reported last must be there, and whole."""
    chance = random.Random(seed)
    finish(start(folder, "whole", *STEPS), PATIENCE)
    checkpoints = folder / "killed" / "checkpoints"
    for number in range(count):
        before, _ = find(checkpoints)
        process = start(folder, "killed", *STEPS)
        in_a_save, wait = number % 3 == 0, chance.uniform(0, 6)
        while process.poll() is None and not _has_begun(checkpoints, before, in_a_save):
            time.sleep(0.005)
        if not in_a_save:
            time.sleep(wait)
        if process.poll() is not None:
            break  # it has come to its end before
        output = kill_all(process)
        reported = [int(step) for step in re.findall(r"saved \S+/step-(\d+) ", output)]
        whole, broken = find(checkpoints)
        assert not reported or whole[0].step >= reported[-1], (reported, whole)
        newest = f"step {whole[0].step}" if whole else "none"
        half = f"; {len(broken)} not written to its end" if broken else ""
        when = "in a save" if in_a_save else "at a random moment"
        print(f"kill {number + 1}, {when}: saved in this start {reported}; newest whole one: {newest}{half}", flush=True)
    finish(start(folder, "killed", *STEPS), PATIENCE)
    assert_same_run(folder / "killed", folder / "whole")
    print("    in the end: metrics, samples and weights of a run that was left alone", flush=True)


def _has_begun(checkpoints: Path, before: list, in_a_save: bool) -> bool:
    """This start has saved something new, or is just about to."""
    if in_a_save:
        return any(checkpoints.glob(".step-*.partial/critic"))
    return find(checkpoints)[0] != before


def full_disk(folder: Path) -> None:
    """The third checkpoint does not fit; with more room the run goes on from the second. Needs the right to mount."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], check=True)
    try:
        options = [f"run.dir={disk}/run", "run.save_every=2"]
        process = start(folder, "disk-full", *options)
        output, _ = process.communicate(timeout=PATIENCE)
        print(output.rstrip().splitlines()[-1].replace(str(folder), ""), flush=True)
        whole, broken = find(disk / "run" / "checkpoints")
        assert process.returncode == 1, process.returncode
        assert str(disk / "run" / "checkpoints" / ".step-6.partial") in output.splitlines()[-1]
        assert [checkpoint.step for checkpoint in whole] == [4, 2], (whole, broken)
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        assert "resumes after step 4" in finish(start(folder, "disk-full", *options), PATIENCE)
        print("    status 1; the last good checkpoint survived, and with more room the run came to its end", flush=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
