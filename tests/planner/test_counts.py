"""Closed forms of parameters, activations and resharded bytes: against the tile maps, the real plan and sums by hand."""

from math import prod

import pytest

from hybridflow.planner import counts
from hybridflow.rollout.grouping import choose_engines
from megatron_ext import weights
from megatron_ext.layout import Layout, Split
from tests.planner.models import shape

MODELS = {
    "untied": shape("qwen2_7b", num_hidden_layers=6),
    "tied": shape("qwen2_180m"),
    "odd vocabulary": shape("qwen2_180m", vocab_size=1001),
    "value head": shape("qwen2_180m", head="value"),
    "qk norm": shape("qwen2_180m", architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=64),
}
EXPERTS = shape("qwen3_30b_a3b", num_hidden_layers=4, num_experts=8)
LAYOUTS = [
    Layout(4),
    Layout(4, tp=4),
    Layout(4, tp=2, pp=2),
    Layout(2, pp=2, vpp=2),
    Layout(4, pp=4),
    Layout(2, pp=2, split=Split(loss=2)),
]
EXPERT_LAYOUTS = [
    Layout(4, ep=4),
    Layout(4, tp=2, ep=2, sequence_parallel=True),
    Layout(4, ep=2, etp=2),
    Layout(4, pp=2, ep=2),
]


@pytest.mark.parametrize("hf", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_tile_maps(hf):
    for layout in LAYOUTS:
        check_parameters(hf, layout)


def test_parameters_with_experts_are_those_of_the_tile_maps():
    for layout in EXPERT_LAYOUTS:
        check_parameters(EXPERTS, layout)


def check_parameters(hf, layout):
    found = counts.stage_elements(hf, layout)
    for rank in range(layout.world_size):
        shapes = weights.local_shapes(hf, layout, rank)
        experts = sum(prod(size) for name, size in shapes.items() if ".experts." in name)
        held = found[layout.coordinates(rank).pp]
        assert (held.all, held.experts) == (sum(map(prod, shapes.values())), experts), (layout, rank)


@pytest.mark.parametrize(
    ("layout", "tp"),
    [
        (Layout(4, tp=4), 1),
        (Layout(4, tp=4), 2),
        (Layout(4, tp=2, pp=2), 1),
        (Layout(4, tp=2, pp=2), 2),
        (Layout(4, tp=2, pp=2), 4),
        (Layout(4, pp=4), 2),
        (Layout(4, pp=2), 4),
        (Layout(4), 4),
    ],
)
def test_resharded_bytes_are_those_of_the_real_plan(layout, tp):
    hf = shape("qwen2_180m", tie_word_embeddings=False)
    received = choose_engines(hf, layout, tp, 4).received / 4
    # biases and norms are whole on every rank or lie in other proportions
    assert counts.received_elements(hf, layout, tp)[0] == pytest.approx(received, rel=0.01, abs=1e5)


@pytest.mark.parametrize(("layout", "tp"), [(Layout(2, ep=2), 2), (Layout(4, ep=4), 2), (Layout(4, ep=2, etp=2), 4)])
def test_resharded_bytes_of_experts_are_those_of_the_real_plan(layout, tp):
    received = choose_engines(EXPERTS, layout, tp, layout.world_size).received / layout.world_size
    assert counts.received_elements(EXPERTS, layout, tp)[0] == pytest.approx(received, rel=0.01, abs=1e5)


def test_activations_of_a_layer_by_hand():
    hf = shape("qwen2_7b")
    h, k, f = 3584, 512, 18944
    inside = (h + 2 * k) + (h + k) + h + 3 * f  # projections, rotated copies, what attention returns, the MLP
    assert counts.activation_bytes(hf, Layout(1)) == 2 * (4 * h + inside)
    assert counts.activation_bytes(hf, Layout(2, tp=2)) == 2 * (4 * h + inside / 2)
    split = Layout(2, tp=2, sequence_parallel=True)
    assert counts.activation_bytes(hf, split) == 4 * h + inside
    assert counts.activation_bytes(hf, split, recompute="mlp") == 4 * h + inside - 3 * f
    assert counts.activation_bytes(hf, split, recompute="full") == h
    experts = shape("qwen3_30b_a3b")
    routed = 8 * (2 * 2048 + 3 * 768)
    assert counts.activation_bytes(experts, Layout(1)) == 2 * (4 * 2048 + 3 * 4096 + 3 * 512 + routed)


@pytest.mark.parametrize(
    ("layout", "micro_batches", "layers"),
    [
        (Layout(1), 8, [8]),
        (Layout(4, pp=4), 8, [8, 6, 4, 2]),  # p - s micro-batches of 2 layers
        (Layout(4, pp=4), 2, [4, 4, 4, 2]),
        (Layout(2, pp=2, vpp=2), 8, [10, 6]),  # 5 and 3 chunks of 2 layers
        (Layout(2, pp=2, vpp=4), 8, [9, 7]),  # 9 and 7 chunks of 1 layer
        (Layout(2, pp=2, vpp=2), 2, [8, 6]),  # no more than the 4 there are
        (Layout(2, pp=2, vpp=2, split=Split(stages=(1, 2, 3, 2))), 4, [9, 6]),  # 1 1 3 3 1, and 2 2 2
    ],
)
def test_layers_in_flight(layout, micro_batches, layers):
    hf = shape("qwen2_180m")
    assert hf.num_layers == 8
    assert counts.layers_in_flight(hf, layout, micro_batches) == layers


def test_kv_heads_are_replicated_where_they_are_too_few():
    hf = shape("qwen2_7b")
    assert counts.kv_bytes(hf, 1) == 2 * 2 * 28 * 4 * 128
    assert counts.kv_bytes(hf, 4) == counts.kv_bytes(hf, 8) == counts.kv_bytes(hf, 1) // 4
