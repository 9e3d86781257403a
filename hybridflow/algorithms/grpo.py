"""Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300): the whole algorithm.

A step: sample a group of responses per prompt, score them, take each reward relative to its group, and improve the policy
with PPO's clipped objective.
"""

from hybridflow.algorithms.advantages import group_advantages
from hybridflow.algorithms.run import Run, per_token
from hybridflow.data.problems import Problem


class GRPO:
    def __init__(self, run: Run):
        self.run = run

    def prepare(self) -> None:
        self.run.start_policy_training()

    def step(self, problems: list[Problem]) -> None:
        run = self.run
        samples = run.generate(problems, run.config.batch.samples_per_prompt)
        samples = run.assess(problems, samples)
        normalize = run.config.algorithm.normalize_advantages
        advantages = group_advantages(run.rewards_less_kl(samples), samples["prompt_index"], normalize)
        run.improve(samples.with_fields(advantages=per_token(advantages, samples)), run.policy_objective())
