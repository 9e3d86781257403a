"""What a step measures: what its verbs found, and what driver and ranks know of it at its end, as one object of metrics."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from hybridflow.algorithms.canary import Canary
from hybridflow.algorithms.rank_meter import RankMeter
from hybridflow.algorithms.reports import bubbles
from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.controller.handle import RoleHandle
from hybridflow.metrics.recorder import Recorder
from hybridflow.metrics.throughput import Throughput
from hybridflow.metrics.timeline import Timeline
from hybridflow.rewards.scoring import Scored
from megatron_ext.intervals import Pass

Metrics = dict[str, float | int | bool | None]
PIPELINES = ("actor", "critic", "cost_critic", "reference")  # roles whose schedules are looked at under run.profile


class StepMeter:
    """A step is measured from `begin` to `finish`. Outside of one (warm start, evaluation) verbs report as well; it's dropped.

    Attributes:
        metrics: what the current step has measured so far, in one object for the whole run.
        canary: knows how far the two sides' log-probs are from each other in this run.
        profile: under run.profile, else None.
    """

    def __init__(self, config: Config, roles: Mapping[str, RoleHandle], recorder: Recorder):
        self._scores, self._recorder, self._courier = config.scores(), recorder, roles["worker"].courier
        self._ranks = RankMeter(roles, recorder)
        self.metrics: Metrics = {}
        self.canary = Canary((config.dtype("actor"), config.dtype("rollout")), config.sampling.temperature)
        self.profile = Profile(roles, recorder) if config.run.profile else None
        self._throughput = Throughput(config)
        self._updates: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._scored: dict[str, Counter[str]] = defaultdict(Counter)
        self._bytes_before = 0

    def begin(self) -> None:
        """What was measured since the last step stays out of this one, but for the time that it waited for a checkpoint."""
        saving = self._recorder.take_phases().get("save")
        for of_the_last_step in (self.metrics, self._updates, self._scored):
            of_the_last_step.clear()
        if saving is not None:
            self.metrics["time/save"] = saving
        self._bytes_before = self._courier.bytes
        self._throughput.reset()
        if self.profile:
            self.profile.begin_step()
        self._ranks.begin_step()

    def finish(self, step: int) -> Metrics:
        """The step's metrics, for the recorder."""
        for role, updates in self._updates.items():
            for name in updates[0]:
                self.metrics[f"{role}/{name}"] = sum(update[name] for update in updates) / len(updates)
        metrics = {"step": step, **self.metrics, "driver/bytes_sent": self._courier.bytes - self._bytes_before}
        metrics |= self._throughput.finish(self._recorder.seconds())
        if self.profile:
            metrics |= self.profile.finish_step(step)
        metrics |= self._ranks.finish_step(self.profile.passes if self.profile else {})
        return metrics

    # --- what the verbs found

    def resharded(self, reports: list[dict]) -> None:
        """`reports`: of the ranks that received weights."""
        slowest = max(reports, key=lambda report: report["seconds"])
        self.metrics["reshard/bytes_received"] = max(report["bytes_received"] for report in reports)
        self.metrics["reshard/wire_bound_fraction"] = slowest["wire_bound_fraction"]
        self.metrics["reshard/verified"] = slowest["verified"]

    def sampled(self, samples: Batch) -> None:
        self.metrics["rollout/response_tokens_mean"] = samples.values("loss_mask").sum().item() / len(samples)
        self.metrics["rollout/truncated_fraction"] = samples["truncated"].float().mean().item()
        self._throughput.rollout(samples)

    def scored(self, name: str, scored: Scored) -> None:
        """Failures, and how many of a step's scores (`name`: reward or cost) were known before where they are kept."""
        counts = self._scored[name]
        counts.update(scored.counts)
        self.metrics |= {f"{name}/{what}": counts[what] for what in ("failed", "timed_out")}
        if self._scores[name].cache_size:
            self.metrics[f"{name}/cache_hit_rate"] = counts["cached"] / counts["asked"]
        if scored.first_failure:
            failed = scored.counts["failed"] + scored.counts["timed_out"]
            self._recorder.line(f"warning: {failed} scores ({name}) are 0: {scored.first_failure}")

    def mismatched(self, sums: Mapping[str, float], samples: Batch) -> None:
        """`sums`: of `objectives.mismatch_sums`. The first of a step count: later updates no longer see the policy that
        sampled."""
        if "mismatch/kl" in self.metrics:
            return
        tokens = max(int(samples.values("loss_mask").sum()), 1)
        self.metrics["mismatch/log_prob_abs_mean"] = sums["mismatch_abs"] / tokens
        self.metrics["mismatch/log_prob_abs_max"] = sums["mismatch_abs_max"]
        self.metrics["mismatch/kl"] = sums["mismatch_kl"] / tokens
        warning = self.canary.look(sums["mismatch_abs"] / tokens)
        if warning:
            self._recorder.line(warning)

    def updated(self, role: str, numbers: dict[str, float], batch: Batch) -> None:
        """`numbers`: an update's means; the step's metrics are the means over its updates."""
        self._updates[role].append(numbers)
        if role == "actor":
            self._throughput.update(batch)

    def updates(self, role: str) -> int:
        """How many the step had so far."""
        return len(self._updates.get(role, ()))


class Profile:
    """What run.profile adds: how the pipelines idled, and a file with what every rank was at.

    Attributes:
        passes: the pipeline schedules of the step that was finished last, by role: when every rank worked in each pass.
    """

    def __init__(self, roles: Mapping[str, RoleHandle], recorder: Recorder):
        self._roles = {name: roles[name] for name in PIPELINES if name in roles}
        self._recorder = recorder
        self._timeline = Timeline(recorder.folder, roles["worker"])
        self.passes: dict[str, list[Pass]] = {}

    def begin_step(self) -> None:
        self._take_passes()
        self._timeline.begin_step()

    def finish_step(self, step: int) -> dict[str, float]:
        self._timeline.end_step()
        self.passes = self._take_passes()
        pipelines = {name: (role.ranks, self.passes[name]) for name, role in self._roles.items()}
        self._timeline.write(step, self._recorder.spans, pipelines)
        return bubbles(self.passes["actor"])

    def _take_passes(self) -> dict[str, list[Pass]]:
        reports = {name: role.take_passes().result() for name, role in self._roles.items()}
        return {name: list(zip(*ranks, strict=True)) for name, ranks in reports.items()}
