"""Models that are never trained: where their weights are while nobody calls them."""

import contextlib
from collections.abc import Iterator

import torch

from hybridflow.controller.role import Role
from megatron_ext.memory import HostMemory


class Frozen(Role):
    """Offloaded (`offload: [params]`), its weights, this rank's `parameters()`, are on the device during its own calls only."""

    _host: HostMemory | None = None
    _changed = True  # since the weights were last copied to the host

    def settle(self, offload: list[str]) -> None:
        """Once the weights are there."""
        if "params" in offload:
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
