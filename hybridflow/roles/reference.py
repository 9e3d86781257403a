"""The reference: a frozen copy of the policy that the KL penalty measures against."""

from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, remote
from hybridflow.roles.frozen import Frozen
from hybridflow.roles.megatron import MegatronRole
from hybridflow.roles.transfer import WeightTransfer


class Reference(Frozen, MegatronRole):
    """Has its own layout; never trained."""

    def __init__(self, name: str, config: Config):
        super().__init__(name, config)
        self.settle(self.role.offload)

    @remote(ONE_TO_ALL, giver="copy_to")
    def copy_from(self, source: str) -> None:
        """Take the weights that another Megatron role holds now."""
        WeightTransfer(self.config, source, self.name, self.peers).run(verify=True)
        self._changed = True

    @remote(ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Take the weights that a checkpoint of the reference holds."""
        super().load(folder)
        self._changed = True

    @remote(THREE_D)
    def log_probs(self, batch: Batch) -> Batch | None:
        return self.forward(batch)
