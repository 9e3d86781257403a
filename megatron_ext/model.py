"""From an HF config to this rank's chunks of a Megatron GPTModel."""

import dataclasses
import importlib.util
from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext import compat, device
from megatron_ext.hf_config import HFConfig
from megatron_ext.layers import block_spec, default_spec
from megatron_ext.layout import Layout, padded_vocab_size

# What is computed again in the backward pass instead of kept: TransformerConfig fields by the name used in configs.
RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def check_layout(hf: HFConfig, layout: Layout) -> None:
    """Whether the model can be cut as `layout` says.

    Raises:
        ValueError: it can't; names both numbers and what would work.
    """
    sizes = {"num_attention_heads": hf.num_heads, "num_key_value_heads": hf.num_kv_heads}
    if not hf.is_moe:  # experts are split by etp
        sizes["intermediate_size"] = hf.intermediate_size
    for name, size in sizes.items():
        if size % layout.tp:
            common = [str(n) for n in range(1, hf.num_kv_heads + 1) if hf.num_heads % n == hf.num_kv_heads % n == 0]
            raise ValueError(f"tp={layout.tp} does not divide {name}={size}: use {' or '.join(common)}")
    layout.stage_layers(hf.num_layers)
    layout.check_experts(hf.num_experts, hf.moe_intermediate_size)
    layout.check_training(hf.num_experts)


def transformer_config(
    hf: HFConfig,
    layout: Layout,
    dtype: torch.dtype,
    recompute: str = "none",
    overrides: Mapping[str, object] | None = None,
) -> TransformerConfig:
    """Megatron's configuration of the model; `overrides` are TransformerConfig fields that win over everything derived here.

    Raises:
        ValueError: the layout does not fit the model, `dtype` has no support, or `recompute` or an override is unknown.
    """
    device.install()
    compat.patch()
    check_layout(hf, layout)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"model.dtype={str(dtype).removeprefix('torch.')} is not supported: use float32 or bfloat16")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r} is unknown: use one of {', '.join(RECOMPUTE)}")
    overrides = dict(overrides or {})
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"megatron.{unknown[0]} is not a field of TransformerConfig in megatron-core {compat.check_version()}")
    fields = _architecture(hf) | _parallelism(hf, layout, dtype) | _fusions(hf, dtype) | RECOMPUTE[recompute]
    if hf.is_moe:
        fields |= _experts(hf, layout)
        if recompute == "mlp":
            fields["recompute_modules"] = ["moe"]
    if overrides.get("bias_activation_fusion"):  # upstream has either
        fields["use_te_activation_func"] = False
    if overrides.get("use_te_activation_func", fields["use_te_activation_func"]):
        fields["bias_activation_fusion"] = False
    merged = {**fields, **overrides}
    # Upstream gives an output's memory back while an overlapped send may still read it (0.16 .. 0.19): it holds the tensor,
    # not its storage. Transfers that are waited for can't have that
    merged["deallocate_pipeline_outputs"] = not merged["overlap_p2p_comm"]
    merged["batch_p2p_comm"] = torch.cuda.is_available() and not merged["overlap_p2p_comm"]
    return TransformerConfig(**merged)


def build_model(hf: HFConfig, layout: Layout, config: TransformerConfig, spec: str | None = None) -> list[GPTModel]:
    """This rank's chunks, first to last, randomly initialised on the device; call it inside `ParallelState.current()`.

    The vocabulary is padded to a multiple of 64 x tp; the padding's rows never get a gradient (log_probs.py leaves them out).
    A head of one number starts at zero.

    Raises:
        RuntimeError: Megatron numbered the layers otherwise than the layout does.
    """
    spec = spec or default_spec(config.params_dtype)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = layout.stage_layers(hf.num_layers)[stage]
    chunks = []
    for index in range(layout.vpp):
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(hf, spec, len(layers[index]), config.use_te_activation_func),
            vocab_size=padded_vocab_size(hf.vocab_size, layout.tp),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=stage == 0 and index == 0,
            post_process=stage == layout.pp - 1 and index == layout.vpp - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=hf.tied,
            position_embedding_type="rope",
            rotary_base=hf.rope_theta,
            vp_stage=index if layout.vpp > 1 else None,
        )
        if hf.head != "lm" and chunk.post_process:
            chunk.output_layer = ValueHead(config, hf.has_bias)  # instead of Megatron's over the vocabulary
        chunk.model_type = ModelType.encoder_or_decoder
        chunk.true_vocab_size = hf.vocab_size  # what step.py masks by
        chunks.append(chunk.to(device=device.current(), dtype=config.params_dtype))
    if hf.is_moe:
        compat.mark_experts(chunks, layout.ep > 1 or layout.etp != layout.tp)
    _check_layers(chunks, layers, stage)
    return chunks


