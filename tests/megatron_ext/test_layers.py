"""Core attention on packed rows against a masked softmax, the norm against its formula, and the specs."""

import math
from types import SimpleNamespace

import pytest
import torch

CONFIG = SimpleNamespace(
    attention_dropout=0.0, context_parallel_size=1, kv_channels=8, params_dtype=torch.float32, sequence_parallel=True
)


def core_attention(**changes):
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_ext.layers import CoreAttention

    mask = changes.pop("attn_mask_type", AttnMaskType.causal)
    return CoreAttention(SimpleNamespace(**(vars(CONFIG) | changes)), layer_number=1, attn_mask_type=mask)


def masked_softmax_attention(query, key, value, lengths: list[int]) -> torch.Tensor:
    """[t, heads, d], [t, groups, d] -> [t, heads x d] by one mask over all pairs of tokens, in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(query))
    visible = (sequence[:, None] == sequence[None]) & (place[:, None] >= place[None])
    scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, value).flatten(1)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[37], [1, 1, 1], [5, 40, 1, 17, 9, 3, 11], [16, 16, 16]])
def test_packed_attention_and_gradients(lengths: list[int], groups: int):
    from megatron_ext.layers import PackedSequences

    torch.manual_seed(0)
    tokens = sum(lengths)
    query, key, value = (torch.randn(tokens, n, 8, requires_grad=True) for n in (4, groups, groups))
    upstream = torch.randn(tokens, 32)
    packed = PackedSequences.of(lengths, torch.device("cpu"))
    found = core_attention()(query, key, value, None, packed_seq_params=packed)
    expected = masked_softmax_attention(query, key, value, lengths)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((found * upstream).sum(), (query, key, value))
    references = torch.autograd.grad((expected * upstream).sum(), (query, key, value))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
def test_packed_attention_in_bfloat16_on_a_gpu(groups: int):
    from megatron_ext.layers import PackedSequences

    lengths = [5, 40, 1, 17, 9, 3, 11]
    query, key, value = (
        torch.randn(86, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4, groups, groups)
    )
    packed = PackedSequences.of(lengths, torch.device("cuda"))
    found = core_attention(kv_channels=64)(query, key, value, None, packed_seq_params=packed)
    expected = masked_softmax_attention(query.cpu(), key.cpu(), value.cpu(), lengths)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=2e-2, atol=2e-2)
    upstream = torch.randn(86, 256)
    gradients = torch.autograd.grad((found * upstream.cuda()).sum(), (query, key, value))
    references = torch.autograd.grad((expected * upstream).sum(), (query, key, value))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=5e-2, atol=5e-2)


def test_batched_attention():
    torch.manual_seed(0)
    query, key, value = (torch.randn(12, 2, n, 8) for n in (4, 2, 2))
    found = core_attention()(query, key, value, None)
    for row in range(2):
        expected = masked_softmax_attention(query[:, row], key[:, row], value[:, row], [12])
        torch.testing.assert_close(found[:, row].double(), expected, rtol=1e-5, atol=1e-6)


def test_buckets_hold_sequences_within_a_factor_of_two():
    from megatron_ext.layers import PackedSequences

    packed = PackedSequences.of([5, 40, 1, 21, 9, 3, 11], torch.device("cpu"))
    buckets, place = packed.buckets
    assert [tuple(bucket.tokens.shape) for bucket in buckets] == [(2, 40), (2, 11), (2, 5), (1, 1)]
    assert sorted(place.tolist()) == list(range(90))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"context_parallel_size": 2}, "cp=2"), ({"attention_dropout": 0.1}, "no dropout"), ({"attn_mask_type": 1}, "is causal")],
)
def test_attention_refuses(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        core_attention(**changes)


def test_norm():
    from megatron_ext.layers import Norm

    norm = Norm(CONFIG, 16, eps=1e-3)
    x = torch.randn(5, 16)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight)
    assert norm.weight.sequence_parallel is True


def test_specs():
    from megatron_ext.layers import default_spec, layer_spec
    from tests.megatron_ext.hf_layout import hf_config, hf_model

    hf = hf_config(hf_model("qwen3", num_hidden_layers=1))
    attention = layer_spec(hf, "local").submodules.self_attention.submodules
    assert attention.q_layernorm.__name__ == attention.k_layernorm.__name__ == "Norm"
    with pytest.raises(ValueError, match="'fast' is unknown: use one of local, te"):
        layer_spec(hf, "fast")
    with pytest.raises(ValueError, match="use_te_activation_func=true: the local layer spec, without .*, has none"):
        layer_spec(hf, "local", te_activation=True)
    if not torch.cuda.is_available():
        assert default_spec() == "local"
