"""What the ranks measured of a step, as its metrics: memory by phase, how the GPUs were used, who was slow."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hybridflow.algorithms.reports import FORWARD, by_phase, phase_of, trains
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.worker import Measured
from hybridflow.metrics.nvml import gpu_metrics, watchers
from hybridflow.metrics.recorder import Recorder
from hybridflow.metrics.stragglers import Stragglers, Unit, by_calls, by_passes
from megatron_ext.intervals import Pass


class RankMeter:
    """Asks all ranks, once a step."""

    def __init__(self, roles: Mapping[str, RoleHandle], recorder: Recorder):
        self._worker, self._recorder = roles["worker"], recorder
        self._roles = {name: role for name, role in roles.items() if name in FORWARD}
        self._stragglers: Stragglers | None = None  # until the ranks have said where they are

    def begin_step(self) -> None:
        """What the ranks did before is no part of the step."""
        if not self._stragglers:
            self._meet()
        self._worker.measured().result()

    def finish_step(self, passes: Mapping[str, Sequence[Pass]]) -> dict[str, float]:
        """`passes`: under run.profile when every rank worked, by role."""
        found: list[Measured] = self._worker.measured().result()
        slow = self._stragglers.look(self._times(found, passes), self._recorder.seconds().get("step", 0.0))
        return memory(found) | gpu_metrics([use for one in found for use in one.gpus]) | slow

    def _times(self, found: Sequence[Measured], passes: Mapping[str, Sequence[Pass]]) -> dict[str, list[dict[Unit, float]]]:
        """By phase, what its peers' times were; from passes where there are some."""
        times: dict[str, list[dict[Unit, float]]] = defaultdict(list)
        for name, role in self._roles.items():
            call, own = f"{name}.{FORWARD[name]}", passes.get(name, ())
            forward, updates = [one for one in own if not trains(one)], [one for one in own if trains(one)]
            seconds = {rank: found[rank].seconds.get(call) for rank in role.ranks}
            if updates:
                times[phase_of(f"{name}.update")] += by_passes(role.layout, role.ranks, updates)
            if forward:
                times[phase_of(call)] += by_passes(role.layout, role.ranks, forward)
            elif all(seconds.values()):  # it was called in this step
                times[phase_of(call)].append(by_calls(role.layout, role.ranks, seconds))
        return times

    def _meet(self) -> None:
        """Have one rank of each host watch the GPUs there; without what it takes, say once what is missing."""
        places = self._worker.place().result()
        self._stragglers = Stragglers([place.host for place in places], self._recorder.line)
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
