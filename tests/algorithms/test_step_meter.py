"""What a step measures, from roles that answer with made-up numbers."""

import json

import pytest

from hybridflow.algorithms.loop import make_algorithm
from megatron_ext.intervals import Interval
from tests.algorithms.fakes import fake_run, problems


def test_a_steps_metrics_are_means_over_its_updates(tmp_path):
    run, _ = fake_run(tmp_path, "algorithm.name=ppo", "batch.mini_batches=2")
    ppo = make_algorithm(run)
    run.begin_step()
    ppo.step(problems(2))
    run.finish_step()
    step = run.recorder.history.steps[0]
    assert step["critic/loss"] == step["actor/loss"] == 0.5 and step["critic/lr"] == 0.1
    assert step["critic/explained_variance"] is not None
    assert {"time/values", "time/update", "time/update_critic"} <= step.keys()


def test_nothing_of_a_step_reaches_the_next(tmp_path):
    run, _ = fake_run(tmp_path, "batch.mini_batches=2")
    grpo = make_algorithm(run)
    for _ in range(2):
        run.begin_step()
        assert run.metrics == {} and run.meter.updates("actor") == 0
        with run.recorder.phase("rollout"):
            grpo.step(problems(2))
        assert run.meter.updates("actor") == 2
        run.finish_step()
    first, second = run.recorder.history.steps
    assert first.keys() == second.keys() and first["step"] + 1 == second["step"]
    assert first["driver/bytes_sent"] == second["driver/bytes_sent"]


def test_memory_is_the_most_of_any_rank_by_phase(tmp_path):
    run, _ = fake_run(tmp_path)
    reports = iter([[{"actor.update": 99}], [{"actor.update": 5, "rollout.generate": 3}, {"actor.update": 7}]])
    run.worker._answers["memory"] = lambda: next(reports)
    run.begin_step()
    run.finish_step()
    step = run.recorder.history.steps[0]
    assert (step["memory/peak_bytes/update"], step["memory/peak_bytes/rollout"]) == (7, 3)


def test_the_time_that_a_checkpoint_took_is_in_the_row_of_the_next_step(tmp_path):
    run, _ = fake_run(tmp_path)
    with run.recorder.phase("save") as phase:
        phase.seconds = 2.5
    run.begin_step()
    assert run.metrics == {"time/save": pytest.approx(2.5)}


def test_the_bubble_is_that_of_the_actors_updates(tmp_path):
    run, _ = fake_run(tmp_path, "run.profile=true")
    update = [Interval.of("forward", 0, 0, 0, 0.0, 1.0), Interval.of("backward", 0, 0, 0, 3.0, 4.0)]
    log_probs = [Interval.of("forward", 0, 0, 0, 9.0, 10.0)]
    busier = [Interval.of("forward", 1, 0, 0, 1.0, 2.0), Interval.of("backward", 1, 0, 0, 2.0, 4.0)]
    reports = iter([[["of the warm start"]] * 2, [[log_probs, update], [[], busier]]])
    run.actor._answers["take_passes"] = lambda: next(reports)
    run.begin_step()
    run.finish_step()
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (logged["pipeline/bubble_mean"], logged["pipeline/bubble_max"]) == (0.375, 0.5)
    assert run.meter.profile.passes == {"actor": [(log_probs, []), (update, busier)]}
