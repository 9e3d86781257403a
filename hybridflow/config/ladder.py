"""The batch ladder: what the batch sizes of a configuration mean, from the prompts of a step to one rank's micro-batches.

prompts -> samples -> mini-batches -> samples per data-parallel rank -> micro-batches
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.config.schema import Config
from megatron_ext.layout import Layout


@dataclass(frozen=True)
class Rung:
    name: str
    size: str
    meaning: str


@dataclass(frozen=True)
class Ladder:
    """One step's sizes; `micro_batches` is an upper bound, since sequences are packed by their real lengths."""

    prompts: int
    samples: int
    mini_batch: int  # samples per optimizer step; mini-batches differ by one where they do not divide
    optimizer_steps: int  # per step of the algorithm
    dp: int
    rank_samples: int  # of a mini-batch on one data-parallel rank, filled up where dp does not divide
    sequence_tokens: int  # the longest sequence
    micro_batches: int  # of a mini-batch on one data-parallel rank, at most
    engines: int
    rungs: tuple[Rung, ...]

    def render(self) -> str:
        names = max(len(rung.name) for rung in self.rungs)
        sizes = max(len(rung.size) for rung in self.rungs)
        return "\n".join(f"{rung.name:<{names}}  {rung.size:>{sizes}}  {rung.meaning}".rstrip() for rung in self.rungs)


def ladder(config: Config, num_layers: Mapping[str, int]) -> Ladder:
    """The ladder of one step; pure arithmetic. `num_layers`: of the Megatron roles' models, by role."""
    batch, actor, layout = config.batch, config.roles.actor, config.layout("actor")
    samples = batch.prompts * batch.samples_per_prompt
    mini_batch = -(-samples // batch.mini_batches)
    rank_samples = -(-mini_batch // layout.dp)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_response_tokens
    micro_batches = layout.schedulable(_micro_batches(rank_samples, actor.micro_batch_tokens, longest))
    engines = len(config.ranks("rollout")) // config.roles.rollout.tp
    optimizer_steps = batch.mini_batches * config.algorithm.epochs
    at_most = "at most " if samples % batch.mini_batches else ""
    rungs = (
        Rung(
            "ranks",
            f"{config.world_size}",
            f"{config.cluster.nodes} x {config.cluster.ranks_per_node}, nodes x ranks of a node",
        ),
        *(rung for role, layers in num_layers.items() for rung in _megatron(config, role, layers)),
        *(_whole(config, role) for role in config.scoring_roles() if role not in num_layers),
        Rung("rollout", f"{engines} x TP{config.roles.rollout.tp}", f"{config.dtype('rollout')}, engines x ranks of an engine"),
        Rung("prompts", f"{batch.prompts}", f"per step; at most {-(-batch.prompts // engines)} per engine"),
        Rung("samples", f"{samples}", f"{batch.samples_per_prompt} per prompt; at most {longest} tokens each"),
        Rung(
            "mini-batches",
            f"{batch.mini_batches}",
            f"of {at_most}{mini_batch} samples: {optimizer_steps} optimizer steps per step",
        ),
        Rung(
            "per rank",
            f"{rank_samples}",
            f"samples of a mini-batch on each of {layout.dp} data-parallel ranks{_fill(mini_batch, layout.dp)}",
        ),
        Rung(
            "micro-batches",
            f"<= {micro_batches}",
            f"per rank and mini-batch, of at most {actor.micro_batch_tokens} packed tokens{_multiple(layout)}",
        ),
        *(_critic(config, name, mini_batch, longest) for name in config.trained_roles() if name != "actor"),
        Rung("steps", f"{config.run.steps}", f"{config.run.steps * samples} samples in all; {_warm_start(config)}"),
    )
    return Ladder(
        batch.prompts, samples, mini_batch, optimizer_steps, layout.dp, rank_samples, longest, micro_batches, engines, rungs
    )


def _micro_batches(samples: int, budget: int, longest: int) -> int:
    """No more than the sequences, and no more than when every sequence has full length."""
    return -(-samples // max(1, budget // longest))


def _multiple(layout: Layout) -> str:
    return f"; a multiple of pp={layout.pp}" if layout.vpp > 1 else ""


def _critic(config: Config, name: str, mini_batch: int, longest: int) -> Rung:
    """The actor's mini-batches on a critic's own ranks."""
    critic, layout = config.trained_roles()[name], config.layout(name)
    count = layout.schedulable(_micro_batches(-(-mini_batch // layout.dp), critic.micro_batch_tokens, longest))
    tokens = f"of at most {critic.micro_batch_tokens} packed tokens{_multiple(layout)}"
    meaning = f"per mini-batch on each of {layout.dp} data-parallel ranks, {tokens}"
    return Rung(f"… of the {name.replace('_', ' ')}", f"<= {count}", meaning)


def _megatron(config: Config, role: str, num_layers: int) -> list[Rung]:
    layout = config.layout(role)
    split = layout.describe_layers(num_layers)
    rungs = [Rung(role, layout.describe(), f"{config.dtype(role)}, {config.model_path(role)}")]
    return [*rungs, Rung(f"{role} layers", f"{num_layers}", f"by pipeline stage: {split}")] if split else rungs


def _whole(config: Config, role: str) -> Rung:
    """A classifier that transformers runs."""
    return Rung(role, config.layout(role).describe(), f"{config.dtype(role)}, {config.model_path(role)} by transformers")


def _fill(mini_batch: int, dp: int) -> str:
    missing = -mini_batch % dp
    return f" ({missing} masked fill-ups)" if missing else ""


def _warm_start(config: Config) -> str:
    warm = config.warm_start
    return f"warm start: {warm.steps} steps of {warm.batch_size} sequences" if warm.steps else "no warm start"
