"""Where a rank stands in a Megatron layout. Pure arithmetic: no torch, so that plans can be made before anything starts."""

import functools
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Coordinates(NamedTuple):
    tp: int
    cp: int
    dp: int
    pp: int


class ExpertCoordinates(NamedTuple):
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Split:
    """How layers are split over the chunks of a pipeline; chunks are in the model's order: the first of every stage, the
    second of every stage, ...

    By default as evenly as possible, where the stage with the output layer gets the fewest and the one with the embedding the
    next fewest. A chunk that has the embedding or the output layer needs no layer if that is counted, or given so.
    """

    stages: tuple[int, ...] = ()  # the layers of every chunk
    embedding: int = 0  # layers that the embedding counts as when `stages` is derived
    loss: int = 0  # layers that the output layer and the loss count as


@dataclass(frozen=True)
class Layout:
    """Sizes of a role's parallel dimensions over `world_size` ranks, in Megatron's default rank order tp-cp-dp-pp.

    Experts have dimensions of their own over the same ranks of a pipeline stage, in the order etp-ep-edp: etp ranks share the
    matrices of an expert, ep ranks the experts, and edp (expert data parallel) ranks hold the same ones.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    split: Split = Split()

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.pp * self.ep * self.etp)

    def coordinates(self, rank: int) -> Coordinates:
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        return Coordinates(tp, cp, rest % self.dp, rest // self.dp)

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Where a rank stands among the ranks of its pipeline stage as far as experts are concerned."""
        in_stage = rank % (self.world_size // self.pp)
        return ExpertCoordinates(in_stage % self.etp, in_stage // self.etp % self.ep, in_stage // (self.etp * self.ep))

    def check_experts(self, num_experts: int, moe_intermediate_size: int) -> None:
        """Whether experts can be spread as this layout says; `num_experts` 0 stands for a dense model.

        Raises:
            ValueError: they can't; names both numbers.
        """
        for name, size in (("ep", self.ep), ("etp", self.etp)):
            if size > 1 and not num_experts:
                raise ValueError(f"{name}={size} spreads experts, and the model has none: use {name}=1")
        ranks = self.world_size // self.pp
        if ranks % (self.ep * self.etp):
            raise ValueError(
                f"ep={self.ep} x etp={self.etp} = {self.ep * self.etp} does not divide the {ranks} ranks of a pipeline stage: "
                "change ep or etp"
            )
        if num_experts % self.ep:
            raise ValueError(f"ep={self.ep} does not divide the model's {num_experts} experts: choose one that does")
        if moe_intermediate_size % self.etp:
            raise ValueError(
                f"etp={self.etp} does not divide the experts' inner size of {moe_intermediate_size}: choose one that does"
            )

    def check_training(self, num_experts: int) -> None:
        """What building the model asks for beyond holding its weights; ValueError names both values."""
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs more than one pipeline stage: use vpp=1 with pp=1")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=true needs tp > 1: use sequence_parallel=false with tp=1")
        if num_experts and self.tp > 1 and not self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel=false: Megatron trains experts at tp={self.tp} with sequence_parallel=true only"
            )
        if self.cp > 1:
            raise ValueError(f"cp={self.cp} is not supported yet: use 1")

    def schedulable(self, micro_batches: int) -> int:
        """The least number of micro-batches, this one or more, that the schedule takes: interleaved, a multiple of pp."""
        return micro_batches if self.vpp == 1 else -(-micro_batches // self.pp) * self.pp

    def stage_layers(self, num_layers: int) -> list[list[list[int]]]:
        """Global layer indices by [pp rank][chunk]; every layer is in one chunk, in order (`Split`).

        Raises:
            ValueError: the split does not fit the model or the pipeline; says which number to change.
        """
        counts = _layers_per_chunk(num_layers, self.pp, self.vpp, self.split)
        chunks = [list(range(stop - n, stop)) for n, stop in zip(counts, accumulate(counts), strict=True)]
        return [chunks[stage :: self.pp] for stage in range(self.pp)]

    def describe_layers(self, num_layers: int) -> str:
        """The layers per stage, a stage's chunks added up, such as `7 | 8 | 8 | 7`; empty when all chunks have equally many."""
        counts = [[len(chunk) for chunk in stage] for stage in self.stage_layers(num_layers)]
        if len({n for stage in counts for n in stage}) == 1:
            return ""
        return " | ".join("+".join(map(str, stage)) for stage in counts)

    def describe(self) -> str:
        names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
        return " x ".join(f"{n.upper()}{getattr(self, n)}" for n in names if getattr(self, n) > 1) or "one rank"


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 64) -> int:
    """Rows of the embedding after padding to a multiple of `multiple` x tp, as Megatron splits it evenly."""
    step = multiple * tp
    return (vocab_size + step - 1) // step * step


@functools.cache
def _layers_per_chunk(num_layers: int, pp: int, vpp: int, split: Split) -> tuple[int, ...]:
    chunks, sizes = pp * vpp, f"pp={pp} x vpp={vpp}"
    for name in ("embedding", "loss"):
        if getattr(split, name) < 0:
            raise ValueError(f"split.{name}={getattr(split, name)} is too small: use at least 0")
    if not split.stages:
        if num_layers < chunks - (split.embedding > 0) - (split.loss > 0):
            raise ValueError(f"num_hidden_layers={num_layers} is too few for the {chunks} chunks of {sizes}: lower one of them")
        return _even_split(num_layers, pp, chunks, split)
    given = f"split.stages={list(split.stages)}"
    if split.embedding or split.loss:
        raise ValueError(f"{given} leaves nothing to derive from split.embedding and split.loss: use 0 for both, or no stages")
    if len(split.stages) != chunks:
        raise ValueError(f"{given} has {len(split.stages)} numbers, but {sizes} = {chunks} chunks: give one for each")
    if min(split.stages) < 0 or 0 in split.stages[1:-1]:
        raise ValueError(f"{given}: only the first and the last number may be 0, and none below")
    if sum(split.stages) != num_layers:
        raise ValueError(f"{given} are {sum(split.stages)} layers, but num_hidden_layers={num_layers}: make them equal")
    return split.stages


def _even_split(num_layers: int, pp: int, chunks: int, split: Split) -> tuple[int, ...]:
    """Layer by layer to the chunk with the least to do; among equals to the stage with the least, the ends last."""
    load, stage_load = [0] * chunks, [0] * pp
    for chunk, counted in ((0, split.embedding), (chunks - 1, split.loss)):
        load[chunk] += counted
        stage_load[chunk % pp] += counted
    counts = [0] * chunks
    for _ in range(num_layers):
        chunk = min(
            range(chunks),
            key=lambda c: (load[c], stage_load[c % pp], c % pp == pp - 1, c % pp == 0, c in (0, chunks - 1), c),
        )
        counts[chunk] += 1
        load[chunk] += 1
        stage_load[chunk % pp] += 1
    return tuple(counts)
