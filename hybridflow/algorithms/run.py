"""A run as an algorithm sees it: verbs over roles, data and rewards. Each reports what it measured to the step's meter."""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import token_rewards
from hybridflow.algorithms.kl import KLCoefficient
from hybridflow.algorithms.losses import means, token_kl
from hybridflow.algorithms.objectives import PolicyObjective, mismatch_sums, policy_objective
from hybridflow.algorithms.reports import OF_THE_STEP, merge_sums
from hybridflow.algorithms.skipped import Skipped
from hybridflow.algorithms.step_meter import StepMeter
from hybridflow.batch import Batch
from hybridflow.config.schema import Config, OptimizerConfig
from hybridflow.controller.handle import Future, RoleHandle
from hybridflow.data.problems import Problem, Source
from hybridflow.data.rollouts import Samplings
from hybridflow.data.text import Text
from hybridflow.metrics.recorder import Recorder
from hybridflow.rewards.samples import Sample, rows_of, samples_of
from hybridflow.rewards.scoring import Scored, Scoring
from hybridflow.rollout.engine import Sampling
from megatron_ext.optimizer import OptimizerSettings

Roles = dict[str, RoleHandle]
Finish = Callable[[Batch], Batch]  # waits for what was started, and adds it to the samples


class CriticFields(NamedTuple):
    """A critic's fields of a step's samples."""

    values: str
    returns: str


CRITICS = {"critic": CriticFields("values", "returns"), "cost_critic": CriticFields("cost_values", "cost_returns")}


def per_token(values: Tensor, samples: Batch) -> list[Tensor]:
    """One value per sequence [N] as a ragged field: the value at every token of the sequence."""
    return [value.expand(length) for value, length in zip(values, samples.lengths().tolist(), strict=True)]


