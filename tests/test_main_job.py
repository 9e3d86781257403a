"""The whole job from the command line, on CPU ranks over gloo: two different jobs at once on one host and one of them on Ray,
and a killed rank."""

import collections
import itertools
import json
import math
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.data.tiny_model import make_tiny_model
from hybridflow.report.page import report
from tests import small_job
from tests.processes import living
from tests.small_job import TIMEOUT, finish, ranks_of, rows

# The quickstart in small.
QUICK = ["warm_start={steps: 20, batch_size: 64}", "run.steps=3", "evaluation.problems=16", "batch.prompts=16", "run.seed=3"]
# What the quickstart leaves out: DP, a reference, several epochs, sequences that don't divide over ranks.
OTHER = [
    *("cluster.ranks_per_node=4", "roles.actor.tp=1", "roles.actor.pp=2", "roles.actor.sequence_parallel=false"),
    *("roles.rollout.tp=1", "roles.reference={tp: 2, pp: 1}", "algorithm.kl_coefficient=0.1", "algorithm.epochs=2"),
    *("algorithm.loss_level=sequence", "algorithm.normalize_advantages=false", "batch.prompts=5"),
    *("batch.samples_per_prompt=3", "batch.mini_batches=2", "warm_start.steps=2", "run.steps=2", "evaluation.problems=3"),
    *("resharding.bucket_mb=1", "resharding.verify_every=1", "sampling.temperature=1.0", "run.profile=true"),
]


def start(model: Path, run: Path, overrides: list[str]) -> subprocess.Popen:
    return small_job.start("configs/quickstart.yaml", f"model.path={model}", f"run.dir={run}", *overrides)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def jobs(model, tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """All jobs' run folders and output. Two run at the same time; a third would have the cores no sooner."""
    root = tmp_path_factory.mktemp("runs")
    asked = {"quick": QUICK, "other": OTHER}
    started = {name: start(model, root / name, options) for name, options in asked.items()}
    found = {name: (root / name, finish(process)) for name, process in started.items()}
    return found | {"ray": (root / "ray", finish(start(model, root / "ray", [*QUICK, "cluster.launcher=ray"])))}


@pytest.mark.timeout(2 * TIMEOUT + 60)
def test_metrics_of_every_step(jobs):
    run, _ = jobs["quick"]
    steps = rows(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["reshard/verified"] for step in steps] == [True, None, None]
    expected = {
        *("reward/mean", "rollout/response_tokens_mean", "rollout/truncated_fraction", "reshard/bytes_received"),
        *("time/step", "time/wake", "time/reshard", "time/rollout", "time/sleep", "time/reward", "time/update"),
        *("perf/step_tokens_per_second_per_gpu", "perf/rollout_tokens_per_second_per_gpu", "perf/mfu"),
        *("perf/update_tokens_per_second_per_gpu", "mismatch/log_prob_abs_mean", "mismatch/log_prob_abs_max", "mismatch/kl"),
        *("time/release", "time/restore", "memory/peak_bytes/release", "memory/peak_bytes/restore"),
        *("memory/peak_bytes/update", "memory/peak_bytes/rollout", "memory/peak_bytes/sleep"),
        *("actor/loss", "actor/lr", "actor/grad_norm", "actor/entropy", "actor/clip_fraction", "actor/kl_old"),
    }
    for step in steps:
        assert expected <= step.keys()
        assert 0 < step["mismatch/log_prob_abs_max"] <= 1e-3
        assert 0 <= step["mismatch/log_prob_abs_mean"] <= step["mismatch/log_prob_abs_max"]
        assert math.isfinite(step["actor/grad_norm"])
        phases = sum(step[f"time/{name}"] for name in ("wake", "reshard", "rollout", "sleep", "reward", "update"))
        assert phases <= step["time/step"]


def test_ray_gives_what_torchrun_gives(jobs):
    ours, theirs = (rows(jobs[name][0] / "metrics.jsonl") for name in ("ray", "quick"))
    assert [step.keys() for step in ours] == [step.keys() for step in theirs] and len(ours) == 3
    for step, other in zip(ours, theirs, strict=True):
        same = [name for name in step if name.partition("/")[0] not in ("time", "perf", "memory", "straggler")]
        assert len(same) > 15
        for name in same:  # approx does not take None, for what a step does not measure
            near = pytest.approx(other[name], rel=0, abs=1e-6) if isinstance(other[name], float) else other[name]
            assert step[name] == near, name
    samples = [(jobs[name][0] / "samples.jsonl").read_text() for name in ("ray", "quick")]
    assert samples[0] == samples[1]


def test_the_warm_start_learns_and_evaluations_are_recorded(jobs):
    run, output = jobs["quick"]
    losses = [row["loss"] for row in rows(run / "warm_start.jsonl")]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]
    assert [(row["step"], row["problems"]) for row in rows(run / "evaluation.jsonl")] == [(0, 16), (3, 16)]
    assert "greedy, 16 held-out problems" in output
    for path in ("config.yaml", "plots/reward.png", "summary.json"):
        assert (run / path).stat().st_size > 0
    assert list((run / "tensorboard").iterdir())


def test_a_healthy_job_warns_of_nothing(jobs):
    """Neither the canary nor the watch over memory."""
    assert "warning" not in "".join(output for _, output in jobs.values())


