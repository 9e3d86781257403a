"""What leaves the device comes back bit for bit: weights rebuilt from masters, and what rested on the host."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.layout import Layout
from megatron_ext.memory import PAGE, HostMemory, TrainingMemory, is_empty
from megatron_ext.optimizer import OptimizerSettings

SETTINGS = OptimizerSettings(lr=3e-3, grad_clip=1.0, weight_decay=0.1)
UPDATES = 3


def train_with_breaks(layout: Layout, dtype: str, away: tuple[str, ...], model: dict, spec: str | None = "local") -> dict:
    """Updates with and without the memory gone before each: parameters at every arrow, and whether all went and came back."""
    from tests.megatron_ext.hf_layout import hf_model

    reference = hf_model(**model)
    _, unbroken = _train(reference, layout, getattr(torch, dtype), (), spec)
    breaks, broken = _train(reference, layout, getattr(torch, dtype), away, spec)
    return {"breaks": breaks, "same": [_equal(a, b) for a, b in zip(unbroken, broken, strict=True)]}


def _train(
    reference, layout: Layout, dtype: torch.dtype, away: tuple[str, ...], spec: str | None
) -> tuple[list[dict], list[dict]]:
    """One entry per break, and the parameters after every update."""
    from megatron_ext.optimizer import Optimizer
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.test_optimizer import _update

    role = scenarios.make_role(reference, layout, dtype, spec=spec)
    mine = scenarios.share(scenarios.sequences(128), layout, role.state.coordinates.dp)
    with role.state.current():
        optimizer = Optimizer(role.wrapped, SETTINGS, dtype)
    memory = TrainingMemory(role.wrapped)
    breaks, after = [], []
    for _ in range(UPDATES):
        if away:  # also before the first update, when there are no moments yet
            breaks.append(_break(role, optimizer, memory, away))
        _update(role, mine, optimizer)
        after.append(_snapshot(role))
    return breaks, after


def _break(role, optimizer, memory, away: tuple[str, ...]) -> dict:
    before, states = _snapshot(role), [state.clone() for state in optimizer.states()]
    parameters = list(_parameters(role).values())
    with role.state.current():
        memory.release_gradients()
        if "optimizer" in away:
            memory.offload_optimizer(optimizer)
        if "weights rebuilt" in away:
            memory.drop_weights(optimizer)
        if "weights copied" in away:
            memory.offload_weights()
        gone = {
            "gradients": all(is_empty(parameter.main_grad) for parameter in parameters),
            "weights": all(is_empty(parameter) for parameter in parameters),
            "optimizer": all(is_empty(state) for state in optimizer.states()),
        }
        memory.hand_over()
        memory.restore()
    back = zip(optimizer.states(), states, strict=True)
    zero = all(not parameter.main_grad.any() for parameter in parameters)
    return gone | {"same": _equal(before, _snapshot(role)) and all(torch.equal(a, b) for a, b in back) and zero}


def _parameters(role) -> dict[str, torch.nn.Parameter]:
    from tests.megatron_ext.hf_layout import named_parameters

    return dict(named_parameters(role.chunks))


def _snapshot(role) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in _parameters(role).items()}


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    bits = {2: torch.int16, 4: torch.int32}
    return a.keys() == b.keys() and all(torch.equal(a[n].view(bits[a[n].itemsize]), b[n].view(bits[b[n].itemsize])) for n in a)


TIED, UNTIED = {"tied": True}, {"family": "qwen3", "head_dim": 16, "vocab_size": 131}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(4), TIED),
        (Layout(4, pp=2), TIED),
        (Layout(4, tp=2, sequence_parallel=True), UNTIED),
        (Layout(4, tp=2, pp=2), UNTIED),
        (Layout(4, pp=2, vpp=2), TIED),
        (Layout(4, tp=2, ep=2, sequence_parallel=True), {"family": "qwen3_moe"}),
        (Layout(4, pp=2, ep=2), {"family": "mixtral"}),
    ],
    ids=["dp4", "dp2-pp2-tied", "dp2-tp2-sp", "tp2-pp2", "dp2-pp2-vpp2", "tp2-ep2", "pp2-ep2"],
)
def test_weights_are_rebuilt_bit_for_bit(worlds, layout: Layout, model: dict):
    for result in worlds(4).run(train_with_breaks, layout, "bfloat16", ("weights rebuilt",), model):
        assert result["breaks"] == [{"gradients": True, "weights": True, "optimizer": False, "same": True}] * UPDATES
        assert result["same"] == [True] * UPDATES


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("dtype", "away", "gone"),
    [
        ("bfloat16", ("weights rebuilt", "optimizer"), {"weights": True, "optimizer": True}),
        ("bfloat16", ("weights copied",), {"weights": True, "optimizer": False}),
        ("float32", ("weights copied", "optimizer"), {"weights": True, "optimizer": True}),
        ("float32", ("weights rebuilt",), {"weights": False}),  # they are their own masters
    ],
)
def test_what_rested_on_the_host_comes_back(worlds, dtype: str, away: tuple[str, ...], gone: dict):
    for result in worlds(4).run(train_with_breaks, Layout(4, tp=2), dtype, away, TIED):
        for found in result["breaks"]:
            assert found["gradients"] and found["same"]
        assert {name: result["breaks"][-1][name] for name in gone} == gone
        assert result["same"] == [True] * UPDATES


def test_what_torch_keeps_is_handed_over_where_others_lack_it(monkeypatch):
    handed_over = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: handed_over.append(True))
    memory = TrainingMemory([])
    memory.make_free(100)
    assert not handed_over
    memory.make_free(101)
    assert handed_over == [True]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("away", [("weights rebuilt",), ("weights rebuilt", "optimizer"), ("weights copied", "optimizer")])
def test_on_a_gpu_with_its_own_kernels(worlds, away: tuple[str, ...]):
    """Transformer Engine's layers and Adam; updates there are not the same twice, so only the breaks are compared."""
    model = {"hidden_size": 256, "intermediate_size": 512}  # heads of 64
    for result in worlds(1, "gpu", cuda=True).run(train_with_breaks, Layout(1), "bfloat16", away, model, None):
        assert [found["same"] and found["weights"] for found in result["breaks"]] == [True] * UPDATES


