"""Parameters, operations and activation bytes of a model under a layout, in closed form from its shapes.

Pure arithmetic, without torch: a search asks for thousands of layouts. Tests hold the parameters against the tile maps and the
operations against torch's own counter.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split, padded_vocab_size

ITEMSIZE = {"bfloat16": 2, "float32": 4}
# What a layer runs again in the backward pass, by the names of megatron_ext.model.RECOMPUTE.
RECOMPUTE = ("none", "selective", "mlp", "full")


class Elements(NamedTuple):
    """Parameters of one rank: experts have data-parallel groups of their own."""

    dense: int
    experts: int

    @property
    def all(self) -> int:
        return self.dense + self.experts


def key_width(hf: HFConfig) -> int:
    return hf.num_kv_heads * hf.head_dim


def attention_matrices(hf: HFConfig) -> int:
    """Weights of a layer's query, key, value and output projections."""
    return hf.hidden_size * (2 * hf.attention_size + 2 * key_width(hf))


def mlp_matrices(hf: HFConfig) -> int:
    """Weights of a layer's MLP that a token meets: of experts those that it goes to, without the router."""
    width = hf.moe_intermediate_size * hf.experts_per_token if hf.is_moe else hf.intermediate_size
    return 3 * hf.hidden_size * width


def router_matrix(hf: HFConfig) -> int:
    return hf.hidden_size * hf.num_experts


def forward_flops(hf: HFConfig, lengths: Sequence[int]) -> float:
    """Operations of one forward pass over sequences of these lengths; a forward and backward pass has three times as many.

    2 N T + 4 L A sum(l^2): N weights in matrix products (the output layer counted, the embedding look-up not; of experts those
    that a token goes to, and the router), T tokens, L layers, A = heads x head size. Causal attention is not discounted (as in
    the appendix of PaLM, arXiv 2204.02311, summed over packed sequences).
    """
    weights = hf.num_layers * hf.layer_weights + hf.output_weights
    squares = sum(length * length for length in lengths)
    return 2.0 * weights * sum(lengths) + 4.0 * hf.num_layers * hf.attention_size * squares


@functools.lru_cache(maxsize=4096)
def stage_elements(hf: HFConfig, layout: Layout) -> tuple[Elements, ...]:
    """What one rank holds, by pipeline stage: the same on all ranks of a stage."""
    layer = _layer_elements(hf, layout)
    vocabulary = padded_vocab_size(hf.vocab_size, layout.tp) // layout.tp * hf.hidden_size
    found = []
    for stage, layers in enumerate(stage_layers(hf.num_layers, layout.pp, layout.vpp, layout.split)):
        dense = layers * layer.dense + (vocabulary if stage == 0 else 0)
        if stage == layout.pp - 1:
            dense += hf.hidden_size  # the final norm
            if hf.head != "lm":
                dense += hf.hidden_size + hf.has_bias
            elif not hf.tied or layout.pp > 1:  # a tied embedding is on the first stage and again on the last
                dense += vocabulary
        found.append(Elements(dense, layers * layer.experts))
    return tuple(found)