def test_evaluation_problems_never_occur_in_training(jobs):
    for run, _ in jobs.values():
        samples = rows(run / "samples.jsonl")
        held_out = {tuple(row["prompt_tokens"]) for row in samples if row["kind"] == "evaluation"}
        trained = {tuple(row["prompt_tokens"]) for row in samples if row["kind"] == "train"}
        assert held_out
        assert trained
        assert not held_out & trained


@pytest.mark.parametrize("name", ["quick", "other"])
def test_the_exported_model_gives_vllms_greedy_tokens(jobs, name):
    run, _ = jobs[name]
    exported = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    last = max(row["step"] for row in rows(run / "evaluation.jsonl"))
    answers = [row for row in rows(run / "samples.jsonl") if row["kind"] == "evaluation" and row["step"] == last]
    assert len(answers) in (3, 16)
    for row in answers:
        tokens = torch.tensor([row["prompt_tokens"]])
        generated = exported.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert generated[0, tokens.shape[1] :].tolist() == row["tokens"]


def test_a_job_with_data_parallel_ranks_a_reference_and_several_epochs(jobs):
    run, _ = jobs["other"]
    steps = rows(run / "metrics.jsonl")
    assert [step["reshard/verified"] for step in steps] == [True, True]
    for step in steps:
        assert step["mismatch/log_prob_abs_max"] <= 1e-3
        assert step["time/reference"] > 0
        assert step["time/log_probs"] > 0
    # the reference is a copy of the policy before the first step: their first difference comes with the second update
    assert steps[0]["actor/kl_reference"] < 0.05
    assert len([row for row in rows(run / "samples.jsonl") if row["kind"] == "train"]) == 2 * 15


def test_the_timeline_of_a_step(jobs):
    run, _ = jobs["other"]
    assert not (jobs["quick"][0] / "timeline").exists()
    assert len(list((run / "timeline").iterdir())) == 2
    for step in (1, 2):
        events = json.loads((run / "timeline" / f"step-{step}.json").read_text())["traceEvents"]
        rows = collections.defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        phases = rows.pop((0, 0))
        assert sorted(rows) == [(row, rank) for row in (1, 2, 3) for rank in range(4)]  # and two pipelines
        rows = {row: spans for row, spans in rows.items() if row[0] == 1}
        assert all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(sorted(phases)))
        assert {"rollout", "reshard", "reference", "log_probs", "update"} <= {name for _, _, name in phases}
        for calls in rows.values():
            roles, methods = calls[::2], calls[1::2]  # a call's role, and the method within it
            assert {name for _, _, name in roles} == {"actor", "reference", "rollout"}
            assert [span[:2] for span in roles] == [span[:2] for span in methods]
            assert all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(roles))  # as they were run, one by one
            assert [name for _, _, name in methods].count("update") == 2 * 2
            at_work = sum(end - start for start, end, _ in roles)
            within = sum(max(min(end, b) - max(start, a), 0) for start, end, _ in roles for a, b, _ in phases)
            assert within > 0.95 * at_work, (within, at_work)


def test_a_report_of_two_jobs(jobs, tmp_path):
    (quick, _), (other, _) = jobs["quick"], jobs["other"]
    page = report([quick, other], tmp_path / "report.html").read_text()
    assert "finished: 3 of 3 steps" in page and "finished: 2 of 2 steps" in page and "Gaps in the run" not in page
    for name in ("Loss of the actor", "Loss of the warm start", "Seconds by phase", "Pipeline bubble of the actor's updates"):
        assert json.dumps(name).replace("'", "\\u0027") in page  # Jinja's JSON
    assert "quick: the bubble was not measured" in page and "other: the bubble" not in page
    assert "before training" in page and "where roles run" in page and "megatron-core" in page


def test_a_run_that_is_there_is_not_overwritten(jobs, model):
    run, _ = jobs["quick"]
    before = (run / "metrics.jsonl").read_text()
    again = start(model, run, QUICK)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 2
    assert "run.overwrite" in output
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("launcher", "rank", "roles"), [("torchrun", "2", "rollout"), ("ray", "[012]", "(actor|rollout)")])
def test_a_rollout_on_a_rank_of_its_own_and_a_rank_that_is_killed(model, tmp_path, launcher, rank, roles):
    """Under torchrun the rollout's rank is killed, which is in another pool than the driver's."""
    options = [*QUICK, "run.steps=1000", "warm_start.steps=1", f"cluster.launcher={launcher}", "cluster.ranks_per_node=3"]
    options += ["roles.actor={ranks: [0, 1], pp: 1}", "roles.rollout={ranks: [2], tp: 1}"]
    process = start(model, tmp_path / "run", options)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    try:
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.2)
            assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        ranks_of(process)[2].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        last = output.rstrip().rpartition("\n")[2]
        at = r"(died in \w+\.\w+ \(step \d+, \w+\)|was ended by SIGKILL in .*phase \w+ after \d+ steps): .*"
        assert re.match(rf"hybridflow: error: rank {rank} on \S+ {at}; its roles: {roles}(;|$)", last), last
        assert time.monotonic() - killed < 60
        assert living(family) == []
        first = json.loads(metrics.read_text().splitlines()[0])
        assert first["reshard/verified"] is True and first["mismatch/log_prob_abs_max"] < 1e-3
        assert "actor TP2 -> rollout one rank: resharding: " in output
        assert "pool 1: rank 2: rollout" in (tmp_path / "run" / "placement.txt").read_text()
    finally:
        process.kill()