def load_into_a_model_with_an_optimizer(layout: Layout) -> dict:
    """Weights from outside: the masters are of others until they are taken again."""
    from megatron_ext.optimizer import Optimizer
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import fill, hf_model

    role = scenarios.make_role(hf_model(), layout, torch.bfloat16)
    memory = TrainingMemory(role.wrapped)
    with role.state.current():
        optimizer = Optimizer(role.wrapped, SETTINGS, torch.bfloat16)
        fill(role.chunks, hf_model(seed=1).state_dict(), role.hf, layout, torch.distributed.get_rank())
        loaded = _snapshot(role)
        try:
            memory.drop_weights(optimizer)
        except RuntimeError as error:
            refused = str(error)
        kept = _equal(loaded, _snapshot(role))
        optimizer.reload()
        memory.drop_weights(optimizer)
        memory.restore()
    return {"refused": refused, "kept": kept, "same": _equal(loaded, _snapshot(role))}


@pytest.mark.timeout(120)
def test_weights_that_the_masters_do_not_know_are_not_dropped(worlds):
    for result in worlds(4).run(load_into_a_model_with_an_optimizer, Layout(4, pp=2)):
        assert "are not what the optimizer's masters say: after writing parameters from outside" in result["refused"]
        assert result["kept"] and result["same"]


def _tensors(device: str = "cpu") -> list[torch.Tensor]:
    whole = torch.arange(3000, dtype=torch.float32, device=device)
    return [whole[:1000], whole[1000:], torch.ones(77, 3, dtype=torch.bfloat16, device=device), torch.ones(0, device=device)]


