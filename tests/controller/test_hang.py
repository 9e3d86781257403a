"""A job that makes no progress: its ranks' stacks, and which of them did not report."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from hybridflow.controller import faults, hang, ray
from hybridflow.controller.hang import Watch
from hybridflow.controller.notes import read
from hybridflow.controller.ray_cluster import Seat
from tests.processes import run

ROOT = Path(__file__).parents[2]
RANK = """
import os, signal, time
from hybridflow.controller import hang
hang.register(int(os.environ["RANK"]))
def stuck_in_a_collective():
    time.sleep(600)
if os.environ["RANK"] == "0":
    hang.progress("phase update after 3 steps")
if os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.SIGSTOP)  # nobody else would notice
stuck_in_a_collective()
"""
STARTS_THREE = f"""
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", {RANK!r}], env=os.environ | {{"RANK": str(rank)}}) for rank in range(3)]
[rank.wait() for rank in ranks]
"""


@pytest.mark.timeout(120)
def test_a_hung_job_ends_with_the_stacks_of_all_ranks(tmp_path):
    code = f"""
        import os, sys
        from pathlib import Path
        from hybridflow.controller.hang import Watch
        from hybridflow.supervise import Job, supervise
        watch = Watch(0.15, range(3), Path({str(tmp_path)!r}), patience=3.0)
        sys.exit(supervise([sys.executable, "-c", {STARTS_THREE!r}], dict(os.environ), "the ranks", Job(watch=watch)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = run(command, timeout=100, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == (
        "hybridflow: error: no progress for 0.15 minutes (run.hang_minutes) in phase update after 3 steps: rank 2 had been"
        f" stopped by a signal; stacks of the ranks in {tmp_path}\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["phase.txt", "rank-0.txt", "rank-1.txt", "rank-2.txt"]
    assert all("stuck_in_a_collective" in (tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert (tmp_path / "rank-2.txt").stat().st_size


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_progress_is_what_keeps_a_job_alive(tmp_path, monkeypatch):
    notes, clock = tmp_path / "notes", Clock()
    notes.mkdir()
    monkeypatch.setenv(faults.FOLDER, str(notes))
    watch = Watch(1.0, [faults.DRIVER, 0, 1], tmp_path / "hang", clock=clock, patience=2.0)
    assert hang.latest(notes) == ""
    for step in range(5):
        clock.now += 50
        hang.progress(f"step {step}")
        assert watch.look(notes) is None
    clock.now += 61
    assert hang.latest(notes) == "step 4"
    assert "in step 4: the driver and ranks 0, 1 did not report" in watch.look(notes)
    assert (tmp_path / "hang/phase.txt").read_text() == "step 4\n"


def test_every_piece_of_the_start_is_progress(tmp_path, monkeypatch):
    notes, clock = tmp_path / "notes", Clock()
    notes.mkdir()
    monkeypatch.setenv(faults.FOLDER, str(notes))
    watches = [Watch(1.0, range(3), tmp_path / name, name == "first", 2.0, clock) for name in ("first", "other")]
    for piece in ("making the rollout", *(f"reading the actor's weights (file {number} of 3)" for number in (1, 2, 3))):
        for rank in range(3):
            clock.now += 50
            hang.note_start(rank, piece)
            os.utime(notes / "progress", (clock.now, clock.now))  # file systems count in steps, which these notes may share
            assert [watch.look(notes) for watch in watches] == [None, None]
    hang.note_start(2, "roles made")
    assert watches[0].look(notes) is None
    clock.now += 61 + hang.NODE_0_IS_LOST
    assert watches[1].look(notes) is None  # it may be seeing its own ranks only
    where = "the start (ranks 0, 1: reading the actor's weights (file 3 of 3); rank 2: roles made)"
    assert f"no progress for 1 minutes (run.hang_minutes) in {where}: ranks 0, 1, 2 did not report" in watches[0].look(notes)
    assert (tmp_path / "first/phase.txt").read_text() == f"{where}\n"


def test_a_start_that_nobody_has_begun(tmp_path):
    clock = Clock()
    watch = Watch(1.0, [0], tmp_path / "hang", clock=clock, patience=2.0)
    clock.now += 61
    assert "in the start (no rank has begun): rank 0 did not report" in watch.look(tmp_path)


def test_a_rank_notes_its_start_once_it_is_registered(tmp_path, monkeypatch):
    code = """
        from hybridflow.controller import hang
        hang.starting("imports")
        hang.register(3)
        hang.starting("making the critic")
        print(hang.at_start())
    """
    monkeypatch.setenv(faults.FOLDER, str(tmp_path))
    done = run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("making the critic\n", "")
    assert {path.name: read(path) for path in tmp_path.glob("start-*")} == {"start-3": "making the critic"}
    assert hang.latest(tmp_path) == hang.START


def test_on_ray_the_driver_notes_the_start_of_the_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv(faults.FOLDER, str(tmp_path))
    store, known = ray._listening_store("127.0.0.1", 0), {}
    ray._take_starts(store, known, 2)
    assert list(tmp_path.iterdir()) == []  # nobody has told anything
    monkeypatch.setattr(hang, "_piece", "making the actor")
    ray._tell_start(store, 1)
    ray._take_starts(store, known, 2)
    assert read(tmp_path / "start-1") == "making the actor"
    (tmp_path / "progress").unlink()
    ray._take_starts(store, known, 2)
    assert hang.latest(tmp_path) == ""  # what was known is no progress


def test_on_ray_the_driver_asks_the_ranks(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv(faults.FOLDER, str(notes))
    store = ray._listening_store("127.0.0.1", 0)
    seats = [Seat("first", "10.0.0.1", "a", 0), Seat("second", "10.0.0.2", "b", 0)]
    ray._tell_stacks(store, 1)
    assert not hang.asked() and not store.check([ray._stacks_of(1)])  # nobody has asked
    (notes / "hung").touch()
    assert hang.asked()
    ray._take_stacks(store, seats)
    ray._tell_stacks(store, 1)
    ray._take_stacks(store, seats)
    watch = Watch(1.0, [faults.DRIVER, 0, 1], tmp_path / "hang", clock=Clock(), patience=2.0)
    assert ": the driver and rank 0 did not report; stacks" in watch.look(notes)
    assert "test_on_ray_the_driver_asks_the_ranks" in (tmp_path / "hang/rank-1.txt").read_text()


def test_who_watches_when(tmp_path, monkeypatch):
    monkeypatch.setenv(faults.FOLDER, str(tmp_path))
    clock = Clock()
    off, other = (Watch(minutes, [0], tmp_path, minutes == 0, 2.0, clock) for minutes in (0.0, 1.0))
    clock.now += 10_000
    assert off.look(tmp_path) is None
    assert other.look(tmp_path) is None  # another node, which sees no progress where folders are not shared
    hang.progress("step 1")
    assert other.look(tmp_path) is None
    clock.now += 61
    assert other.look(tmp_path) is None  # node 0 decides ...
    (tmp_path / "hung").touch()
    assert "did not report" in other.look(tmp_path)  # ... and this one follows
    (tmp_path / "hung").unlink()
    clock.now += hang.NODE_0_IS_LOST + 61
    assert "did not report" in other.look(tmp_path)
