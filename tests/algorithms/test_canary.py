"""The canary: silent while rounding alone is at work, and heard at once when a weight was not written."""

import random

import pytest

from hybridflow.algorithms.canary import REPEAT, Canary

BF16 = ("bfloat16", "bfloat16")


@pytest.mark.parametrize(("dtypes", "level"), [(("float32", "float32"), 3e-5), (BF16, 0.04), (("float32", "bfloat16"), 0.03)])
def test_silent_in_a_healthy_run(dtypes, level):
    draw = random.Random(0)
    canary = Canary(dtypes, temperature=1.0)
    assert not any(canary.look(level * draw.lognormvariate(0, 0.4)) for _ in range(500))
    slowly = Canary(dtypes, temperature=1.0)  # a policy that sharpens drifts, and that is no jump
    assert not any(slowly.look(level * (1 + step / 100)) for step in range(500))


def test_a_jump_is_said_once_and_again_when_it_goes_on():
    canary = Canary(BF16, temperature=1.0)
    assert [canary.look(gap) for gap in (0.04, 0.05, 0.03)] == [""] * 3
    text = canary.look(0.31)
    assert text.startswith(
        "warning: vLLM's log-probs are 0.31 away from Megatron's on average, where 0.04 is usual in this run"
    )
    assert "resharding.verify_every=1" in text and "\n" not in text
    assert [bool(canary.look(0.3)) for _ in range(REPEAT)] == [False] * (REPEAT - 1) + [True]
    assert canary.look(0.04) == ""
    assert canary.look(0.3)


def test_the_first_steps_have_no_history_to_jump_from():
    canary = Canary(("float32", "float32"), temperature=1.0)
    assert [canary.look(gap) for gap in (1e-6, 2e-3, 1e-5)] == [""] * 3
    assert canary.look(2e-3)


@pytest.mark.parametrize("gap", [2.0, float("nan"), float("inf")])
def test_what_rounding_never_does_is_said_in_the_first_step(gap):
    assert "where rounding explains 0.7" in Canary(BF16, temperature=1.0).look(gap)


def test_a_low_temperature_magnifies_the_gap():
    cold = Canary(BF16, temperature=0.25)
    assert [cold.look(gap) for gap in (0.05, 0.05, 0.05, 0.35)] == [""] * 4
    assert cold.look(0.45)
