"""The search: sets of roles, Pareto fronts, the best of a small cluster found by trying everything, and its config."""

import dataclasses
import json
from itertools import product

import numpy as np
import pytest

from benchmarks.random_job import RECIPE, random_model
from hybridflow.config.load import load, save
from hybridflow.config.preflight import check_shapes
from hybridflow.controller.placement import place
from hybridflow.planner import options
from hybridflow.planner.calibration import GIB, Calibration
from hybridflow.planner.forecast import Workload, forecast, workload
from hybridflow.planner.hardware import Cluster, named
from hybridflow.planner.memory import Release, memory_plan
from hybridflow.planner.options import JobRole, front
from hybridflow.planner.outcome import configured, job_roles, why_slower
from hybridflow.planner.passes import Machine
from hybridflow.planner.search import ENGINE, STAGES, PoolPlan, Search, partitions, placements, pool_sizes
from tests.config.folders import write_config, write_model
from tests.planner.models import ROOT, h200s, shape

WORK = Workload(64, 256, 256, 256.0, 768.0, 1536, 2, 1, True)
ACTOR = JobRole("actor", shape("qwen2_180m"), True, True)
CRITIC = JobRole("critic", shape("qwen2_180m", "value"), True, True)
REFERENCE = JobRole("reference", shape("qwen2_180m"), False, True)


def small_machine(gpus: int, gib: float) -> Machine:
    """GPUs so small that memory decides."""
    gpu = dataclasses.replace(named("H200"), memory_bytes=int(gib * GIB))
    return Machine(Cluster(gpu, 1, gpus), Calibration(fixed_bytes=0.5 * GIB))


def test_partitions_are_bells_number():
    assert [len(set(partitions("abcde"[:n]))) for n in range(6)] == [1, 1, 2, 5, 15, 52]
    found = list(placements(["actor", "critic"]))
    assert len(found) == len(set(found)) == 4
    assert (("actor", ENGINE), ("critic",)) in {tuple(sorted(partition)) for partition in found}
    assert all(sum(ENGINE in pool for pool in partition) == 1 for partition in found)


def test_pool_sizes_are_parts_of_a_node_and_whole_nodes():
    assert pool_sizes(1, 8) == [1, 2, 4, 8]
    assert pool_sizes(5, 8) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert pool_sizes(128, 8)[-4:] == [384, 512, 768, 1024]


def test_a_front_is_what_no_other_beats():
    rows = np.random.default_rng(0).integers(0, 20, (200, 3)).astype(float)
    kept = front(rows, np.zeros(3))
    assert len({tuple(rows[index]) for index in kept}) == len(kept)
    beaten = {tuple(row) for row in rows if any((other <= row).all() and (other < row).any() for other in rows)}
    assert {tuple(rows[index]) for index in kept} == {tuple(row) for row in rows} - beaten
    thinner = front(rows, np.array([2.0, 2.0, 2.0]))
    assert len(thinner) < len(kept)
    assert all(any((rows[index] <= row + 2).all() for index in thinner) for row in rows)


def everything(search: Search, partition, gpus: int) -> float:
    """The shortest step of a placement, over every allocation, every option of every role and every rollout TP."""

    def plans(names, size):
        roles = [name for name in names if name != ENGINE]
        for chosen in product(*(list(search.options.all(search.roles[name], size)) for name in roles)):
            if chosen and sum(o.static for o in chosen) + max(o.extra for o in chosen) > search.options.capacity:
                continue
            yield from search._with_engine(names, size, chosen)

    def stages(plan: PoolPlan) -> tuple[float, ...]:
        return plan.costs

    best = float("inf")
    for sizes in product(pool_sizes(1, gpus), repeat=len(partition)):
        if sum(sizes) > gpus:
            continue
        pools = [{stages(plan) for plan in plans(names, size)} for names, size in zip(partition, sizes, strict=True)]
        for costs in product(*pools):
            best = min(best, sum(max(stage) for stage in zip(*costs, strict=True)))
    return best


@pytest.mark.parametrize(
    ("roles", "gpus", "gib"), [((ACTOR, REFERENCE), 4, 6), ((ACTOR, CRITIC), 2, 9), ((ACTOR, CRITIC), 4, 5)]
)
def test_the_best_is_that_of_trying_everything(monkeypatch, roles, gpus, gib):
    monkeypatch.setattr(options, "MICRO_BATCH_TOKENS", (4096, 16384))
    monkeypatch.setattr(options, "CHUNKS", (1, 2))
    search = Search(roles, small_machine(gpus, gib), WORK)
    ranked = search.run()
    assert [found.seconds for found in ranked] == sorted(found.seconds for found in ranked)
    for found in ranked:
        best = everything(search, found.partition, gpus) if len(found.partition) <= gpus else float("inf")
        assert best * (1 - 1e-9) <= found.seconds <= best * 1.02, found
        assert bool(found.pools) == (best < float("inf"))
    assert ranked[0].pools


