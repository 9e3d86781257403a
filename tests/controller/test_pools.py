"""Jobs under torchrun whose roles live on different ranks: two pools with a critic apart; on GPUs a rollout of its own, which
tests/test_main_job.py has on a CPU."""

from pathlib import Path

import pytest

from hybridflow.data.tiny_model import make_tiny_model
from tests.small_job import finish, rows, start, write_recipe

TIMEOUT = 300
SPLIT = """
cluster: {ranks_per_node: 4}
roles:
  actor: {ranks: [0, 1], pp: 2}
  rollout: {ranks: [0, 1], tp: 2}
evaluation: {problems: 4}
"""


def train(folder: Path, *overrides: str) -> tuple[list[dict], str]:
    """The steps' metrics, and what was printed."""
    config = write_recipe(folder / "c.yaml", make_tiny_model(folder / "tiny"), folder / "run", SPLIT)
    printed = finish(start(config, *overrides), TIMEOUT)
    return rows(folder / "run" / "metrics.jsonl"), printed


@pytest.mark.timeout(TIMEOUT + 20)
def test_a_critic_in_a_pool_of_its_own(tmp_path):
    """It starts as a copy of the actor, whose weights go over a group between the two worlds; the reference is a part of the
    actor's pool."""
    steps, printed = train(
        tmp_path,
        "algorithm={name: ppo, kl_coefficient: 0.01, kl_in: reward}",
        "roles.critic={ranks: ['node0:[2,3]'], tp: 2, micro_batch_tokens: 2048, optimizer: {lr: 1.0e-3}}",
        "roles.reference={ranks: [1]}",
    )
    assert [step["reshard/verified"] for step in steps] == [True, None]
    assert max(step["mismatch/log_prob_abs_max"] for step in steps) < 1e-3
    assert steps[0]["critic/explained_variance"] == 0 and steps[1]["critic/loss"] > 0  # a new head says 0 of every token
    for transfer in ("actor PP2 -> critic TP2", "actor PP2 -> reference one rank", "actor PP2 -> rollout TP2"):
        assert f"{transfer}: resharding: " in printed
    picture = (tmp_path / "run" / "placement.txt").read_text()
    assert picture in printed and "pool 1: ranks 2-3: critic" in picture


@pytest.mark.gpu(2)
@pytest.mark.timeout(TIMEOUT + 20)
def test_a_rollout_on_a_gpu_of_its_own(tmp_path):
    """NCCL between two worlds."""
    overrides = ["cluster={ranks_per_node: 2, device: cuda}", "roles.actor={ranks: [0], pp: 1}", "model.dtype=bfloat16"]
    steps, _ = train(tmp_path, *overrides, "roles.rollout={ranks: [1], tp: 1, gpu_memory_utilization: 0.3}")
    assert [step["reshard/verified"] for step in steps] == [True, None]
    assert max(step["mismatch/log_prob_abs_mean"] for step in steps) < 0.1
