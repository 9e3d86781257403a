"""Reads an HF `config.json` into the few numbers that the model is built from, and refuses what it would get wrong.

Pure (json only): the preflight, the planner and the tile maps use it without importing torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

# Fields that change the computation: only these values are built.
_REQUIRED = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1.0, None),
    "attention_multiplier": (None,),
    "residual_multiplier": (None,),
    "logits_scaling": (None,),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
}
_READ = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "max_position_embeddings", "layer_types", "attention_dropout",
}  # fmt: skip
# Fields that say nothing about the forward pass as it is built here.
_NEUTRAL = {
    "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "initializer_range", "max_window_layers", "sliding_window", "_name_or_path", "is_llama_config", "output_attentions",
    "output_hidden_states", "return_dict", "unk_token_id", "sep_token_id", "cls_token_id", "chunk_size_feed_forward",
    "problem_type", "id2label", "label2id", "tokenizer_class", "use_mrope", "debug",
}  # fmt: skip


class UnsupportedModel(ValueError):
    """The model folder or its config cannot be built; the message names the field."""


@dataclass(frozen=True)
class HFConfig:
    """A dense decoder of the Llama, Qwen2 or Qwen3 family."""

    family: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_folder(cls, folder: str | Path) -> "HFConfig":
        """Read `folder/config.json`.

        Raises:
            UnsupportedModel: the folder or file is missing, or a field's value isn't supported.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            what = "has no config.json" if Path(folder).is_dir() else "does not exist"
            raise UnsupportedModel(f"model folder {folder} {what}: give a folder in HF format")
        try:
            fields = json.loads(path.read_text())
        except ValueError as error:  # also what is not UTF-8
            raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise UnsupportedModel(f"{path} holds a {type(fields).__name__}: give the config.json of a model")
        return cls.from_dict(fields, str(path))

    @classmethod
    def from_dict(cls, fields: dict, where: str = "config.json") -> "HFConfig":
        architectures = fields.get("architectures") or ["(none)"]
        if architectures[0] not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{where}: architecture {architectures[0]} is not supported: use one of {', '.join(ARCHITECTURES)}"
            )
        family = ARCHITECTURES[architectures[0]]
        _refuse(fields, where)
        try:
            heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
            return cls(
                family=family,
                architecture=architectures[0],
                hidden_size=hidden,
                intermediate_size=fields["intermediate_size"],
                num_layers=fields["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=fields.get("num_key_value_heads") or heads,
                head_dim=fields.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
                vocab_size=fields["vocab_size"],
                tied=bool(fields.get("tie_word_embeddings", False)),
                rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
                rope_theta=_rope_theta(fields, where),
                max_position_embeddings=fields.get("max_position_embeddings", 32768),
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
            )
        except KeyError as error:
            raise UnsupportedModel(f"{where}: field {error.args[0]} is missing") from error


def _refuse(fields: dict, where: str) -> None:
    for name, allowed in _REQUIRED.items():
        if name in fields and fields[name] not in allowed:
            raise UnsupportedModel(f"{where}: {name}={fields[name]!r} is not supported (only {allowed[0]!r})")
    if fields.get("attention_dropout"):
        raise UnsupportedModel(f"{where}: attention_dropout={fields['attention_dropout']} is not supported (only 0.0)")
    if set(fields.get("layer_types") or ()) - {"full_attention"}:
        raise UnsupportedModel(f"{where}: layer_types other than full_attention are not supported")
    for name, value in fields.items():
        known = name in _READ or name in _REQUIRED or name in _NEUTRAL
        # an unknown switch or number may change the computation; names and nested notes do not
        if not known and isinstance(value, bool | int | float) and value:
            raise UnsupportedModel(f"{where}: field {name}={value!r} is unknown here and may change the computation")


def _rope_theta(fields: dict, where: str) -> float:
    for name in ("rope_scaling", "rope_parameters"):  # the second is transformers 5's name for both
        rope = fields.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedModel(f"{where}: {name} of type {kind!r} is not supported (only plain RoPE)")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{where}: {name}.partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
    return float((fields.get("rope_parameters") or {}).get("rope_theta", fields.get("rope_theta", 10000.0)))
