"""The model's tokenizer as a run uses it."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase


class Text:
    """Tokenizer of an HF folder, and the tokens that end a response: the tokenizer's end-of-text token and those of the
    folder's generation config."""

    def __init__(self, folder: str):
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        ends = {self.tokenizer.eos_token_id}
        if (Path(folder) / "generation_config.json").is_file():
            configured = GenerationConfig.from_pretrained(folder).eos_token_id
            ends |= set(configured if isinstance(configured, list) else [configured])
        self.stop_token_ids = sorted(token for token in ends if token is not None)

    def decode(self, tokens: list[int]) -> str:
        """The text of a response, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
