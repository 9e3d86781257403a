"""From the config to the roles of a rank."""

from hybridflow.config.schema import Config
from hybridflow.controller.handle import RoleHandle, Transport
from hybridflow.controller.role import Role
from hybridflow.controller.worker import Worker
from hybridflow.roles.actor import Actor
from hybridflow.roles.critic import Critic
from hybridflow.roles.reference import Reference
from hybridflow.roles.reward import HFRewardModel, RewardModel
from hybridflow.roles.rollout import Rollout, choose_layout
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
    """The class of a role, by its backend where it has a choice."""
    return HFRewardModel if getattr(getattr(config.roles, name), "backend", "megatron") == "hf" else ROLES[name]


def configured(config: Config) -> list[str]:
    """The names of the config's roles, in the order in which they are built."""
    return [name for name in ROLES if getattr(config.roles, name) is not None]


def build_roles(config: Config) -> dict[str, Role]:
    """Build this rank's part of every role. Collective: all ranks build in the same order."""
    return {name: role_class(config, name)(name, config) for name in configured(config)}


def layout_of(config: Config, name: str) -> Layout:
    """A role's layout, for those who don't have the role."""
    return choose_layout(config) if name == "rollout" else config.layout(name)


def handles(config: Config, transport: Transport) -> dict[str, RoleHandle]:
    """The driver's handles of all roles, and of the ranks themselves as `worker`."""
    found = {
        name: RoleHandle(name, role_class(config, name), layout_of(config, name), transport) for name in configured(config)
    }
    return found | {"worker": RoleHandle("worker", Worker, Layout(config.world_size), transport)}
