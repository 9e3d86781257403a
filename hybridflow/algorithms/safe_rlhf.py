"""Safe RLHF (Dai et al. 2023, arXiv 2310.12773): the highest reward among the policies whose mean cost stays under a limit.

With J_R the mean reward and J_C the mean cost less the limit, the policy seeks min over theta, max over lambda >= 0 of
-J_R + lambda J_C (section 3.3). A step is PPO's with two critics, one of rewards and one of costs, each with advantages by
generalized advantage estimation. The policy is improved on (A_R - lambda A_C) / (1 + lambda) (eq. 30, added up before the
clipping as in the authors' own code), and the multiplier follows the mean cost of the step's responses (eq. 31).

A KL penalty that is in the reward goes off the rewards and onto the costs, so that the combination is penalised with
`algorithm.kl_coefficient` whatever lambda is. Rewards and costs come from the sections `reward` and `cost` of the config.
"""

import math

from torch import Tensor

from hybridflow.algorithms.ppo import PPO
from hybridflow.algorithms.run import Run
from hybridflow.data.problems import Problem


class CostMultiplier:
    """Lambda, whose logarithm goes up while the cost is over the limit and down while it is under (eq. 31):
    ln lambda <- ln lambda + lr lambda (cost - limit).

    Attributes:
        value: lambda now. Never above `largest`: where no policy is under the limit, lambda would grow without end.
    """

    def __init__(self, start: float, limit: float, lr: float, largest: float):
        self.value, self._limit, self._lr, self._largest = start, limit, lr, largest

    def weigh(self, rewards: Tensor, costs: Tensor) -> Tensor:
        """Of two advantages [T] the one that the policy improves on."""
        return (rewards - self.value * costs) / (1 + self.value)

    def adapt(self, cost: float) -> None:
        """Take in the mean cost of a step's responses."""
        exponent = math.log(self.value) + self._lr * self.value * (cost - self._limit)
        self.value = math.exp(min(exponent, math.log(self._largest)))


class SafeRLHF(PPO):
    """Prepares, estimates and improves as PPO does, with costs beside the rewards."""

    def __init__(self, run: Run):
        super().__init__(run)
        s = run.config.algorithm
        self.multiplier = CostMultiplier(s.lambda_init, s.cost_limit, s.lambda_lr, s.lambda_max)

    def state(self) -> dict[str, float]:
        return {"lambda": self.multiplier.value}

    def load_state(self, state: dict[str, float]) -> None:
        self.multiplier.value = state["lambda"]

    def step(self, problems: list[Problem]) -> None:
        run = self.run
        samples = self.sample(problems)
        rewards, returns = self.estimate(samples, run.token_rewards(samples), "critic")
        costs, cost_returns = self.estimate(samples, run.token_costs(samples), "cost_critic")
        run.metrics["cost/lambda"] = self.multiplier.value
        self.improve(samples, self.multiplier.weigh(rewards, costs), returns=returns, cost_returns=cost_returns)
        self.multiplier.adapt(samples["costs"].mean().item())
