"""Bubbles from intervals, against values worked out by hand."""

import json

import pytest

from megatron_ext.intervals import Interval, bubble, chrome_events, span, union


def interval(kind: str, start: float, end: float, stage: int = 0) -> Interval:
    return Interval.of(kind, stage, 0, 0, start, end)


def test_overlapping_intervals_count_once():
    assert union([interval("forward", 3, 4), interval("forward", 0, 2), interval("backward", 1, 2.5)]) == 3.5
    assert union([interval("forward", 0, 4), interval("forward", 1, 2)]) == 4


def test_stages_are_means_over_their_ranks_and_of_the_slowest_ranks_span():
    ranks = [
        [interval("forward", 0, 2), interval("backward", 8, 10)],  # stage 0: 4 of 10
        [interval("forward", 0, 2), interval("backward", 3, 5)],  # stage 0 of a faster replica: 4 of 10
        [interval("forward", 2, 7, 1), interval("backward", 7, 8, 1)],  # stage 1: 6 of 10
        [],  # took no part
    ]
    found = bubble([ranks])
    assert found.span_s == 10
    assert found.stages == pytest.approx((0.6, 0.4))
    assert (found.mean, found.max) == pytest.approx((0.5, 0.6))


def test_passes_add_up_without_the_time_between_them():
    first = [[interval("forward", 0, 1), interval("backward", 3, 4)]]
    second = [[interval("forward", 100, 106)]]
    found = bubble([first, second])
    assert found.span_s == 10
    assert found.stages == pytest.approx((0.2,))


def test_a_clock_that_is_ahead_on_another_host_changes_nothing_in_training():
    ranks = [
        [interval("forward", 0, 1), interval("backward", 4, 6)],
        [interval("forward", 1, 2, 1), interval("backward", 2, 4, 1)],
    ]
    ahead = [ranks[0], [i._replace(start_s=i.start_s + 50, end_s=i.end_s + 50) for i in ranks[1]]]
    assert bubble([ahead]).stages == bubble([ranks]).stages == pytest.approx((0.5, 0.5))


def test_forward_only_spans_from_the_first_stages_start_to_the_last_ones_end():
    assert span([[interval("forward", 0, 2)], [interval("forward", 2, 5, 1)]]) == 5


def test_nothing_recorded_is_an_error():
    with pytest.raises(ValueError, match="was the meter on"):
        bubble([[[], []]])


def test_chrome_events():
    events = json.loads(
        json.dumps(chrome_events([[interval("forward", 1.5, 2)], [interval("backward", 2, 3, 1)]], "actor", 7, 1.0))
    )
    names = {(event["name"], event.get("tid")): event for event in events}
    assert names["process_name", None]["args"] == {"name": "actor"}
    assert names["thread_name", 1]["args"] == {"name": "stage 1, rank 1"}
    forward = names["F0.0", 0]
    assert (forward["ph"], forward["pid"], forward["ts"], forward["dur"], forward["cat"]) == (
        "X",
        7,
        500_000,
        500_000,
        "forward",
    )
    assert names["B0.0", 1]["args"] == {"micro_batch": 0, "chunk": 0, "stage": 1}
    assert names["B0.0", 1]["cname"] != forward["cname"]
