"""Micro-batches: every sequence once, within the budget, balanced, and clear errors."""

import random

import pytest

from hybridflow.data.packing import pace, partition


def padded(lengths, group, multiple):
    return -(-sum(lengths[i] for i in group) // multiple) * multiple


def test_random_cases_hold_the_budget_and_lose_nothing():
    rng = random.Random(0)
    for _ in range(300):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 50))]
        multiple = rng.choice([1, 2, 4, 8])
        budget = rng.randint(64, 200)
        groups = partition(lengths, budget, multiple)
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        assert all(group == sorted(group) and padded(lengths, group, multiple) <= budget for group in groups)
        assert len(groups) <= -(-sum(lengths) // (budget // multiple * multiple)) * 11 / 9 + 1
        for count in (len(groups), len(groups) + 1, len(groups) + 7):
            forced = partition(lengths, budget, multiple, count)
            assert len(forced) == count
            assert sorted(i for group in forced for i in group) == list(range(len(lengths)))
            assert all(padded(lengths, group, multiple) <= budget for group in forced)
            empty = [not group for group in forced]
            assert empty == sorted(empty), "empty groups come last"


def test_groups_are_balanced():
    lengths = [random.Random(1).randint(10, 100) for _ in range(64)]
    loads = [sum(lengths[i] for i in group) for group in partition(lengths, 1000)]
    assert len(loads) == -(-sum(lengths) // 1000)
    assert max(loads) - min(loads) <= 10
    loads = [sum(lengths[i] for i in group) for group in partition(lengths, 1000, count=8)]
    assert max(loads) - min(loads) <= 20


def test_tight_fit_where_the_balanced_rule_fails():
    # longest first to the emptiest group gives 3+2+2 = 7 > 6; first fit finds 3+3 and 2+2+2
    lengths = [3, 3, 2, 2, 2]
    assert partition(lengths, 6) == [[0, 1], [2, 3, 4]]
    assert partition(lengths, 6, count=2) == [[0, 1], [2, 3, 4]]


def test_the_multiple_eats_into_the_budget():
    assert partition([7, 7], 15, multiple=1) == [[0, 1]]
    assert partition([7, 7], 15, multiple=8) == [[0], [1]]


def test_more_groups_than_sequences():
    assert partition([5, 4], 8, count=4) == [[0], [1], [], []]
    assert partition([], 8, count=2) == [[], []]
    assert partition([], 8) == []


def test_errors_name_the_numbers_and_the_key():
    with pytest.raises(ValueError, match="a sequence of 17 tokens does not fit micro_batch_tokens=16"):
        partition([3, 17, 4], 16)
    with pytest.raises(ValueError, match="a sequence of 15 tokens .* micro_batch_tokens=15 .*multiple of 8"):
        partition([15], 15, multiple=8)
    with pytest.raises(ValueError, match="do not fit 1 micro-batches of micro_batch_tokens=16: 2 are needed"):
        partition([10, 10], 16, count=1)


def test_attention_is_spread_where_tokens_alone_would_not_do_it():
    # equal tokens: one long sequence beside short ones in every group, rather than the long ones together
    lengths = [100, 100, 10] + [10] * 19
    even = partition(lengths, 400, count=2)
    assert sorted(sum(lengths[i] for i in group) for group in even) == [200, 200]
    assert [sum(lengths[i] == 100 for i in group) for group in partition(lengths, 400, count=2, attention=0.01)] == [1, 1]


def test_evening_out_never_makes_the_slowest_group_slower():
    rng, better = random.Random(2), 0
    for _ in range(200):
        lengths = [int(10 * rng.paretovariate(1.2)) % 400 + 1 for _ in range(rng.randint(2, 60))]
        budget, cost = rng.randint(420, 900), rng.choice([1e-4, 1e-3, 1e-2])
        plain = partition(lengths, budget)
        found = partition(lengths, budget, attention=cost)
        assert len(found) == len(plain)
        assert sorted(i for group in found for i in group) == list(range(len(lengths)))
        assert all(group == sorted(group) and padded(lengths, group, 1) <= budget for group in found)
        assert pace(found, lengths, cost) <= pace(plain, lengths, cost)
        better += pace(found, lengths, cost) < pace(plain, lengths, cost)
    assert better > 20
