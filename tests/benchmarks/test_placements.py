"""benchmarks/placements.py: its jobs would start, and what it makes of their metrics."""

import pytest

from benchmarks.placements import CASES, summary, table, write_recipe
from hybridflow.config.load import load
from hybridflow.config.preflight import check
from hybridflow.controller.placement import place
from hybridflow.data.tiny_model import make_tiny_model


def test_the_jobs_would_start(tmp_path):
    recipe = write_recipe(make_tiny_model(tmp_path / "tiny", max_positions=256), tmp_path)
    configs = {name: load(recipe, [f"run.dir={tmp_path}/run", *overrides]) for name, overrides in CASES.items()}
    pools = {name: place(config).pools for name, config in configs.items()}
    assert pools["colocated, torchrun"] == pools["colocated, ray"] == ((0, 1),)
    assert pools["rollout apart, torchrun"] == pools["rollout apart, ray"] == ((0,), (1,))
    for name, config in configs.items():
        assert check(config).keys() == {"actor", "critic", "reference", "reward"}
        assert config.cluster.launcher in name


def test_medians_leave_the_warm_up_out():
    seconds = [9.0, 4.0, 1.0, 3.0, 2.0]
    rest = {"reshard/verified": None, "reshard/bytes_received": 7, "rollout/response_tokens_mean": 6.0}
    steps = [{"time/step": s, "time/rollout": s / 2, "mismatch/log_prob_abs_mean": s / 100, **rest} for s in seconds]
    found = summary(steps, warmup=2)
    assert found["median"] == {"time/step": 2.0, "time/rollout": 1.0}
    assert found["steps_seconds"] == seconds and found["mismatch_log_prob_abs_mean"] == 0.09
    shown = table({"a": found, "another": {"median": {"time/step": 0.5, "time/wake": 0.25}}}).splitlines()
    assert shown[0].split() == ["seconds", "(median)", "a", "another"]
    assert [line.split() for line in shown[1:3]] == [["step", "2.000", "0.500"], ["rollout", "1.000", "-"]]
    assert len({len(line) for line in shown}) == 1
    with pytest.raises(ValueError, match="leaves none of 5 steps"):
        summary(steps, warmup=5)