def update_and_empty(model: dict, length: int) -> dict:
    """Two optimizers after one another; for each, its states whenever torch's cache was emptied, and what torch then keeps."""
    from megatron_ext.optimizer import Optimizer
    from megatron_ext.step import forward_backward, pack
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model

    role = scenarios.make_role(hf_model(**model), Layout(1), torch.bfloat16, spec=None)
    micro_batches = [pack([item], length) for item in scenarios.sequences(model["vocab_size"], [length] * 2)]
    empty_cache, optimizer, states, emptied, kept = torch.cuda.empty_cache, None, [], [], []
    torch.cuda.empty_cache = lambda: (emptied.append(len(optimizer.states()) if optimizer else 0), empty_cache())
    try:
        for _ in range(2):
            optimizer = None
            with role.state.current():
                optimizer = Optimizer(role.wrapped, SETTINGS, torch.bfloat16)
                assert not any(state() is not None for state in states), "states of the first optimizer are still there"
                for _ in range(2):
                    optimizer.zero_grad()
                    forward_backward(role.wrapped, micro_batches, scenarios.policy_loss)
                    optimizer.step()
            states = [weakref.ref(state) for state in optimizer.states()]
            empty_cache()
            if torch.cuda.is_available():
                kept.append((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))
    finally:
        torch.cuda.empty_cache = empty_cache
    return {"emptied": emptied, "masters": len(optimizer.states()) // 3, "kept": kept}


def _chunk(nbytes: int, on: str) -> SimpleNamespace:
    """All that TrainingMemory looks at: 16-bit weights of so many bytes, and gradients of twice as many."""
    buffer = SimpleNamespace(
        param_data=torch.ones(nbytes // 2, dtype=torch.bfloat16, device=on), grad_data=torch.ones(nbytes // 2, device=on)
    )
    return SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])


@pytest.mark.parametrize(("nbytes", "weights", "gradients"), [(50_000_000, 24, 48), (10_000_000, None, 10)])
def test_buffers_fill_whole_blocks(nbytes: int, weights: int | None, gradients: int):
    """In pages of 2 MiB; below 10 MiB several tensors share a block anyway."""
    chunk = _chunk(nbytes, "cpu")
    TrainingMemory([chunk])
    (buffer,) = chunk.buffers
    assert buffer.param_data.untyped_storage().nbytes() == (weights * PAGE if weights else nbytes)
    assert buffer.grad_data.untyped_storage().nbytes() == gradients * PAGE
    assert (buffer.param_data == 1).all() and not buffer.grad_data.any()


@pytest.mark.gpu
def test_a_small_tensor_that_stays_keeps_no_weights():
    left = 3438 * 512  # bytes of the weights' last page, in the allocator's own unit
    torch.cuda.empty_cache()
    chunk = _chunk(26 * PAGE - left, "cuda")
    TrainingMemory([chunk])
    torch.cuda.empty_cache()
    small = torch.zeros(left, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    (buffer,) = chunk.buffers
    for data in (buffer.param_data, buffer.grad_data):
        data.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    assert before - torch.cuda.memory_reserved() >= 3 * (26 * PAGE - left) and not small.any()


def test_states_that_stay_are_not_made_in_the_gaps_of_activations(worlds):
    (found,) = worlds(1).run(update_and_empty, {"vocab_size": 128}, 9)
    assert found["emptied"] == [0, found["masters"]] * 2  # before the masters, and before the moments


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_what_is_left_of_blocks_that_states_lie_in_is_little(worlds):
    """Logits of 1.6 GB and their like, in whose place the 1.3 GB of the moments would hold on to them."""
    model = {"vocab_size": 100_000, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8}
    model |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    (found,) = worlds(1, "gpu", cuda=True).run(update_and_empty, model, 8192)
    for held, used in found["kept"]:
        assert held - used < 0.1 * used, found["kept"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_memory_is_allocated_once(device):
    tensors, host = _tensors(device), HostMemory()
    expected = [tensor.clone() for tensor in tensors]
    host.take(tensors[:2], reserve=1 << 20)
    block = host._block.data_ptr()
    assert host.nbytes == 1 << 20 and host._block.is_pinned() == (device == "cuda")
    assert [is_empty(tensor) for tensor in tensors] == [True, True, False, False]
    with pytest.raises(RuntimeError, match="rest on the host already"):
        host.take(tensors[2:])
    host.give_back()
    host.take(tensors)
    host.give_back()
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    assert host._block.data_ptr() == block


def test_what_did_not_change_is_not_copied_again():
    tensor, host = torch.arange(10), HostMemory()
    with pytest.raises(RuntimeError, match="no copy of these tensors yet"):
        host.take([tensor], copy=False)
    host.take([tensor])
    host.give_back()
    tensor.zero_()
    host.take([tensor], copy=False)
    host.give_back()
    assert tensor.tolist() == list(range(10))


@pytest.mark.gpu
def test_the_device_gets_its_memory_back():
    size = 1 << 30
    tensor, host = torch.ones(size, dtype=torch.uint8, device="cuda"), HostMemory()
    for _ in range(3):
        before, _ = torch.cuda.mem_get_info()
        host.take([tensor])
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] - before >= size
        host.give_back()
        assert tensor[:: 1 << 20].sum().item() == 1024
