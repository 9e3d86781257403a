"""Vocabulary-parallel log-probs, entropy and their gradient against torch on the whole, unpadded vocabulary."""

import pytest
import torch

TOKENS = 13


def compare_with_torch(tp: int, vocab_size: int, dtype: torch.dtype, overwrite: bool) -> dict[str, float]:
    import torch.distributed as dist

    from megatron_ext import log_probs
    from megatron_ext.layout import padded_vocab_size

    log_probs.CHUNK_ELEMENTS = 300  # a few rows at a time
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
