"""What a failed job says last: the one fault that all others follow from."""

import contextlib
import pickle
import signal

import pytest

from hybridflow.controller import faults

LOST = (
    "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3. This is typically caused by a remote worker"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(faults.FOLDER, str(tmp_path))
    return tmp_path


def fail(rank: int, error: Exception) -> None:
    try:
        raise error
    except type(error) as caught:
        faults.report(faults.describe(rank, "actor.update (step 3, update)", caught))


def test_a_fault_of_its_own_comes_before_lost_connections(folder, capfd):
    fail(2, RuntimeError(LOST))
    fail(1, ValueError("two\n  lines"))
    fail(3, ValueError("later"))
    cause = faults.cause(folder)
    assert cause.startswith("rank 1 on ") and cause.endswith(" failed in actor.update (step 3, update): ValueError: two lines")
    shown = capfd.readouterr().err
    assert "Traceback" in shown and "step 3, update): RuntimeError: Connection closed by peer [127.0.0.1]:3\n" in shown


def test_a_killed_rank_is_named_with_what_a_peer_was_at(folder):
    fail(0, RuntimeError(LOST))
    faults.note_exits({0: 1, 1: -signal.SIGTERM, 2: -signal.SIGKILL})
    cause = faults.cause(folder)
    assert cause.startswith("rank 2 on ") and "was ended by SIGKILL: the machine may have run out of memory; rank 0 on" in cause
    assert "failed in actor.update (step 3, update)" in cause


def test_a_rank_that_nobody_missed_is_named_with_its_roles_and_what_the_driver_was_at(folder):
    faults.note_exits({0: -signal.SIGTERM, 2: -signal.SIGKILL})
    cause = faults.cause(folder, ["actor", "actor", "critic, reward"], "phase rollout after 2 steps")
    assert cause.startswith("rank 2 on ")
    assert cause.endswith(
        "was ended by SIGKILL in phase rollout after 2 steps: the machine may have run out of memory; its roles: critic, reward"
    )


def test_what_is_left_to_say(folder, monkeypatch, capfd):
    assert faults.cause(folder) is None
    faults.note_exits({3: 7})
    assert faults.cause(folder).startswith("rank 3 on ") and faults.cause(folder).endswith(" ended with status 7")
    fail(1, ConnectionResetError("Connection reset by peer"))
    assert faults.cause(folder).endswith("ConnectionResetError: Connection reset by peer")
    monkeypatch.setenv(faults.FOLDER, str(folder / "gone"))
    fail(2, ValueError("a full disk"))
    err = capfd.readouterr().err
    assert "could not note the fault" in err and "ValueError: a full disk" in err


def test_notes_are_written_over_room_that_was_set_aside(folder):
    faults.set_room_aside(1)
    faults.set_room_aside()
    aside = {path.stat().st_ino: path.stat().st_size for path in folder.iterdir()}
    assert faults.cause(folder) is None
    fail(1, ValueError("a full disk"))
    faults.note_exits({1: 1})
    assert {path.stat().st_ino: path.stat().st_size for path in folder.glob("*.json")} == aside
    assert faults.cause(folder).endswith("ValueError: a full disk")


def test_a_fault_is_noted_though_nobody_listens(folder, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(faults.sys, "stderr", full)
        fail(1, ValueError("a full disk"))
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert "ValueError: a full disk" in (folder / "rank-1.json").read_text()


def test_a_fault_travels_as_an_exception(folder, capfd):
    with pytest.raises(faults.RankFailed) as caught, faults.as_rank_failed(2, "building"):
        raise KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert arrived.fault == caught.value.fault and arrived.fault.line.endswith("failed in building: KeyError: 'x'")
    assert "Traceback" in str(arrived) and faults.describe(0, "elsewhere", arrived) is arrived.fault
