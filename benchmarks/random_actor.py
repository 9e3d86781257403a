"""An actor whose weights are random: no file is read, and none is written at the end."""

from benchmarks.random_weights import fill_model
from hybridflow.controller.protocols import ONE_TO_ALL, remote
from hybridflow.roles.actor import Actor
from megatron_ext import weights


class RandomActor(Actor):
    def read_weights(self) -> None:
        fill_model(self.parameters(), self.tile_map(self.state.rank), weights.hf_shapes(self.hf))

    @remote(ONE_TO_ALL)
    def export(self, destination: str) -> None:
        """There is nothing to keep."""
