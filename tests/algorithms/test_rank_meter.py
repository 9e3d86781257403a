"""Who was slow, from ranks whose clock is made up: a role that sleeps longer on one of them."""

from types import SimpleNamespace

import pytest

from hybridflow.algorithms.rank_meter import RankMeter
from hybridflow.controller import worker
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.protocols import ONE_TO_ALL, remote
from hybridflow.controller.role import Role
from hybridflow.controller.worker import Reply, Worker
from hybridflow.metrics.stragglers import IN_A_ROW
from megatron_ext.intervals import Interval
from megatron_ext.layout import Layout

RANKS, SLOW = 4, 2


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


class Sleepy(Role):
    def __init__(self, rank: int, clock: Clock, seconds: list[float]):
        """`seconds`: of every rank, and looked up at each call."""
        self.rank, self.clock, self.seconds = rank, clock, seconds

    @remote(ONE_TO_ALL)
    def log_probs(self) -> None:
        self.clock.now += self.seconds[self.rank]


class Ranks:
    """Runs the calls of all ranks in this process, one after the other."""

    def __init__(self, workers: list[Worker]):
        self._workers, self.phase = workers, lambda: ""

    def submit(self, calls):
        replies: dict[int, Reply] = {rank: self._workers[rank].execute(call) for rank, call in calls.items()}
        return lambda: replies


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(worker.socket, "gethostname", lambda: "host-a")
    return clock


def make_roles(clock: Clock, seconds: list[float], pp: int = 1) -> dict[str, RoleHandle]:
    ranks = Ranks([Worker(rank, {"actor": Sleepy(rank, clock, seconds)}) for rank in range(RANKS)])
    return {
        "actor": RoleHandle("actor", Sleepy, Layout(RANKS, pp=pp), ranks),
        "worker": RoleHandle("worker", Worker, Layout(RANKS), ranks),
    }


def take_steps(roles: dict[str, RoleHandle], count: int, passes: dict | None = None) -> tuple[dict[str, float], list[str]]:
    """The last step's metrics, and all lines that were shown."""
    lines: list[str] = []
    meter = RankMeter(roles, SimpleNamespace(line=lines.append, seconds=lambda: {"step": 5.0}))
    for _ in range(count):
        meter.begin_step()
        roles["actor"].log_probs().result()
        found = meter.finish_step(passes or {})
    return {name: value for name, value in found.items() if name.startswith("straggler/")}, lines


def test_a_rank_that_sleeps_longer_is_named_with_its_host(clock):
    roles = make_roles(clock, [1.0, 1.1, 1.5, 0.9])
    metrics, lines = take_steps(roles, IN_A_ROW - 1)
    assert metrics == {"straggler/log_probs_rank": SLOW, "straggler/log_probs_excess": pytest.approx(0.5)} and not lines
    metrics, lines = take_steps(roles, 3 * IN_A_ROW)
    assert lines == [
        f"warning: rank {SLOW} on host-a was the slowest in log_probs for {IN_A_ROW} steps in a row, now 50% over the median of"
        " its peers"
    ]


def test_what_ranks_did_before_the_step_is_no_part_of_it(clock):
    seconds = [1.0, 9.0, 1.0, 1.0]
    roles = make_roles(clock, seconds)
    roles["actor"].log_probs().result()
    seconds[:] = 1.0, 1.0, 1.0, 2.0
    metrics, _ = take_steps(roles, 1)
    assert metrics == {"straggler/log_probs_rank": 3, "straggler/log_probs_excess": 1.0}


def test_under_profile_passes_tell_stage_by_stage_and_updates_as_well(clock):
    def worked(rank: int, seconds: float) -> list[Interval]:
        stage = rank // 2
        forward = Interval.of("forward", stage, 0, 0, 10.0, 10.0 + seconds)
        return [forward, Interval.of("backward", stage, 0, 0, 20.0, 20.0 + seconds)]

    # the second stage has more to do on both of its ranks, which are no peers of the first's
    passes = {"actor": [[worked(rank, seconds) for rank, seconds in enumerate((1.0, 1.3, 3.0, 3.0))]]}
    roles = make_roles(clock, [1.0, 1.0, 1.0, 1.0], pp=2)
    metrics, lines = take_steps(roles, IN_A_ROW, passes)
    assert metrics["straggler/update_rank"] == 1 and metrics["straggler/update_excess"] == pytest.approx(0.3)
    assert metrics["straggler/log_probs_excess"] == 0
    assert [line.partition(" on ")[0] for line in lines] == ["warning: rank 1"]
