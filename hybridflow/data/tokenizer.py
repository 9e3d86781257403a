"""A character tokenizer in HF format, for models that are made here, and the few things asked of any tokenizer."""

import string

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ARITHMETIC = string.digits + "+-*/=()?"
TEXT = string.digits + string.ascii_lowercase + " +-*/=()?.,:;'\n"


def character_tokenizer(characters: str = ARITHMETIC) -> PreTrainedTokenizerFast:
    """One token per character, without merges; ids 0, 1, 2 are padding, end of text and unknown.

    Spaces are dropped from the text where `characters` has none: "1 + 2" is three tokens then, and decodes as "1+2".
    `save_pretrained` writes a folder that `AutoTokenizer.from_pretrained` loads.

    Raises:
        ValueError: a character occurs twice.
    """
    repeated = sorted({c for c in characters if characters.count(c) > 1})
    if repeated:
        raise ValueError(f"a character tokenizer needs distinct characters: {repeated} occur more than once")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    if " " not in characters:
        core.normalizer = normalizers.Replace(" ", "")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Tokens of `text`; with `special` also what the tokenizer puts before a text (a begin-of-text token, or nothing).

    Raises:
        ValueError: the tokenizer has no token for some part of the text.
    """
    tokens = tokenizer(text, add_special_tokens=special)["input_ids"]
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in tokens and tokenizer.unk_token not in text:
        missing = sorted({c for c in text if unknown in tokenizer(c, add_special_tokens=False)["input_ids"]})
        raise ValueError(
            f"the tokenizer has no token for {missing} in {text!r}: change data.prompt_template or data.response_template,"
            " or use a model whose tokenizer has them"
        )
    return tokens


def without_token(tokenizer: PreTrainedTokenizerBase, characters: set[str]) -> list[str]:
    """Those of `characters` that the tokenizer leaves out or takes for its unknown token. Spaces may be left out on purpose."""
    seen = sorted(c for c in characters if c.isprintable() and not c.isspace() and c not in (tokenizer.unk_token or ""))
    return [c for c in seen if tokenizer(c, add_special_tokens=False)["input_ids"] in ([], [tokenizer.unk_token_id])]
