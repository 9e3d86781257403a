"""Lengths of micro-batches: few different ones, little padding, within the budget."""

import pytest

from hybridflow.roles.megatron import _padded


@pytest.mark.parametrize("multiple", [1, 2, 3, 8])
def test_lengths_are_few_and_hardly_longer(multiple):
    budget = 5000
    lengths = {tokens: _padded(tokens, multiple, budget) for tokens in range(1, budget // multiple * multiple + 1)}
    for tokens, length in lengths.items():
        assert tokens <= length <= budget
        assert length % multiple == 0
        assert length <= tokens * (1 + 1 / 8) + 2 * multiple
    assert len({length for tokens, length in lengths.items() if tokens > 2500}) <= 24


def test_examples():
    assert _padded(39_000, 1, 40_960) == 40_960
    assert _padded(38_900, 1, 40_960) == 38_912
    assert _padded(40_900, 1, 40_960) == 40_960
    assert _padded(40_900, 1, 40_950) == 40_950
