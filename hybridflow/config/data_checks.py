"""Checks that the data and the reward exist and fit each other, before a start."""

import ast
import json
from pathlib import Path
from string import Formatter

from hybridflow.config.schema import Config, ConfigError, DataConfig


def check_data(config: Config) -> None:
    """Raises ConfigError: a template, a file, a column, a reward function or a task that isn't there."""
    data, reward = config.data, config.reward
    _check_template("data.prompt_template", data.prompt_template, "question")
    _check_template("data.response_template", data.response_template, "answer")
    if reward.kind == "task" and data.source != "reasoning_gym":
        raise ConfigError(
            f"reward.kind=task is a task's own scorer, but data.source={data.source} has none: use last_integer or function"
        )
    if reward.kind == "function":
        _check_function(reward.function)
    elif reward.function:
        raise ConfigError(f"reward.function={reward.function} would not be used: set reward.kind=function")
    if data.source == "file":
        _check_file(data)
    else:
        _check_task(data)


def _check_template(key: str, template: str, name: str) -> None:
    try:
        names = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(f"{key}={template!r} is not a template: {error} (write {{{{ and }}}} for braces)") from error
    if not names:
        raise ConfigError(f"{key}={template!r} must hold {{{name}}} or another field of the problem")


def _check_function(reference: str) -> None:
    path, colon, name = reference.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"reward.function={reference!r} is not of the form path/to/file.py:name")
    if not Path(path).is_file():
        raise ConfigError(f"reward.function={reference}: there is no file {path}")
    try:
        tree = ast.parse(Path(path).read_text(), path)
    except SyntaxError as error:
        raise ConfigError(f"reward.function={reference}: {path} line {error.lineno}: {error.msg}") from error
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if name not in functions:
        raise ConfigError(f"reward.function={reference}: {path} defines {', '.join(functions) or 'no function'}, not {name}")


def _check_file(data: DataConfig) -> None:
    path = Path(data.path)
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"data.path={data.path!r} must be a .parquet or .jsonl file, since data.source=file")
    if not path.is_file():
        raise ConfigError(f"data.path={data.path} does not exist")
    columns = _parquet_columns(path) if path.suffix == ".parquet" else _jsonl_columns(path)
    for key, name in (("data.prompt_key", data.prompt_key), ("data.answer_key", data.answer_key)):
        if name not in columns:
            raise ConfigError(f"{key}={name} is not a column of {path}, which has {', '.join(columns)}")


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_schema(path).names
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"data.path={path} is not a parquet file: {str(error).splitlines()[0]}") from error


def _jsonl_columns(path: Path) -> list[str]:
    with path.open() as file:
        first = file.readline()
    try:
        row = json.loads(first)
    except json.JSONDecodeError as error:
        raise ConfigError(f"data.path={path}: line 1 is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"data.path={path}: line 1 is not a JSON object with columns")
    return list(row)


def _check_task(data: DataConfig) -> None:
    import difflib

    import reasoning_gym  # takes seconds: last of all checks
    from reasoning_gym.factory import DATASETS

    if data.path:
        raise ConfigError(f"data.path={data.path} would not be used: set data.source=file")
    if data.task not in DATASETS:
        near = difflib.get_close_matches(data.task, DATASETS, n=1)
        hint = f"did you mean {near[0]}?" if near else "give the name of one, such as chain_sum"
        raise ConfigError(f"data.task={data.task!r} is not a reasoning_gym task: {hint}")
    owned = sorted({"seed", "size"} & set(data.options))
    if owned:
        raise ConfigError(f"data.options.{owned[0]} is set by the run: use data.seed for other problems")
    try:
        reasoning_gym.create_dataset(data.task, seed=data.seed, size=1, **data.options)
    except (TypeError, ValueError, AssertionError) as error:  # what the tasks' own validation raises
        raise ConfigError(f"data.options={data.options} do not fit data.task={data.task}: {error}") from error
