"""Tiny random HF model folders of every family, and Megatron's sharding of them written out by hand as a reference."""

import json
from pathlib import Path

import torch
from torch import Tensor

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 4, 8, 4
EXPERTS, CHOSEN, EXPERT_INTERMEDIATE = 8, 2, 48  # the last of Qwen3-MoE; Mixtral's experts have INTERMEDIATE
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


def config(family: str, tied: bool, vocab_size: int = 131, **changes) -> dict:
    """The fields of a config.json. Qwen3 and Qwen3-MoE have heads that don't make up the hidden size."""
    fields = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    if family in ("qwen3", "qwen3_moe"):
        fields["head_dim"] = 16
    if family == "qwen3_moe":
        fields |= {"num_experts": EXPERTS, "moe_intermediate_size": EXPERT_INTERMEDIATE, "norm_topk_prob": True}
    if family == "mixtral":
        fields["num_local_experts"] = EXPERTS
    if family in ("qwen3_moe", "mixtral"):
        fields["num_experts_per_tok"] = CHOSEN
    return fields | changes


def make(folder: Path, family: str, tied: bool, vocab_size: int = 131, seed: int = 0, shard: str = "5GB", **changes) -> Path:
    """Write a folder by transformers itself, every weight random (norms and biases included)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = config(family, tied, vocab_size, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": True}))
    (folder / "tokenizer.json").write_text(json.dumps({"note": "not read here"}))
    return folder


def make_classifier(
    folder: Path, family: str, seed: int = 0, pad: int | None = None, vocab_size: int = 131, labels: int = 1, **changes
) -> Path:
    """Write a sequence classifier's folder by transformers itself, every weight random."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = config(family, False, vocab_size, **changes)
    fields.pop("architectures")
    model_config = AutoConfig.for_model(**fields, num_labels=labels, pad_token_id=pad)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(model_config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"note": "not read here"}))
    return folder


def state(folder: Path) -> dict[str, Tensor]:
    """The checkpoint as safetensors has it."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def megatron_shard(
    hf: dict[str, Tensor],
    fields: dict,
    tp: int,
    tp_rank: int,
    layers: list[int],
    first: bool,
    last: bool,
    te: bool = False,
    etp: tuple[int, int] = (1, 0),
    ep: tuple[int, int] = (1, 0),
) -> dict[str, Tensor]:
    """What a Megatron rank holds, by splitting and concatenating whole tensors (no tile map); etp and ep: size, rank."""
    groups, queries = fields["num_key_value_heads"], fields["num_attention_heads"] // fields["num_key_value_heads"]

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp, 0)[tp_rank]

    def vocabulary(tensor: Tensor) -> Tensor:
        padding = -len(tensor) % (64 * tp)
        return rows(torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])]))

    def qkv(prefix: str, kind: str) -> Tensor:
        parts = []
        for letter, heads in (("q", queries), ("k", 1), ("v", 1)):
            tensor = hf[f"{prefix}{letter}_proj.{kind}"]
            parts.append(tensor.view(groups, heads * (len(tensor) // groups // heads), *tensor.shape[1:]))
        mixed = torch.cat(parts, 1)
        return rows(mixed.reshape(-1, *mixed.shape[2:]))

    shard = {}
    if first:
        shard["embedding.word_embeddings.weight"] = vocabulary(hf["model.embed_tokens.weight"])
    for layer in layers:
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        norms = norms if te else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        moe = fields["model_type"] in ("qwen3_moe", "mixtral")
        norms = (norms[0], "pre_mlp_layernorm.weight") if moe else norms
        shard[ours + norms[0]] = hf[f"{theirs}input_layernorm.weight"]
        shard[ours + norms[1]] = hf[f"{theirs}post_attention_layernorm.weight"]
        shard[f"{ours}self_attention.linear_qkv.weight"] = qkv(f"{theirs}self_attn.", "weight")
        if fields["model_type"] == "qwen2":
            shard[f"{ours}self_attention.linear_qkv.bias"] = qkv(f"{theirs}self_attn.", "bias")
        if fields["model_type"] in ("qwen3", "qwen3_moe"):
            shard[f"{ours}self_attention.q_layernorm.weight"] = hf[f"{theirs}self_attn.q_norm.weight"]
            shard[f"{ours}self_attention.k_layernorm.weight"] = hf[f"{theirs}self_attn.k_norm.weight"]
        shard[f"{ours}self_attention.linear_proj.weight"] = hf[f"{theirs}self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
        if moe:
            shard |= {f"{ours}mlp.{name}": tensor for name, tensor in _experts(hf, theirs, fields, te, etp, ep).items()}
            continue
        gate, up = hf[f"{theirs}mlp.gate_proj.weight"], hf[f"{theirs}mlp.up_proj.weight"]
        shard[f"{ours}mlp.linear_fc1.weight"] = torch.cat([rows(gate), rows(up)])
        shard[f"{ours}mlp.linear_fc2.weight"] = hf[f"{theirs}mlp.down_proj.weight"].chunk(tp, 1)[tp_rank]
    if last:
        shard["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not fields["tie_word_embeddings"]:
            shard["output_layer.weight"] = vocabulary(hf["lm_head.weight"])
        elif not first:
            shard["output_layer.weight"] = vocabulary(hf["model.embed_tokens.weight"])
    return shard


def _experts(
    hf: dict[str, Tensor], layer: str, fields: dict, te: bool, etp: tuple[int, int], ep: tuple[int, int]
) -> dict[str, Tensor]:
    """A layer's router and this rank's experts."""
    if fields["model_type"] == "mixtral":
        block, names, count = f"{layer}block_sparse_moe.", ("w1", "w3", "w2"), fields["num_local_experts"]
    else:
        block, names, count = f"{layer}mlp.", ("gate_proj", "up_proj", "down_proj"), fields["num_experts"]
    mine = range(count)[ep[1] * count // ep[0] :][: count // ep[0]]
    shard = {"router.weight": hf[f"{block}gate.weight"]}
    for local, expert in enumerate(mine):
        gate, up, down = (hf[f"{block}experts.{expert}.{name}.weight"] for name in names)
        where = "experts.{}.weight" + str(local) if te else f"experts.local_experts.{local}.{{}}.weight"
        shard[where.format("linear_fc1")] = torch.cat([half.chunk(etp[0])[etp[1]] for half in (gate, up)])
        shard[where.format("linear_fc2")] = down.chunk(etp[0], 1)[etp[1]]
    return shard
