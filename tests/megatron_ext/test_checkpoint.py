"""Checkpoints of a model and its optimizer: another layout goes on as the one that saved would have, Adam's step included."""

import multiprocessing

import pytest
import torch

from megatron_ext.checkpoint import rectangles, writers
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split
from megatron_ext.offline import hf_to_role, role_to_hf
from megatron_ext.optimizer import OptimizerSettings
from megatron_ext.stored import CheckpointError
from megatron_ext.weights import tile_map
from tests import hf_models

SETTINGS = OptimizerSettings(lr=2e-3, weight_decay=0.1, warmup_steps=2, schedule="linear", decay_steps=10)
UPDATES = 3
DENSE = {"family": "qwen2", "tied": True, "num_key_value_heads": 4, "vocab_size": 131}
EXPERTS = {"family": "qwen3_moe", "num_key_value_heads": 4}


def _saved(role, optimizer=None):
    from megatron_ext.checkpoint import Saved
    from megatron_ext.weights import hf_shapes, named_parameters

    tiles = [tile_map(role.hf, role.layout, rank) for rank in range(role.layout.world_size)]
    return Saved(role.state, named_parameters(role.chunks), tiles, hf_shapes(role.hf), optimizer)


def _update(role, optimizer) -> tuple[float, float, float]:
    """Loss per token over all ranks, and what the optimizer says."""
    from megatron_ext.step import forward_backward
    from tests.megatron_ext import scenarios

    mine = scenarios.share(scenarios.sequences(128), role.layout, role.state.coordinates.dp)
    with role.state.current():
        optimizer.zero_grad()
        batches = scenarios.micro_batches(mine, packed=True, layout=role.layout, count=4)
        sums = forward_backward(role.wrapped, batches, scenarios.policy_loss)
        stepped = optimizer.step()
    total = torch.tensor([sums["loss"], sums["count"]] if sums and role.state.coordinates.tp == 0 else [0.0, 0.0])
    torch.distributed.all_reduce(total, group=role.state.group)
    return (total[0] / total[1]).item(), stepped["grad_norm"], stepped["lr"]


def _role(model: dict, layout: Layout, dtype: torch.dtype, seed: int, ranks=None):
    from megatron_ext.optimizer import Optimizer
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model

    role = scenarios.make_role(hf_model(**model, seed=seed), layout, dtype=dtype, ranks=ranks)
    if role is None:
        return None, None
    with role.state.current():
        return role, Optimizer(role.wrapped, SETTINGS, dtype, role.state.group)


def train_and_save(model: dict, layout: Layout, dtype: torch.dtype, folder: str, background: bool) -> dict:
    """Three updates, a save, and what comes after it: with `background` the next update runs while the files are written."""
    from megatron_ext.checkpoint import save

    role, optimizer = _role(model, layout, dtype, seed=0)
    before = [_update(role, optimizer) for _ in range(UPDATES)]
    multiprocessing.current_process()._config["daemon"] = False  # a world's ranks are, and may have no children then
    with role.state.current():
        pending = save(_saved(role, optimizer), folder, background)
    after = [_update(role, optimizer) for _ in range(2)]
    with role.state.current():
        done = pending is None or pending.finished(wait=True)
    multiprocessing.current_process()._config["daemon"] = True
    return {"before": before, "after": after, "done": done, "steps": optimizer.adam_steps()}


def load_and_train(model: dict, layout: Layout, dtype: torch.dtype, folder: str) -> dict:
    """Other weights, a fresh optimizer and other random numbers, then the checkpoint, then two updates."""
    from megatron_ext.checkpoint import load

    role, optimizer = _role(model, layout, dtype, seed=7)
    fresh = torch.get_rng_state()
    with role.state.current():
        torch.manual_seed(99)
        load(_saved(role, optimizer), folder)
        drawn = torch.rand(2).tolist()
    loaded = optimizer.adam_steps()
    after = [_update(role, optimizer) for _ in range(2)]
    assert torch.equal(fresh, torch.get_rng_state())  # the role's own states only
    return {"after": after, "loaded": loaded, "steps": optimizer.adam_steps(), "drawn": drawn}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "dtype", "layout", "others"),
    [
        (
            DENSE,
            torch.float32,
            Layout(4, tp=2, pp=2, sequence_parallel=True),
            [Layout(4, pp=2), Layout(4, tp=4), Layout(4, pp=2, vpp=2), Layout(4, pp=4, split=Split((0, 2, 2, 0)))],
        ),
        (DENSE, torch.bfloat16, Layout(4, tp=2), [Layout(4, tp=2), Layout(4, tp=2, pp=2)]),
        (
            EXPERTS,
            torch.float32,
            Layout(4, tp=2, ep=2, sequence_parallel=True),
            [Layout(4, ep=4), Layout(4, pp=2, tp=2, ep=2, etp=1, sequence_parallel=True)],
        ),
    ],
    ids=["dense", "bfloat16", "experts"],
)
def test_any_layout_goes_on_as_the_saving_one_would_have(worlds, tmp_path, model, dtype, layout, others):
    world, folder = worlds(4), tmp_path / "actor"
    expected = world.run(train_and_save, model, layout, dtype, str(folder), dtype == torch.bfloat16)
    assert all(rank["done"] and rank["steps"] == {UPDATES + 2} for rank in expected)
    exact = {"rel": 1e-5} if dtype == torch.float32 else {"rel": 2e-2}
    for other in others:
        for found in world.run(load_and_train, model, other, dtype, str(folder)):
            assert found["loaded"] == {UPDATES} and found["steps"] == {UPDATES + 2}
            for update, reference in zip(found["after"], expected[0]["after"], strict=True):
                assert update == pytest.approx(reference, **exact)
            assert found["after"][0][2] == SETTINGS.lr_at(UPDATES)
            if other == layout:
                assert found["after"] == expected[0]["after"]  # not a bit differs


