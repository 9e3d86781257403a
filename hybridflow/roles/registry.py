"""From the config to the roles of a rank."""

from hybridflow.config.own_class import load_role
from hybridflow.config.schema import ROLE_METHODS, Config
from hybridflow.controller import hang
from hybridflow.controller.handle import RoleHandle, Transport
from hybridflow.controller.kept import Courier
from hybridflow.controller.placement import place
from hybridflow.controller.role import Role
from hybridflow.controller.worker import Worker
from hybridflow.roles.actor import Actor
from hybridflow.roles.critic import Critic
from hybridflow.roles.reference import Reference
from hybridflow.roles.reward import HFRewardModel, RewardModel
from hybridflow.roles.rollout import Rollout
from hybridflow.roles.sides import layout_of
from megatron_ext.layout import Layout

# The engine comes first: vLLM wants the memory free that it is going to use.
ROLES: dict[str, type[Role]] = {
    "rollout": Rollout,
    "actor": Actor,
    "critic": Critic,
    "cost_critic": Critic,
    "reference": Reference,
    "reward": RewardModel,
    "cost": RewardModel,
}


def role_class(config: Config, name: str) -> type[Role]:
    """The user's own (`roles.X.implementation`), or the one of this package, by its backend where it has a choice."""
    path = getattr(getattr(config.roles, name), "implementation", "")
    if path:
        return load_role(f"roles.{name}.implementation", path, ROLE_METHODS.get(name, ()))
    return HFRewardModel if getattr(getattr(config.roles, name), "backend", "megatron") == "hf" else ROLES[name]


def configured(config: Config) -> list[str]:
    """The names of the config's roles, in the order in which they are built."""
    return [name for name in ROLES if getattr(config.roles, name) is not None]


def build_roles(config: Config, rank: int) -> dict[str, Role]:
    """Build this rank's part of every role that lives on it. Collective over its pool: all ranks build in the same order, and
    those of the pool that a role leaves out help it to make its groups."""
    placement = place(config)
    pool, roles = placement.pools[placement.pool_of(rank)], {}
    for name in configured(config):
        if rank in placement.roles[name]:
            hang.starting(f"making the {name}")
            roles[name] = role_class(config, name)(name, config)
        elif placement.roles[name][0] in pool:
            hang.starting(f"making the {name}'s groups")
            role_class(config, name).stand_by(name, config)
    return roles


def handles(config: Config, transport: Transport) -> dict[str, RoleHandle]:
    """The driver's handles of all roles, and of the ranks themselves as `worker`."""
    placed, courier = place(config).roles, Courier()
    found = {
        name: RoleHandle(name, role_class(config, name), layout_of(config, name), transport, placed, courier)
        for name in configured(config)
    }
    return found | {"worker": RoleHandle("worker", Worker, Layout(config.world_size), transport, courier=courier)}
