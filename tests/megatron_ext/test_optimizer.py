"""The distributed optimizer against torch's AdamW on the HF model; masters, skipped updates, the schedule."""

import math

import pytest
import torch

from megatron_ext.layout import Layout, Split
from megatron_ext.optimizer import OptimizerSettings

# eps: the key bias has next to no gradient, and Adam with a tiny eps would blow its rounding errors up to full updates
SETTINGS = OptimizerSettings(
    lr=2e-3, grad_clip=0.5, weight_decay=0.1, eps=1e-6, warmup_steps=2, schedule="cosine", decay_steps=6
)
STEPS = 5


def train_beside_hf(layout: Layout, model: dict, restart: bool) -> dict:
    """A few updates on both sides; `restart`: a second optimizer takes over after the second update, in HF as well."""
    import gc
    import weakref

    from megatron_ext.optimizer import Optimizer
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model, largest_difference, named_parameters, to_megatron

    reference = hf_model(**model)
    role = scenarios.make_role(reference, layout)
    items = scenarios.sequences(reference.config.vocab_size)
    mine = scenarios.share(items, layout, role.state.coordinates.dp)
    with role.state.current():
        optimizer = Optimizer(role.wrapped, SETTINGS, torch.float32)
    adam = _hf_adam(reference)
    norms, rates = [], []
    for step in range(STEPS):
        if restart and step == 2:
            gone = weakref.ref(optimizer.megatron.chained_optimizers[0])
            with role.state.current():
                optimizer = Optimizer(role.wrapped, SETTINGS, torch.float32)
            gc.collect()
            assert gone() is None, "the first optimizer's state is still held"
            adam = _hf_adam(reference)
        _, result = _update(role, mine, optimizer)
        scenarios.hf_gradients(reference, items, 1.0)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), SETTINGS.grad_clip).item()
        for group in adam.param_groups:
            group["lr"] = SETTINGS.lr_at(step - 2 if restart and step >= 2 else step)
        adam.step()
        norms.append((result["grad_norm"], norm))
        rates.append((result["lr"], adam.param_groups[0]["lr"]))
        assert not result["skipped"]
    expected = to_megatron(dict(reference.state_dict()), role.hf, layout, torch.distributed.get_rank())
    found = {name: parameter.detach() for name, parameter in named_parameters(role.chunks)}
    return {"worst": largest_difference(found, expected), "norms": norms, "rates": rates}


def _hf_adam(reference) -> torch.optim.AdamW:
    """HF's convention: no weight decay on biases and norms."""
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in reference.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)


def _update(role, mine: list, optimizer, loss=None):
    from megatron_ext.step import forward_backward
    from tests.megatron_ext import scenarios

    with role.state.current():
        optimizer.zero_grad()
        batches = scenarios.micro_batches(mine, packed=True, layout=role.layout, count=4)
        sums = forward_backward(role.wrapped, batches, loss or scenarios.policy_loss)
        return sums, optimizer.step()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("layout", "model", "restart"),
    [
        (Layout(4, pp=2), {"family": "qwen2", "tied": True}, False),
        (Layout(4, pp=4, split=Split((0, 2, 2, 0))), {"family": "qwen2", "tied": True}, False),
        (Layout(4, tp=2, pp=2), {"family": "qwen2"}, True),
        (Layout(4, tp=2, sequence_parallel=True), {"family": "qwen3", "head_dim": 16, "vocab_size": 131}, False),
        (Layout(4, tp=2, ep=2, sequence_parallel=True), {"family": "qwen3_moe"}, False),
        (Layout(4, ep=2), {"family": "qwen3_moe", "norm_topk_prob": False}, True),
        (Layout(4, tp=2, ep=2, etp=2, sequence_parallel=True), {"family": "mixtral"}, False),
        (Layout(4, pp=2, ep=2), {"family": "mixtral", "tied": True}, False),
        (Layout(4, tp=2, sequence_parallel=True), {"family": "mixtral"}, False),
    ],
    ids=[
        "dp2-pp2",
        "pp4-bare-ends",
        "tp2-pp2-restart",
        "tp2-sp-dp2",
        "moe-tp2-ep2",
        "moe-dp4-ep2-restart",
        "moe-ep2-etp2",
        "moe-pp2-ep2",
        "moe-tp2-dp2",
    ],  # fmt: skip
)
def test_updates_equal_adamw_on_hf(worlds, layout: Layout, model: dict, restart: bool):
    for result in worlds(4).run(train_beside_hf, layout, model, restart):
        assert result["worst"][0] < 1e-4, result["worst"]
        for found, expected in result["norms"]:
            assert found == pytest.approx(expected, rel=1e-4)
            assert found > SETTINGS.grad_clip  # so that clipping is in it
        for found, expected in result["rates"]:
            assert found == expected