def train_on_some_ranks(folder: str) -> tuple[tuple, tuple]:
    """The update after a save by a role on two of four ranks, and the same by one on all four that loads it."""
    from megatron_ext.checkpoint import load, save

    role, optimizer = _role(DENSE, Layout(2, pp=2), torch.float32, seed=0, ranks=(1, 3))
    expected = None
    if role is not None:
        _update(role, optimizer)
        with role.state.current():
            save(_saved(role, optimizer), folder)
            load(_saved(role, optimizer), folder)
        expected = _update(role, optimizer)
    torch.distributed.barrier()
    role, optimizer = _role(DENSE, Layout(4, tp=2, pp=2), torch.float32, seed=7)
    with role.state.current():
        load(_saved(role, optimizer), folder)
    return expected, _update(role, optimizer)


@pytest.mark.timeout(280)
def test_a_role_on_a_part_of_the_ranks(worlds, tmp_path):
    found = worlds(4).run(train_on_some_ranks, str(tmp_path / "critic"))
    expected = found[1][0]
    assert found[0][0] is None and found[3][0] == expected
    assert all(update == pytest.approx(expected, rel=1e-5) for _, update in found)


def load_and_save(source: str, destination: str, layout: Layout) -> None:
    """Only the weights, from a converted folder into a model, and from there into a folder of several ranks' files."""
    from megatron_ext.checkpoint import load, save
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model

    role = scenarios.make_role(hf_model(**DENSE), layout)
    with role.state.current():
        load(_saved(role), source)
        save(_saved(role), destination)


@pytest.mark.timeout(280)
def test_what_several_ranks_saved_is_converted_bit_for_bit(worlds, tmp_path):
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 131}
    sizes = {"num_attention_heads": 4, "max_position_embeddings": 256, "rope_theta": 1e4}
    model = hf_models.make(tmp_path / "hf", "qwen2", tied=True, seed=3, **fields, **sizes)
    said = []
    hf_to_role(model, tmp_path / "converted", tmp_path / "about", said.append, file_bytes=20_000)
    assert len(said) > 3 and said[-1].endswith("(100%)")
    worlds(4).run(load_and_save, str(tmp_path / "converted"), str(tmp_path / "saved"), Layout(4, tp=2, pp=2))
    assert len(list((tmp_path / "saved").glob("*.distcp"))) >= 4  # from every rank
    role_to_hf(tmp_path / "saved", tmp_path / "about", tmp_path / "back", said.append, file_bytes=20_000)
    expected, found = hf_models.state(model), hf_models.state(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def fail_to_save(folder: str, fault: str) -> str:
    """The disk is full on rank 1, or what Megatron's writer does not declare to need is not installed anywhere."""
    import errno
    from unittest import mock

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_ext.checkpoint import save

    role, optimizer = _role(DENSE, Layout(4, tp=2, pp=2), torch.float32, seed=0)
    full = mock.patch.object(filesystem_async, "_write_item", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    patch = mock.patch.object(filesystem_async, "HAVE_PSUTIL", False) if fault == "psutil" else full
    with role.state.current(), patch if fault == "psutil" or torch.distributed.get_rank() == 1 else mock.MagicMock():
        try:
            save(_saved(role, optimizer), folder)
        except CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("fault", "what"), [("disk", "No space left on device"), ("psutil", "psutil")])
def test_a_failed_save_is_told_on_every_rank_and_leaves_nothing(worlds, tmp_path, fault, what):
    folder = tmp_path / "actor"
    messages = worlds(4).run(fail_to_save, str(folder), fault)
    assert all(f"{folder} could not be written" in message for message in messages)
    assert what in messages[0]
    assert not folder.exists()


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_a_range_of_a_flattened_tensor_as_rectangles(shape):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            found = [
                (offset, numbers[tuple(slice(*dim) for dim in rectangle)].flatten().tolist())
                for rectangle, offset in rectangles(shape, start, stop)
            ]
            assert [number for _, part in found for number in part] == list(range(start, stop))
            assert all(part[0] == start + offset for offset, part in found)
            assert len(found) <= 2 * len(shape) - 1


def test_every_rectangle_is_written_once_and_the_work_is_shared():
    hf = HFConfig.from_dict(hf_models.config("qwen3_moe", tied=False))
    layout = Layout(8, tp=2, ep=2, pp=2, sequence_parallel=True)
    by_rank = writers([tile_map(hf, layout, rank) for rank in range(8)])
    written = [(tile.hf_name, tile.hf_slices) for tiles in by_rank for _, tile in tiles]
    assert len(written) == len(set(written))
    sizes = [sum(tile.numel for _, tile in tiles) for tiles in by_rank]
    assert max(sizes) < 2 * sum(sizes) / 8
