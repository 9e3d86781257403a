"""Problems from a parquet or jsonl file: a prompt string or chat `messages`, and a ground truth."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hybridflow.data.problems import DataError, Entry

MESSAGES = "messages"


class ProblemFile:
    """The rows of a file, checked when it is opened. All other columns are the entry's metadata."""

    def __init__(self, path: str | Path, prompt_key: str = "prompt", answer_key: str = "answer"):
        """
        Args:
            prompt_key: column with a string or a list of messages; `messages` is taken where there is no such column.
            answer_key: column with the ground truth; dots reach into structs ("reward_model.ground_truth").

        Raises:
            DataError: the file is missing, empty, of another kind or broken, or a column is missing or ill-typed.
        """
        path = Path(path)
        self.name = str(path)
        if not path.is_file():
            raise DataError(f"data.path={path} {'is not a file' if path.exists() else 'does not exist'}")
        readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
        if path.suffix not in readers:
            raise DataError(f"data.path={path} must end with .parquet or .jsonl")
        self._rows = readers[path.suffix](path)
        if not self._rows:
            raise DataError(f"data.path={path} holds no rows")
        self._prompt_key, self._answer_key = prompt_key, answer_key
        for number in range(len(self._rows)):
            self[number]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Entry:
        row, where = self._rows[index], f"{self.name}, row {index + 1}"
        prompt_key = MESSAGES if self._prompt_key not in row and MESSAGES in row else self._prompt_key
        prompt = _field(row, prompt_key, "data.prompt_key", where)
        answer = _field(row, self._answer_key, "data.answer_key", where)
        metadata = {name: value for name, value in row.items() if name != prompt_key}
        if isinstance(prompt, str):
            return Entry(prompt, str(answer), metadata)
        messages = _checked_messages(prompt, prompt_key, where)
        return Entry(messages[-1]["content"], str(answer), metadata, messages)


def _field(row: dict[str, Any], key: str, setting: str, where: str) -> Any:
    value: Any = row
    for part in key.split(".") if key not in row else [key]:
        if not isinstance(value, dict) or part not in value:
            raise DataError(f"{where}: no column {key!r} ({setting}): there are {', '.join(sorted(row))}")
        value = value[part]
    if value is None or (setting == "data.prompt_key" and isinstance(value, str) and not value.strip()):
        raise DataError(f"{where}: column {key!r} ({setting}) is empty")
    return value


def _checked_messages(messages: Any, key: str, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: column {key!r} must be a string or a list of messages, not {messages!r:.80}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise DataError(f"{where}: a message in {key!r} must have the strings role and content, not {message!r:.80}")
    if messages[-1]["role"] != "user":
        raise DataError(f"{where}: the last message in {key!r} must be the user's, not the {messages[-1]['role']}'s")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open("rb") as file:  # json finds out itself that a line is not UTF-8, so the line number is known
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also what is not UTF-8, a number of thousands of digits
                raise DataError(f"{path}, line {number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: want an object with named fields, not {row!r:.60}")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a valid parquet file: {error}") from error
