"""Time that passes only where somebody sleeps, one clock for all ranks of a world: a run of which every second is known."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch

_SENDERS, _RECEIVERS = 1, 2  # tags; those whose time is kept don't use any


class VirtualTime:
    """What a rank sees in place of the module `time`. A transfer is over when both sides have come to it and takes no time."""

    def __init__(self):
        self._now = 0.0

    def time(self) -> float:
        return self._now

    perf_counter = time

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    @contextlib.contextmanager
    def passes_in(self, *modules: ModuleType) -> Iterator[None]:
        """Meanwhile these modules' `time` is this one, and every point-to-point transfer over gloo tells both sides' time."""
        isend, irecv = torch.distributed.isend, torch.distributed.irecv

        def transfer(start: Callable, peer: str, own_tag: int, peers_tag: int, **arguments: Any) -> "_Transfer":
            to = {"group": arguments["group"]}
            now, then = torch.tensor([self._now, 0.0], dtype=torch.float64).split(1)
            requests = (
                start(**arguments),
                isend(tensor=now, dst=arguments[peer], tag=own_tag, **to),
                irecv(tensor=then, src=arguments[peer], tag=peers_tag, **to),
            )
            return _Transfer(self, requests, then)

        sends = partial(transfer, isend, "dst", _SENDERS, _RECEIVERS)
        receives = partial(transfer, irecv, "src", _RECEIVERS, _SENDERS)
        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(mock.patch.object(module, "time", self))
            stack.enter_context(mock.patch.multiple(torch.distributed, isend=sends, irecv=receives))
            yield


class _Transfer:
    """A request for it, as torch's."""

    def __init__(self, clock: VirtualTime, requests: Sequence, peers_time: torch.Tensor):
        self._clock, self._requests, self._peers_time = clock, requests, peers_time

    def wait(self) -> None:
        for request in self._requests:
            request.wait()
        self._clock._now = max(self._clock._now, self._peers_time.item())
