"""Checkpoints of a model and its optimizer: another layout goes on as the one that saved would have, Adam's step included."""

import multiprocessing

import pytest
import torch

from megatron_ext.checkpoint import CheckpointError, rectangles
from megatron_ext.layout import Layout, Split
from megatron_ext.optimizer import OptimizerSettings

SETTINGS = OptimizerSettings(lr=2e-3, weight_decay=0.1, warmup_steps=2, schedule="linear", decay_steps=10)
UPDATES = 3
DENSE = {"family": "qwen2", "tied": True, "num_key_value_heads": 4, "vocab_size": 131}
EXPERTS = {"family": "qwen3_moe", "num_key_value_heads": 4}


def _saved(role, optimizer=None):
    from megatron_ext.checkpoint import Saved
    from megatron_ext.weights import hf_shapes, named_parameters, tile_map

    tiles = [tile_map(role.hf, role.layout, rank) for rank in range(role.layout.world_size)]
    return Saved(role.layout, named_parameters(role.chunks), tiles, hf_shapes(role.hf), optimizer)


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
    torch.distributed.all_reduce(total)
    return (total[0] / total[1]).item(), stepped["grad_norm"], stepped["lr"]


def _role(model: dict, layout: Layout, dtype: torch.dtype, seed: int):
    from megatron_ext.optimizer import Optimizer
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model

    role = scenarios.make_role(hf_model(**model, seed=seed), layout, dtype=dtype)
    with role.state.current():
        return role, Optimizer(role.wrapped, SETTINGS, dtype)


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


@pytest.mark.timeout(240)
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