def test_losers_have_a_reason():
    ranked = Search([ACTOR, CRITIC], small_machine(4, 9), WORK).run()
    for loser in ranked[1:]:
        reason = why_slower(loser, ranked[0])
        if not loser.pools:
            assert "fit" in reason or "GPUs" in reason
            continue
        stage = max(STAGES, key=lambda name: loser.stages[name] - ranked[0].stages[name])
        assert reason.startswith(f"{stage} {loser.stages[stage]:.3g} s against {ranked[0].stages[stage]:.3g}: ")
        assert ("while others wait" in reason) == (len(loser.pools) > 1)


def test_a_thousand_gpus_are_searched_by_looking_at_few_ways():
    """Two roles on 1,024 GPUs; that four take under a minute is in the README."""
    actor = JobRole("actor", shape("qwen2_7b"), True, True)
    reference = JobRole("reference", shape("qwen2_7b"), False, True)
    work = Workload(1024, 8192, 8192, 512.0, 1024.0, 2048, 4, 1, True)
    search = Search([actor, reference], Machine(Cluster(named("H200"), 128, 8)), work)
    ranked = search.run()
    assert len(ranked) == 4 and all(found.pools for found in ranked)
    assert max(sum(pool.gpus for pool in found.pools) for found in ranked) == 1024
    assert search.evaluated < 20_000 and search.combined < 100_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "small", max_position_embeddings=2048)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_configs_of_all_placements_are_accepted_and_forecast_alike(tmp_path, model, algorithm):
    sampling = {"max_prompt_tokens": 256, "max_response_tokens": 768}
    roles = {"actor": {"micro_batch_tokens": 2048}, "rollout": {"tp": 1}}
    sections = {"roles": roles, "cluster": {"ranks_per_node": 4, "device": "cuda"}, "sampling": sampling}
    sections["algorithm"] = {"name": algorithm, "kl_coefficient": 0.1}
    path = write_config(tmp_path, model, **sections)
    config = load(path, ["model.dtype=bfloat16"])
    models, work = check_shapes(config), workload(config)
    machine = Machine(Cluster(named("H200"), 1, 4))
    search = Search(job_roles(config, models, work), machine, work)
    placed = [found for found in search.run() if found.pools and sum(pool.gpus for pool in found.pools) == 4]
    assert {len(found.pools) for found in placed} >= {1, 2, 3}
    for best in placed:
        save(configured(config, best, machine.cluster), tmp_path / "best.yaml")
        chosen = load(tmp_path / "best.yaml")
        assert [len(pool) for pool in place(chosen).pools] == sorted((pool.gpus for pool in best.pools), reverse=True)
        found = forecast(chosen, check_shapes(chosen), machine, work)
        # the search counts on weights and gradients to leave, the job keeps what fits
        releases = sum(phase.causes.get("release", 0.0) for phase in search.phases(best))
        assert best.seconds - releases - 1e-9 <= found.seconds <= best.seconds + 1e-9, best.partition
        assert found.fullest().nbytes < machine.cluster.gpu.memory_bytes
        assert {phase.name for phase in search.phases(best)} == {phase.name for phase in found.phases}


@pytest.mark.parametrize(("prompts", "response_tokens", "sleeps"), [(64, 2048, True), (8, 512, False)])
def test_what_it_counts_on_is_what_the_job_does(tmp_path, prompts, response_tokens, sleeps):
    """An engine that has all the room beside the optimizer's states: the weights have to go, as the search took for granted.
    And one that has enough beside all of training: it stays awake, and nothing goes."""
    random_model(json.loads((ROOT / "configs" / "models" / "qwen2_7b.json").read_text()), tmp_path / "model")
    sizes = {"ranks": 2, "prompts": prompts, "samples": 8, "mini_batches": 2, "steps": 1, "prompt_tokens": 255, "terms": 85}
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tmp_path / "model", response_tokens=response_tokens, **sizes))
    config = load(tmp_path / "recipe.yaml")
    models, work, machine = check_shapes(config), workload(config), Machine(h200s(2))
    search = Search(job_roles(config, models, work), machine, work)
    best = search.run()[0]
    chosen = configured(config, best, machine.cluster)
    total = machine.cluster.gpu.memory_bytes
    assert chosen.roles.rollout.sleep == sleeps
    assert memory_plan(chosen, models, total).releases["actor"] == Release(gradients=sleeps, weights=sleeps)
    found = forecast(chosen, check_shapes(chosen), machine, work)
    assert found.seconds == pytest.approx(best.seconds) and found.fullest().nbytes < total
    found = forecast(chosen, models, machine, work)
    assert 0.9 * total < found.fullest().nbytes <= (1 - options.RESERVE) * total
