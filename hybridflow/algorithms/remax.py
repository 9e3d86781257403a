"""ReMax (Li et al. 2023, arXiv 2310.10505): REINFORCE whose baseline is the reward of the greedy answer to the same prompt.

A step: sample responses and one greedy answer per prompt in one rollout, score both, take each reward less that of the greedy
answer, and improve the policy. No critic, and one sample a prompt is enough. The paper makes one update with fresh samples,
which `batch.mini_batches: 1` and `algorithm.epochs: 1` are; further updates go by PPO's clipped objective.
"""

from hybridflow.algorithms.advantages import baseline_advantages
from hybridflow.algorithms.objectives import policy_objective
from hybridflow.algorithms.run import Run, per_token
from hybridflow.data.problems import Problem


class ReMax:
    def __init__(self, run: Run):
        self.run, self.settings = run, run.config.algorithm
        self.objective = policy_objective(self.settings)

    def prepare(self) -> None:
        self.run.start_policy_training()

    def step(self, problems: list[Problem]) -> None:
        run = self.run
        with run.awake():
            samples = run.sample(problems, run.config.batch.samples_per_prompt)
            greedy = run.sample(problems, 1, greedy=True)
        baseline = run.score_baseline(problems, greedy)
        samples = run.score(problems, samples)
        samples = run.add_log_probs(samples)
        rewards = run.rewards_less_kl(samples) if self.settings.kl_in == "reward" else samples["rewards"]
        advantages = baseline_advantages(rewards, baseline, samples["prompt_index"])
        run.improve(samples.with_fields(advantages=per_token(advantages, samples)), self.objective)
