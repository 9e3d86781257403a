"""The critic as a role: it takes the actor's weights in another layout, and its folder is a value model of transformers'."""

from pathlib import Path

import pytest
import torch

from tests import hf_models
from tests.roles import critics

LAYOUTS = {
    "TP2 PP2 -> PP2 DP2": ("roles.actor={tp: 2, pp: 2, sequence_parallel: true}", "roles.critic={pp: 2}"),
    "DP4 -> TP2 PP2 SP": ("roles.actor={}", "roles.critic={tp: 2, pp: 2, sequence_parallel: true}"),
    "PP4 -> TP4": ("roles.actor={pp: 4}", "roles.critic={tp: 4}"),
    "PP2 VPP2 DP2 -> PP4 of 0 + 2 + 2 + 0 layers": (
        "roles.actor={pp: 2, vpp: 2}",
        "roles.critic={pp: 4, split: {stages: [0, 2, 2, 0]}}",
    ),
}
LENGTHS = (5, 9, 3, 12, 7)
CONFIG = """
model: {{path: {model}, dtype: float32}}
cluster: {{ranks_per_node: 4}}
algorithm: {{name: ppo}}
sampling: {{max_prompt_tokens: 32, max_response_tokens: 16}}
data: {{task: chain_sum}}
run: {{dir: {run}}}
"""


def tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 131, (length,), generator=generator) for length in LENGTHS]


def hf_values(folder: Path) -> list[torch.Tensor]:
    """transformers' values, aligned with the tokens: those of a token are said at the one before it."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    with torch.no_grad():
        return [torch.cat([torch.zeros(1), model(row[None]).logits[0, :-1, 0]]) for row in tokens()]


def config_of(tmp_path: Path, model: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(model=model, run=tmp_path / "run"))
    return str(path)


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_critic_becomes_a_copy_of_the_actor_and_is_exported(worlds, tmp_path, layout, tied):
    first = hf_models.make(tmp_path / "first", "qwen2", tied)
    second = hf_models.make(tmp_path / "second", "qwen2", tied, seed=1)
    config, overrides = config_of(tmp_path, first), list(LAYOUTS[layout])
    out = tmp_path / "critic"
    ranks = worlds(4).run(critics.copy_and_export, config, overrides, str(second), tokens(), str(out), timeout=200)
    for rank in ranks:
        assert rank["new_head"] == 0  # zero on every rank before anybody writes it
    found = next(rank["values"] for rank in ranks if rank["values"])
    close(found, hf_values(out))
    assert all(row[1:].abs().min() > 0 for row in found)
    body, copied = hf_models.state(second), hf_models.state(out)
    assert copied.keys() - body.keys() == {"score.weight", "score.bias"}
    assert body.keys() - copied.keys() == (set() if tied else {"lm_head.weight"})
    assert all(torch.equal(copied[name], body[name]) for name in body.keys() & copied.keys())


@pytest.mark.timeout(300)
def test_a_value_models_folder_is_loaded_with_its_head(worlds, tmp_path):
    model = hf_models.make(tmp_path / "model", "llama", True)
    config, out = config_of(tmp_path, model), tmp_path / "critic"
    layout = ["roles.critic={tp: 2}"]
    first = worlds(4).run(critics.copy_and_export, config, layout, str(model), tokens(), str(out), timeout=200)
    again = worlds(4).run(
        critics.load_values, config, [f"roles.critic={{pp: 4, model: {{path: {out}}}}}"], tokens(), timeout=200
    )
    close(next(rows for rows in again if rows), next(rank["values"] for rank in first if rank["values"]))


@pytest.mark.timeout(300)
def test_the_critic_learns_what_it_is_told(worlds, tmp_path):
    """Twenty updates towards returns that can be told from the tokens; old values are those of before, unclipped."""
    model = hf_models.make(tmp_path / "model", "qwen2", False)
    overrides = ["roles.critic={tp: 2, pp: 2, sequence_parallel: true, optimizer: {lr: 3e-3}}"]
    losses = worlds(4).run(critics.learn, config_of(tmp_path, model), overrides, tokens(), 20, timeout=200)
    found = next(rank for rank in losses if rank)
    assert found[-1] < 0.1 * found[0], found
