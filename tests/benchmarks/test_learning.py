"""benchmarks/learning.py: how curves are held against those of another run."""

import pytest

from benchmarks.learning import against


def test_curves_apart_and_spread():
    ours, others = [[0.0] * 20 + [0.5] * 20, [0.0] * 20 + [0.7] * 20], [[0.1] * 30]
    found = against(ours, others)
    assert found == {"apart": pytest.approx(0.5), "spread": pytest.approx(0.1), "steps": 30}
    assert against(others, others)["apart"] == 0
