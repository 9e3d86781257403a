"""The adaptive KL coefficient: the controller's steps by hand, and that it holds its target on a simulated policy."""

import pytest

from hybridflow.algorithms.kl import KLCoefficient


@pytest.mark.parametrize(
    ("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98), (-3.0, 0.98)], ids=str
)
def test_a_step_in_proportion_to_the_error_and_bounded(kl, factor):
    coefficient = KLCoefficient(0.2, target=6.0, gain=0.1)
    coefficient.adapt(kl)
    assert coefficient.value == pytest.approx(0.2 * factor)


def test_without_a_target_it_stays():
    coefficient = KLCoefficient(0.2)
    coefficient.adapt(100.0)
    assert coefficient.value == 0.2


@pytest.mark.parametrize("start", [0.01, 1.0])
def test_it_finds_the_coefficient_that_holds_the_target(start):
    coefficient = KLCoefficient(start, target=2.0)
    for _ in range(600):
        coefficient.adapt(0.3 / coefficient.value)  # a policy that goes the further the less it is penalised
    assert coefficient.value == pytest.approx(0.15, rel=0.01)
