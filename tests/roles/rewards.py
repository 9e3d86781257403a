"""What the ranks of a test world do with models that score."""

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.load import load
from hybridflow.controller.protocols import THREE_D
from hybridflow.roles.registry import role_class


def scores(config_path: str, overrides: list[str], tokens: list[Tensor]) -> dict:
    """Of all sequences, on the ranks that are asked for them: every data-parallel rank scores the whole batch, twice."""
    config = load(config_path, overrides)
    role = role_class(config, "reward")("reward", config)
    away = all(not parameter.untyped_storage().nbytes() for parameter in role.parameters().values())
    found = []
    for _ in range(2):
        with role.context():
            found.append(role.scores(Batch({"tokens": tokens})))
    collected = torch.distributed.get_rank() in THREE_D.collecting_ranks(role.layout)
    return {"scores": [batch["scores"] for batch in found] if collected else None, "away": away}
