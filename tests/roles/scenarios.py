"""What the ranks of a test world do with roles: real Megatron models and real engines in the same processes."""

import torch
import torch.distributed as dist

from hybridflow.config.load import load
from hybridflow.config.schema import Config
from hybridflow.roles.actor import Actor
from hybridflow.roles.reference import Reference
from hybridflow.roles.rollout import Rollout
from hybridflow.rollout.engine import Sampling
from hybridflow.rollout.grouping import choose_layout
from megatron_ext import weights

_kept: dict[str, object] = {}  # the engine between calls, as building one takes seconds


def _rollout(config: Config) -> Rollout:
    kind = config.model_path("rollout"), choose_layout(config).layout, config.roles.rollout.expert_parallel
    if _kept.get("kind") != kind:
        close()
        _kept.update(rollout=Rollout("rollout", config), kind=kind)
    rollout = _kept["rollout"]
    rollout._transfers.clear()
    rollout.config = config  # the actor's layout is another one
    return rollout


def close() -> None:
    """The engine that is kept."""
    if "rollout" in _kept:
        _kept["rollout"].close()
    _kept.clear()


def reshard_and_generate(
    config_path: str, overrides: list[str], folders: list[str], prompts: list[list[int]], sampling: Sampling
) -> list[dict]:
    """For each folder in turn, as if it were the next update: load it into the actor, reshard with verification, generate.

    Returns per folder whether the resharding verified, the bytes that this rank received and the least that it could receive
    under any grouping of the ranks into engines, and this rank's tokens.
    """
    config = load(config_path, overrides)
    rollout = _rollout(config)
    actor = Actor("actor", config)
    rollout.peers = actor.peers = {"actor": actor, "rollout": rollout}
    found = []
    for folder in folders:
        with actor.context():
            weights.load_hf(actor.parameters(), actor.tile_map(dist.get_rank()), folder)
        rollout.wake_weights()
        report = rollout.receive("actor", verify=True)
        rollout.wake_kv_cache()
        generations = rollout.engine.generate(prompts, sampling, seed=0)
        rollout.sleep()
        least = rollout._transfers["actor"].plan.least_received_bytes[dist.get_rank()]
        received = {"received": report["bytes_received"], "least": least}
        found.append({"verified": report["verified"], "tokens": [g.tokens for g in generations], **received})
    return found


def copy_into_reference(config_path: str, overrides: list[str], folder: str) -> float:
    """The reference takes the weights of an actor in another layout; the largest difference of their log-probs."""
    from hybridflow.batch import Batch

    config = load(config_path, overrides)
    actor, reference = Actor("actor", config), Reference("reference", config)
    reference.peers = actor.peers = {"actor": actor, "reference": reference}
    with actor.context():
        weights.load_hf(actor.parameters(), actor.tile_map(dist.get_rank()), folder)
    generator = torch.Generator().manual_seed(0)
    batch = Batch({"tokens": [torch.randint(0, 100, (length,), generator=generator) for length in (5, 9, 3, 12)]})
    reference.copy_from("actor")
    rows = []
    for role in (actor, reference):
        with role.context():
            own = role.forward(batch)  # every data-parallel rank forwards the whole batch
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, None if own is None else own.values("log_probs"))
        rows.append(next(value for value in gathered if value is not None))
    return (rows[0] - rows[1]).abs().max().item()
