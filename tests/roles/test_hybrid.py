"""The main joint: weights from Megatron under every layout into vLLM under every TP, judged by HF's own greedy tokens."""

import pytest

from hybridflow.rollout.engine import Sampling
from tests.roles import scenarios
from tests.rollout import models

PROMPTS = [[(i * 37 + j * 11) % models.VOCABULARY for j in range(5 + i)] for i in range(6)]
GREEDY = Sampling(max_tokens=10, greedy=True)
LAYOUTS = {
    "DP4": "",
    "TP2 PP2": "tp: 2, pp: 2, sequence_parallel: true",
    "PP4": "pp: 4",
    "TP4": "tp: 4",
    "PP2 of 3 + 1 layers": "pp: 2, split: {stages: [3, 1]}",
    "PP2 VPP2 DP2": "pp: 2, vpp: 2",
    "EP4": "ep: 4",
    "EP2 TP2": "ep: 2, tp: 2, sequence_parallel: true",
    "EP2 ETP2": "ep: 2, etp: 2",
    "PP2 EP2": "pp: 2, ep: 2",
}
# Three sets of weights of each: family, tied output layer, layers, KV heads
MODELS = {
    "tied": ("qwen2", True, 4, 4),
    "untied": ("qwen2", False, 4, 4),
    "untied, 2 KV heads": ("llama", False, 4, 2),
    "qwen3_moe": ("qwen3_moe", False, 2, 2),
    "mixtral": ("mixtral", False, 2, 4),
}
DENSE = ("DP4", "TP2 PP2", "PP4", "TP4", "PP2 of 3 + 1 layers", "PP2 VPP2 DP2")
# Model, training layout, rollout TP, expert parallelism; an engine is kept while only the training layout changes
CASES = [("tied", layout, tp, False) for tp in (1, 2, 4) for layout in DENSE]
CASES += [("untied", "TP4", 1, False)]
CASES += [("untied", layout, 2, False) for layout in ("TP4", "PP4", "PP2 VPP2 DP2", "PP2 of 3 + 1 layers")]
CASES += [("untied, 2 KV heads", layout, 4, False) for layout in ("DP4", "TP2 PP2")]
CASES += [("qwen3_moe", layout, 2, False) for layout in ("EP4", "EP2 ETP2")]
CASES += [("qwen3_moe", "EP4", 2, True), ("qwen3_moe", "EP2 TP2", 4, False)]
CASES += [("mixtral", layout, 2, True) for layout in ("PP2 EP2", "EP2 ETP2")]
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
def folders(tmp_path_factory) -> dict[str, list[str]]:
    root, made = tmp_path_factory.mktemp("models"), {}
    for name, (family, tied, layers, kv_heads) in MODELS.items():
        sizes = {"tied": tied, "layers": layers, "kv_heads": kv_heads}
        made[name] = [str(models.save_model(root / name / str(seed), family, seed, **sizes)) for seed in range(3)]
    return made


@pytest.fixture(scope="module")
def config(folders, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_text(CONFIG.format(model=folders["tied"][0], run=path.parent / "run"))
    return str(path)


@pytest.fixture(scope="module")
def world(worlds):
    used = worlds(4, "vllm")  # which tests/roles/test_jobs.py uses after this, and closes
    yield used
    if used.alive:
        used.run(scenarios.close)


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, list[list[list[int]]]]:
    """HF's greedy tokens, by model, set of weights and prompt."""

    def tokens(folder: str) -> list[list[int]]:
        model = models.load_model(folder)
        return [models.greedy(model, prompt, 10) for prompt in PROMPTS]

    return {name: [tokens(folder) for folder in three] for name, three in folders.items()}


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize(("model", "layout", "tp", "expert_parallel"), CASES)
def test_three_updates_reach_the_engine(world, config, folders, expected, model, layout, tp, expert_parallel):
    rollout = f"roles.rollout={{tp: {tp}, expert_parallel: {str(expert_parallel).lower()}}}"
    overrides = [f"model.path={folders[model][0]}", f"roles.actor={{{LAYOUTS[layout]}}}", rollout]
    results = world.run(scenarios.reshard_and_generate, config, overrides, folders[model], PROMPTS, GREEDY, timeout=TIMEOUT)
    for result in results:
        assert [update["verified"] for update in result] == [True] * 3
        assert [update["tokens"] for update in result] == expected[model]
        assert all(update["received"] == update["least"] for update in result)


@pytest.mark.timeout(TIMEOUT + 60)
def test_a_reference_in_another_layout_takes_the_actors_weights(world, config, folders):
    overrides = ["roles.actor.tp=2", "roles.actor.pp=2", "roles.actor.split.loss=1", "roles.reference.pp=4"]
    differences = world.run(scenarios.copy_into_reference, config, overrides, folders["tied"][2], timeout=TIMEOUT)
    assert max(differences) < 1e-5
