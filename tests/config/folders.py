"""Model folders and configuration files for tests of what reads only configs and headers."""

import json
import string
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import save_file

from hybridflow.config.model_folder import expected_tensors
from hybridflow.data.tokenizer import character_tokenizer
from megatron_ext.hf_config import HFConfig

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 110,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, shards: int = 1, **fields) -> Path:
    """A folder in HF format with all-zero weights."""
    folder.mkdir(parents=True)
    config = {**QWEN2, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    character_tokenizer(string.printable).save_pretrained(folder)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in expected_tensors(HFConfig.from_dict(config)).items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    placed = {tensor: names[n % shards] for n, tensor in enumerate(tensors)}
    for file in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if placed[tensor] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def write_config(folder: Path, model: Path, **sections) -> Path:
    """A configuration for 4 ranks, actor TP2 PP2 and rollout TP2, that passes all checks."""
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"ranks_per_node": 4, "device": "cpu"},
        "roles": {"actor": {"tp": 2, "pp": 2}, "rollout": {"tp": 2}},
        "batch": {"prompts": 8, "samples_per_prompt": 4, "mini_batches": 2},
        "data": {"task": "chain_sum", "options": {"max_terms": 2}},
        "run": {"dir": str(folder / "run"), "steps": 5},
        **sections,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