def _layer_elements(hf: HFConfig, layout: Layout) -> Elements:
    split = attention_matrices(hf) + (0 if hf.is_moe else mlp_matrices(hf))
    if hf.qkv_bias:
        split += hf.attention_size + 2 * key_width(hf)
    whole = 2 * hf.hidden_size + router_matrix(hf) + (2 * hf.head_dim if hf.qk_norm else 0)
    experts = 3 * hf.hidden_size * hf.moe_intermediate_size * hf.num_experts // (layout.ep * layout.etp)
    return Elements(split // layout.tp + whole, experts)


@functools.cache
def chunk_layers(num_layers: int, pp: int, vpp: int, split: Split) -> tuple[tuple[int, ...], ...]:
    """The number of layers by [pipeline stage][chunk]."""
    stages = Layout(pp, pp=pp, vpp=vpp, split=split).stage_layers(num_layers)
    return tuple(tuple(len(chunk) for chunk in stage) for stage in stages)


@functools.cache
def stage_layers(num_layers: int, pp: int, vpp: int, split: Split) -> tuple[int, ...]:
    """The number of layers by pipeline stage, a stage's chunks added up."""
    return tuple(sum(chunks) for chunks in chunk_layers(num_layers, pp, vpp, split))


def activation_bytes(hf: HFConfig, layout: Layout, itemsize: int = 2, recompute: str = "none") -> float:
    """What a layer keeps of a token on one rank until its backward pass, with flash attention.

    Every tensor that a backward pass reads, in elements: inputs and outputs of the two norms (4 h; split over tp only under
    sequence parallelism), query, key and value (q + 2k) and the rotated copies of query and key (q + k), what attention returns
    (q), gate, up and their product (3 f): all of these split over tp. h hidden, q query and k key width, f width of the MLP. An
    expert's token counts once for each expert that it goes to, with a copy of it on the way in and on the way out (2 h each).
    After Korthikanti et al. 2022 (arXiv 2205.05198), section 4, for SwiGLU, rotary embeddings and grouped queries.

    recompute: `mlp` keeps the MLP's input only; `full` a layer's input only; `selective` runs the core attention again, of
    which flash attention keeps nothing but its output anyway.
    """
    shards = layout.tp if layout.sequence_parallel else 1
    if recompute == "full":
        return itemsize * hf.hidden_size / shards
    elements = 4 * hf.hidden_size / shards
    elements += (3 * hf.attention_size + 3 * key_width(hf)) / layout.tp
    if recompute != "mlp":
        elements += mlp_activations(hf, layout)
    return itemsize * elements


def mlp_activations(hf: HFConfig, layout: Layout) -> float:
    """Elements of a token inside a layer's MLP on one rank; experts even out over the ranks that share them."""
    if hf.is_moe:
        return hf.experts_per_token * (2 * hf.hidden_size + 3 * hf.moe_intermediate_size) / layout.tp
    return 3 * hf.intermediate_size / layout.tp


def layers_in_flight(hf: HFConfig, layout: Layout, micro_batches: int) -> list[int]:
    """Layers x micro-batches whose activations a rank holds at most, by pipeline stage.

    1F1B: stage s runs p - s micro-batches forward before its first backward one. Interleaved: (v - 1) p + 2 (p - s - 1) + 1
    chunks (Narayanan et al. 2021, arXiv 2104.04473; the warm-up of Megatron's schedule and the one that is running).
    """
    p, v = layout.pp, layout.vpp
    found = []
    for stage, chunks in enumerate(chunk_layers(hf.num_layers, p, v, layout.split)):
        if v == 1:
            found.append(chunks[0] * min(p - stage, micro_batches))
            continue
        in_flight = min((v - 1) * p + 2 * (p - stage - 1) + 1, v * micro_batches)
        found.append(_first_chunks(chunks, p, in_flight, micro_batches))
    return found


def _first_chunks(chunks: Sequence[int], p: int, count: int, micro_batches: int) -> int:
    """Layers of the first `count` forward passes of an interleaved stage: p micro-batches through the first chunk, the same p
    through the second, ..., then the next p."""
    layers, group = 0, 0
    while count > 0 and group < micro_batches:
        width = min(p, micro_batches - group)
        for size in chunks:
            layers += size * min(width, count)
            count = max(0, count - width)
        group += p
    return layers


def kv_bytes(hf: HFConfig, tp: int, itemsize: int = 2) -> int:
    """Of one token in the KV cache of one engine rank; with fewer KV heads than ranks, neighbours hold the same one."""
    return 2 * itemsize * hf.num_layers * max(1, hf.num_kv_heads // tp) * hf.head_dim


def weight_shares(hf: HFConfig) -> tuple[int, int]:
    """Parameters of the whole model: all but the experts, and the experts."""
    whole = stage_elements(hf, Layout(1))[0]
    return whole.dense, whole.experts


def received_elements(hf: HFConfig, layout: Layout, tp: int, expert_parallel: bool = False) -> tuple[float, float]:
    """(received, copied on the rank itself) when a rank of an engine of `tp` gets its weights from training in `layout`.

    HybridFlow, section 5.4 and table 2 (arXiv 2409.19256): a rank needs 1/t_g of the model and, in the best grouping, its own
    training shard lies within that: (t p - t_g) / (t_g t p) M is received. Where an engine is wider than t, its shard lies
    inside the training shard's columns and overlaps with one stage of them: 1/t_g - 1/(p max(t, t_g)) in general. Experts by
    ep x etp alike: expert parallel engines have whole experts, others columns of all.
    """
    dense, experts = weight_shares(hf)
    local = dense / (layout.pp * max(layout.tp, tp))
    by_expert, by_columns = (tp, 1) if expert_parallel else (1, tp)
    local += experts / (layout.pp * max(layout.ep, by_expert) * max(layout.etp, by_columns))
    needed = (dense + experts) / tp
    return needed - local, local
