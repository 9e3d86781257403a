"""The reference: a frozen copy of the policy that the KL penalty measures against."""

import contextlib
from collections.abc import Iterator

import torch

from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, remote
from hybridflow.roles.megatron import MegatronRole
from hybridflow.roles.transfer import WeightTransfer
from megatron_ext.memory import HostMemory


class Reference(MegatronRole):
    """Has its own layout; never trained. Offloaded, its weights are on the device during its own calls only."""

    _host: HostMemory | None = None
    _changed = True  # since the weights were last copied to the host

    def __init__(self, name: str, config: Config):
        super().__init__(name, config)
        if "params" in self.role.offload:
            self._host = HostMemory()
            self._leave()

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with super().context():
            if self._host:
                self._host.give_back()
            yield
            if self._host:
                self._leave()

    def _leave(self) -> None:
        self._host.take(self.parameters().values(), copy=self._changed)
        self._changed = False
        torch.cuda.empty_cache()

    @remote(ONE_TO_ALL)
    def copy_from(self, source: str) -> None:
        """Take the weights that another Megatron role of these ranks holds now."""
        WeightTransfer(self.peers[source], self, self.config).run(verify=True)
        self._changed = True

    @remote(ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Take the weights that a checkpoint of the reference holds."""
        super().load(folder)
        self._changed = True

    @remote(THREE_D)
    def log_probs(self, batch: Batch) -> Batch | None:
        return self.forward(batch)
