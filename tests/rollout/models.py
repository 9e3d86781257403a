"""Tiny HF models of all families with random weights, and what `transformers` computes with them."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 100  # not a multiple of 64, so that rows are padded; with tp=4 the last rank has 4 real rows of 32
_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
_EXPERTS = {  # of 48 and 32 columns: over 4 ranks vLLM pads them on CPU
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
}


def save_model(
    folder: Path,
    family: str,
    seed: int,
    tied: bool = False,
    vocabulary: int = VOCABULARY,
    layers: int = 2,
    kv_heads: int = 2,
) -> Path:
    """Write a model whose biases and norms are random too; 4 heads of 32 (64 for Qwen3 and Qwen3-MoE)."""
    config_class, model_class = _FAMILIES[family]
    sizes = {
        "vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 512, "initializer_range": 0.15,
    }  # fmt: skip
    if family in ("qwen3", "qwen3_moe"):
        sizes["head_dim"] = 64  # not hidden / heads
    sizes |= _EXPERTS.get(family, {})
    torch.manual_seed(seed)
    model = model_class(config_class(tie_word_embeddings=tied, **sizes)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def load_model(folder: str | Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def log_probs(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    tokens = torch.tensor([prompt + response])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None]).squeeze(1).tolist()