class ValueHead(torch.nn.Module):
    """One number for each token in place of the output layer: whole on every tensor-parallel rank, computed in fp32."""

    def __init__(self, config: TransformerConfig, bias: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size))
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)) if bias else None)
        self._gathers = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # each rank sees its tokens only: gradients are summed

    def forward(self, hidden: Tensor, **_) -> tuple[Tensor, None]:
        """[T, 1, hidden] (T / tp under sequence parallelism) -> [T, 1, 1] float32, as Megatron calls its output layer."""
        bias = None if self.bias is None else self.bias.float()
        values = torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)
        if self._gathers:  # all ranks go on with all values: each takes its own tokens' part of the gradient
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def _check_layers(chunks: list[GPTModel], expected: list[list[int]], stage: int) -> None:
    """Every weight that is loaded, sent or exported goes by these numbers: a wrong one would be fluent garbage, no error."""
    built = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks]
    if built != expected:
        raise RuntimeError(
            f"pipeline stage {stage}: megatron-core {compat.check_version()} numbers its layers {built}, the layout {expected}:"
            " is there a TransformerConfig override that splits layers? Use the role's split instead"
        )


def _pipeline_layout(layers: list[list[list[int]]]) -> list[list[str]]:
    """Megatron's own description of [pp rank][chunk] -> layers: what each chunk has, in the model's order."""
    chunks = [["decoder"] * len(stage[index]) for index in range(len(layers[0])) for stage in layers]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _architecture(hf: HFConfig) -> dict[str, object]:
    return {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_heads,
        "num_query_groups": hf.num_kv_heads,
        "kv_channels": hf.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.qkv_bias,
        "qk_layernorm": hf.qk_norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
    }


def _experts(hf: HFConfig, layout: Layout) -> dict[str, object]:
    """HF's routing: softmax over all experts in fp32, the top k of them, their weights divided by their sum if normalised.

    Which is the softmax over the chosen logits alone, Megatron's default order. No token is dropped and no loss added.
    """
    return {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.experts_per_token,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,  # of Transformer Engine's spec; the local one has an expert at a time
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _parallelism(hf: HFConfig, layout: Layout, dtype: torch.dtype) -> dict[str, object]:
    interleaved = layout.vpp > 1
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "pipeline_model_parallel_layout": _pipeline_layout(layout.stage_layers(hf.num_layers)) if layout.pp > 1 else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # the mean over tokens is right for any split over micro-batches and data-parallel ranks only when taken at the end
        "calculate_per_token_loss": True,
        "variable_seq_lengths": False,  # micro-batches are padded to one length: no shape exchange per transfer
        "overlap_p2p_comm": interleaved,  # 1F1B has nothing to overlap them with
    }


def _fusions(hf: HFConfig, dtype: torch.dtype) -> dict[str, object]:
    """Fused kernels where there is a GPU; RoPE's comes from Transformer Engine, as does SwiGLU's in its own dense layers."""
    cuda = torch.cuda.is_available()
    return {
        "use_cpu_initialization": not cuda,
        "bias_activation_fusion": cuda,
        "use_te_activation_func": default_spec(dtype) == "te" and not hf.is_moe,
        "bias_dropout_fusion": cuda,
        "apply_rope_fusion": cuda and importlib.util.find_spec("transformer_engine") is not None,
        "gradient_accumulation_fusion": cuda,
        "masked_softmax_fusion": False,  # of the attention that is not used here
        "persist_layer_norm": False,
        "tp_comm_overlap": False,
    }
