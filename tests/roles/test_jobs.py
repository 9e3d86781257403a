"""Steps of GRPO and PPO with real Megatron and vLLM: memory that comes back changes nothing; roles in layouts of their own; the
canary hears a stale weight."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForSequenceClassification

from hybridflow.config.load import load
from hybridflow.config.preflight import check
from hybridflow.data.tiny_model import make_tiny_model
from hybridflow.data.tokenizer import character_tokenizer
from hybridflow.rewards.scorers import last_integer
from tests.roles import jobs
from tests.small_job import CLASSIFIERS_TOKENS, finish, rows, start, write_classifier, write_recipe

TIMEOUT = 300
TWO = """
cluster: {ranks_per_node: 2}
roles: {actor: {tp: 2}, reference: {pp: 2}}
algorithm: {kl_coefficient: 0.01}
warm_start: {steps: 4, batch_size: 16, optimizer: {lr: 3.0e-3}}
evaluation: {problems: 4}
run: {steps: 6}
"""
# Actor TP2 x PP2 beside a critic PP2 x DP2 and a reward model TP2 x DP2 whose tokens have other numbers; 6
# prompts that do not divide evenly into 4 mini-batches of 2 data-parallel ranks
FOUR = """
cluster: {ranks_per_node: 4}
roles:
  actor: {tp: 2, pp: 2}
  rollout: {tp: 2}
  critic: {pp: 2, micro_batch_tokens: 2048, forward_micro_batch_tokens: 4096, optimizer: {lr: 3.0e-4}}
  reference: {tp: 2}
  reward: {tp: 2, forward_micro_batch_tokens: 4096}
