"""Layers for Megatron's local spec (no Transformer Engine), and the specs of a decoder's layers.

Upstream's local spec has a norm that refuses sequence parallelism and an attention that refuses packed sequences; the two
classes here replace them. The TE spec is taken as it is.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Sequence

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.nn import functional

from megatron_ext import compat, device
from megatron_ext.hf_config import HFConfig

SPECS = ("local", "te")


def default_spec(dtype: torch.dtype = torch.bfloat16) -> str:
    """The spec to build with: te where Transformer Engine is importable and CUDA there, local elsewhere and for float32.

    TE's attention over packed sequences is for 16-bit tensors.
    """
    te = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    return "te" if te and dtype != torch.float32 else "local"


def layer_spec(hf: HFConfig, spec: str, te_activation: bool = False) -> ModuleSpec:
    """The spec of one decoder layer. `te_activation`: what the config's use_te_activation_func asks for.

    Raises:
        ValueError: `spec` is not one of SPECS, or has no such activation.
    """
    if te_activation and spec != "te":  # Megatron would call the bare function, without the gate
        raise ValueError(f"megatron.use_te_activation_func=true: the {spec} layer spec, without Transformer Engine, has none")
    experts = {"num_experts": hf.num_experts, "moe_grouped_gemm": spec == "te"} if hf.is_moe else {}
    if spec == "te":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=hf.qk_norm, use_te_activation_func=te_activation, **experts
        )
    if spec != "local":
        raise ValueError(f"layer spec {spec!r} is unknown: use one of {', '.join(SPECS)}")
    layer = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=hf.qk_norm, normalization="RMSNorm", **experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if hf.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return layer


def block_spec(hf: HFConfig, spec: str, num_layers: int, te_activation: bool = False) -> TransformerBlockSubmodules:
    """The spec of a chunk of `num_layers` layers. Given one layer's spec alone, upstream picks its own final norm."""
    layer = layer_spec(hf, spec, te_activation)
    if spec == "te":
        from megatron.core.extensions.transformer_engine import TENorm as final_norm
    else:
        final_norm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=final_norm)


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose weight says that its gradient is a sum over TP ranks under sequence parallelism."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, device=device.current(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed row, with the lengths on the host as well: no synchronisation to learn them."""

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], on: torch.device) -> "PackedSequences":
        """Sequences of `lengths` tokens, one after the other; together they fill the row."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(on, non_blocking=True)
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
        )

    @functools.cached_property
    def buckets(self) -> tuple[list["Bucket"], Tensor]:
        """The sequences grouped by length, and the place of each token of the row in the buckets' concatenated tokens."""
        starts, start = [], 0
        for length in self.lengths:
            starts.append(start)
            start += length
        longest_first = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        groups: list[list[int]] = []
        for i in longest_first:
            if not groups or 2 * self.lengths[i] < self.lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(i)
        on = self.cu_seqlens_q.device
        buckets = [Bucket.of([starts[i] for i in group], [self.lengths[i] for i in group], on) for group in groups]
        order = torch.cat([bucket.tokens.flatten()[bucket.real] for bucket in buckets])
        return buckets, torch.argsort(order)


@dataclasses.dataclass
class Bucket:
    """Sequences within a factor of two in length, as a padded batch: one attention call instead of one per sequence."""

    tokens: Tensor  # [sequences, longest] int64: which token of the row stands there; a sequence's last one again as padding
    real: Tensor  # [number of real tokens] int64: the places of `tokens.flatten()` that are not padding

    @classmethod
    def of(cls, starts: list[int], lengths: list[int], on: torch.device) -> "Bucket":
        first, count = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
        place = torch.arange(max(lengths))[None]
        tokens = first + torch.minimum(place, count - 1)
        return cls(tokens.to(on), (place < count).flatten().nonzero().squeeze(1).to(on))


class CoreAttention(MegatronModule):
    """Causal attention with grouped queries over packed (THD) rows or plain batches.

    16-bit tensors on CUDA use torch's variable-length flash attention; all else scaled_dot_product_attention over padded
    batches of similar lengths, so that no tokens x tokens mask is made.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type=None, attention_dropout=None, softmax_scale=None, **_
    ):
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"the local core attention is causal, not {attn_mask_type}")
        if attention_dropout or (attention_dropout is None and config.attention_dropout):
            raise ValueError(f"the local core attention has no dropout: attention_dropout={config.attention_dropout}")
        if config.context_parallel_size > 1:
            raise ValueError(f"the local core attention is not context-parallel: cp={config.context_parallel_size}, use 1")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, groups, d] -> [t, heads x d]; not packed: [s, b, ...] -> [s, b, heads x d]."""
        if packed_seq_params is None:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
            return self._batch(query, key, value).transpose(0, 1)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return self._variable_length(query, key, value, packed_seq_params)
        buckets, place = packed_seq_params.buckets
        outputs = []
        for bucket in buckets:
            output = self._batch(query[bucket.tokens], key[bucket.tokens], value[bucket.tokens])
            outputs.append(output.flatten(0, 1)[bucket.real])
        return torch.cat(outputs)[place]

    def _batch(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, s, heads, d] and [b, s, groups, d] -> [b, s, heads x d]. Padding at the end is harmless: attention is causal."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # explicitly, since the CPU's fused kernel has no grouped queries
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return output.transpose(1, 2).flatten(2)

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.10 has is_causal and no scale, 2.11 window_size and scale, 2.12 grouped queries
        options = compat.accepted(
            varlen_attn, {"window_size": (-1, 0), "is_causal": True, "scale": self.scale, "enable_gqa": True}
        )
        if "scale" not in options and self.scale != 1.0 / math.sqrt(query.shape[-1]):
            raise ValueError(f"torch {torch.__version__}: varlen_attn cannot scale by {self.scale}, install torch>=2.11")
        if "enable_gqa" not in options:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        output = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            **options,
        )
        return output.flatten(1)
