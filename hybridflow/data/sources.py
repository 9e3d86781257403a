"""Opens the source of problems that a config names."""

from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from hybridflow.data.files import ProblemFile
from hybridflow.data.problems import DataError, Entries, Source, Templates


class DataSettings(Protocol):
    """The `data` section of the config."""

    source: str
    task: str
    options: dict[str, Any]
    path: str
    prompt_key: str
    answer_key: str
    system_prompt: str
    prompt_template: str
    response_template: str
    seed: int


def open_source(
    data: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    evaluation_problems: int = 0,
    correct_fraction: float = 1.0,
) -> Source:
    """The source of `data`, with its evaluation split drawn. See `Source` for the arguments.

    Raises:
        DataError: the data cannot be used.
    """
    templates = Templates(data.prompt_template, data.response_template, data.system_prompt)
    return Source(open_entries(data), tokenizer, templates, max_prompt_tokens, evaluation_problems, correct_fraction, data.seed)


def open_entries(data: DataSettings) -> Entries:
    """The entries behind a source, without a tokenizer: enough to check a config."""
    match data.source:
        case "reasoning_gym":
            # 2 s of imports that a file doesn't need
            from hybridflow.data.reasoning import ReasoningGym

            return ReasoningGym(data.task, dict(data.options), data.seed)
        case "file":
            return ProblemFile(data.path, data.prompt_key, data.answer_key)
    raise DataError(f"data.source={data.source!r} is unknown: use reasoning_gym or file")
