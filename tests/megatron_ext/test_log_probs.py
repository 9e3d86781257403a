"""Vocabulary-parallel log-probs, entropy and their gradient against torch on the whole, unpadded vocabulary."""

import pytest
import torch

TOKENS = 13


def compare_with_torch(tp: int, vocab_size: int, dtype: torch.dtype, overwrite: bool) -> dict[str, float]:
    import torch.distributed as dist

    from megatron_ext import log_probs
    from megatron_ext.layout import padded_vocab_size

    whole_chunk, log_probs.CHUNK_ELEMENTS = log_probs.CHUNK_ELEMENTS, 300  # a few rows at a time
    groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, dist.get_world_size(), tp)]
    group = groups[dist.get_rank() // tp]
    padded, temperature = padded_vocab_size(vocab_size, tp), 0.6
    generator = torch.Generator().manual_seed(3)
    whole = (torch.randn(TOKENS, padded, generator=generator) * 4).to(dtype)
    whole[:, vocab_size:] = 1000.0  # would rule every sum that it got into
    labels = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    labels[0] = vocab_size - 1
    upstream = torch.randn(TOKENS, generator=generator)

    reference = whole[:, :vocab_size].float().requires_grad_()
    table = (reference / temperature).log_softmax(-1)
    expected = table.gather(1, labels[:, None]).squeeze(1)
    (expected * upstream).sum().backward()
    expected_gradient = torch.zeros_like(whole, dtype=torch.float32)
    expected_gradient[:, :vocab_size] = reference.grad

    columns = slice(group.rank() * padded // tp, (group.rank() + 1) * padded // tp)
    leaf = whole[:, columns].clone().requires_grad_()
    logits = leaf * 1
    found, entropy = log_probs.vocab_parallel_log_probs(logits, labels, vocab_size, temperature, group, overwrite)
    untouched = torch.equal(logits, leaf)
    (found * upstream).sum().backward()
    log_probs.CHUNK_ELEMENTS = whole_chunk  # the rank runs other tests too
    return {
        "log_probs": (found - expected).abs().max().item(),
        "entropy": (entropy + (table.exp() * table).sum(-1)).abs().max().item(),
        "gradient": (leaf.grad.float() - expected_gradient[:, columns]).abs().max().item(),
        "padding": leaf.grad[:, max(0, vocab_size - columns.start) :].abs().sum().item(),
        "dtypes": (found.dtype, entropy.dtype, leaf.grad.dtype) == (torch.float32, torch.float32, dtype),
        "untouched": untouched and torch.equal(logits, leaf) != overwrite,
        "no_entropy_gradient": not entropy.requires_grad,
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("tp", "vocab_size", "dtype", "overwrite"),
    [
        (2, 131, torch.float32, False),
        (2, 131, torch.float32, True),
        (4, 100, torch.float32, False),  # two ranks hold padding only
        (2, 131, torch.bfloat16, True),
    ],
)
def test_equal_torch(worlds, tp: int, vocab_size: int, dtype: torch.dtype, overwrite: bool):
    for result in worlds(4).run(compare_with_torch, tp, vocab_size, dtype, overwrite):
        assert result["log_probs"] < 1e-5 and result["entropy"] < 1e-5
        assert result["gradient"] < (5e-6 if dtype == torch.float32 else 2e-2)  # of values up to 4
        assert result["padding"] == 0
        assert result["dtypes"] and result["untouched"] and result["no_entropy_gradient"]


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "width"), [(152064, 152064), (151669, 151680), (5, 64), (0, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_equal_torch(vocab_size: int, width: int, dtype: torch.dtype):
    from megatron_ext import log_probs

    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(33, width, generator=generator) * 4).to(dtype)
    labels = torch.randint(0, max(vocab_size, 1), (33,), generator=generator)
    scale = torch.randn(33, generator=generator)
    scale_of_label = scale * (torch.rand(33, generator=generator) > 0.5)
    found = {}
    for device in ("cpu", "cuda"):
        own, own_labels, *scales = (t.to(device, copy=True) for t in (logits, labels, scale, scale_of_label))
        largest, total, weighted = log_probs._statistics(own, vocab_size, 0.6)
        normalizer = largest + total.log() if vocab_size else torch.zeros_like(largest)
        log_probs._gradient(own, own, vocab_size, 0.6, own_labels, normalizer, *scales)
        found[device] = [tensor.cpu() for tensor in (largest, total, weighted, own)]
    for ours, expected in zip(found["cuda"][:3], found["cpu"][:3], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(found["cuda"][3], found["cpu"][3], **tolerance)
    assert not found["cuda"][3][:, vocab_size:].any()
