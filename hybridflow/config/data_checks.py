"""Checks that the data, the templates, the tokenizer and the reward fit each other, by opening them as the run will.

Takes seconds of imports: last of all checks.
"""

import re
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING

from hybridflow.config.model_folder import tensor_shapes
from hybridflow.config.schema import Config, ConfigError, one_line
from hybridflow.config.score_checks import check_reachable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_data(config: Config) -> None:
    """Raises ConfigError: a task, a file, a column, a template's field, a reward function or a tokenizer that isn't there."""
    data, warm_start = config.data, config.warm_start
    if data.source == "reasoning_gym" and data.path:
        raise ConfigError(f"data.path={data.path} would not be used: set data.source=file")
    for name, settings in config.scores().items():
        if settings.kind == "task" and data.source != "reasoning_gym":
            raise ConfigError(
                f"{name}.kind=task is a task's own scorer, but data.source={data.source} has none: use last_integer or function"
            )

    from hybridflow.data.problems import DataError
    from hybridflow.data.sources import open_entries, open_source
    from hybridflow.rewards.scorers import INTEGER, RewardError, ScorerSpec, load_scorer

    try:
        entries = open_entries(data)
        for name, settings in config.scores().items():
            if settings.kind not in ("model", "http"):
                load_scorer(ScorerSpec(settings.kind, settings.function, data.task, data.options, name))
    except (DataError, RewardError) as error:
        raise ConfigError(one_line(error)) from error
    tokenizer = _tokenizer(config.model_path("actor"))
    _check_ends(config, tokenizer)
    _check_same_tokens(config, tokenizer.get_vocab())
    for name, settings in config.scores().items():
        if settings.kind == "http":
            check_reachable(f"{name}.url", settings.url)
    for name, role in config.scoring_roles().items():
        if role.backend == "hf":
            _check_head(config, name)
    try:
        source = open_source(
            data, tokenizer, config.sampling.max_prompt_tokens, config.evaluation.problems, warm_start.correct_fraction
        )
        if data.source == "file":  # a task makes its entries one by one, of one kind
            source.check(warm_start.steps > 0)
        problems, _ = source.take(0, 1)
        tokens = problems[0].prompt_tokens + (source.demonstration(problems[0]) if warm_start.steps else [])
    except DataError as error:
        raise ConfigError(one_line(error)) from error
    _check_vocabulary(config, tokenizer, tokens)
    answers = (entries[n].answer for n in range(len(entries))) if data.source == "file" else (problems[0].answer,)
    for name, settings in config.scores().items():
        other = next((a for a in answers if not re.fullmatch(INTEGER, a)), None) if settings.kind == "last_integer" else None
        if other is not None:
            raise ConfigError(f"{name}.kind=last_integer needs integer answers, not {other!r}: use task or function")
    for key in ("prompt_template", "response_template"):
        template = getattr(data, key)
        if not any(field for _, field, _, _ in Formatter().parse(template)):
            raise ConfigError(f"data.{key}={template!r} is the same for all problems: use a field, such as {{question}}")


def _check_head(config: Config, name: str) -> None:
    """What turns a classifier's states into its score is in the folder: transformers would make up what is missing."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder, trust = config.model_path(name), config.scoring_roles()[name].trust_remote_code
    try:
        fields = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(fields, trust_remote_code=trust)
    except Exception as error:  # whatever comes of broken files, or of the folder's own code
        raise ConfigError(f"roles.{name}.model.path={folder} is no classifier of transformers: {one_line(error)}") from error
    stored = tensor_shapes(Path(folder))
    missing = [key for key in model.state_dict() if not key.startswith(f"{model.base_model_prefix}.") and key not in stored]
    if missing:
        raise ConfigError(
            f"roles.{name}.model.path: model folder {folder} lacks the tensor {missing[0]} of {type(model).__name__}:"
            " is it a language model that was never trained to score?"
        )


def _tokenizer(folder: str, trust: bool = False) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except Exception as error:  # whatever comes of broken files in transformers
        what = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"model folder {folder} has a tokenizer that cannot be loaded ({what})") from error


def _check_ends(config: Config, tokenizer: "PreTrainedTokenizerBase") -> None:
    """What ends a response (data/text.py) are tokens of the model: vLLM refuses others, once it is asked to generate."""
    from transformers import GenerationConfig

    folder, size = config.model_path("actor"), config.read_model("actor").vocab_size
    path = Path(folder) / "generation_config.json"
    named = {f"model folder {folder}: its tokenizer's eos_token": tokenizer.eos_token_id}
    if path.is_file():
        try:
            named[f"{path}: eos_token_id"] = GenerationConfig.from_pretrained(folder).eos_token_id
        except Exception as error:  # whatever comes of a file of another kind
            raise ConfigError(f"{path} cannot be read: {one_line(error)}: copy it again, or remove it") from error
    for where, ends in named.items():
        for end in ends if isinstance(ends, list) else [ends]:
            if end is not None and (type(end) is not int or not 0 <= end < size):
                raise ConfigError(
                    f"{where} has the number {end!r}, which is none of the model's vocab_size={size} tokens: mend it"
                )


def _check_vocabulary(config: Config, tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> None:
    """A problem's tokens are tokens of the model, of which the tokenizer may have fewer or, unused, more."""
    size, folder = config.read_model("actor").vocab_size, config.model_path("actor")
    if tokens and max(tokens) >= size:
        token = tokenizer.convert_ids_to_tokens(max(tokens))
        raise ConfigError(
            f"model folder {folder}: its tokenizer's token {token!r} has the number {max(tokens)}, but config.json's"
            f" vocab_size={size}: are they of different models?"
        )


def _check_same_tokens(config: Config, vocabulary: dict[str, int]) -> None:
    """Roles with a model of their own read the actor's tokens, unless a sequence may be encoded anew for them."""
    scoring = config.scoring_roles()
    for name in {**config.megatron_roles(), **scoring}:
        if name in scoring and scoring[name].retokenize != "never":
            _tokenizer(config.model_path(name), scoring[name].trust_remote_code)
            continue
        actors, folder = config.model_path("actor"), config.model_path(name)
        if folder != actors and _tokenizer(folder).get_vocab() != vocabulary:
            raise ConfigError(
                f"roles.{name}.model.path={folder} has other tokens than the actor's {actors}:"
                f" use {f'roles.{name}.retokenize=auto' if name in scoring else 'a model with the same tokenizer'}"
            )