class Run:
    """The driver's state: which problems come next, and the roles.

    Attributes:
        actor, rollout, reference, critic: role handles; reference and critic are None where the config has none.
        critics: the critics by name: critic, and cost_critic where there are costs.
        scorings: where rewards and, after them, costs come from.
        step_index: 0 before the first step (warm start, first evaluation), then 1, 2, ...
        position: in the source's order of problems.
        kl: the coefficient of the KL penalty.
        meter: measures the steps.
        metrics: what the current step has measured so far; an algorithm adds its own.
    """

    def __init__(
        self, config: Config, roles: Roles, text: Text, source: Source, scorings: Sequence[Scoring], recorder: Recorder
    ):
        self.config, self.text, self.source, self.scorings, self.recorder = config, text, source, scorings, recorder
        self.actor, self.rollout = roles["actor"], roles["rollout"]
        self.reference, self.critic, self.worker = roles.get("reference"), roles.get("critic"), roles["worker"]
        self.critics = {name: roles[name] for name in CRITICS if name in roles}
        settings = config.algorithm
        self.kl = KLCoefficient(settings.kl_coefficient, settings.kl_target, settings.kl_gain)
        self.meter = StepMeter(config, roles, recorder)
        self.metrics = self.meter.metrics
        self.step_index = self.position = 0
        self._samplings = Samplings(config)
        self._told_of_dropped = False
        self._skipped = Skipped(config.run.max_skipped, Path(config.run.dir) / "skipped")

    def where(self) -> str:
        """What the run is at, for messages."""
        step = f"step {self.step_index}" if self.step_index else "before the first step"
        return f"{step}, {self.recorder.latest_phase or 'start'}"

    # --- checkpoints

    def saved_roles(self) -> list[RoleHandle]:
        """Whose weights a checkpoint holds; the engine's are the actor's."""
        return self._trained() if self.reference is None else [*self._trained(), self.reference]

    def start_saved_training(self) -> None:
        """Fresh optimizers for a checkpoint's states to be read into."""
        for role in self._trained():
            role.start_training(optimizer_settings(self.config.trained_roles()[role.name].optimizer)).result()

    def state(self) -> dict[str, Any]:
        """What goes on from step to step, as JSON can hold it."""
        return {
            "step": self.step_index,
            "position": self.position,
            "dropped": self.source.dropped,
            "kl_coefficient": self.kl.value,
            "canary": self.meter.canary.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state`. A KL coefficient that nothing adapts is the config's."""
        self.step_index, self.position, self.source.dropped = state["step"], state["position"], state["dropped"]
        if self.kl.target:
            self.kl.value = state["kl_coefficient"]
        self.meter.canary.load_state(state["canary"])

    # --- data

    def next_problems(self, count: int) -> list[Problem]:
        """The next `count` problems in the source's order, across all phases of the run."""
        problems, self.position = self.source.take(self.position, count)
        dropped = self.metrics["data/prompts_dropped"] = self.source.dropped
        if dropped and not self._told_of_dropped:
            self._told_of_dropped = True
            limit = self.config.sampling.max_prompt_tokens
            self.recorder.line(f"prompts of more than sampling.max_prompt_tokens={limit} tokens are dropped and counted")
        return problems

    def mini_batches(self, samples: Batch) -> list[Batch]:
        """The samples in random order, in `batch.mini_batches` parts whose sizes differ by one at most."""
        order = list(range(len(samples)))
        random.Random(f"{self.config.run.seed} {self.step_index} {self.meter.updates('actor')}").shuffle(order)
        count = self.config.batch.mini_batches
        if count == 1:
            return [samples]
        return [samples.select(order[part::count]) for part in range(count)]

    # --- rollout

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Hand the actor's weights to the rollout, sample within, and give the memory back to training."""
        self._wake()
        yield
        with self.recorder.phase("sleep"):
            self.rollout.sleep().result()
        with self.recorder.phase("restore"):
            _wait_for([role.restore() for role in self._trained()])

    def _trained(self) -> list[RoleHandle]:
        return [self.actor, *self.critics.values()]

    def generate(self, problems: list[Problem], samples_per_prompt: int, greedy: bool = False) -> Batch:
        """`sample` in a rollout of its own."""
        with self.awake():
            return self.sample(problems, samples_per_prompt, greedy)

    def sample(self, problems: list[Problem], samples_per_prompt: int, greedy: bool = False) -> Batch:
        """Responses of the awake rollout: tokens, loss_mask, rollout_log_probs, truncated, and prompt_index: the position in
        `problems`."""
        config = self.config
        index = torch.arange(len(problems)).repeat_interleave(samples_per_prompt)
        prompts = Batch({"prompt": [torch.tensor(problems[i].prompt_tokens) for i in index.tolist()]})
        seed = config.run.seed * 1_000_003 + self.step_index
        with self.recorder.phase("rollout"):
            samples = self._samplings.replayed(prompts)
            if samples is None:
                samples = self.rollout.generate(prompts, self._sampling(greedy), seed).result()
        self._samplings.note(samples)
        samples = samples.with_fields(prompt_index=index).keep()
        if not greedy:
            self.meter.sampled(samples)
        return samples

    def _wake(self) -> None:
        """In the order that needs the least memory: what the resharding does not read goes first, the KV cache comes last."""
        every = self.config.resharding.verify_every
        verify = self.step_index % every == 0 if every else self.step_index <= 1
        with self.recorder.phase("release"):
            leaving = [role.make_room() for role in self._trained()]
            leaving += [critic.release_weights() for critic in self.critics.values()]  # the engine has no use for their weights
            _wait_for(leaving)
        with self.recorder.phase("wake"):
            self.rollout.wake_weights().result()
        with self.recorder.phase("reshard"):
            self.meter.resharded(self.rollout.receive("actor", verify).result())
        with self.recorder.phase("release"):
            self.actor.release_weights().result()
        with self.recorder.phase("wake"):
            self.rollout.wake_kv_cache().result()

    def _sampling(self, greedy: bool) -> Sampling:
        sampling = self.config.sampling
        return Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_response_tokens,
            stop_token_ids=self.text.stop_token_ids,
            greedy=greedy,
        )

    # --- what is known of the samples before their advantages

    def assess(self, problems: list[Problem], samples: Batch) -> Batch:
        """`score`, `add_log_probs` and, where there are critics, `add_values`. All of it is started before any of it is waited
        for: the scorers work beside the roles, and roles on ranks of their own beside each other."""
        scored = self._start_scoring(problems, samples)
        for finish in (*self._start_log_probs(samples), *self._start_values(samples), scored):
            samples = finish(samples)
        return samples

    def _start(self, phase: str, call: Callable[[Batch], Future], samples: Batch, **names: str) -> Finish:
        """Begin a role's call on the tokens; the columns of its answer come under new `names`."""
        with self.recorder.phase(phase):
            pending = call(samples.only("tokens", "loss_mask"))

        def finish(samples: Batch) -> Batch:
            found = self._result(phase, pending)
            return samples.with_fields(**{name: found[column] for name, column in names.items()})

        return finish

    def _result(self, phase: str, pending: Future) -> Any:
        """Of a call that others may have run beside or before: the phase takes what the call's ranks were at it themselves."""
        with self.recorder.phase(phase) as measured:
            found = pending.result()
            measured.seconds = pending.seconds
        return found

    # --- rewards

    def score(self, problems: list[Problem], samples: Batch) -> Batch:
        """Add `rewards` [N], where the config has costs also `costs` [N], and write the samples down."""
        return self._start_scoring(problems, samples)(samples)

    def _start_scoring(self, problems: list[Problem], samples: Batch) -> Finish:
        asked = samples_of(problems, samples, self.text)
        pending = {f"{scoring.name}s": self._start_score(scoring, asked) for scoring in self.scorings}

        def finish(samples: Batch) -> Batch:
            found = {name: wait() for name, wait in pending.items()}
            for scored in found.values():
                self.metrics |= scored.metrics
            totals = {name: scored.total for name, scored in found.items()}
            self.recorder.samples(rows_of(asked, samples, totals, step=self.step_index, kind="train"))
            return samples.with_fields(**totals)

        return finish

    def start_baseline(self, problems: list[Problem], samples: Batch) -> Callable[[], Tensor]:
        """Begin to score responses that the samples are compared with; nothing is trained on them. What is returned waits for
        the rewards [N]."""
        wait = self._start_score(self.scorings[0], samples_of(problems, samples, self.text))

        def finish() -> Tensor:
            rewards = wait().total
            self.metrics["reward/baseline_mean"] = rewards.mean().item()
            return rewards

        return finish

    def _start_score(self, scoring: Scoring, asked: list[Sample]) -> Callable[[], Scored]:
        """What is returned waits."""
        with self.recorder.phase(scoring.name):
            wait = scoring.start(asked)

        def finish() -> Scored:
            with self.recorder.phase(scoring.name) as measured:
                scored = wait()
                measured.seconds = scored.seconds
            self.meter.scored(scoring.name, scored)
            return scored

        return finish

    def evaluate(self) -> None:
        """Record the greedy accuracy (mean reward of greedy answers) on the fixed evaluation problems, where there are any."""
        problems = self.source.evaluation
        if not problems:
            return
        samples = self.generate(problems, 1, greedy=True)
        asked = samples_of(problems, samples, self.text)
        rewards = self._start_score(self.scorings[0], asked)().total
        self.recorder.samples(rows_of(asked, samples, {"rewards": rewards}, step=self.step_index, kind="evaluation"))
        seconds = sum(self.recorder.take_phases().values())
        self.recorder.evaluation(self.step_index, rewards.mean().item(), len(problems), seconds)

    # --- log-probs and values

    def add_log_probs(self, samples: Batch) -> Batch:
        """Add what the loss compares with: the reference's log-probs where there is a reference, and the old policy's as
        `algorithm.old_log_probs` says (`PolicyObjective` does without where they are the policy's own)."""
        for finish in self._start_log_probs(samples):
            samples = finish(samples)
        return samples

    def _start_log_probs(self, samples: Batch) -> list[Finish]:
        pending: list[Finish] = []
        if self.reference is not None:
            pending.append(self._start("reference", self.reference.log_probs, samples, reference_log_probs="log_probs"))
        if self.config.old_log_probs == "rollout":
            pending.append(lambda samples: samples.with_fields(log_probs=samples["rollout_log_probs"]))
        if self.config.old_log_probs == "recompute":
            pending.append(self._start("log_probs", self.actor.log_probs, samples, log_probs="log_probs"))
            pending.append(self._measure_mismatch)
        return pending

    def _measure_mismatch(self, samples: Batch) -> Batch:
        columns = (samples.values(name) for name in ("log_probs", "rollout_log_probs", "loss_mask"))
        self.meter.mismatched({name: value.item() for name, value in mismatch_sums(*columns).items()}, samples)
        return samples

    def add_values(self, samples: Batch) -> Batch:
        """Add `values`, and of a cost critic `cost_values`: what a critic expects before each token."""
        for finish in self._start_values(samples):
            samples = finish(samples)
        return samples

    def _start_values(self, samples: Batch) -> list[Finish]:
        return [
            self._start("values", critic.values, samples, **{CRITICS[name].values: "values"})
            for name, critic in self.critics.items()
        ]

    def rewards_less_kl(self, samples: Batch) -> Tensor:
        """Rewards [N], under `algorithm.kl_in: reward` minus the KL penalty against the reference, summed over the response."""
        penalty = self._kl_in_reward(samples)
        if penalty is None:
            return samples["rewards"]
        return samples["rewards"].index_add(0, samples.segments(), -penalty)

    def token_rewards(self, samples: Batch) -> Tensor:
        """Rewards of all tokens [T]: the response's at its last token, under `algorithm.kl_in: reward` minus the KL penalty at
        each (Ziegler et al. 2019, eq. 2)."""
        rewards = token_rewards(samples["rewards"], samples.values("loss_mask"), samples.segments())
        penalty = self._kl_in_reward(samples)
        return rewards if penalty is None else rewards - penalty

    def token_costs(self, samples: Batch) -> Tensor:
        """Costs of all tokens [T]; a KL penalty that goes off the rewards comes on top of them."""
        costs = token_rewards(samples["costs"], samples.values("loss_mask"), samples.segments())
        penalty = self._kl_in_reward(samples)
        return costs if penalty is None else costs + penalty

    def _kl_in_reward(self, samples: Batch) -> Tensor | None:
        """The KL penalty at each token [T] that goes off the rewards; None where none does."""
        settings = self.config.algorithm
        if settings.kl_in != "reward" or not self.kl.value:
            return None
        return self.kl.value * self._kl(samples, settings.kl_estimator)

    def _kl(self, samples: Batch, estimator: str) -> Tensor:
        """KL(policy || reference) at each token [T], 0 where the policy did not sample it."""
        policy = "log_probs" if "log_probs" in samples else "rollout_log_probs"
        return token_kl(*(samples.values(name) for name in (policy, "reference_log_probs", "loss_mask")), estimator)

    # --- training

    def start_training(self, optimizer: OptimizerConfig | None = None) -> None:
        """Begin with a fresh optimizer: the actor's own, or another phase's."""
        self.actor.start_training(optimizer_settings(optimizer or self.config.roles.actor.optimizer)).result()

    def start_policy_training(self) -> None:
        """The reference, where there is one, becomes a copy of the policy as it is now; the optimizer is a fresh one."""
        if self.reference is not None:
            self.reference.copy_from("actor").result()
        self.start_training()

    def start_value_training(self) -> None:
        """A critic that has the actor's model becomes a copy of the policy as it is now, but for its head; its optimizer is a
        fresh one."""
        for name, critic in self.critics.items():
            if self.config.model_path(name) == self.config.model_path("actor"):
                critic.copy_from("actor").result()
            critic.start_training(optimizer_settings(self.config.trained_roles()[name].optimizer)).result()

    def policy_objective(self) -> PolicyObjective:
        """The policy's loss as the config says, with the KL coefficient of this step."""
        return policy_objective(self.config.algorithm, self.kl.value)

    def improve(self, samples: Batch, objective: object, value_objective: object = None) -> None:
        """The updates of a step: `algorithm.epochs` times over the samples in mini-batches, of the critics as well where they
        have an objective; then the KL coefficient for the next step."""
        samples = samples.keep()
        for _ in range(self.config.algorithm.epochs):
            for mini_batch in self.mini_batches(samples):
                critics = self.critics if value_objective else ()
                begun = [self._start_value_update(name, mini_batch, value_objective) for name in critics]
                self.update(mini_batch, objective)
                for finish in begun:
                    finish()
        if self.kl.target:
            kl = self._kl(samples, "k1").sum().item() / len(samples)
            self.metrics |= {"actor/kl_response": kl, "actor/kl_coefficient": self.kl.value}
            self.kl.adapt(kl)

    def update(self, batch: Batch, objective: object, temperature: float | None = None) -> dict[str, float]:
        """One optimizer step of the actor, on log-probs at `temperature` (default: the sampling's)."""
        with self.recorder.phase("update"):
            pending = self.actor.update(batch, objective, temperature or self.config.sampling.temperature)
        shards = self._result("update", pending)
        sums = merge_sums(shards)
        if "mismatch_abs" in sums:
            self.meter.mismatched(sums, batch)
        own = {name: value for name, value in sums.items() if not name.startswith("mismatch")}
        return self._note_update("actor", own, shards, batch)

    def _start_value_update(self, name: str, batch: Batch, objective: object) -> Callable[[], None]:
        """Begin an optimizer step of a critic; what is returned waits for it: on ranks of their own, critics and actor update
        at the same time."""
        fields, phase = CRITICS[name], f"update_{name}"
        own = batch.only("tokens", "loss_mask", *fields).renamed({fields.values: "values", fields.returns: "returns"})
        with self.recorder.phase(phase):
            pending = self.critics[name].update(own, objective)

        def finish() -> None:
            shards = self._result(phase, pending)
            self._note_update(name, merge_sums(shards), shards, own)

        return finish

    def _note_update(self, role: str, sums: dict[str, float], shards: list[dict[str, float]], batch: Batch) -> dict[str, float]:
        """An update's metrics as means. Too many updates in a row that were skipped end the run."""
        numbers = means(sums) | {name: shards[0][name] for name in OF_THE_STEP}
        if numbers["skipped"]:
            norm = numbers["grad_norm"]
            self.recorder.line(f"warning: update of the {role} skipped, its gradient's norm is {norm}: nothing was changed")
        self._skipped.look(role, bool(numbers["skipped"]), numbers["grad_norm"], batch, self.step_index)
        self.meter.updated(role, numbers, batch)
        return numbers

    # --- steps

    def begin_step(self) -> None:
        self.step_index += 1
        self._samplings.begin(self.step_index)
        self.meter.begin()

    def finish_step(self) -> None:
        """Keep its responses where they are asked for, let the ranks forget its rows, and record what it measured."""
        self._samplings.finish()
        self.worker.courier.forget()
        self.worker.forget_rows().result()
        self.recorder.log(self.meter.finish(self.step_index))


def _wait_for(calls: list[Future]) -> None:
    for call in calls:
        call.result()


def optimizer_settings(optimizer: OptimizerConfig) -> OptimizerSettings:
    return OptimizerSettings(**dataclasses.asdict(optimizer) | {"betas": tuple(optimizer.betas)})
