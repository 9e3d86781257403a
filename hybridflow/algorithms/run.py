"""A run as an algorithm sees it: verbs over roles, data and rewards. Each verb measures itself into the step's metrics."""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import token_rewards
from hybridflow.algorithms.canary import Canary
from hybridflow.algorithms.kl import KLCoefficient
from hybridflow.algorithms.losses import means, token_kl
from hybridflow.algorithms.objectives import PolicyObjective, mismatch_sums, policy_objective
from hybridflow.batch import Batch
from hybridflow.config.schema import Config, OptimizerConfig
from hybridflow.controller.handle import RoleHandle
from hybridflow.data.problems import Problem, Source
from hybridflow.data.text import Text
from hybridflow.metrics.recorder import Recorder
from hybridflow.metrics.throughput import Throughput
from hybridflow.rewards.pool import DirectScorer, ScorerPool
from hybridflow.rollout.engine import Sampling
from megatron_ext.optimizer import OptimizerSettings

Roles = dict[str, RoleHandle]
_OF_THE_STEP = ("grad_norm", "lr", "skipped")  # what an update reports once, the same on every rank; the rest are sums


def per_token(values: Tensor, samples: Batch) -> list[Tensor]:
    """One value per sequence [N] as a ragged field: the value at every token of the sequence."""
    return [value.expand(length) for value, length in zip(values, samples.lengths().tolist(), strict=True)]


