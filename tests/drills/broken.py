"""Actors with a fault of their own, for drills (`roles.actor.implementation`)."""

import time
from typing import Any

import torch.distributed as dist

from hybridflow.controller.protocols import THREE_D, remote
from hybridflow.roles.actor import Actor

FAULTY = 1  # the rank
WARM_START = 10  # updates of CONFIG before the algorithm's own
POISONED = (3, 7, 8, 9)  # the algorithm's updates, counted from 1; each step has two
STUCK = 3


class _Counting(Actor):
    """Knows which of the algorithm's updates it is at, and whether this is the rank with the fault."""

    count = -WARM_START

    def is_due(self, *updates: int) -> bool:
        self.count += 1
        return dist.get_rank() == FAULTY and self.count in updates


class PoisonedActor(_Counting):
    """One rank's gradient of one parameter is NaN."""

    @remote(THREE_D)
    def update(self, *arguments: Any) -> dict[str, Any]:
        if not self.is_due(*POISONED):
            return super().update(*arguments)
        hook = next(iter(self.wrapped[0].parameters())).register_hook(lambda gradient: gradient * float("nan"))
        try:
            return super().update(*arguments)
        finally:
            hook.remove()


class UnmadeActor(Actor):
    """One rank never comes to the end of its start."""

    def read_weights(self) -> None:
        super().read_weights()
        if dist.get_rank() == FAULTY:
            sit_still()


class StuckActor(_Counting):
    """One rank never comes back from an update, and the others wait for it."""

    @remote(THREE_D)
    def update(self, *arguments: Any) -> dict[str, Any]:
        while self.is_due(STUCK):
            sit_still()
        return super().update(*arguments)


def sit_still() -> None:
    while True:
        time.sleep(1)
