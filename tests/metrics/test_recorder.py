"""What a recorder writes and shows, read back with independent readers."""

import io
import itertools
import json
import threading

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridflow.config.load import load
from hybridflow.metrics import recorder as module
from hybridflow.metrics.recorder import Recorder
from tests.full_disk import no_file_grows_beyond


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

        def time(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def config(tmp_path):
    (tmp_path / "c.yaml").write_text(f"model: {{path: m}}\nrun: {{dir: '{tmp_path}/run', steps: 30}}\n")
    return load(tmp_path / "c.yaml")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run(tmp_path, config, clock):
    out, run = io.StringIO(), tmp_path / "run"
    recorder = Recorder(run, config, out)
    recorder.evaluation(0, 0.25, 64)
    recorder.warm_start(1, {"loss": torch.tensor(2.5)})
    for step in range(1, 13):
        with recorder.phase("rollout"):
            clock.now += 2
        with recorder.phase("update"):
            clock.now += 1
        with recorder.phase("update"):
            clock.now += 0.5
        clock.now += 0.5  # outside of all phases
        recorder.log({"step": step, "reward/mean": torch.tensor(step / 12), "reshard/verified": True if step == 1 else None})
        assert len(lines(run / "metrics.jsonl")) == step  # on disk at once
        clock.now += 7  # between steps: nobody's time
    recorder.samples([{"step": 12, "prompt": "1+1=", "response": "2", "reward": torch.tensor(1.0)}])
    recorder.evaluation(12, 0.9, 64)
    text = recorder.close()

    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[0] == {
        "step": 1,
        "reward/mean": pytest.approx(1 / 12),
        "reshard/verified": True,
        "time/rollout": 2.0,
        "time/update": 1.5,
        "time/step": 4.0,
    }
    assert rows[1]["reshard/verified"] is None
    assert lines(run / "samples.jsonl") == [{"step": 12, "prompt": "1+1=", "response": "2", "reward": 1.0}]
    assert lines(run / "warm_start.jsonl") == [{"step": 1, "loss": 2.5}]
    assert [(row["step"], row["accuracy"]) for row in lines(run / "evaluation.jsonl")] == [(0, 0.25), (12, 0.9)]
    assert (run / "plots/reward.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert load(run / "config.yaml") == config

    summary = json.loads((run / "summary.json").read_text())
    assert summary["reward_first"] == pytest.approx((1 + 2 + 3) / 3 / 12)
    assert summary["reward_last"] == pytest.approx(sum(range(3, 13)) / 10 / 12)
    assert summary["time_shares"] == {"rollout": 0.5, "update": 0.375, "other": 0.125}
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["stopped_by"]) == (0.25, 0.9, None)
    assert summary["seconds"] == 12 * 11
    assert text.splitlines()[0] == "finished after 12 steps in 2 min 12 s"
    assert "reward         0.167 (first 3 steps) -> 0.625 (last 10)" in text
    assert "accuracy       0.250 -> 0.900 (greedy, 64 held-out problems)" in text
    assert "time           4.00 s a step (median): rollout 50%, update 38%, other 12%" in text
    assert f"metrics        {run}/metrics.jsonl" in text and "trained model" not in text
    assert out.getvalue().endswith(text + "\n")


def test_phases_that_belong_to_no_step(tmp_path, config, clock):
    recorder = Recorder(tmp_path / "run", config, io.StringIO())
    assert recorder.seconds() == {}
    with recorder.phase("rollout"):
        clock.now += 5
    assert recorder.seconds() == {"rollout": 5.0, "step": 5.0}
    clock.now += 1
    assert recorder.take_phases() == {"rollout": 5.0}
    with recorder.phase("rollout"):
        clock.now += 2
    recorder.log({"step": 1})
    recorder.close()
    assert lines(tmp_path / "run/metrics.jsonl") == [{"time/rollout": 2.0, "time/step": 2.0, "step": 1}]


def test_phases_do_not_overlap_where_the_process_is_held_up_between_two_clocks(tmp_path, config, clock, monkeypatch):
    held_up = itertools.chain([5], itertools.repeat(0))  # once, when the first phase begins

    def read_and_be_held_up():
        read = clock.now
        clock.now += next(held_up)
        return read

    with Recorder(tmp_path / "run", config, io.StringIO()) as recorder:
        monkeypatch.setattr(clock, "monotonic", read_and_be_held_up)
        for name in ("rollout", "reward", "update"):
            with recorder.phase(name):
                clock.now += 1
        monkeypatch.undo()
        first, second, third = recorder.spans
    assert first.start < first.end <= second.start < second.end <= third.start < third.end


def test_tensorboard(tmp_path, config):
    with Recorder(tmp_path / "run", config, io.StringIO()) as recorder:
        recorder.log({"step": 3, "reward/mean": 0.5, "reshard/verified": False, "actor/lr": None})
        recorder.evaluation(3, 0.75, 8)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward/mean", "reshard/verified", "evaluation/accuracy"}
    scalar = events.Scalars("reward/mean")[0]
    assert (scalar.step, scalar.value) == (3, 0.5)


def test_plain_lines_are_aligned(tmp_path, config):
    out = io.StringIO()
    with Recorder(tmp_path / "run", config, out) as recorder:
        for step in range(1, 4):
            recorder.log({"step": step, "reward/mean": step / 4, "mismatch/log_prob_abs_max": 3e-5, "time/step": 61.5})
    header, *rows = out.getvalue().splitlines()[:4]
    assert "\x1b" not in out.getvalue()
    assert {len(row) for row in rows} == {len(header)}
    for title, cell in (("step", "2"), ("reward", "0.500"), ("mismatch", "3.0e-05"), ("step s", "61.50"), ("tokens", "-")):
        end = header.index(f"  {title}", 1) + 2 + len(title) if title != "step" else header.index("step") + 4
        assert rows[1][:end].endswith(cell)


def test_live_table_on_a_terminal(tmp_path, config, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    out = Terminal()
    with Recorder(tmp_path / "run", config, out) as recorder:
        for step in (1, 2):
            recorder.log({"step": step, "reward/mean": 0.5, "time/step": 2.0})
        recorder.line("a line")
    assert "step 2 of 30, 56.0 s left" in out.getvalue()
    assert "\x1b[" in out.getvalue() and "a line" in out.getvalue()


def test_an_error_is_named_and_what_was_recorded_stays(tmp_path, config):
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path / "run", config, io.StringIO()) as recorder:
        recorder.log({"step": 1, "reward/mean": 0.5, "time/step": 1.0})
        1 / 0  # noqa: B018
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["stopped_by"] == "ZeroDivisionError: division by zero"
    assert len(lines(tmp_path / "run/metrics.jsonl")) == 1


def test_a_full_disk_leaves_whole_lines_and_a_summary(tmp_path, config):
    stream = io.StringIO()
    with pytest.raises(OSError, match=r"File too large: .*samples\.jsonl"), Recorder(tmp_path, config, stream) as recorder:
        recorder.log({"step": 1, "reward/mean": 0.5})
        with no_file_grows_beyond(50_000):
            for rows in (2, 1):
                recorder.samples({"response": "x" * 20_000} for _ in range(rows))
    assert [len(json.loads(line)["response"]) for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [20_000] * 2
    assert "stopped by OSError" in stream.getvalue() and "after 1 steps" in stream.getvalue()


def test_a_full_disk_is_named_with_the_file_whatever_is_written(tmp_path, config, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard writes in a thread, which fails aloud
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots/reward.png").symlink_to("/dev/full")
    recorder = Recorder(tmp_path, config, io.StringIO())
    recorder.log({"step": 1, "reward/mean": 0.5})
    with pytest.raises(OSError, match=r"No space left on device: .*plots/reward\.png"):
        recorder.close()
    recorder = Recorder(tmp_path / "other", config, io.StringIO())
    (events,) = (tmp_path / "other/tensorboard").iterdir()
    with pytest.raises(OSError, match="File too large: .*other/tensorboard"), no_file_grows_beyond(events.stat().st_size):
        recorder.warm_start(1, {"loss": 2.0})
        recorder.warm_start(2, {"loss": 2.0})  # the first may be over before the thread has failed
    recorder.close(OSError("a full disk"))  # and does not wait for a thread that has ended


def test_a_run_that_cannot_write_its_summary_still_shows_it(tmp_path, config):
    stream = io.StringIO()
    (tmp_path / "summary.json").symlink_to("/dev/full")
    with pytest.raises(ValueError, match="the fault itself"), Recorder(tmp_path, config, stream):
        raise ValueError("the fault itself")
    assert "stopped by ValueError: the fault itself" in stream.getvalue()


def test_a_run_without_steps_closes(tmp_path, config):
    text = Recorder(tmp_path / "run", config, io.StringIO()).close()
    assert text.startswith("finished after 0 steps")
    assert not (tmp_path / "run/plots").exists()


def test_memory_growth_warns_once(tmp_path, config):
    out = io.StringIO()
    with Recorder(tmp_path / "run", config, out) as recorder:
        for step, gib in enumerate([1, 8, 10, 10.4, 10.6, 12], start=1):
            recorder.log({"step": step, "memory/peak_bytes/rollout": int(gib * 2**30), "memory/peak_bytes/update": 2**30})
    warnings = [line for line in out.getvalue().splitlines() if "warning" in line]
    assert warnings == ["warning: memory of phase rollout grew from 10.00 GiB at the third step to 10.60 GiB"]
    assert "memory         peak rollout 12.00 GiB, update 1.00 GiB" in out.getvalue()


def test_memory_that_grows_in_many_phases_is_one_line(tmp_path, config):
    out = io.StringIO()
    with Recorder(tmp_path / "run", config, out) as recorder:
        for step, gib in enumerate([1, 1, 1, 1.2, 1.3, 1.3], start=1):  # 5% of little is soon reached
            peaks = {"wake": 2 * gib, "rollout": 3 * gib, "sleep": 0.1 * gib}
            recorder.log({"step": step, **{f"memory/peak_bytes/{name}": int(size * 2**30) for name, size in peaks.items()}})
    warnings = [line for line in out.getvalue().splitlines() if "warning" in line]
    assert warnings == [
        "warning: memory of phase rollout grew from 3.00 GiB at the third step to 3.60 GiB (and that of 1 other phases)"
    ]


def test_overwrite_deletes_a_runs_files_only(tmp_path, config):
    run = tmp_path / "run"
    (run / "checkpoints/step-1").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("old\n")
    (run / "report-with-other.html").touch()
    (run / "notes.txt").write_text("mine")
    config.run.overwrite = True
    with Recorder(run, config, io.StringIO()) as recorder:
        recorder.log({"step": 1})
    assert not (run / "checkpoints").exists() and not (run / "report-with-other.html").exists()
    assert (run / "notes.txt").read_text() == "mine"
    assert lines(run / "metrics.jsonl") == [{"step": 1}]


def test_numbers_that_are_not_finite_stay_visible(tmp_path, config):
    out = io.StringIO()
    with Recorder(tmp_path / "run", config, out) as recorder:
        recorder.log({"step": 1, "actor/grad_norm": float("nan")})
    assert "nan" in out.getvalue()
    assert (
        lines(tmp_path / "run/metrics.jsonl")[0]["actor/grad_norm"]
        != lines(tmp_path / "run/metrics.jsonl")[0]["actor/grad_norm"]
    )


def test_going_on_cuts_the_records_back(tmp_path, config):
    run = tmp_path / "run"
    with Recorder(run, config, io.StringIO()) as recorder:
        recorder.warm_start(1, {"loss": 2.5})
        recorder.evaluation(0, 0.25, 64)
        recorder.log({"step": 1, "reward/mean": 0.1})
        position = recorder.position()
        recorder.log({"step": 2, "reward/mean": 0.2})
        recorder.evaluation(2, 0.5, 64)
        recorder.samples([{"step": 2}])
    with Recorder(run, config, io.StringIO()) as recorder:
        recorder.go_on(position, 1)
        recorder.log({"step": 2, "reward/mean": 0.3})
        assert recorder.history.rewards() == [(1, 0.1), (2, 0.3)]
        assert [row.step for row in recorder.history.evaluations] == [0] and len(recorder.history.warm_start) == 1
    assert [row["reward/mean"] for row in lines(run / "metrics.jsonl")] == [0.1, 0.3]
    assert lines(run / "samples.jsonl") == [] and len(lines(run / "evaluation.jsonl")) == 1
    (run / "metrics.jsonl").write_text("")
    with (
        Recorder(run, config, io.StringIO()) as recorder,
        pytest.raises(ValueError, match="metrics.jsonl has 0 bytes, the check"),
    ):
        recorder.go_on(position, 1)
