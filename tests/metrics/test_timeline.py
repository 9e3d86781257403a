"""The trace of a step from made-up calls, and clocks that differ; that of a real job is looked at in tests/test_main_job.py."""

import json
import time

import pytest

from hybridflow.metrics import timeline
from hybridflow.metrics.recorder import Phase
from hybridflow.metrics.timeline import Span, Timeline, trace
from megatron_ext.intervals import Interval
from tests.algorithms.fakes import Answered

HOSTS = ["a", "a", "b"]


class Ranks:
    """Three ranks on two hosts; the second host's clock is `ahead`."""

    def __init__(self, ahead: float, travel: float = 0.0):
        self.ahead, self._travel, self.recording, self.noted = ahead, travel, False, []

    def record_calls(self):
        self.recording = True
        return Answered([None] * 3)

    def clock(self):
        time.sleep(self._travel)
        found = [(host, time.time() + (self.ahead if host == "b" else 0)) for host in HOSTS]
        time.sleep(self._travel)
        return Answered(found)

    def calls(self):
        noted, self.noted = self.noted, []
        return Answered(noted or [[], [], []])


def test_clocks_that_agree_are_left_alone_and_others_are_known_to_half_an_exchange():
    hosts, ahead = timeline.read_clocks(Ranks(ahead=30.0, travel=0.002))
    assert hosts == HOSTS and ahead[:2] == [0.0, 0.0]
    assert ahead[2] == pytest.approx(30.0, abs=0.01)
    assert timeline.read_clocks(Ranks(ahead=0.001, travel=0.002))[1] == [0.0, 0.0, 0.0]


def test_a_steps_file(tmp_path):
    ranks = Ranks(ahead=-50.0)
    written = Timeline(tmp_path, ranks)
    assert ranks.recording
    ranks.noted = [[("actor.export", 1.0, 2.0)], [], []]
    written.begin_step()
    # the third rank's clock, 50 s behind, read 950 when the call began
    ranks.noted = [[("actor.update", 1000.5, 1001.0)], [], [("critic.update", 950.25, 951.0)]]
    written.end_step()
    ranks.noted = [[("actor.take_passes", 1002.0, 1002.1)], [], []]
    forward = Interval.of("forward", 0, 0, 3, 950.5, 950.75)
    written.write(4, [Phase("update", 1000.0, 1002.0)], {"critic": ((2,), [[[forward]]]), "reference": ((0, 1), [])})
    events = json.loads((tmp_path / "timeline" / "step-4.json").read_text())["traceEvents"]
    slices = {(e["tid"], e["name"]): (e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X" and e["pid"]}
    assert slices[0, "actor"] == slices[0, "update"] == (0.5, 0.5)
    assert slices[2, "critic"] == pytest.approx((0.25, 0.75), abs=1e-3)
    assert slices[0, "F3.0"] == pytest.approx((0.5, 0.25), abs=1e-3)
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["driver", "a", "b", "pipeline of critic"]
    assert not [event for event in events if event["name"] in ("export", "take_passes")]


def test_rows_and_names():
    calls = [[Span("actor.update", 10.1, 10.4)], [], [Span("critic.update", 10.1, 10.2), Span("critic.values", 10.2, 10.3)]]
    events = trace([Phase("update", 10.0, 10.5)], calls, HOSTS, {})["traceEvents"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        (0, 0, "process_name"): "driver",
        (0, 0, "thread_name"): "phases",
        (1, 0, "process_name"): "a",
        (2, 0, "process_name"): "b",
        (1, 0, "thread_name"): "rank 0",
        (1, 1, "thread_name"): "rank 1",
        (2, 2, "thread_name"): "rank 2",
    }
    shown = [(e["pid"], e["tid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert shown == [
        (0, 0, "update", "phase", 0, 500_000),
        (1, 0, "actor", "actor", 100_000, 300_000),
        (1, 0, "update", "actor", 100_000, 300_000),
        (2, 2, "critic", "critic", 100_000, 100_000),
        (2, 2, "update", "critic", 100_000, 100_000),
        (2, 2, "critic", "critic", 200_000, 100_000),
        (2, 2, "values", "critic", 200_000, 100_000),
    ]


def test_a_step_without_a_call_is_an_empty_trace():
    assert [event["ph"] for event in trace([], [[]], ["a"], {})["traceEvents"]] == ["M"] * 4
