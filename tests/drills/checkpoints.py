"""Drills of checkpoints: a job killed at random moments, and a disk that is too small or fills up (faults.py)."""

import os
import random
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridflow.checkpoints.folder import find
from tests.checkpoints.test_killed_job import finish, start
from tests.drills.job import PATIENCE, Drilled, in_the_end_same
from tests.processes import ahead_of_others
from tests.small_job import rows

# --- kills

# More steps than ten starts can take; answers long enough for the rollout to be hit.
KILLED = ("run.steps=32", "run.save_every=1", "sampling.max_response_tokens=24")
PHASES = ("rollout", "update", "save")
AIMS = (*PHASES, *PHASES, *PHASES, "any phase")
MORE_STEPS = 1  # of a start, at most, before the one in which it is killed
KEPT = 2  # run.keep_checkpoints


def kills(folder: Path, seed: int) -> None:
    """As many kills as there are AIMS, in a random order; after each the checkpoints that were reported last must be there, and
    whole."""
    chance = random.Random(seed)
    finish(start(folder, "whole", *KILLED), PATIENCE)
    seconds = _seconds_of_phases(folder / "whole")
    hit, last = Counter(), 0
    for number, aim in enumerate(chance.sample(AIMS, len(AIMS)), start=1):
        job = Drilled(folder, "killed", *KILLED)
        output = _kill_at_random(job, aim, seconds, chance)
        hit[next((phase for phase in PHASES if job.was_at.startswith(f"phase {phase}")), "another phase")] += 1
        reported = [int(step) for step in re.findall(r"saved \S+/step-(\d+) ", output)]
        whole, broken = find(job.run / "checkpoints")
        last = max([last, *reported])
        assert set(reported[-KEPT:]) <= {checkpoint.step for checkpoint in whole}, (reported, whole, broken)
        assert not last or whole[0].step >= last, (last, whole, broken)  # of all starts
        newest = f"step {whole[0].step}" if whole else "none"
        half = f"; {len(broken)} not written to its end" if broken else ""
        saved = f"saved in this start {reported}; newest whole one: {newest}{half}"
        print(f"kill {number}, aimed at {aim}, hit {job.was_at}: {saved}", flush=True)
    print(f"    {hit.total()} kills: {', '.join(f'{count} in {phase}' for phase, count in hit.most_common())}", flush=True)
    assert hit.total() == len(AIMS) and all(hit[phase] for phase in PHASES), hit
    finish(start(folder, "killed", *KILLED), PATIENCE)
    in_the_end_same(folder / "killed", folder / "whole")


def _kill_at_random(job: Drilled, aim: str, seconds: dict[str, float], chance: random.Random) -> str:
    """After up to MORE_STEPS steps of this start, somewhere in the phase that is aimed at."""
    job.await_first_step()
    job.await_steps(job.steps() + chance.randint(0, MORE_STEPS))
    job.about_to()
    with ahead_of_others():
        if aim in PHASES:
            job.wait_for(lambda: not job.is_in(aim), f"another phase than {aim}", 0.001)
            job.wait_for(lambda: job.is_in(aim), aim, 0.001)
        time.sleep(chance.uniform(0, seconds.get(aim, seconds["step"])))
        return job.kill()


def _seconds_of_phases(run: Path) -> dict[str, float]:
    """How long each phase, and a step, usually takes."""
    steps = rows(run / "metrics.jsonl")
    return {name: statistics.median(step.get(f"time/{name}", 0.0) for step in steps) for name in (*PHASES, "step")}


# --- a full disk

SAVING = ("run.save_every=2",)
TOO_SMALL, ENOUGH = 40 << 20, 300 << 20  # bytes of a disk
LITTLE = 4 << 20  # bytes: less than a checkpoint has
HALF_A_MODEL = 1 << 20
CAUSE = "No space left on device|the disk is full"


def full_disk(folder: Path) -> None:
    """Needs the right to mount."""
    finish(start(folder, "whole", *SAVING), PATIENCE)
    with _disk(folder, TOO_SMALL) as disk:
        _too_small(folder, disk)
    with _disk(folder, ENOUGH) as disk:
        _fills_up(folder, disk, "while a checkpoint is written", LITTLE, r"checkpoints/\.step-\d\.partial")
    with _disk(folder, ENOUGH) as disk:
        _fills_up(folder, disk, "while records are written", 0, r"(metrics|samples|evaluation)\.jsonl|tensorboard|plots")
        shutil.rmtree(disk / "run" / "hf")  # of the run that has come to its end: the next start has only to export
        _fills_up(folder, disk, "while the trained model is written", HALF_A_MODEL, r"\.hf\.partial", at_the_start=True)


def _too_small(folder: Path, disk: Path) -> None:
    """Refused before anything is written."""
    job = Drilled(folder, "run", *SAVING, disk=disk)
    job.about_to()
    output = job.ended("a disk of 40 MB", 2)
    numbers = r"0\.04 GB are free there, but the trained model takes \d+\.\d\d GB and the rest about 0\.1 GB"
    assert re.search(rf"error: run\.dir={disk}/run: {numbers}: free some, or choose another run\.dir", output), output
    assert not job.run.exists()


def _fills_up(folder: Path, disk: Path, when: str, leave: int, path: str, at_the_start: bool = False) -> None:
    """Something else takes all but so many bytes of the disk; the last line names this path. With room again the run goes on
    from the checkpoint that was the newest when it happened."""
    job = Drilled(folder, "run", *SAVING, disk=disk)
    if at_the_start:
        job.wait_for(lambda: job.has_note("progress"), "the first rank")
        newest = _fill(job, disk, leave)
    else:
        job.wait_for(lambda: bool(find(job.run / "checkpoints")[0]), "a checkpoint")
        with job.caught_in("rollout"):
            newest = _fill(job, disk, leave)
    output = job.ended(f"a full disk {when}", 1, "hybridflow: error: ")
    last = output.rstrip().splitlines()[-1]
    assert re.search(rf"{disk}/run/({path})", last) and re.search(CAUSE, last), last
    whole, _ = find(job.run / "checkpoints")
    assert whole[0].step == newest, whole
    (disk / "of-another-user").unlink()
    output = finish(start(folder, "run", *SAVING, f"run.dir={job.run}"), PATIENCE)
    assert f"resumes after step {newest} " in output, output
    assert not find(job.run / "checkpoints")[1]  # what was half-written has gone
    print(f"    the checkpoint of step {newest} survived; with room again the run resumed after it", flush=True)
    in_the_end_same(job.run, folder / "whole")


def _fill(job: Drilled, disk: Path, leave: int) -> int:
    """The step of the newest checkpoint then."""
    job.about_to()
    with (disk / "of-another-user").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - leave)
    return find(job.run / "checkpoints")[0][0].step


@contextmanager
def _disk(folder: Path, size: int) -> Iterator[Path]:
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)