class Run:
    """The driver's state: which problems come next, the current step's metrics, and the roles.

    Attributes:
        actor, rollout, reference, critic: role handles; reference and critic are None where the config has none.
        step_index: 0 before the first step (warm start, first evaluation), then 1, 2, ...
        position: in the source's order of problems.
        kl: the coefficient of the KL penalty.
        metrics: what the current step has measured so far; `finish_step` hands it to the recorder.
    """

    def __init__(
        self, config: Config, roles: Roles, text: Text, source: Source, scorer: DirectScorer | ScorerPool, recorder: Recorder
    ):
        self.config, self.text, self.source, self.scorer, self.recorder = config, text, source, scorer, recorder
        self.actor, self.rollout = roles["actor"], roles["rollout"]
        self.reference, self.critic, self.worker = roles.get("reference"), roles.get("critic"), roles["worker"]
        settings = config.algorithm
        self.kl = KLCoefficient(settings.kl_coefficient, settings.kl_target, settings.kl_gain)
        self.throughput = Throughput(config)
        self.step_index = self.position = 0
        self._told_of_dropped = False
        self._canary = Canary((config.dtype("actor"), config.dtype("rollout")), config.sampling.temperature)
        self.metrics: dict[str, float | int | bool | None] = {}
        self._updates: dict[str, list[dict[str, float]]] = {"actor": [], "critic": []}

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
            role.start_training(_settings(self.config.trained_roles()[role.name].optimizer)).result()

    def state(self) -> dict[str, Any]:
        """What goes on from step to step, as JSON can hold it."""
        return {
            "step": self.step_index,
            "position": self.position,
            "dropped": self.source.dropped,
            "kl_coefficient": self.kl.value,
            "canary": self._canary.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state`. A KL coefficient that nothing adapts is the config's."""
        self.step_index, self.position, self.source.dropped = state["step"], state["position"], state["dropped"]
        if self.kl.target:
            self.kl.value = state["kl_coefficient"]
        self._canary.load_state(state["canary"])

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
        random.Random(f"{self.config.run.seed} {self.step_index} {len(self._updates['actor'])}").shuffle(order)
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
            for role in self._trained():
                role.restore().result()

    def _trained(self) -> list[RoleHandle]:
        return [self.actor] if self.critic is None else [self.actor, self.critic]

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
            samples = self.rollout.generate(prompts, self._sampling(greedy), seed).result()
        samples = samples.with_fields(prompt_index=index)
        if not greedy:
            self.metrics["rollout/response_tokens_mean"] = samples.values("loss_mask").sum().item() / len(samples)
            self.metrics["rollout/truncated_fraction"] = samples["truncated"].float().mean().item()
            self.throughput.rollout(samples)
        return samples

    def _wake(self) -> None:
        """In the order that needs the least memory: what the resharding does not read goes first, the KV cache comes last."""
        every = self.config.resharding.verify_every
        verify = self.step_index % every == 0 if every else self.step_index <= 1
        with self.recorder.phase("release"):
            for role in self._trained():
                role.make_room().result()
            if self.critic is not None:  # the engine has no use for its weights
                self.critic.release_weights().result()
        with self.recorder.phase("wake"):
            self.rollout.wake_weights().result()
        with self.recorder.phase("reshard"):
            reports = self.rollout.receive("actor", verify).result()
        with self.recorder.phase("release"):
            self.actor.release_weights().result()
        with self.recorder.phase("wake"):
            self.rollout.wake_kv_cache().result()
        slowest = max(reports, key=lambda report: report["seconds"])
        self.metrics["reshard/bytes_received"] = max(report["bytes_received"] for report in reports)
        self.metrics["reshard/wire_bound_fraction"] = slowest["wire_bound_fraction"]
        self.metrics["reshard/verified"] = slowest["verified"]

    def _sampling(self, greedy: bool) -> Sampling:
        sampling = self.config.sampling
        return Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_response_tokens,
            stop_token_ids=self.text.stop_token_ids,
            greedy=greedy,
        )

    # --- rewards

    def score(self, problems: list[Problem], samples: Batch) -> Batch:
        """Add `rewards` [N] and write the samples down."""
        with self.recorder.phase("reward"):
            rewards, responses = self._score(problems, samples)
        self.metrics["reward/mean"] = rewards.mean().item()
        self.recorder.samples(self._rows("train", problems, samples, responses, rewards))
        return samples.with_fields(rewards=rewards)

    def score_baseline(self, problems: list[Problem], samples: Batch) -> Tensor:
        """Rewards [N] of responses that the samples are compared with; nothing is trained on them."""
        with self.recorder.phase("reward"):
            rewards, _ = self._score(problems, samples)
        self.metrics["reward/baseline_mean"] = rewards.mean().item()
        return rewards

    def _score(self, problems: list[Problem], samples: Batch) -> tuple[Tensor, list[str]]:
        """Rewards [N] float32 and the responses as text. Where the scorer fails or is too slow the reward is 0, and counted."""
        rows = zip(samples.rows("tokens"), samples.rows("loss_mask"), strict=True)
        responses = [self.text.decode(tokens[mask].tolist()) for tokens, mask in rows]
        asked = [problems[i] for i in samples["prompt_index"].tolist()]
        pairs = zip(asked, responses, strict=True)
        scores = self.scorer.score([(p.question, response, p.answer, p.metadata) for p, response in pairs])
        for name, count in (("reward/failed", scores.failed), ("reward/timed_out", scores.timed_out)):
            self.metrics[name] = self.metrics.get(name, 0) + count
        if scores.first_failure:
            self.recorder.line(f"warning: {scores.failed + scores.timed_out} rewards are 0: {scores.first_failure}")
        return torch.tensor(scores.rewards, dtype=torch.float32), responses

    def _rows(self, kind: str, problems: list[Problem], samples: Batch, responses: list[str], rewards: Tensor) -> list[dict]:
        return [
            {
                "step": self.step_index,
                "kind": kind,
                "prompt": problems[index].question,
                "answer": problems[index].answer,
                "response": response,
                "reward": reward,
                "tokens": tokens[mask].tolist(),
                "prompt_tokens": problems[index].prompt_tokens,
            }
            for index, response, reward, tokens, mask in zip(
                samples["prompt_index"].tolist(),
                responses,
                rewards.tolist(),
                samples.rows("tokens"),
                samples.rows("loss_mask"),
                strict=True,
            )
        ]

    def evaluate(self) -> None:
        """Record the greedy accuracy (mean reward of greedy answers) on the fixed evaluation problems, where there are any."""
        problems = self.source.evaluation
        if not problems:
            return
        samples = self.generate(problems, 1, greedy=True)
        rewards, responses = self._score(problems, samples)
        self.recorder.samples(self._rows("evaluation", problems, samples, responses, rewards))
        seconds = sum(self.recorder.take_phases().values())
        self.recorder.evaluation(self.step_index, rewards.mean().item(), len(problems), seconds)

    # --- log-probs and values

    def add_log_probs(self, samples: Batch) -> Batch:
        """Add what the loss compares with: the reference's log-probs where there is a reference, and the old policy's as
        `algorithm.old_log_probs` says (`PolicyObjective` does without where they are the policy's own)."""
        if self.reference is not None:
            with self.recorder.phase("reference"):
                found = self.reference.log_probs(samples.only("tokens", "loss_mask")).result()
            samples = samples.with_fields(reference_log_probs=found["log_probs"])
        if self.config.old_log_probs == "rollout":
            return samples.with_fields(log_probs=samples["rollout_log_probs"])
        if self.config.old_log_probs == "recompute":
            with self.recorder.phase("log_probs"):
                found = self.actor.log_probs(samples.only("tokens", "loss_mask")).result()
            samples = samples.with_fields(log_probs=found["log_probs"])
            columns = (samples.values(name) for name in ("log_probs", "rollout_log_probs", "loss_mask"))
            self._log_mismatch({name: value.item() for name, value in mismatch_sums(*columns).items()}, samples)
        return samples

    def add_values(self, samples: Batch) -> Batch:
        """Add `values`: what the critic expects before each token."""
        with self.recorder.phase("values"):
            found = self.critic.values(samples.only("tokens", "loss_mask")).result()
        return samples.with_fields(values=found["values"])

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

    def _log_mismatch(self, sums: dict[str, float], samples: Batch) -> None:
        tokens = max(int(samples.values("loss_mask").sum()), 1)
        self.metrics["mismatch/log_prob_abs_mean"] = sums["mismatch_abs"] / tokens
        self.metrics["mismatch/log_prob_abs_max"] = sums["mismatch_abs_max"]
        self.metrics["mismatch/kl"] = sums["mismatch_kl"] / tokens
        warning = self._canary.look(sums["mismatch_abs"] / tokens)
        if warning:
            self.recorder.line(warning)

    # --- training

    def start_training(self, optimizer: OptimizerConfig | None = None) -> None:
        """Begin with a fresh optimizer: the actor's own, or another phase's."""
        self.actor.start_training(_settings(optimizer or self.config.roles.actor.optimizer)).result()

    def start_policy_training(self) -> None:
        """The reference, where there is one, becomes a copy of the policy as it is now; the optimizer is a fresh one."""
        if self.reference is not None:
            self.reference.copy_from("actor").result()
        self.start_training()

    def start_value_training(self) -> None:
        """The critic, where it has the actor's model, becomes a copy of the policy as it is now, but for its head; its
        optimizer is a fresh one."""
        if self.config.model_path("critic") == self.config.model_path("actor"):
            self.critic.copy_from("actor").result()
        self.critic.start_training(_settings(self.config.roles.critic.optimizer)).result()

    def policy_objective(self) -> PolicyObjective:
        """The policy's loss as the config says, with the KL coefficient of this step."""
        return policy_objective(self.config.algorithm, self.kl.value)

    def improve(self, samples: Batch, objective: object, value_objective: object = None) -> None:
        """The updates of a step: `algorithm.epochs` times over the samples in mini-batches, of the critic as well where it has
        an objective; then the KL coefficient for the next step."""
        for _ in range(self.config.algorithm.epochs):
            for mini_batch in self.mini_batches(samples):
                finish = self._start_value_update(mini_batch, value_objective) if value_objective else None
                self.update(mini_batch, objective)
                if finish:
                    finish()
        if self.kl.target:
            kl = self._kl(samples, "k1").sum().item() / len(samples)
            self.metrics |= {"actor/kl_response": kl, "actor/kl_coefficient": self.kl.value}
            self.kl.adapt(kl)

    def update(self, batch: Batch, objective: object, temperature: float | None = None) -> dict[str, float]:
        """One optimizer step of the actor, on log-probs at `temperature` (default: the sampling's)."""
        with self.recorder.phase("update"):
            shards = self.actor.update(batch, objective, temperature or self.config.sampling.temperature).result()
        sums = merge_sums(shards)
        first = "mismatch/kl" not in self.metrics  # later updates no longer see the policy that sampled
        if "mismatch_abs" in sums and first:
            self._log_mismatch(sums, batch)
        self.throughput.update(batch)
        return self._note_update(
            "actor", {name: value for name, value in sums.items() if not name.startswith("mismatch")}, shards
        )

    def _start_value_update(self, batch: Batch, objective: object) -> Callable[[], None]:
        """Begin an optimizer step of the critic; what is returned waits for it: on ranks of their own, critic and actor update
        at the same time."""
        with self.recorder.phase("update_critic"):
            pending = self.critic.update(batch.only("tokens", "loss_mask", "values", "returns"), objective)

        def finish() -> None:
            with self.recorder.phase("update_critic"):
                shards = pending.result()
            self._note_update("critic", merge_sums(shards), shards)

        return finish

    def _note_update(self, role: str, sums: dict[str, float], shards: list[dict[str, float]]) -> dict[str, float]:
        """An update's metrics as means, which are noted down for the step's."""
        numbers = means(sums) | {name: shards[0][name] for name in _OF_THE_STEP}
        if numbers["skipped"]:
            norm = numbers["grad_norm"]
            self.recorder.line(f"warning: update of the {role} skipped, its gradient's norm is {norm}: nothing was changed")
        self._updates[role].append(numbers)
        return numbers

    def begin_step(self) -> None:
        """What was measured since the last step (warm start, evaluation) stays out of this one."""
        self.step_index += 1
        saving = self.recorder.take_phases().get("save")  # since the last step: what it waited for a checkpoint
        self.metrics, self._updates = {} if saving is None else {"time/save": saving}, {"actor": [], "critic": []}
        self.throughput.reset()
        self._memory()

    def finish_step(self) -> None:
        """Complete the step's metrics and hand them to the recorder."""
        for role, updates in self._updates.items():
            for name in updates[0] if updates else ():
                self.metrics[f"{role}/{name}"] = sum(update[name] for update in updates) / len(updates)
        metrics = {"step": self.step_index} | self.metrics
        metrics |= self._memory()
        metrics |= self.throughput.finish(self.recorder.seconds())
        self.recorder.log(metrics)

    def _memory(self) -> dict[str, int]:
        """memory/peak_bytes/PHASE: the most that any rank had in use after a kind of call in this step."""
        reports = [_by_phase(report) for report in self.worker.memory().result()]
        phases = {phase: None for report in reports for phase in report}  # in the order of the step
        return {f"memory/peak_bytes/{phase}": max(r.get(phase, 0) for r in reports) for phase in phases}


def _settings(optimizer: OptimizerConfig) -> OptimizerSettings:
    return OptimizerSettings(**dataclasses.asdict(optimizer) | {"betas": tuple(optimizer.betas)})


def merge_sums(shards: list[dict[str, float]]) -> dict[str, float]:
    """Metric sums of the data-parallel ranks added up; names ending in `_max` by their maximum."""
    merge = {name: max if name.endswith("_max") else sum for name in shards[0] if name not in _OF_THE_STEP}
    return {name: how(shard[name] for shard in shards) for name, how in merge.items()}


_PHASES = {
    "actor.make_room": "make_room",
    "rollout.wake_weights": "wake_weights",
    "rollout.receive": "reshard",
    "actor.release_weights": "release",
    "rollout.wake_kv_cache": "wake",
    "rollout.generate": "rollout",
    "rollout.sleep": "sleep",
    "actor.restore": "restore",
    "reference.log_probs": "reference",
    "actor.log_probs": "log_probs",
    "actor.update": "update",
    "critic.make_room": "make_room",
    "critic.release_weights": "make_room",
    "critic.restore": "restore",
    "critic.values": "values",
    "critic.update": "update_critic",
}


def _by_phase(memory: dict[str, int]) -> dict[str, int]:
    """A rank's bytes in use by call, as the highest by phase of the step."""
    found: dict[str, int] = {}
    for call, size in memory.items():
        phase = _PHASES.get(call, call)
        found[phase] = max(found.get(phase, 0), size)
    return found
