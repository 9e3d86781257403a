"""What the ranks of a test world do with a critic."""

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.objectives import ValueObjective
from hybridflow.batch import Batch
from hybridflow.config.load import load
from hybridflow.config.schema import Config
from hybridflow.roles.actor import Actor
from hybridflow.roles.critic import Critic
from megatron_ext import weights
from megatron_ext.optimizer import OptimizerSettings

HEAD = ("output_layer.weight", "output_layer.bias")


def _values(critic: Critic, tokens: list[Tensor]) -> list[Tensor] | None:
    """Of all rows, on the ranks that have them: every data-parallel rank forwards the whole batch."""
    with critic.context():
        found = critic.values(Batch({"tokens": tokens}))
    return None if found is None else found.rows("values")


def copy_and_export(config_path: str, overrides: list[str], folder: str, tokens: list[Tensor], destination: str) -> dict:
    """The critic takes the weights of an actor that has `folder`'s, gets a head that is not zero, and is exported."""
    config = load(config_path, overrides)
    actor, critic = Actor("actor", config), Critic("critic", config)
    critic.peers = actor.peers = {"actor": actor, "critic": critic}
    with actor.context():
        weights.load_hf(actor.parameters(), actor.tile_map(dist.get_rank()), folder)
    with critic.context():
        critic.copy_from("actor")
        head = [critic.parameters()[name] for name in HEAD if name in critic.parameters()]
        new_head = sum(part.abs().sum().item() for part in head)
        for part in head:
            part.copy_(torch.linspace(-0.3, 0.5, part.numel()).view(part.shape))
    values = _values(critic, tokens)
    with critic.context():
        critic.export(destination)
    return {"new_head": new_head, "values": values}


def load_values(config_path: str, overrides: list[str], tokens: list[Tensor]) -> list[Tensor] | None:
    return _values(Critic("critic", load(config_path, overrides)), tokens)


def learn(config_path: str, overrides: list[str], tokens: list[Tensor], steps: int) -> list[float] | None:
    """The loss per token of each update, where a rank has it."""
    config: Config = load(config_path, overrides)
    critic, settings = Critic("critic", config), config.roles.critic.optimizer
    returns = [(row % 7).float() / 3 for row in tokens]
    batch = Batch(
        {
            "tokens": tokens,
            "loss_mask": [torch.arange(len(row)) > 1 for row in tokens],
            "values": [torch.zeros(len(row)) for row in tokens],
            "returns": [
                torch.cat([torch.zeros(1), row[:-1]]) for row in returns
            ],  # of the token before: the critic has seen it
        }
    )
    losses = []
    with critic.context():
        critic.start_training(OptimizerSettings(lr=settings.lr))
        for _ in range(steps):
            found = critic.update(batch, ValueObjective(0.0))
            assert not found["skipped"]
            losses.append(found["loss"] / found["loss_count"] if "loss" in found else None)
    return losses if None not in losses else None
