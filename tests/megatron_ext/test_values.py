"""A value model against transformers' own (token classification with one label): values, clipped loss and every gradient."""

import pytest
import torch

from megatron_ext.layout import Layout, Split

CLIP = 0.3
NOT_OVERLAPPED = {"overrides": {"overlap_p2p_comm": False}}
CASES = {
    "pp2-dp2": (Layout(4, pp=2), {"family": "qwen2"}, {}),
    "tp2-pp2-tied": (Layout(4, tp=2, pp=2), {"family": "qwen2", "tied": True, "vocab_size": 131}, {}),
    "tp2-sp-dp2": (Layout(4, tp=2, sequence_parallel=True), {"family": "llama"}, {"recompute": "mlp"}),
    "tp2-dp2-qwen3": (Layout(4, tp=2), {"family": "qwen3", "head_dim": 16}, {}),
    "dp4-tied": (Layout(4), {"family": "llama", "tied": True}, {}),
    "tp2-pp2-vpp2-sp": (Layout(4, tp=2, pp=2, vpp=2, sequence_parallel=True), {"family": "qwen2"}, {"recompute": "full"}),
    "dp2-pp2-vpp4": (Layout(4, pp=2, vpp=4), {"family": "llama", "num_hidden_layers": 8, "tied": True}, {}),
    "pp4-vpp2": (Layout(4, pp=4, vpp=2), {"family": "qwen2", "num_hidden_layers": 8}, {"recompute": "selective"}),
    "pp4-vpp4": (Layout(4, pp=4, vpp=4), {"family": "qwen2", "num_hidden_layers": 16}, NOT_OVERLAPPED),
    "pp4-bare-ends": (Layout(4, pp=4, split=Split((0, 2, 2, 0))), {"family": "qwen2", "tied": True}, {}),
    "qwen3-moe-tp2-ep2": (Layout(4, tp=2, ep=2, sequence_parallel=True), {"family": "qwen3_moe"}, {}),
    "mixtral-ep2-pp2": (Layout(4, pp=2, ep=2), {"family": "mixtral"}, {}),
}


def with_returns(items: list) -> list:
    """Old values and returns for each token, such that the clip matters for some."""
    generator = torch.Generator().manual_seed(11)
    names = ("values", "returns")
    return [item | {name: torch.randn(len(item["tokens"]), generator=generator) for name in names} for item in items]


def hf_gradients(reference: torch.nn.Module, items: list) -> tuple[list, float, dict]:
    """Values aligned with tokens, the loss per token, its gradients; one sequence at a time."""
    reference.zero_grad()
    count = sum(item["loss_mask"][1:].sum() for item in items)
    rows, loss = [], 0.0
    for item in items:
        # said at the token before: what is expected of the tokens from here on
        values = torch.cat([torch.zeros(1), reference(item["tokens"][None]).logits[0, :-1, 0]])
        kept = item["loss_mask"].clone()
        kept[0] = False
        old, returns = item["values"][kept], item["returns"][kept]
        clipped = torch.minimum(torch.maximum(values[kept], old - CLIP), old + CLIP)
        part = 0.5 * torch.maximum((values[kept] - returns) ** 2, (clipped - returns) ** 2).sum() / count
        if kept.any():
            part.backward()
        rows.append(values.detach())
        loss += part.item()
    return rows, loss, {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}


def compare_with_hf(layout: Layout, model: dict, config: dict) -> dict:
    """The largest differences of this rank, and the loss summed over its micro-batches."""
    from hybridflow.algorithms.objectives import ValueObjective
    from megatron_ext.step import forward_backward_values, forward_values
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model, largest_difference, to_megatron, value_model

    reference = value_model(hf_model(**model))
    role = scenarios.make_role(reference, layout, name="critic", **config)
    items = with_returns(scenarios.sequences(reference.config.vocab_size))
    mine = scenarios.share(items, layout, role.state.coordinates.dp)
    rows, hf_loss, gradients = hf_gradients(reference, items)
    expected = to_megatron(gradients, role.hf, layout, torch.distributed.get_rank())
    with role.state.current():
        for chunk in role.wrapped:
            chunk.zero_grad_buffer()
        batches = scenarios.micro_batches(mine, True, layout, 5)
        sums = forward_backward_values(role.wrapped, batches, ValueObjective(CLIP))
        found = forward_values(role.chunks, batches)
        worst = largest_difference(scenarios.gradients(role), expected)
    last = role.state.is_last_stage
    assert (sums is None) == (found is None) == (not last)
    difference = 0.0
    if last:
        own = [next(row for item, row in zip(items, rows, strict=True) if item is one) for one in mine]
        pairs = zip(found, own, strict=True)
        difference = max((row["values"] - theirs).abs().max().item() for row, theirs in pairs)
        sums = {name: value.item() for name, value in sums.items()} if role.state.coordinates.tp == 0 else None
    return {"sums": sums, "hf_loss": hf_loss, "gradient": worst, "values": difference}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES)
def test_values_loss_and_gradients_equal_hf(worlds, case: str):
    layout, model, config = CASES[case]
    ranks = worlds(4).run(compare_with_hf, layout, model, config, timeout=200)
    sums = [rank["sums"] for rank in ranks if rank["sums"]]
    assert len(sums) == layout.dp
    loss, count, clipped = (sum(one[name] for one in sums) for name in ("loss", "loss_count", "clip_fraction"))
    assert 0 < clipped < count
    assert loss / count == pytest.approx(ranks[0]["hf_loss"], rel=1e-5)
    for rank in ranks:
        assert rank["gradient"][0] < 1e-5, rank["gradient"]
        assert rank["values"] < 1e-5
