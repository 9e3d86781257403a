"""Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347), on language models as Ziegler et al. 2019 do it.

A step: sample responses and score them; a critic says what reward was to be expected at every token, which makes advantages by
generalized advantage estimation (Schulman et al. 2016); the critic learns the returns, and the policy is improved with the
clipped objective. The KL penalty against the reference is in the tokens' rewards or in the policy's loss.
"""

from hybridflow.algorithms.advantages import explained_variance, generalized_advantages, whiten
from hybridflow.algorithms.objectives import ValueObjective
from hybridflow.algorithms.run import Run
from hybridflow.data.problems import Problem


class PPO:
    def __init__(self, run: Run):
        self.run, self.value_objective = run, ValueObjective(run.config.algorithm.value_clip)

    def prepare(self) -> None:
        self.run.start_policy_training()
        self.run.start_value_training()

    def step(self, problems: list[Problem]) -> None:
        run, settings = self.run, self.run.config.algorithm
        samples = run.generate(problems, run.config.batch.samples_per_prompt)
        samples = run.assess(problems, samples)
        values, mask = samples.values("values"), samples.values("loss_mask")
        advantages, returns = generalized_advantages(
            run.token_rewards(samples), values, mask, samples.segments(), settings.gamma, settings.gae_lambda
        )
        run.metrics["critic/explained_variance"] = explained_variance(values, returns, mask)
        if settings.normalize_advantages:
            advantages = whiten(advantages, mask)
        samples = samples.with_values(advantages=advantages, returns=returns)
        run.improve(samples, run.policy_objective(), self.value_objective)
