"""What a step measures, from roles that answer with made-up numbers."""

import json

import pytest

from hybridflow.algorithms.loop import make_algorithm
from hybridflow.controller.worker import Measured
from hybridflow.metrics.nvml import INSTALL, Place
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
    run.worker._answers["measured"] = lambda: [Measured(memory) for memory in next(reports)]
    run.begin_step()
    run.finish_step()
    step = run.recorder.history.steps[0]
    assert (step["memory/peak_bytes/update"], step["memory/peak_bytes/rollout"]) == (7, 3)


def test_one_rank_of_each_host_watches_the_jobs_gpus_there(tmp_path):
    run, calls = fake_run(tmp_path)
    places = [Place("a", "GPU-1"), Place("b", "GPU-3"), Place("a", "GPU-2"), Place("b", "GPU-3"), Place("c")]
    run.worker._answers["place"] = lambda: places
    use = [{"utilization": 0.5, "memory_bytes": 3e9, "power_watts": 300.0}, {"utilization": 0.7, "memory_bytes": 2e9}]
    run.worker._answers["measured"] = lambda: [Measured(gpus=use)] + [Measured()] * 4
    for _ in range(2):
        run.begin_step()
        run.finish_step()
    assert [args for name, args in calls if name == "worker.watch_gpus"] == [({0: ["GPU-1", "GPU-2"], 1: ["GPU-3"]},)]
    step = run.recorder.history.steps[1]
    found = {name: value for name, value in step.items() if name.startswith("gpu/")}
    expected = {"gpu/utilization_mean": 0.6, "gpu/memory_bytes_max": 3e9, "gpu/power_watts_mean": 300.0}
    assert found == pytest.approx(expected)


def test_what_is_missing_to_watch_gpus_is_said_once_and_on_a_cpu_nothing(tmp_path, capsys):
    for lacks, times in ((INSTALL, 1), ("", 0)):
        run, calls = fake_run(tmp_path, "run.overwrite=true")
        run.worker._answers["place"] = lambda lacks=lacks: [Place("a", lacks=lacks)] * 3
        for _ in range(2):
            run.begin_step()
            run.finish_step()
        assert capsys.readouterr().out.count("nvidia-ml-py") == times
        assert not [name for name in run.recorder.history.steps[1] if name.startswith("gpu/")]
        assert "worker.watch_gpus" not in [name for name, _ in calls]


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
