"""The main joint: weights from Megatron under every layout into vLLM under every TP, judged by HF's own greedy tokens."""

import pytest

from hybridflow.rollout.engine import Sampling
from tests.roles import scenarios
from tests.rollout import models

PROMPTS = [[(i * 37 + j * 11) % models.VOCABULARY for j in range(5 + i)] for i in range(6)]
GREEDY = Sampling(max_tokens=10, greedy=True)
LAYOUTS = {
    "DP4": [],
    "TP2PP2": ["roles.actor.tp=2", "roles.actor.pp=2", "roles.actor.sequence_parallel=true"],
    "PP4": ["roles.actor.pp=4"],
    "TP4": ["roles.actor.tp=4"],
    "PP2 of 3 + 1 layers": ["roles.actor.pp=2", "roles.actor.split.stages=[3,1]"],
}
TIMEOUT = 400  # importing Megatron and vLLM on four ranks takes a minute of CPU time

CONFIG = """
model: {{path: {model}, dtype: float32}}
cluster: {{ranks_per_node: 4}}
roles:
  rollout: {{gpu_memory_utilization: 0.1, engine_args: {{max_num_seqs: 16}}}}
sampling: {{max_prompt_tokens: 32, max_response_tokens: 16}}
data: {{task: chain_sum}}
run: {{dir: {run}}}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Three sets of weights of one shape: qwen2 with 4 layers and 4 KV heads, its output layer tied."""
    root = tmp_path_factory.mktemp("models")
    return [str(models.save_model(root / str(s), "qwen2", s, tied=True, layers=4, kv_heads=4)) for s in range(3)]


@pytest.fixture(scope="module")
def config(folders, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_text(CONFIG.format(model=folders[0], run=path.parent / "run"))
    return str(path)


@pytest.fixture(scope="module")
def world(worlds):
    used = worlds(4, "hybrid")
    yield used
    used.close()


@pytest.fixture(scope="module")
def expected(folders) -> list[list[list[int]]]:
    return [[models.greedy(models.load_model(folder), prompt, 10) for prompt in PROMPTS] for folder in folders]


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("layout", LAYOUTS)  # varies fastest: the engine is kept while its TP stays the same
@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
def test_three_updates_reach_the_engine(world, config, folders, expected, rollout_tp: int, layout: str):
    overrides = [*LAYOUTS[layout], f"roles.rollout.tp={rollout_tp}"]
    results = world.run(scenarios.reshard_and_generate, config, overrides, folders, PROMPTS, GREEDY, timeout=TIMEOUT)
    for result in results:
        assert [update["verified"] for update in result] == [True] * 3
        assert [update["tokens"] for update in result] == expected


@pytest.mark.timeout(TIMEOUT + 60)
def test_a_reference_in_another_layout_takes_the_actors_weights(world, config, folders):
    overrides = ["roles.actor.tp=2", "roles.actor.pp=2", "roles.actor.split.loss=1", "roles.reference.pp=4"]
    differences = world.run(scenarios.copy_into_reference, config, overrides, folders[2], timeout=TIMEOUT)
    assert max(differences) < 1e-5
