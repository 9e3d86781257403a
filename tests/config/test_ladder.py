"""The ladder's numbers against numbers worked out by hand."""

import pytest

from hybridflow.config.ladder import ladder
from hybridflow.config.load import load


def make(tmp_path, *overrides, num_layers=4):
    (tmp_path / "c.yaml").write_text("model: {path: m}\nrun: {dir: r}\n")
    config = load(tmp_path / "c.yaml", list(overrides))
    return ladder(config, dict.fromkeys(config.megatron_roles(), num_layers))


def test_by_hand(tmp_path):
    steps = make(
        tmp_path,
        "cluster.ranks_per_node=8",
        "roles.actor={tp: 2, pp: 2, micro_batch_tokens: 500}",
        "roles.rollout.tp=2",
        "batch={prompts: 10, samples_per_prompt: 6, mini_batches: 4}",
        "algorithm.epochs=2",
        "sampling={max_prompt_tokens: 100, max_response_tokens: 60}",
    )
    # 60 samples, 15 a mini-batch, DP 2: 8 on the fuller rank; 3 sequences of 160 tokens fit 500: 3 micro-batches
    assert (steps.samples, steps.mini_batch, steps.dp, steps.rank_samples) == (60, 15, 2, 8)
    assert (steps.sequence_tokens, steps.micro_batches, steps.optimizer_steps, steps.engines) == (160, 3, 8, 4)
    text = steps.render()
    for part in ("TP2 x PP2 x DP2", "4 x TP2", "1 masked fill-ups", "<= 3", "at most 3 per engine"):
        assert part in text
    assert max(len(line) for line in text.splitlines()) < 128


def test_an_interleaved_schedule_takes_multiples_of_its_stages(tmp_path):
    steps = make(
        tmp_path,
        "cluster.ranks_per_node=4",
        "roles.actor={pp: 4, vpp: 2, micro_batch_tokens: 500}",
        "batch={prompts: 4, samples_per_prompt: 4}",
        "sampling={max_prompt_tokens: 100, max_response_tokens: 60}",
        num_layers=8,
    )
    assert steps.micro_batches == 8  # 16 sequences, 3 to a micro-batch: 6
    assert "<= 8  per rank and mini-batch, of at most 500 packed tokens; a multiple of pp=4" in steps.render()


def test_uneven_stages_are_shown(tmp_path):
    layout = ["cluster.ranks_per_node=4", "roles.actor.pp=4", "algorithm.kl_coefficient=0.1"]
    text = make(tmp_path, *layout, num_layers=30).render()
    assert [line for line in text.splitlines() if "stage" in line] == [
        "actor layers           30  by pipeline stage: 7 | 8 | 8 | 7",
        "reference layers       30  by pipeline stage: 7 | 8 | 8 | 7",
    ]
    assert "stage" not in make(tmp_path, *layout, num_layers=28).render()


def test_the_critics_micro_batches_are_its_own(tmp_path):
    text = make(
        tmp_path,
        *("algorithm.name=ppo", "cluster.ranks_per_node=4", "roles.actor={tp: 2, pp: 2}"),
        "roles.critic={pp: 2, micro_batch_tokens: 400}",  # DP 2: 4 samples of at most 192 tokens, two in a micro-batch
        "batch={prompts: 4, samples_per_prompt: 2}",
    ).render()
    line = next(line for line in text.splitlines() if line.startswith("… of the critic"))
    assert "<= 2  per mini-batch on each of 2 data-parallel ranks, of at most 400 packed tokens" in line
    assert "critic" not in make(tmp_path).render()


def test_safe_rlhf_shows_its_roles(tmp_path):
    text = make(
        tmp_path,
        "cluster.ranks_per_node=4",
        "algorithm.name=safe_rlhf",
        "roles.cost_critic={micro_batch_tokens: 400}",
        "roles.cost={backend: hf, model: {path: costs}}",
    ).render()
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "<= " in lines["… of the critic"] and "of at most 400 packed" in lines["… of the cost critic"]
    assert lines["cost"].split() == ["cost", "DP4", "bfloat16,", "costs", "by", "transformers"]


@pytest.mark.parametrize("budget,expected", [(192, 8), (383, 8), (384, 4), (100_000, 1)])
def test_micro_batches_by_budget(tmp_path, budget, expected):
    steps = make(tmp_path, f"roles.actor.micro_batch_tokens={budget}", "batch={prompts: 4, samples_per_prompt: 2}")
    assert steps.micro_batches == expected
