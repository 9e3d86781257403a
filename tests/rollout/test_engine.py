"""vLLM inside four gloo ranks, compared with what `transformers` computes from the same checkpoint.

The ranks keep one engine; tests that use the same one stand together.
"""

import functools
import os
import sys

import pytest
import torch

from hybridflow.rollout.engine import Sampling
from tests.processes import PYTHON_PATH, run
from tests.rollout import models, scenarios

PROMPTS = [[(i * 37 + j * 11) % models.VOCABULARY for j in range(5 + i)] for i in range(20)]  # more than max_num_seqs
GREEDY = Sampling(max_tokens=12, greedy=True)
FAMILIES = {"llama": True, "qwen3": False, "qwen2": False}  # tied?
EXPERTS = [("qwen3_moe", tp, expert_parallel) for tp in (1, 2, 4) for expert_parallel in (False, True)[:tp]]
EXPERTS += [("mixtral", 2, True), ("mixtral", 4, False)]
TIMEOUT = 400  # importing vLLM on four ranks takes a minute of CPU time


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {name: str(models.save_model(root / name, name, seed, tied=FAMILIES[name])) for seed, name in enumerate(FAMILIES)}
    others = [("other", "qwen2", 9), ("qwen3_other", "qwen3", 10)]
    others += [(f"{name}{seed}", name, seed) for name in ("qwen3_moe", "mixtral") for seed in (1, 2)]
    return made | {name: str(models.save_model(root / name, family, seed)) for name, family, seed in others}


