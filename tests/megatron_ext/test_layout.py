"""Which layers and experts a rank has: by hand, what always holds, and what is refused. Pure arithmetic but for one test."""

import itertools

import pytest
import torch

from megatron_ext.layout import Layout, Split


def layers(num_layers: int, pp: int, vpp: int = 1, **split) -> str:
    return Layout(pp, pp=pp, vpp=vpp, split=Split(**split)).describe_layers(num_layers)


@pytest.mark.parametrize(
    ("num_layers", "sizes", "split", "expected"),
    [
        (30, (4,), {}, "7 | 8 | 8 | 7"),  # SmolLM2-135M: the ends have the embedding and the output layer besides
        (31, (4,), {}, "8 | 8 | 8 | 7"),
        (7, (2,), {}, "4 | 3"),
        (5, (2, 2), {}, "1+2 | 1+1"),
        (6, (2, 2), {}, "1+2 | 2+1"),
        (7, (2, 2), {}, "2+2 | 2+1"),
        (30, (4,), {"embedding": 1, "loss": 1}, "7 | 8 | 8 | 7"),
        (31, (4,), {"loss": 1}, "8 | 8 | 8 | 7"),
        (28, (2,), {"loss": 2}, "15 | 13"),
        (29, (4, 2), {"embedding": 1, "loss": 2}, "3+4 | 4+4 | 4+4 | 4+2"),
        (3, (4,), {"loss": 4}, "1 | 1 | 1 | 0"),
        (2, (4,), {"embedding": 1, "loss": 1}, "0 | 1 | 1 | 0"),
        (4, (2,), {"stages": (3, 1)}, "3 | 1"),
        (9, (2, 2), {"stages": (1, 2, 3, 3)}, "1+3 | 2+3"),
        (4, (4,), {"stages": (0, 2, 2, 0)}, "0 | 2 | 2 | 0"),
        (28, (4,), {}, ""),
        (28, (4,), {"stages": (7, 7, 7, 7)}, ""),
        (3, (1,), {"loss": 1}, ""),
    ],
)
def test_by_hand(num_layers: int, sizes: tuple[int, ...], split: dict, expected: str):
    assert layers(num_layers, *sizes, **split) == expected


def test_indices_are_global_and_in_the_models_order():
    assert Layout(2, pp=2, vpp=2).stage_layers(7) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert Layout(4, pp=2, split=Split((3, 1))).stage_layers(4) == [[[0, 1, 2]], [[3]]]
    assert Layout(1).stage_layers(3) == [[[0, 1, 2]]]


