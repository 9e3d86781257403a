"""The character tokenizer through a save and AutoTokenizer, and what it refuses."""

import pytest
from transformers import AutoTokenizer

from hybridflow.data.tokenizer import ARITHMETIC, TEXT, character_tokenizer, encode


@pytest.fixture(params=[ARITHMETIC, TEXT])
def characters(request):
    return request.param


def test_survives_a_folder(tmp_path, characters):
    character_tokenizer(characters).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(characters) + 3 <= 64
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    tokens = tokenizer(characters)["input_ids"]
    assert tokens == list(range(3, len(characters) + 3))
    assert tokenizer.decode(tokens) == characters
    assert tokenizer.decode([*tokens, 1, 0, 0], skip_special_tokens=True) == characters


def test_spaces_are_dropped_only_where_there_is_no_token_for_them():
    tokenizer = character_tokenizer("+12")
    assert encode(tokenizer, "1 + 2") == [4, 3, 5]
    assert tokenizer.decode([4, 3, 5]) == "1+2"
    tokenizer = character_tokenizer(" +12")
    assert tokenizer.decode(encode(tokenizer, "1  + 2 ")) == "1  + 2 "


def test_special_tokens_stay_whole():
    tokenizer = character_tokenizer("12")
    assert encode(tokenizer, "1<eos>2") == [3, 1, 4]


def test_unknown_and_repeated_characters_are_named():
    with pytest.raises(ValueError, match=r"no token for \['x', 'é'\] in '1é\+x'"):
        encode(character_tokenizer("1+"), "1é+x")
    with pytest.raises(ValueError, match=r"\['1'\] occur more than once"):
        character_tokenizer("1+1")
