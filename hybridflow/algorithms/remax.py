"""ReMax (Li et al. 2023, arXiv 2310.10505): REINFORCE whose baseline is the reward of the greedy answer to the same prompt.

A step: sample responses and one greedy answer per prompt in one rollout, score both, take each reward less that of the greedy
answer, and improve the policy. No critic, and one sample a prompt is enough. The paper makes one update with fresh samples,
which `batch.mini_batches: 1` and `algorithm.epochs: 1` are; further updates go by PPO's clipped objective.
"""

from hybridflow.algorithms.advantages import baseline_advantages
from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.run import per_token
from hybridflow.data.problems import Problem


class ReMax(GRPO):
    """Prepares and improves the policy as GRPO does; what differs is the baseline."""

    def step(self, problems: list[Problem]) -> None:
        run = self.run
        with run.awake():
            samples = run.sample(problems, run.config.batch.samples_per_prompt)
            greedy = run.sample(problems, 1, greedy=True)
        baseline = run.start_baseline(problems, greedy)
        samples = run.assess(problems, samples)
        advantages = baseline_advantages(run.rewards_less_kl(samples), baseline(), samples["prompt_index"])
        run.improve(samples.with_fields(advantages=per_token(advantages, samples)), run.policy_objective())