@pytest.mark.parametrize("pp,vpp", [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (2, 4), (4, 2), (4, 3)])
def test_every_layer_once_and_as_even_as_possible(pp, vpp):
    for num_layers, embedding, loss in itertools.product(range(max(2, pp * vpp), 40), range(3), range(3)):
        stages = Layout(pp, pp=pp, vpp=vpp, split=Split(embedding=embedding, loss=loss)).stage_layers(num_layers)
        chunks = [stages[chunk % pp][chunk // pp] for chunk in range(pp * vpp)]
        assert list(itertools.chain.from_iterable(chunks)) == list(range(num_layers))
        load = [len(chunk) for chunk in chunks]
        load[0] += embedding
        load[-1] += loss
        least = max(-(-(num_layers + embedding + loss) // (pp * vpp)), embedding, loss)
        assert max(load) == least or pp == 1
        inner = load[1:-1] or load
        assert max(inner) - min(inner) <= 1
        if embedding == loss == 0:
            assert max(load) - min(load) <= 1
            of_stage = [sum(map(len, stage)) for stage in stages]
            assert max(of_stage) - min(of_stage) <= 1
            assert of_stage[-1] == min(of_stage)


@pytest.mark.parametrize(
    ("num_layers", "sizes", "split", "message"),
    [
        (4, (2, 4), {}, "num_hidden_layers=4 is too few for the 8 chunks of pp=2 x vpp=4: lower one of them"),
        (3, (4,), {}, "num_hidden_layers=3 is too few for the 4 chunks of pp=4 x vpp=1: lower one of them"),
        (1, (4,), {"loss": 2}, "num_hidden_layers=1 is too few for the 4 chunks of pp=4 x vpp=1: lower one of them"),
        (4, (2,), {"stages": (3, 2)}, "split.stages=[3, 2] are 5 layers, but num_hidden_layers=4: make them equal"),
        (4, (2, 2), {"stages": (3, 1)}, "split.stages=[3, 1] has 2 numbers, but pp=2 x vpp=2 = 4 chunks: give one for each"),
        (4, (3,), {"stages": (2, 0, 2)}, "split.stages=[2, 0, 2]: only the first and the last number may be 0, and none below"),
        (4, (2,), {"stages": (5, -1)}, "split.stages=[5, -1]: only the first and the last number may be 0, and none below"),
        (
            4,
            (2,),
            {"stages": (2, 2), "loss": 1},
            "split.stages=[2, 2] leaves nothing to derive from split.embedding and split.loss: use 0 for both, or no stages",
        ),
        (4, (2,), {"loss": -1}, "split.loss=-1 is too small: use at least 0"),
    ],
)
def test_refused(num_layers: int, sizes: tuple[int, ...], split: dict, message: str):
    with pytest.raises(ValueError) as error:
        layers(num_layers, *sizes, **split)
    assert str(error.value) == message


@pytest.mark.parametrize("embedding,loss", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_where_megatron_has_a_split_of_its_own_it_is_the_same(embedding, loss):
    """Megatron's own formula takes only what divides; its ranks are given, since no group is needed for it."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    for pp, vpp, per_chunk in itertools.product((2, 4), (1, 2), (2, 3)):
        num_layers = pp * vpp * per_chunk - embedding - loss
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            pipeline_dtype=torch.float32,
            account_for_embedding_in_pipeline_split=bool(embedding),
            account_for_loss_in_pipeline_split=bool(loss),
        )
        ours = Layout(pp, pp=pp, vpp=vpp, split=Split(embedding=embedding, loss=loss)).stage_layers(num_layers)
        for stage, chunk in itertools.product(range(pp), range(vpp)):
            arguments = (config, chunk if vpp > 1 else None, stage)
            offset = get_transformer_layer_offset(*arguments)
            assert ours[stage][chunk] == list(range(offset, offset + get_num_layers_to_build(*arguments)))


EXPERTS = [
    Layout(4, tp=2, ep=2, sequence_parallel=True),
    Layout(4, ep=4),
    Layout(4, tp=2, ep=2, etp=2, sequence_parallel=True),
    Layout(4, pp=2, ep=2),
    Layout(4, ep=2),
    Layout(4, tp=4, ep=2, sequence_parallel=True),
    Layout(4, pp=2, cp=2, ep=2),
    Layout(4, tp=2, cp=2, etp=2, sequence_parallel=True),
]


def megatrons_expert_coordinates(layout: Layout) -> tuple[int, int, int, int]:
    from megatron.core import parallel_state

    from megatron_ext.parallel import ParallelState

    with ParallelState("actor", layout, seed=1).current():
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_data_parallel_world_size(),
        )


@pytest.mark.timeout(180)
def test_expert_coordinates_are_megatrons(worlds):
    for layout in EXPERTS:
        found = worlds(4).run(megatrons_expert_coordinates, layout)
        assert [(*layout.expert_coordinates(rank), layout.edp) for rank in range(4)] == found, layout


def test_expert_coordinates_by_hand():
    layout = Layout(32, tp=4, pp=2, ep=2, etp=2)
    assert layout.edp == 4
    assert [layout.expert_coordinates(rank) for rank in (0, 1, 2, 3, 4, 15)] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 1, 3),
    ]  # fmt: skip
    assert layout.expert_coordinates(16) == (0, 0, 0)
    assert layout.describe() == "TP4 x PP2 x EP2 x ETP2 x DP4"


@pytest.mark.parametrize(
    ("layout", "experts", "message"),
    [
        (Layout(8, ep=3), (9, 48), "ep=3 x etp=1 = 3 does not divide the 8 ranks of a pipeline stage: change ep or etp"),
        (
            Layout(8, pp=2, ep=4, etp=2),
            (8, 48),
            "ep=4 x etp=2 = 8 does not divide the 4 ranks of a pipeline stage: change ep or etp",
        ),
        (Layout(8, ep=4), (6, 48), "ep=4 does not divide the model's 6 experts: choose one that does"),
        (Layout(8, etp=4), (6, 42), "etp=4 does not divide the experts' inner size of 42: choose one that does"),
        (Layout(8, ep=2), (0, 0), "ep=2 spreads experts, and the model has none: use ep=1"),
        (Layout(8, etp=2), (0, 0), "etp=2 spreads experts, and the model has none: use etp=1"),
    ],
)
def test_experts_refused(layout: Layout, experts: tuple[int, int], message: str):
    with pytest.raises(ValueError) as error:
        layout.check_experts(*experts)
    assert str(error.value) == message


def test_experts_under_tensor_parallelism_need_sequence_parallelism():
    with pytest.raises(ValueError, match="sequence_parallel=false: Megatron trains experts at tp=2"):
        Layout(8, tp=2, ep=2).check_training(8)
    Layout(8, tp=2).check_training(0)
    Layout(8, tp=2, ep=2, sequence_parallel=True).check_training(8)
