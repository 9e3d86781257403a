"""The device's answers, and the CPU shim's limits."""

import pytest
import torch

from megatron_ext import device

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for hosts without CUDA")


def test_memory_in_use_follows_an_allocation():
    before = device.memory_in_use()
    held = torch.ones(64 << 20, dtype=torch.uint8, device=device.current())
    device.synchronize()
    assert device.memory_in_use() - before > 60 << 20
    assert held.device == device.current()


@needs_cpu
def test_scope_rewrites_cuda_and_nothing_else():
    device.install()
    device.install()
    assert device.backend() == "gloo" and device.current() == torch.device("cpu")
    with device.scope():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert torch.zeros(2).cuda().device.type == "cpu"
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).type(torch.float64).dtype == torch.float64
        assert not torch.zeros(2, pin_memory=True).is_pinned()
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@needs_cpu
def test_rng_tracker_forks_the_cpu_generator():
    device.install()
    from megatron.core.tensor_parallel import random

    tracker = random.CudaRNGStatesTracker()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tracked = torch.rand(4)
    torch.manual_seed(1)
    tracker.add("tracked", 7)
    with tracker.fork("tracked"):
        first = torch.rand(2)
    outside = torch.rand(3)
    with tracker.fork("tracked"):
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), tracked) and torch.equal(outside, expected)
    with pytest.raises(KeyError, match="rng state missing is not added"), tracker.fork("missing"):
        pass