@pytest.fixture(scope="module")
def hf(folders) -> dict:
    return {name: models.load_model(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def greedy(hf):
    """`greedy(name)`: the tokens of transformers for every prompt."""
    return functools.cache(lambda name: [models.greedy(hf[name], prompt, 12) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def world(worlds):
    used = {}

    def run(*args):
        used["world"] = worlds(4, "engine")
        return used["world"].run(*args, timeout=TIMEOUT)

    yield run
    if used:
        used["world"].close()  # four engines are 3 GB


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize(("family", "tp", "expert_parallel"), EXPERTS)
def test_three_updates_of_experts_reach_the_engine(world, folders, greedy, family: str, tp: int, expert_parallel: bool):
    names = [f"{family}{seed}" for seed in (1, 2, 1)]
    results = world(scenarios.updates, [folders[name] for name in names], tp, expert_parallel, PROMPTS[:6], GREEDY)
    expected = [greedy(name)[:6] for name in names]
    assert expected[0] != expected[1]
    for number, tokens in enumerate(expected):
        assert [result[number]["tokens"] for result in results] == [tokens] * 4
        _assert_only_padding_is_uncovered([result[number]["uncovered"] for result in results], tp, tied=False)


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 4, 2])
def test_tokens_and_log_probs_equal_transformers(world, folders, hf, greedy, family: str, tp: int):
    sampled = Sampling(temperature=0.7, max_tokens=12)
    results = world(scenarios.against_hf, folders[family], tp, PROMPTS, [GREEDY, sampled])
    for result in results:
        best, random = result["generations"]
        assert [g.tokens for g in best] == greedy(family)
        assert random == results[0]["generations"][1]  # same prompts and seed, whatever the engine and the ranks' RNGs
    for generation, prompt in zip(random, PROMPTS, strict=True):
        reference = models.log_probs(hf[family], prompt, generation.tokens, temperature=0.7)
        assert generation.log_probs == pytest.approx(reference, abs=1e-4)
    _assert_only_padding_is_uncovered([result["uncovered"] for result in results], tp, tied=FAMILIES[family])


def _assert_only_padding_is_uncovered(uncovered: list[dict[str, int]], tp: int, tied: bool) -> None:
    """100 rows are padded to 128; hidden size 128."""
    for rank, found in enumerate(uncovered):
        rows = 128 // tp
        padding = rows - max(0, min(models.VOCABULARY - rank % tp * rows, rows))
        names = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
        assert found == (dict.fromkeys(names, padding * 128) if padding else {})


# From here on: the engine that the last test above has left.


def test_the_seed_decides_whatever_training_did_to_the_generators(world, folders):
    def sample(seed: int) -> list[list[list[int]]]:
        results = world(scenarios.generate, folders["qwen2"], 2, PROMPTS, Sampling(max_tokens=8), seed)
        return [[g.tokens for g in generations] for generations in results]

    first, again, other = sample(7), sample(7), sample(8)
    assert all(rank == first[0] for rank in first + again)
    assert sum(a != b for a, b in zip(first[0], other[0], strict=True)) >= 18


def test_one_prompt_with_many_seeds_follows_the_distribution(world, folders, hf):
    sampling = Sampling(temperature=0.7, max_tokens=1)
    results = world(scenarios.generate, folders["qwen2"], 2, [PROMPTS[0]] * 600, sampling)
    drawn = torch.tensor([g.tokens[0] for g in results[0]])
    with torch.no_grad():
        expected = (hf["qwen2"](torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(-1)
    frequency = torch.bincount(drawn, minlength=models.VOCABULARY) / 600
    error = 4 * (expected * (1 - expected) / 600).sqrt() + 2 / 600  # 4 standard deviations
    assert ((frequency - expected).abs() <= error).all()


def test_top_p_log_probs_are_those_of_the_truncated_distribution(world, folders, hf):
    generations = world(scenarios.generate, folders["qwen2"], 2, PROMPTS, Sampling(temperature=0.7, top_p=0.5, max_tokens=6))[0]
    for generation, prompt in zip(generations, PROMPTS, strict=True):
        tokens = torch.tensor([prompt + generation.tokens])
        with torch.no_grad():
            probabilities = (hf["qwen2"](tokens).logits[0, len(prompt) - 1 : -1] / 0.7).softmax(-1)
        ordered, order = probabilities.sort(descending=True)
        kept = torch.zeros_like(probabilities).scatter(1, order, (ordered.cumsum(1) - ordered < 0.5).float())
        truncated = probabilities * kept / (probabilities * kept).sum(1, keepdim=True)
        reference = truncated.gather(1, tokens[0, len(prompt) :, None]).squeeze(1).log()
        assert generation.log_probs == pytest.approx(reference.tolist(), abs=1e-4)


def test_stop_tokens_end_a_response_and_length_truncates_it(world, folders, hf):
    expected = models.greedy(hf["qwen2"], PROMPTS[3], 12)
    third = expected[2]
    stop = Sampling(max_tokens=12, greedy=True, stop_token_ids=(third,))
    at_once = Sampling(max_tokens=12, greedy=True, stop_token_ids=(expected[0],))
    (stopped,) = world(scenarios.generate, folders["qwen2"], 2, [PROMPTS[3]], stop)[0]
    (empty,) = world(scenarios.generate, folders["qwen2"], 2, [PROMPTS[3]], at_once)[0]
    nearly_full = [1] * (scenarios.MAX_MODEL_LEN - 4)
    free, short = world(scenarios.generate, folders["qwen2"], 2, [PROMPTS[3], nearly_full], GREEDY)[0]
    assert (stopped.tokens, stopped.truncated) == (expected[: expected.index(third) + 1], False)
    assert (empty.tokens, len(empty.log_probs), empty.truncated) == (expected[:1], 1, False)
    assert (free.tokens, free.truncated) == (expected, True)
    assert (len(short.tokens), short.truncated) == (4, True)


def test_new_weights_take_effect_once_the_engine_is_told(world, folders, hf):
    prompt = [(j * 13) % models.VOCABULARY for j in range(80)]  # two full blocks, which the prefix cache keeps
    order = ["qwen2", "other", "qwen2", "other"]
    results = world(scenarios.change_weights, folders["qwen2"], 2, [folders[name] for name in order], prompt, GREEDY)
    expected = [models.greedy(hf[name], prompt, 12) for name in order]
    for result in results:
        assert result["tokens"] == expected
        assert result["untold"] != expected[0]  # else this test could not tell a stale cache from a fresh one


def test_sleep_frees_the_kv_cache_and_misuse_is_named(world, folders, greedy):
    results = world(scenarios.sleep_and_wake, folders["qwen2"], 2, PROMPTS, GREEDY)
    expected = greedy("qwen2")
    for result in results:
        full, *others = result["sizes"]
        assert sum(full) == (16 * 3 + 1) * 32 * 512  # 16 sequences of 3 blocks, and a spare, of 32 tokens of 512 bytes
        assert others == [[0] * len(full), full] * 2
        assert result["rounds"] == [expected, expected]
        assert result["same_addresses"]
        said = result["complaints"]
        assert "sleeps (weights)" in said["generate asleep"]
        assert "call wake_weights() before wake_kv_cache()" in said["KV cache first"]
        assert "call wake_weights()" in said["weights asleep"]
        assert "sleeps (KV cache)" in said["generate half awake"]
        assert "half awake: call wake_kv_cache() before sleep()" in said["sleep half awake"]
        assert "call weights_changed() first" in said["unwritten weights"]


def test_bad_requests_and_arguments_are_named(world, folders):
    said = world(scenarios.complaints, folders["qwen2"], 2)[0]
    assert "prompt 0 has 96 tokens, where 1 to 95 fit max_model_len=96" in said["long"]
    assert "prompt 0 has 0 tokens" in said["empty"]
    assert "sampling.temperature=0.0" in said["cold"]
    assert "sampling.top_p=0.0" in said["top_p"]
    assert "sampling.max_response_tokens=0" in said["max_tokens"]
    assert "engine_args.max_num_seq is not an argument of vLLM: did you mean max_num_seqs?" in said["unknown"]
    assert "engine_args.dtype is set by the trainer: use model.dtype" in said["owned"]
    assert "engine_args.load_format cannot be changed" in said["fixed"]
    assert "engine_args.block_size=16" in said["block_size"]
    assert "roles.rollout.tp=3 cannot split" in said["tp"]


def test_a_world_of_one_beside_another_job_on_the_host(world, folders, hf):
    """Without a launcher's variables, and while the four ranks above hold their engines."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": PYTHON_PATH}
    arguments = [sys.executable, "-m", "tests.rollout.alone", folders["qwen2"]]
    done = run(arguments, TIMEOUT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(token) for token in models.greedy(hf["qwen2"], PROMPTS[4], 12)]


def test_the_process_stays_the_trainers(world, folders, tmp_path):
    prompts = [[(i + j * 7) % models.VOCABULARY for j in range(70)] for i in range(6)]
    results = world(scenarios.process_state, folders["qwen2"], 2, prompts, str(tmp_path))
    assert [result["sockets"] > 0 for result in results] == [True, False, True, False]  # the first rank of an engine listens
    assert list(tmp_path.iterdir()) == []  # and its sockets have no files any more
    for result in results:
        assert result["changed by building"] == []
        assert result["changed by closing"] == []
        assert not result["shared memory"]  # its name is one per host
        assert [len(g.tokens) for g in result["generations"]] == [4] * 6
        assert result["generations"] == results[0]["generations"]
        assert result["sums"] == [4.0, 4.0]
        assert "is closed" in result["closed"]


@pytest.mark.gpu
@pytest.mark.timeout(TIMEOUT)
def test_steps_are_scheduled_ahead_on_a_gpu_and_none_is_left_behind(worlds, folders):
    """The last response ends at a stop token, which is known when the next step has begun already."""
    names = ["qwen3", "qwen3_other", "qwen3"]
    (found,) = worlds(1, "gpu", cuda=True).run(
        scenarios.on_a_gpu, [folders[name] for name in names], PROMPTS, GREEDY, timeout=TIMEOUT
    )
    assert found["ahead"]
    assert found["in_flight"] == [0, 0, 0]
    stop = found["whole"][0][5]
    cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in found["whole"]]
    first, second, again = found["stopped"]
    assert first == again == cut != second
