"""What the ranks measured of a step, as its metrics: memory by phase and how the GPUs were used."""

from collections.abc import Sequence

from hybridflow.algorithms.reports import by_phase
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.worker import Measured
from hybridflow.metrics.nvml import gpu_metrics, watchers
from hybridflow.metrics.recorder import Recorder


class RankMeter:
    """Asks all ranks, once a step."""

    def __init__(self, worker: RoleHandle, recorder: Recorder):
        self._worker, self._recorder = worker, recorder
        self._met = False

    def begin_step(self) -> None:
        """What the ranks did before is no part of the step."""
        if not self._met:
            self._meet()
        self._worker.measured().result()

    def finish_step(self) -> dict[str, float]:
        found: list[Measured] = self._worker.measured().result()
        return memory(found) | gpu_metrics([use for one in found for use in one.gpus])

    def _meet(self) -> None:
        """Have one rank of each host watch the GPUs there; without what it takes, say once what is missing."""
        self._met = True
        places = self._worker.place().result()
        watching = watchers(places)
        if watching:
            self._worker.watch_gpus(watching).result()
        lacking = [place.lacks for place in places if place.lacks]
        if lacking:
            self._recorder.line(lacking[0])


def memory(found: Sequence[Measured]) -> dict[str, int]:
    """memory/peak_bytes/PHASE: the most that any rank had in use after a kind of call."""
    reports = [by_phase(one.memory) for one in found]
    phases = {phase: None for report in reports for phase in report}  # in the order of the step
    return {f"memory/peak_bytes/{phase}": max(r.get(phase, 0) for r in reports) for phase in phases}
