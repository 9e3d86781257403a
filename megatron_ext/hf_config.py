"""Reads an HF `config.json` into the few numbers that the model is built from, and refuses what it would get wrong.

Pure (json only): the preflight, the planner and the tile maps use it without importing torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
}
# Whose folders have a head of one number, as transformers calls them: the head's kind and the language model's name.
_WITH_HEAD = {
    name.replace("ForCausalLM", kind): (head, name)
    for head, kind in (("value", "ForTokenClassification"), ("score", "ForSequenceClassification"))
    for name in ARCHITECTURES
}
Head = Literal["lm", "value", "score"]
# What a layer's router and each expert's gate, up and down projection are called in the checkpoint.
_MOE_NAMES = {
    "qwen3_moe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
}

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
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "router_jitter_noise": (0.0, None),
    "shared_expert_intermediate_size": (0, None),
    "num_shared_experts": (0, None),
    "n_shared_experts": (0, None),
}
_READ = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "max_position_embeddings", "layer_types", "attention_dropout",
}  # fmt: skip
_LONGEST = {"mixtral": 131072}  # max_position_embeddings where a config leaves it out
_READ_MOE = {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
# The auxiliary loss is left out: it would pull the policy away from the objective's own gradient.
_NEUTRAL_MOE = {"router_aux_loss_coef", "output_router_logits"}
# Whole numbers above 0, and numbers above 0; null stands for a field that is left out, where it may be.
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
_SIZES_MOE = {"num_experts", "num_local_experts", "moe_intermediate_size"}
_SIZES_OR_NULL = {"num_key_value_heads", "head_dim", "max_position_embeddings"}
_NUMBERS = {"rms_norm_eps", "rope_theta"}
_SWITCHES = {"tie_word_embeddings", "norm_topk_prob"}
_SECTIONS_OR_NULL = {"rope_scaling", "rope_parameters"}
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
    """A decoder of the Llama, Qwen2 or Qwen3 family, or one whose every layer has experts (Qwen3-MoE, Mixtral).

    `head`: what stands on the last layer. `lm`: the output layer over the vocabulary; `value`: one number per token, where a
    folder of a language model lends all the rest (`head_stored` False: the head is a new one); `score`: one number per
    sequence, said at its last token, of a trained classifier with one label.
    """

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
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    moe_intermediate_size: int = 0  # of one expert
    norm_topk_prob: bool = True  # the weights of the chosen experts add up to 1
    head: Head = "lm"
    head_stored: bool = True  # the folder holds the head's weights
    pad_token: int | None = None  # of a model that scores: it passes over those at a sequence's end

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def value_architecture(self) -> str:
        """What transformers calls a model of this family with a value head."""
        return self.architecture.replace("ForCausalLM", "ForTokenClassification")

    @property
    def attention_size(self) -> int:
        """Of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Weights of a layer that multiply each token: of experts those that it goes to, and the router."""
        mlp = 3 * self.intermediate_size
        if self.is_moe:
            mlp = 3 * self.moe_intermediate_size * self.experts_per_token + self.num_experts
        return self.hidden_size * (2 * self.attention_size + 2 * self.num_kv_heads * self.head_dim + mlp)

    @property
    def output_weights(self) -> int:
        """Those of the output layer; a look-up in the embedding multiplies nothing."""
        return self.hidden_size * (self.vocab_size if self.head == "lm" else 1)

    @property
    def attention_cost(self) -> float:
        """Causal attention's operations over a sequence of l tokens are l^2 times this, in units of what a layer's matrices
        take for a token: 2 l^2 A for scores and values, half of 4 l^2 A since what is masked is not computed, over 2 N."""
        return self.attention_size / self.layer_weights

    def router_name(self, layer: int) -> str:
        """The HF tensor [num_experts, hidden_size] that scores the experts; of a model with experts only."""
        return f"model.layers.{layer}.{_MOE_NAMES[self.family][0]}.weight"

    def expert_names(self, layer: int, expert: int) -> tuple[str, str, str]:
        """The HF tensors of an expert's gate and up projection, [inner, hidden] each, and of its down projection."""
        _, experts, projections = _MOE_NAMES[self.family]
        gate, up, down = (f"model.layers.{layer}.{experts}.{expert}.{name}.weight" for name in projections)
        return gate, up, down

    @property
    def has_bias(self) -> bool:
        """Whether a head of one number adds one."""
        return self.head == "value"

    @classmethod
    def from_folder(cls, folder: str | Path, head: Head = "lm") -> "HFConfig":
        """Read `folder/config.json`, of a language model; with `head="value"` also of a value model (token classification with
        one label), with `head="score"` of a reward or cost model (sequence classification with one label).

        Raises:
            UnsupportedModel: the folder or file is missing, or a field's value isn't supported.
        """
        path, fields = str(Path(folder) / "config.json"), read_fields(folder)
        found = cls.from_dict(fields, path, head)
        if "model_type" not in fields:  # by which transformers, and with it vLLM, knows how to read the rest
            raise UnsupportedModel(f"{path}: field model_type is missing: it is {found.family!r} of {found.architecture}")
        return found

    @classmethod
    def from_dict(cls, fields: dict, where: str = "config.json", head: Head = "lm") -> "HFConfig":
        architecture, head_stored = _architecture(fields, where, head)
        family = ARCHITECTURES[architecture]
        if fields.get("model_type", family) != family:
            kind = fields["model_type"]
            raise UnsupportedModel(f"{where}: model_type={kind!r}, but {architecture} is of {family}: which of them is it?")
        _check_kinds(fields, where, _SIZES | (_SIZES_MOE if family in _MOE_NAMES else set()))
        _refuse(fields, where, family)
        try:
            heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
            return cls(
                family=family,
                architecture=architecture,
                hidden_size=hidden,
                intermediate_size=fields["intermediate_size"],
                num_layers=fields["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=fields.get("num_key_value_heads") or heads,
                head_dim=fields.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
                vocab_size=fields["vocab_size"],
                tied=head == "lm" and bool(fields.get("tie_word_embeddings", False)),
                rms_norm_eps=fields.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
                rope_theta=_rope_theta(fields, where, 1e6 if family == "mixtral" else 1e4),
                max_position_embeddings=fields.get("max_position_embeddings") or _LONGEST.get(family, 32768),
                qkv_bias=family == "qwen2",
                qk_norm=family in ("qwen3", "qwen3_moe"),
                head=head,
                head_stored=head_stored,
                pad_token=fields.get("pad_token_id") if head == "score" else None,
                **_experts(fields, where, family),
            )
        except KeyError as error:
            raise UnsupportedModel(f"{where}: field {error.args[0]} is missing") from error


def read_fields(folder: str | Path) -> dict:
    """What `folder/config.json` holds. Raises UnsupportedModel: it isn't there, or no JSON object."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        what = (
            "is not a folder" if Path(folder).is_file() else "has no config.json" if Path(folder).is_dir() else "does not exist"
        )
        raise UnsupportedModel(f"model folder {folder} {what}: give a folder in HF format")
    try:
        fields = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"{path} holds a {type(fields).__name__}: give the config.json of a model")
    return fields


def _architecture(fields: dict, where: str, head: str) -> tuple[str, bool]:
    """The language model's architecture, and whether the folder has the weights of the head that is asked for."""
    name = named_architecture(fields) or "(none)"
    if name in ARCHITECTURES and head != "score":
        return name, head == "lm"
    if _WITH_HEAD.get(name, ("", ""))[0] != head:
        usable = [
            *(ARCHITECTURES if head != "score" else ()),
            *(name for name, (kind, _) in _WITH_HEAD.items() if kind == head),
        ]
        raise UnsupportedModel(f"{where}: architecture {name} is not supported: use one of {', '.join(usable)}")
    labels = len(fields.get("id2label") or ("LABEL_0", "LABEL_1"))  # transformers' default
    if labels != 1:
        kind = "value" if head == "value" else "reward"
        raise UnsupportedModel(f"{where}: {name} with {labels} labels is not a {kind} model, which has 1 (id2label)")
    return _WITH_HEAD[name][1], True


def named_architecture(fields: dict) -> str:
    """The first of `architectures`; empty where there is none."""
    names = fields.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _experts(fields: dict, where: str, family: str) -> dict[str, object]:
    if family not in _MOE_NAMES:
        return {}
    # transformers 5 writes Qwen3-MoE's number under Mixtral's name
    experts = fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"]
    chosen = fields["num_experts_per_tok"]
    if type(chosen) is not int or not 1 <= chosen <= experts:
        raise UnsupportedModel(f"{where}: num_experts_per_tok={chosen!r} is not from 1 to the number of experts, {experts}")
    mixtral = family == "mixtral"
    normalised = mixtral or bool(fields.get("norm_topk_prob", False))
    if chosen == 1 and normalised:
        raise UnsupportedModel(f"{where}: num_experts_per_tok=1 with a weight that is always 1 leaves the router untrained")
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "moe_intermediate_size": fields["intermediate_size" if mixtral else "moe_intermediate_size"],
        "norm_topk_prob": normalised,
    }


