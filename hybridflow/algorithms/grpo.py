"""Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300): the whole algorithm.

A step: sample a group of responses per prompt, score them, take each reward relative to its group, and improve the policy
with PPO's clipped objective.
"""

from hybridflow.algorithms.advantages import group_advantages
from hybridflow.algorithms.losses import PolicyLoss
from hybridflow.algorithms.objectives import PolicyObjective
from hybridflow.algorithms.run import Run, per_token
from hybridflow.data.problems import Problem


class GRPO:
    def __init__(self, run: Run):
        self.run, self.settings = run, run.config.algorithm
        in_loss = self.settings.kl_in == "loss"
        self.objective = PolicyObjective(
            PolicyLoss(
                clip_low=self.settings.clip_low,
                clip_high=self.settings.clip_high,
                level=self.settings.loss_level,
                kl_coefficient=self.settings.kl_coefficient if in_loss else 0.0,
                kl_estimator=self.settings.kl_estimator,
            )
        )

    def prepare(self) -> None:
        """Once, before the first step: the reference becomes a copy of the policy as it is now."""
        if self.run.reference is not None:
            self.run.reference.copy_from("actor").result()
        self.run.start_training()

    def step(self, problems: list[Problem]) -> None:
        run = self.run
        samples = run.generate(problems, run.config.batch.samples_per_prompt)
        samples = run.score(problems, samples)
        samples = run.add_log_probs(samples)
        rewards = run.rewards_less_kl(samples) if self.settings.kl_in == "reward" else samples["rewards"]
        advantages = group_advantages(rewards, samples["prompt_index"], self.settings.normalize_advantages)
        samples = samples.with_fields(advantages=per_token(advantages, samples))
        for _ in range(self.settings.epochs):
            for mini_batch in run.mini_batches(samples):
                run.update(mini_batch, self.objective)
