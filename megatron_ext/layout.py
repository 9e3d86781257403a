"""Where a rank stands in a Megatron layout. Pure arithmetic: no torch, so that plans can be made before anything starts."""

from dataclasses import dataclass
from typing import NamedTuple


class Coordinates(NamedTuple):
    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of a role's parallel dimensions over `world_size` ranks, in Megatron's default rank order tp-cp-dp-pp."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp * self.cp)

    def coordinates(self, rank: int) -> Coordinates:
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        return Coordinates(tp, cp, rest % self.dp, rest // self.dp)

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def stage_layers(self, num_layers: int) -> list[list[list[int]]]:
        """Global layer indices by [pp rank][chunk]: Megatron's even split, interleaved when vpp > 1.

        Raises:
            ValueError: `num_layers` is not a multiple of pp x vpp.
        """
        per_chunk, left = divmod(num_layers, self.pp * self.vpp)
        if left:
            raise ValueError(f"num_hidden_layers={num_layers} is not a multiple of pp={self.pp} x vpp={self.vpp}")
        return [
            [list(range((v * self.pp + p) * per_chunk, (v * self.pp + p + 1) * per_chunk)) for v in range(self.vpp)]
            for p in range(self.pp)
        ]

    def describe(self) -> str:
        names = ("tp", "pp", "vpp", "cp", "ep", "dp")
        return " x ".join(f"{n.upper()}{getattr(self, n)}" for n in names if getattr(self, n) > 1) or "one rank"


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 64) -> int:
    """Rows of the embedding after padding to a multiple of `multiple` x tp, as Megatron splits it evenly."""
    step = multiple * tp
    return (vocab_size + step - 1) // step * step
