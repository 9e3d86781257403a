"""Parquet and jsonl files as sources, and the errors of broken ones."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.data.files import ProblemFile
from hybridflow.data.problems import DataError, Entry
from hybridflow.data.sources import open_source
from hybridflow.data.tokenizer import TEXT, character_tokenizer


def jsonl(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_prompt_strings_and_metadata(tmp_path):
    rows = [{"prompt": "1+1", "answer": 2, "level": "easy"}, {"prompt": "2+2", "answer": "4", "level": "hard"}]
    pq.write_table(pa.Table.from_pylist([dict(row, answer=str(row["answer"])) for row in rows]), tmp_path / "a.parquet")
    for file in (ProblemFile(jsonl(tmp_path / "a.jsonl", *rows)), ProblemFile(tmp_path / "a.parquet")):
        assert len(file) == 2
        assert file[1] == Entry("2+2", "4", {"answer": "4", "level": "hard"})
        assert file[0].answer == "2"


def test_messages_and_a_nested_ground_truth(tmp_path):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "1+1?"}]
    row = {"messages": messages, "reward_model": {"style": "rule", "ground_truth": "2"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    for path in (jsonl(tmp_path / "a.jsonl", row), tmp_path / "a.parquet"):
        entry = ProblemFile(path, answer_key="reward_model.ground_truth")[0]
        assert (entry.question, entry.answer, entry.messages) == ("1+1?", "2", messages)
    tokenizer = character_tokenizer(TEXT)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    settings = SimpleNamespace(
        source="file", path=str(path), prompt_key="prompt", answer_key="reward_model.ground_truth", system_prompt="be nice",
        prompt_template="{question}", response_template="{answer}", seed=0,
    )  # fmt: skip
    (problem,), _ = open_source(settings, tokenizer, 100).take(0, 1)
    assert problem.prompt == "system:short;user:1+1?;"  # the file's own system message wins
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="a file of `messages` needs a chat template"):
        open_source(settings, tokenizer, 100).take(0, 1)


def test_prompt_key_may_name_a_column_of_messages(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"chat": [{"role": "user", "content": "hi", "name": None}], "truth": 1})
    assert ProblemFile(path, "chat", "truth")[0].messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "rows,message",
    [
        ([{"question": "1+1", "answer": 2}], r"row 1: no column 'prompt' \(data.prompt_key\): there are answer, question"),
        ([{"prompt": "a", "answer": 1}, {"prompt": "b"}], r"row 2: no column 'answer' \(data.answer_key\): there are prompt"),
        ([{"prompt": None, "answer": 1}], r"row 1: column 'prompt' \(data.prompt_key\) is empty"),
        ([{"prompt": 3, "answer": 1}], "row 1: column 'prompt' must be a string or a list of messages, not 3"),
        ([{"prompt": [], "answer": 1}], "must be a string or a list of messages"),
        ([{"prompt": [{"role": "user"}], "answer": 1}], "must have the strings role and content"),
        ([{"messages": [{"role": "assistant", "content": "x"}], "answer": 1}], "must be the user's, not the assistant's"),
    ],
)
def test_columns_that_are_not_as_wanted(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        ProblemFile(jsonl(tmp_path / "a.jsonl", *rows))


def test_broken_files(tmp_path):
    path = tmp_path / "a.jsonl"
    with pytest.raises(DataError, match="a.jsonl does not exist"):
        ProblemFile(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="a.jsonl holds no rows"):
        ProblemFile(path)
    path.write_text('{"prompt": "1", "answer": 1}\n\n{"prompt": "1", \n')
    with pytest.raises(DataError, match="a.jsonl, line 3: not valid JSON: Expecting property name"):
        ProblemFile(path)
    path.write_bytes(b'{"prompt": "1", "answer": 1}\n{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(DataError, match="a.jsonl, line 2: not valid JSON: .*codec can't decode"):
        ProblemFile(path)
    path.write_text("[1, 2]\n")
    with pytest.raises(DataError, match=r"line 1: want an object with named fields, not \[1, 2\]"):
        ProblemFile(path)
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match="a.parquet is not a valid parquet file"):
        ProblemFile(tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet holds no rows"):
        ProblemFile(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("no")
    with pytest.raises(DataError, match="a.csv must end with .parquet or .jsonl"):
        ProblemFile(tmp_path / "a.csv")
    with pytest.raises(DataError, match="is not a file"):
        ProblemFile(tmp_path)


def test_unknown_source():
    with pytest.raises(DataError, match="data.source='web' is unknown: use reasoning_gym or file"):
        open_source(SimpleNamespace(source="web", prompt_template="", response_template="", system_prompt=""), None, 1)
