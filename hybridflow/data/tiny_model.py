"""Makes a tiny randomly initialised Qwen2 model with a character tokenizer: the model of the quickstart and of tests.

python -m hybridflow.data.tiny_model --to models/tiny --seed 0
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from hybridflow.data.tokenizer import ARITHMETIC, character_tokenizer


def make_tiny_model(
    folder: str | Path,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    initializer_range: float = 0.06,
    max_positions: int = 128,
    tied: bool = False,
    characters: str = ARITHMETIC,
) -> Path:
    """Write an HF folder with config.json, model.safetensors (fp32), tokenizer and generation_config.json.

    The same arguments give the same bytes. An existing folder of that name is replaced. `initializer_range` is larger than
    usual: at a hidden size of 128 the usual 0.02 starts so flat that a few hundred steps are spent on leaving it.

    Raises:
        ValueError: the heads don't divide the hidden size or the KV heads don't divide the heads.
    """
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"heads={heads} must divide hidden={hidden}, and kv_heads={kv_heads} must divide heads={heads}")
    folder = Path(folder)
    tokenizer = character_tokenizer(characters)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", required=True, type=Path, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.to, seed=arguments.seed, layers=arguments.layers))


if __name__ == "__main__":
    main()