def _check_kinds(fields: dict, where: str, sizes: set[str]) -> None:
    """What is read is of the kind that it is computed with; true is no number."""
    for name, value in fields.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        null = value is None and name in _SIZES_OR_NULL | _SECTIONS_OR_NULL
        for names, fits, what in (
            (sizes | _SIZES_OR_NULL, type(value) is int and value > 0, "a whole number above 0"),
            (_NUMBERS, number and value > 0, "a number above 0"),
            (_SWITCHES, isinstance(value, bool), "true or false"),
            (_SECTIONS_OR_NULL, isinstance(value, dict), "a section or null"),
            ({"layer_types"}, isinstance(value, list) or value is None, "a list"),
        ):
            if name in names and not fits and not null:
                raise UnsupportedModel(f"{where}: {name}={value!r} is not {what}")


def _refuse(fields: dict, where: str, family: str) -> None:
    for name, allowed in _REQUIRED.items():
        if name in fields and fields[name] not in allowed:
            raise UnsupportedModel(f"{where}: {name}={fields[name]!r} is not supported (only {allowed[0]!r})")
    if fields.get("attention_dropout"):
        raise UnsupportedModel(f"{where}: attention_dropout={fields['attention_dropout']!r} is not supported (only 0.0)")
    if set(fields.get("layer_types") or ()) - {"full_attention"}:
        raise UnsupportedModel(f"{where}: layer_types other than full_attention are not supported")
    window, longest = fields.get("sliding_window"), fields.get("max_position_embeddings") or _LONGEST["mixtral"]
    if family == "mixtral" and window is not None and window < longest:  # the Qwen families have a switch for it
        raise UnsupportedModel(f"{where}: sliding_window={window} below max_position_embeddings={longest} is not supported")
    understood = _READ | _REQUIRED.keys() | _NEUTRAL | (_READ_MOE | _NEUTRAL_MOE if family in _MOE_NAMES else set())
    for name, value in fields.items():
        # an unknown switch or number may change the computation; names and nested notes do not
        if name not in understood and isinstance(value, bool | int | float) and value:
            raise UnsupportedModel(f"{where}: field {name}={value!r} is unknown here and may change the computation")


def _rope_theta(fields: dict, where: str, default: float) -> float:
    for name in ("rope_scaling", "rope_parameters"):  # the second is transformers 5's name for both
        rope = fields.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", None if "factor" in rope else "default"))
        if kind != "default":
            raise UnsupportedModel(f"{where}: {name} of type {kind!r} is not supported (only plain RoPE)")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{where}: {name}.partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
    theta = {"rope_theta": fields.get("rope_theta", default)} | (fields.get("rope_parameters") or {})
    _check_kinds({"rope_theta": theta["rope_theta"]}, where, set())
    return float(theta["rope_theta"])