def train_in_bfloat16(layout: Layout) -> dict:
    from megatron_ext.optimizer import Optimizer
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model, named_parameters

    role = scenarios.make_role(hf_model(tied=True), layout, dtype=torch.bfloat16)
    mine = scenarios.share(scenarios.sequences(128), layout, role.state.coordinates.dp)

    def likelihood(log_probs, entropy, batch):
        mask = batch.fields["loss_mask"]
        return -(log_probs * mask).sum(), mask.sum(), {"loss": -(log_probs * mask).sum(), "count": mask.sum()}

    with role.state.current():
        optimizer = Optimizer(role.wrapped, OptimizerSettings(lr=1e-5), torch.bfloat16)
    before = {name: parameter.detach().clone() for name, parameter in named_parameters(role.chunks)}
    _update(role, mine, optimizer, likelihood)
    small = sum((parameter != before[name]).sum().item() for name, parameter in named_parameters(role.chunks))
    masters = [p for group in optimizer.megatron.param_groups for p in group["params"]]
    with role.state.current():
        optimizer = Optimizer(role.wrapped, OptimizerSettings(lr=3e-3), torch.bfloat16)
    losses = []
    for _ in range(12):
        sums, _ = _update(role, mine, optimizer, likelihood)
        losses.append(sums["loss"].item() / sums["count"].item() if sums else None)
    return {
        "dtypes": {parameter.dtype for _, parameter in named_parameters(role.chunks)},
        "masters": {master.dtype for master in masters},
        "changed_by_a_small_update": small / sum(tensor.numel() for tensor in before.values()),
        "losses": losses,
    }


@pytest.mark.timeout(120)
def test_bfloat16_trains_with_float32_masters(worlds):
    for result in worlds(4).run(train_in_bfloat16, Layout(4, pp=2)):
        assert result["dtypes"] == {torch.bfloat16} and result["masters"] == {torch.float32}
        assert result["changed_by_a_small_update"] < 0.5  # most updates are below a bfloat16's step: only the masters move
        if result["losses"][0] is not None:
            assert result["losses"][-1] < 0.7 * result["losses"][0]


def spoil_an_update(layout: Layout) -> dict:
    from megatron_ext.optimizer import Optimizer
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model, named_parameters

    role = scenarios.make_role(hf_model(), layout)
    mine = scenarios.share(scenarios.sequences(128), layout, role.state.coordinates.dp)
    with role.state.current():
        optimizer = Optimizer(role.wrapped, SETTINGS, torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in named_parameters(role.chunks)}

    def spoiled(log_probs, entropy, batch):
        total, count, sums = scenarios.policy_loss(log_probs, entropy, batch)
        return total * float("nan"), count, sums

    def infinite(log_probs, entropy, batch):  # its gradient is finite
        total, count, sums = scenarios.policy_loss(log_probs, entropy, batch)
        return total + float("inf"), count, sums

    _, bad = _update(role, mine, optimizer, spoiled)
    _, worse = _update(role, mine, optimizer, infinite)
    same = all(torch.equal(parameter, before[name]) for name, parameter in named_parameters(role.chunks))
    _, good = _update(role, mine, optimizer)
    finite = all(parameter.isfinite().all().item() for _, parameter in named_parameters(role.chunks))
    return {"bad": bad, "worse": worse, "same": same, "good": good, "finite": finite, "updates": optimizer.updates}


@pytest.mark.timeout(120)
def test_an_update_that_is_not_finite_is_skipped(worlds):
    for result in worlds(4).run(spoil_an_update, Layout(4, pp=2)):
        assert result["bad"]["skipped"] and math.isnan(result["bad"]["grad_norm"]) and result["same"]
        assert result["worse"]["skipped"] and not result["good"]["skipped"] and result["finite"]
        assert result["good"]["lr"] == SETTINGS.lr_at(0) and result["updates"] == 1


def test_schedule():
    assert OptimizerSettings(lr=1.0).lr_at(100) == 1.0
    warm = OptimizerSettings(lr=1.0, warmup_steps=3)
    assert [warm.lr_at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = OptimizerSettings(lr=1.0, warmup_steps=1, schedule="linear", decay_steps=4, min_lr=0.2)
    assert [linear.lr_at(step) for step in (1, 3, 5, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    cosine = OptimizerSettings(lr=1.0, schedule="cosine", decay_steps=2)
    assert [cosine.lr_at(step) for step in (0, 1, 2)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"schedule": "cosin"}, "'cosin' is unknown"), ({"schedule": "linear"}, "needs optimizer.decay_steps > 0")],
)
def test_settings_refuse(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(lr=1.0, **fields)
