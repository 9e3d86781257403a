"""reasoning_gym's tasks as a source of problems, and their own scorers."""

from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from hybridflow.data.problems import DataError, Entry

DEFAULT_SIZE = 20000  # some generators refuse or precompute more


class ReasoningGym:
    """Entries of one task. The options are the task's own config fields; `size` is the number of entries of an epoch."""

    def __init__(self, task: str, options: dict[str, Any], seed: int):
        """
        Raises:
            DataError: the task or an option is unknown, or the task refuses a value.
        """
        self.name = f"reasoning_gym {task}"
        self.dataset = create_dataset(task, options, seed)

    def __len__(self) -> int:
        return self.dataset.size

    def __getitem__(self, index: int) -> Entry:
        entry = self.dataset[index]
        return Entry(entry["question"], str(entry["answer"]), entry["metadata"])


def create_dataset(task: str, options: dict[str, Any], seed: int) -> Any:
    """The task's dataset with `options` checked against its config."""
    if task not in DATASETS:
        near = [name for name in sorted(DATASETS) if task and task.split("_")[0] in name]
        raise DataError(f"data.task={task!r} is no task of reasoning_gym: did you mean {', '.join(near) or sorted(DATASETS)}?")
    known = set(DATASETS[task][1].__dataclass_fields__)
    unknown = sorted(set(options) - known)
    if unknown or "seed" in options:
        hint = "set data.seed" if not unknown else f"there are {', '.join(sorted(known - {'seed'}))}"
        raise DataError(f"data.options.{(unknown or ['seed'])[0]} is not an option of {task}: {hint}")
    try:
        return reasoning_gym.create_dataset(task, **{"size": DEFAULT_SIZE, **options, "seed": seed})
    except (AssertionError, ValueError, TypeError) as error:
        raise DataError(f"data.options={options} of task {task}: {error or type(error).__name__}") from error
