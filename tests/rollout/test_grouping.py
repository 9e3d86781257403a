"""Which ranks form an engine: the paper's groups where it gives them, neighbours where they are as good."""

import pytest

from hybridflow.rollout.grouping import EngineLayout, choose_engines
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout
from tests import hf_models

LLAMA = HFConfig.from_dict(hf_models.config("llama", False, 512, num_key_value_heads=8))
MOE = HFConfig.from_dict(hf_models.config("qwen3_moe", False, 512))


def engines(layout: EngineLayout) -> list[list[int]]:
    return [[layout.rank(tp=tp, dp=dp) for tp in range(layout.tp)] for dp in range(layout.dp)]


def test_the_papers_example():
    """HybridFlow, EuroSys 2025, section 5.3: training 1-4-2, generation groups of two."""
    assert engines(choose_engines(LLAMA, Layout(8, tp=4), 2, 8).layout) == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    ("training", "tp", "ranks_per_node", "expected"),
    [
        (Layout(4, tp=2, pp=2), 4, 4, [[0, 2, 1, 3]]),
        (Layout(4, tp=2, pp=2), 2, 4, [[0, 1], [2, 3]]),
        (Layout(4, pp=2), 2, 4, [[0, 1], [2, 3]]),
        (Layout(4, tp=4), 4, 4, [[0, 1, 2, 3]]),
        (Layout(8, tp=4), 2, 4, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (Layout(8, tp=4), 2, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),  # a node has the ranks of one half of the model only
    ],
    ids=lambda value: value.describe() if isinstance(value, Layout) else None,
)
def test_engines_stay_within_a_node_and_neighbours_where_that_is_as_good(training, tp, ranks_per_node, expected):
    choice = choose_engines(LLAMA, training, tp, ranks_per_node)
    assert engines(choice.layout) == expected
    assert bool(choice.layout.order) == (expected != engines(EngineLayout(training.world_size, tp)))
    assert (choice.received < choice.received_by_neighbours) == bool(choice.layout.order)
    assert bool(choice.describe(2, ranks_per_node)) == bool(choice.layout.order)


def test_expert_parallel_engines_take_the_experts_that_ranks_have():
    """EP4 training: ranks 0 and 1 have the first half of the experts, which rank 0 of an engine needs."""
    assert engines(choose_engines(MOE, Layout(4, ep=4), 2, 4, expert_parallel=True).layout) == [[0, 2], [1, 3]]


def test_engines_of_ranks_that_only_some_share_with_the_actor():
    """Rank 0 of the engine needs the first half of the model, which of the pool's four ranks 2 and 3 have (TP4 on 2 to 5)."""
    on_some = choose_engines(LLAMA, Layout(4, tp=4), 2, 8, placed=((2, 3, 4, 5), (2, 3, 4, 5)))
    assert engines(on_some.layout) == [[0, 2], [1, 3]]
    assert "engines: ranks 2, 4 | 3, 5:" in on_some.describe(2, 8)
    elsewhere = choose_engines(LLAMA, Layout(2, tp=2), 2, 2, placed=((0, 1), (2, 3, 4, 5)))
    assert engines(elsewhere.layout) == [[0, 1], [2, 3]]  # all receive everything
    assert elsewhere.received == elsewhere.received_by_neighbours > 0


def test_coordinates_and_ranks_are_inverse_whatever_the_order():
    layout = EngineLayout(8, 2, order=(0, 2, 3, 1, 7, 4, 6, 5))
    for rank in range(8):
        at = layout.coordinates(rank)
        assert layout.rank(*at) == rank and layout.order[at.dp * 2 + at.tp] == rank
    assert EngineLayout(8, 2).coordinates(5) == Layout(8, 2).coordinates(5)
    assert layout.dp == 4 and layout.describe() == "TP2 x DP4"


def test_what_is_said_of_the_engines():
    said = choose_engines(LLAMA, Layout(16, tp=4), 2, 8).describe(2, 8)
    assert said.startswith("rollout engines of the first node: ranks 0, 2 | 1, 3 | 4, 6 | 5, 7: a resharding receives 0.00")
