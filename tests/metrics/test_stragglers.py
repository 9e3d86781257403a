"""The slowest of peers, by hand."""

import pytest

from hybridflow.metrics.stragglers import IN_A_ROW, Stragglers, by_calls, by_passes, often_slow, slowest
from megatron_ext.intervals import Interval
from megatron_ext.layout import Layout


def test_the_slowest_against_the_median_of_the_others():
    assert slowest({(0,): 1.0, (1,): 2.0, (2,): 1.2, (3,): 1.6}) == ((1,), pytest.approx(2.0 / 1.2 - 1), pytest.approx(0.8))
    assert slowest({(0,): 3.0, (1,): 2.0}).excess == pytest.approx(0.5)
    assert slowest({(0,): 3.0}) is None and slowest({}) is None and slowest({(0,): 0.0, (1,): 0.0}) is None


def test_ranks_that_wait_for_each_other_are_one_unit():
    seconds = dict(enumerate((1.0, 1.1, 4.0, 3.0, 1.2, 1.3, 5.0, 2.0)))
    # of two replicas TP2 x PP2 the second is ranks 2, 3 and 6, 7; a stage's time is that of the rank that waited for nobody
    assert by_calls(Layout(8, tp=2, pp=2), range(8), seconds) == {(0, 1, 4, 5): 1.2, (2, 3, 6, 7): 3.0}
    assert by_calls(Layout(4, tp=2), (4, 5, 6, 7), seconds) == {(4, 5): 1.2, (6, 7): 2.0}
    assert by_calls(Layout(4, ep=2), range(4), seconds) == {}


def test_passes_are_compared_within_a_stage():
    def rank(stage: int, *seconds: float) -> list[Interval]:
        return [Interval.of("forward", stage, 0, number, 10.0 * number, 10.0 * number + s) for number, s in enumerate(seconds)]

    two = [[rank(0, 1, 1), rank(0, 2, 1), rank(1, 4), rank(1, 5)], [rank(0, 1), rank(0, 1), rank(1, 1), rank(1, 1)]]
    assert by_passes(Layout(4, pp=2), (4, 5, 6, 7), two) == [{(4,): 3.0, (5,): 4.0}, {(6,): 5.0, (7,): 6.0}]
    assert by_passes(Layout(4, tp=2), range(4), two[:1]) == [{(0, 1): 2.0, (2, 3): 4.0}]


def step(slow: int, excess: float = 0.5) -> list[dict[tuple[int, ...], float]]:
    return [{(rank,): 1 + excess * (rank == slow) for rank in range(4)}]


def test_another_rank_each_time_is_no_straggler():
    lines: list[str] = []
    stragglers = Stragglers(["a", "a", "b", "b"], lines.append)
    for number in range(4 * IN_A_ROW):
        stragglers.look({"rollout": step(number % 4)}, step_seconds=2.0)
    for _ in range(IN_A_ROW):
        stragglers.look({"rollout": step(3, excess=0.1)}, step_seconds=2.0)  # slow, but not much
        stragglers.look({"restore": step(3)}, step_seconds=200.0)  # much, but of little
    assert lines == []
    for _ in range(IN_A_ROW):
        stragglers.look({"rollout": [{(0, 1): 1.0, (1, 2): 1.5}]}, step_seconds=2.0)
    assert len(lines) == 1 and lines[0].startswith(
        "warning: one of the ranks 1, 2 (they wait for each other) on a, b was the slowest in rollout for"
    )


def test_the_summary_names_who_was_often_slow():
    def rows(rank: int, excess: float, count: int) -> list[dict[str, float]]:
        return [{"step": 1, "straggler/rollout_rank": rank, "straggler/rollout_excess": excess} for _ in range(count)]

    few, many = rows(1, 0.3, IN_A_ROW - 1), rows(2, 0.4, IN_A_ROW + 2)
    assert often_slow(few) == often_slow(rows(1, 0.1, 50)) == often_slow([{"step": 1}]) == ""
    assert (
        often_slow(many + rows(1, 0.3, 3)) == f"rank 2 in rollout ({IN_A_ROW + 2} of {IN_A_ROW + 5} steps, 40% over its peers)"
    )
    assert often_slow(many + rows(2, 0.1, 2 * IN_A_ROW)) == ""  # less than half
