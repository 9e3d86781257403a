"""The tests' own way between HF and Megatron layouts, apart from megatron_ext/weights.py: whole tensors, cut with torch.

Works for weights and for gradients alike, by the names of both layer specs.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, padded_vocab_size
from tests.hf_models import ARCHITECTURES

MOE = {"num_experts_per_tok": 2, "num_local_experts": 8}


def hf_model(family: str = "qwen2", tied: bool = False, seed: int = 0, **changes) -> torch.nn.Module:
    """A tiny HF model in fp32 with weights, biases and norms all of a size that matters."""
    import transformers

    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "tie_word_embeddings": tied,
    }
    if family == "qwen3_moe":
        sizes |= MOE | {"moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16}
    if family == "mixtral":
        sizes |= MOE
    name = ARCHITECTURES[family]
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(
        **(sizes | changes), attn_implementation="eager", architectures=[name]
    )
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + len(parameter_name)))
            parameter.copy_(1 + 0.1 * noise if "norm" in parameter_name else 0.1 * noise)
    return model


def value_model(model: torch.nn.Module, seed: int = 3) -> torch.nn.Module:
    """transformers' token classification with one label over the decoder of `hf_model`, and a random head."""
    import transformers

    name = type(model).__name__.replace("ForCausalLM", "ForTokenClassification")
    config = type(model.config)(
        **model.config.to_dict()
        | {"num_labels": 1, "classifier_dropout": 0.0, "architectures": [name], "id2label": {0: "value"}},
    )
    config._attn_implementation = "eager"
    found = getattr(transformers, name)(config).float()
    found.model.load_state_dict(model.model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.score.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return found


def hf_config(model: torch.nn.Module) -> HFConfig:
    fields = model.config.to_dict()
    return HFConfig.from_dict(fields, head="value" if "TokenClassification" in fields["architectures"][0] else "lm")


def to_megatron(tensors: Mapping[str, Tensor], hf: HFConfig, layout: Layout, rank: int) -> dict[str, Tensor]:
    """All of a model's tensors by HF names -> the part of a rank by Megatron's names, all layers, with global numbers."""
    tp, tp_rank = layout.tp, rank % layout.tp

    def columns(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp, 0)[tp_rank]

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp, 1)[tp_rank]

    def vocabulary(tensor: Tensor) -> Tensor:
        padding = tensor.new_zeros(padded_vocab_size(hf.vocab_size, tp) - hf.vocab_size, tensor.shape[1])
        return columns(torch.cat([tensor, padding]))

    def by_group(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [tensor.reshape(hf.num_kv_heads, -1, *tensor.shape[1:]) for tensor in (query, key, value)]
        return columns(torch.cat(parts, 1).flatten(0, 1))

    embedding = tensors["model.embed_tokens.weight"]
    found = {
        "embedding.word_embeddings.weight": vocabulary(embedding),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    if hf.head == "value":
        found |= {f"output_layer.{kind}": tensors[f"score.{kind}"] for kind in ("weight", "bias")}
    else:
        found["output_layer.weight"] = vocabulary(embedding if hf.tied else tensors["lm_head.weight"])
    for index in range(hf.num_layers):
        source, target = f"model.layers.{index}.", f"decoder.layers.{index}."
        attention, mlp = source + "self_attn.", source + "mlp."
        found[target + "input_layernorm.weight"] = tensors[source + "input_layernorm.weight"]
        found[target + "pre_mlp_layernorm.weight"] = tensors[source + "post_attention_layernorm.weight"]
        for kind in ("weight", "bias") if hf.qkv_bias else ("weight",):
            found[target + f"self_attention.linear_qkv.{kind}"] = by_group(
                *(tensors[f"{attention}{part}_proj.{kind}"] for part in "qkv")
            )
        for part in "qk" if hf.qk_norm else "":
            found[target + f"self_attention.{part}_layernorm.weight"] = tensors[f"{attention}{part}_norm.weight"]
        found[target + "self_attention.linear_proj.weight"] = rows(tensors[attention + "o_proj.weight"])
        if hf.is_moe:
            found |= {target + "mlp." + name: tensor for name, tensor in _experts(tensors, mlp, layout, rank).items()}
        else:
            gate, up = (columns(tensors[f"{mlp}{part}_proj.weight"]) for part in ("gate", "up"))
            found[target + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
            found[target + "mlp.linear_fc2.weight"] = rows(tensors[mlp + "down_proj.weight"])
        # Transformer Engine's spec holds the norms in the linear layers behind them
        found[target + "self_attention.linear_qkv.layer_norm_weight"] = found[target + "input_layernorm.weight"]
        found[target + "mlp.linear_fc1.layer_norm_weight"] = found[target + "pre_mlp_layernorm.weight"]
    return found


def _experts(tensors: Mapping[str, Tensor], mlp: str, layout: Layout, rank: int) -> dict[str, Tensor]:
    """From transformers' stacked experts: gate over up [experts, 2 x inner, hidden] and down [experts, hidden, inner]."""
    in_stage = rank % (layout.world_size // layout.pp)
    etp_rank, ep_rank = in_stage % layout.etp, in_stage // layout.etp % layout.ep
    found = {"router.weight": tensors[mlp + "gate.weight"]}
    mine = (tensors[mlp + "experts." + name].chunk(layout.ep)[ep_rank] for name in ("gate_up_proj", "down_proj"))
    for number, (gate_up, down) in enumerate(zip(*mine, strict=True)):
        parts = [half.chunk(layout.etp)[etp_rank] for half in gate_up.chunk(2)]
        for name in (f"local_experts.{number}.linear_fc{{}}.weight", f"linear_fc{{}}.weight{number}"):
            found["experts." + name.format(1)] = torch.cat(parts)
            found["experts." + name.format(2)] = down.chunk(layout.etp, 1)[etp_rank]
    return found


def named_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank's chunks, wrapped or not, by names with global layer numbers."""
    for chunk in chunks:
        model = getattr(chunk, "module", chunk)
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.layers."):
                head, local, tail = "decoder.layers.", *name.removeprefix("decoder.layers.").split(".", 1)
                name = f"{head}{model.decoder.layers[int(local)].layer_number - 1}.{tail}"
            yield name, parameter


def fill(chunks: Sequence[torch.nn.Module], tensors: Mapping[str, Tensor], hf: HFConfig, layout: Layout, rank: int) -> None:
    """Copy an HF model's weights into the chunks."""
    parts = to_megatron({name: tensor.detach() for name, tensor in tensors.items()}, hf, layout, rank)
    with torch.no_grad():
        for name, parameter in named_parameters(chunks):
            assert parameter.shape == parts[name].shape, (name, parameter.shape, parts[name].shape)
            parameter.copy_(parts[name])


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference over tensors, each against its largest element, and where it is."""
    assert found
    worst = (0.0, "")
    for name, tensor in found.items():
        reference = expected[name].float()
        difference = (tensor.float() - reference).abs().max() / reference.abs().max().clamp(min=1e-12)
        worst = max(worst, (difference.item() if difference.isfinite() else float("inf"), name))
    return worst