algorithm: {name: ppo, epochs: 2, kl_coefficient: 0.05, kl_in: reward, kl_estimator: k1, kl_target: 0.5}
batch: {prompts: 6, samples_per_prompt: 3, mini_batches: 4}
reward: {model_weight: 0.5, cache_size: 1000}
warm_start: {steps: 20, batch_size: 64, optimizer: {lr: 3.0e-3}}
evaluation: {problems: 4}
run: {steps: 3}
"""
PPO = ["algorithm={name: ppo, kl_in: reward}", "run.steps=3", "evaluation.problems=0"]
CRITIC = "roles.critic={{pp: 2, micro_batch_tokens: 2048, optimizer: {{lr: 1.0e-3}}{0}}}"
ALL_AWAY = ["roles.actor.release_weights=always", "roles.actor.offload=[optimizer]", "roles.reference.offload=[params]"]


@pytest.fixture(scope="module")
def world(worlds):
    used = worlds(2, "jobs")
    yield used
    used.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def train(world, model, folder, dtype: str, *overrides: str, **fault) -> tuple[list[dict], dict]:
    folder.mkdir()
    config = write_recipe(folder / "c.yaml", model, folder / "run", TWO, f"model: {{dtype: {dtype}}}")
    found = world.run(jobs.train, str(config), list(overrides), timeout=TIMEOUT, **fault)
    return found, load_file(folder / "run" / "hf" / "model.safetensors")


@pytest.mark.timeout(2 * TIMEOUT)
def test_memory_that_leaves_changes_nothing(world, model, tmp_path):
    kept, expected = train(world, model, tmp_path / "kept", "bfloat16")
    gone, found = train(world, model, tmp_path / "gone", "bfloat16", *ALL_AWAY, "run.profile=true")
    rollouts = 6 + 2  # and the evaluations before and after: twice in a row at either end
    assert [rank["away"] for rank in kept] == [[False] * rollouts] * 2
    assert [rank["away"] for rank in gone] == [[True] * rollouts] * 2
    pieces = ["making the rollout"]
    for role in ("actor", "reference"):
        pieces += [f"making the {role}", f"reading the {role}'s model.safetensors (file 1 of 1)"]
    assert [rank["pieces"] for rank in kept] == [pieces, pieces]
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(expected, torch.bfloat16)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    same = ("reward/mean", "mismatch/log_prob_abs_max", "actor/loss", "actor/kl_reference", "actor/grad_norm")
    for with_all, without in zip(kept[0]["steps"], gone[0]["steps"], strict=True):
        assert [with_all[name] for name in same] == [without[name] for name in same]
        arrows = ("make_room", "wake_weights", "reshard", "release", "wake", "rollout", "sleep", "restore", "update")
        assert all(without[f"memory/peak_bytes/{arrow}"] > 0 for arrow in arrows)
        assert without["time/release"] > 0 and without["time/restore"] > 0
        assert 0 <= without["pipeline/bubble_mean"] <= without["pipeline/bubble_max"] < 1
        assert "pipeline/bubble_mean" not in with_all
    assert "warning" not in kept[0]["printed"] + gone[0]["printed"]


@pytest.fixture(scope="module")
def job_with_a_critic(world, model, tmp_path_factory) -> tuple[list[dict], dict]:
    """Where all memory stays."""
    return train(world, model, tmp_path_factory.mktemp("critic") / "kept", "bfloat16", *PPO, CRITIC.format(""))


@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("how", ["release_weights: always, offload: [optimizer]", "offload: [params, grads, optimizer]"])
def test_a_critics_memory_that_leaves_changes_nothing(world, model, job_with_a_critic, tmp_path, how):
    kept, expected = job_with_a_critic
    gone, found = train(world, model, tmp_path / "gone", "bfloat16", *PPO, CRITIC.format(f", {how}"))
    assert [rank["critic_away"] for rank in kept] == [[False] * 3] * 2
    assert [rank["critic_away"] for rank in gone] == [[True] * 3] * 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    same = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "critic/explained_variance")
    for with_all, without in zip(kept[0]["steps"], gone[0]["steps"], strict=True):
        assert [with_all[name] for name in same] == [without[name] for name in same]
        assert all(without[f"memory/peak_bytes/{phase}"] > 0 for phase in ("values", "update_critic", "make_room"))
    assert kept[0]["steps"][1]["critic/loss"] > 0
    assert "warning" not in kept[0]["printed"] + gone[0]["printed"]


@pytest.mark.timeout(2 * TIMEOUT)
def test_a_run_replayed_in_other_layouts_has_the_same_losses(worlds, world, model, tmp_path):
    """PPO on one rank, and on two with an actor of TP2, a critic of PP2 and engines of one: the same step by step."""
    (tmp_path / "rewards.py").write_text("def score(prompt, response, answer, metadata):\n    return len(response) / 6\n")
    ppo = ["algorithm={name: ppo, kl_in: reward, kl_coefficient: 0.05}", "run.steps=3", "evaluation.problems=0"]
    ppo += ["roles.actor.optimizer.lr=1e-4", f"reward={{kind: function, function: '{tmp_path}/rewards.py:score'}}"]
    critic = "roles.critic={{{0}micro_batch_tokens: 2048, optimizer: {{lr: 1.0e-3}}}}"
    alone = ["cluster.ranks_per_node=1", "roles.actor.tp=1", "roles.reference.pp=1", critic.format("")]
    one, _ = train(worlds(1, "jobs"), model, tmp_path / "one", "float32", *ppo, *alone, "run.save_rollouts=true")
    replay = [critic.format("pp: 2, "), f"run.replay={tmp_path}/one/run"]
    two, _ = train(world, model, tmp_path / "two", "float32", *ppo, *replay)
    same = ("reward/mean", "actor/loss", "actor/kl_reference", "critic/loss", "critic/explained_variance")
    for expected, found in zip(one[0]["steps"], two[0]["steps"], strict=True):
        assert {name: found[name] for name in same} == pytest.approx({name: expected[name] for name in same}, abs=1e-5)
        assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)
        assert found["reshard/bytes_received"] > 0 and found["mismatch/log_prob_abs_max"] < 1e-3
    assert one[0]["steps"][1]["actor/loss"] != 0
    assert "warning" not in two[0]["printed"]


@pytest.mark.timeout(TIMEOUT + 60)
def test_a_critic_and_a_reward_model_in_layouts_of_their_own(worlds, model, tmp_path):
    classifier = write_classifier(tmp_path / "classifier")
    scorer = f"roles: {{reward: {{model: {{path: {classifier}}}}}}}"
    config = write_recipe(tmp_path / "c.yaml", model, tmp_path / "run", FOUR, scorer)
    check(load(config))
    four = worlds(4, "vllm")  # as test_hybrid.py has left it
    steps = four.run(jobs.train, str(config), [], timeout=TIMEOUT)[0]["steps"]
    four.close()
    assert [step["reshard/verified"] for step in steps] == [True, None, None]
    measured = {
        *("time/values", "time/update", "time/update_critic", "time/reference", "critic/loss", "critic/explained_variance"),
        *("critic/clip_fraction", "critic/value", "critic/grad_norm", "critic/lr", "actor/kl_response", "actor/kl_coefficient"),
        *("memory/peak_bytes/values", "memory/peak_bytes/update_critic", "memory/peak_bytes/reward"),
        *("reward/last_integer", "reward/model", "reward/cache_hit_rate", "time/reward"),
    }
    for step in steps:
        assert measured <= step.keys()
        assert not step["critic/skipped"] and step["critic/grad_norm"] > 0 and step["critic/lr"] == 3e-4
        assert step["reward/mean"] == pytest.approx(step["reward/last_integer"] + 0.5 * step["reward/model"])
        assert step["reward/failed"] == 0 and 0 <= step["reward/cache_hit_rate"] < 1
    check_scores(classifier, tmp_path / "run")
    # the policy starts as the reference: nothing to penalise, and the coefficient comes down by its largest step
    assert abs(steps[0]["actor/kl_response"]) < 1e-3
    assert [step["actor/kl_coefficient"] for step in steps[:2]] == [0.05, pytest.approx(0.05 * 0.98)]


def check_scores(classifier: Path, run: Path) -> None:
    """The samples' rewards are what transformers' own classifier says of their text, beside whether the answer is right."""
    model = Qwen2ForSequenceClassification.from_pretrained(classifier, dtype=torch.float32).eval()
    tokenizer = character_tokenizer(CLASSIFIERS_TOKENS)
    policy = character_tokenizer()
    trained = [row for row in rows(run / "samples.jsonl") if row["kind"] == "train"]
    assert len(trained) == 3 * 18
    for row in trained:
        text = policy.decode(row["prompt_tokens"]) + row["response"]
        ends = [tokenizer.eos_token_id] if row["tokens"][-1] == policy.eos_token_id else []
        with torch.no_grad():
            score = model(torch.tensor([tokenizer(text)["input_ids"] + ends])).logits[0, 0].item()
        right = last_integer("", row["response"], row["answer"], {})
        assert row["reward"] == pytest.approx(right + 0.5 * score, abs=1e-4), row


@pytest.mark.timeout(TIMEOUT + 60)
def test_float32_weights_rest_on_the_host(world, model, tmp_path):
    overrides = ["roles.actor.offload=[params,grads,optimizer]", "run.steps=2", "roles.actor={tp: 1, pp: 2}"]
    found, _ = train(world, model, tmp_path / "run", "float32", *overrides)
    assert [rank["away"] for rank in found] == [[True] * 4] * 2
    assert all(step["mismatch/log_prob_abs_max"] < 1e-3 for step in found[0]["steps"])


@pytest.mark.timeout(TIMEOUT + 60)
def test_the_canary_hears_one_weight_that_was_not_written(world, model, tmp_path):
    fault = {"stale": "model.layers.2.mlp.down_proj.weight", "stale_from": 4}  # with the rollout of step 4
    found, _ = train(world, model, tmp_path / "run", "float32", "run.steps=8", **fault)
    gaps = [step["mismatch/log_prob_abs_mean"] for step in found[0]["steps"]]
    lines = [line for line in found[0]["printed"].splitlines() if line.startswith("warning")]
    assert max(gaps[:3]) < 1e-4, gaps
    assert len(lines) == 1 and "is usual in this run: a weight that was not written" in lines[0], (lines, gaps)


def _gpu_job(model, folder, steps: int, *overrides: str) -> list[dict]:
    folder.mkdir()
    config = write_recipe(folder / "c.yaml", model, folder / "run", TWO, "model: {dtype: bfloat16}")
    chosen = ["cluster={ranks_per_node: 1, device: cuda}", "roles.actor.tp=1", "roles.reference.pp=1", *overrides]
    assert "memory of phase" not in finish(start(config, f"run.steps={steps}", *chosen), 900)
    return rows(folder / "run" / "metrics.jsonl")


@pytest.mark.gpu
@pytest.mark.timeout(2000)
def test_a_gpu_really_gets_its_memory_back(tmp_path):
    """By the device's own count: with everything away, a rollout has the room that training takes; and nothing grows."""
    model = make_tiny_model(tmp_path / "model", layers=6, hidden=2048, intermediate=8192, heads=16, kv_heads=8)
    elements = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    kept = _gpu_job(model, tmp_path / "kept", 4, "roles.actor.release_weights=never")
    gone = _gpu_job(model, tmp_path / "gone", 20, *ALL_AWAY)
    at = {name: [job[-1][f"memory/peak_bytes/{name}"] for job in (kept, gone)] for name in ("rollout", "reshard", "release")}
    assert at["rollout"][0] - at["rollout"][1] > 0.9 * (2 + 4 + 12 + 2) * elements, at  # weights, gradients, states, reference
    assert at["reshard"][1] - at["release"][1] > 0.9 * 2 * elements, at
    for arrow in ("make_room", "wake_weights", "reshard", "release", "wake", "rollout", "sleep", "restore", "update"):
        in_use = [step[f"memory/peak_bytes/{arrow}"] for step in gone]
        assert max(in_use[3:]) < 1.02 * in_use[2], (arrow, in_use)
