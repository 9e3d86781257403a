"""The reference: a frozen copy of the policy that the KL penalty measures against."""

from hybridflow.batch import Batch
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, remote
from hybridflow.roles.megatron import MegatronRole
from hybridflow.roles.transfer import WeightTransfer


class Reference(MegatronRole):
    """Has its own layout; never trained."""

    @remote(ONE_TO_ALL)
    def copy_from(self, source: str) -> None:
        """Take the weights that another Megatron role of these ranks holds now."""
        WeightTransfer(self.peers[source], self, self.config).run(verify=True)

    @remote(THREE_D)
    def log_probs(self, batch: Batch) -> Batch | None:
        return self.forward(batch)
