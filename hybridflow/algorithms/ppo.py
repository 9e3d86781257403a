"""Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347), on language models as Ziegler et al. 2019 do it.

A step: sample responses and score them; a critic says what reward was to be expected at every token, which makes advantages by
generalized advantage estimation (Schulman et al. 2016); the critic learns the returns, and the policy is improved with the
clipped objective. The KL penalty against the reference is in the tokens' rewards or in the policy's loss.
"""

from torch import Tensor

from hybridflow.algorithms.advantages import explained_variance, generalized_advantages, whiten
from hybridflow.algorithms.objectives import ValueObjective
from hybridflow.algorithms.run import CRITICS, Run
from hybridflow.batch import Batch
from hybridflow.data.problems import Problem


class PPO:
    def __init__(self, run: Run):
        self.run, self.value_objective = run, ValueObjective(run.config.algorithm.value_clip)

    def prepare(self) -> None:
        self.run.start_policy_training()
        self.run.start_value_training()

    def step(self, problems: list[Problem]) -> None:
        samples = self.sample(problems)
        advantages, returns = self.estimate(samples, self.run.token_rewards(samples), "critic")
        self.improve(samples, advantages, returns=returns)

    def sample(self, problems: list[Problem]) -> Batch:
        """Responses with their scores, log-probs and values."""
        run = self.run
        samples = run.generate(problems, run.config.batch.samples_per_prompt)
        return run.assess(problems, samples)

    def estimate(self, samples: Batch, rewards: Tensor, critic: str) -> tuple[Tensor, Tensor]:
        """Advantages and returns [T] of the tokens' rewards [T] (or costs), which `critic` has said its values of."""
        settings = self.run.config.algorithm
        values, mask = samples.values(CRITICS[critic].values), samples.values("loss_mask")
        advantages, returns = generalized_advantages(
            rewards, values, mask, samples.segments(), settings.gamma, settings.gae_lambda
        )
        self.run.metrics[f"{critic}/explained_variance"] = explained_variance(values, returns, mask)
        return advantages, returns

    def improve(self, samples: Batch, advantages: Tensor, **returns: Tensor) -> None:
        """The step's updates of the policy and of the critics, who learn the returns [T]."""
        run = self.run
        if run.config.algorithm.normalize_advantages:
            advantages = whiten(advantages, samples.values("loss_mask"))
        samples = samples.with_values(advantages=advantages, **returns)
        run.improve(samples, run.policy_objective(), self.value_objective)
