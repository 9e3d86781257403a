"""Skipped updates: counted in a row, and the batch kept that ended the run."""

import pytest
import torch

from hybridflow.algorithms.skipped import Skipped, TooManySkipped, load_batch
from hybridflow.batch import Batch
from tests.algorithms.fakes import Answered, fake_run

BATCH = Batch(
    {
        "tokens": [torch.arange(3), torch.arange(1)],
        "loss_mask": [torch.ones(3) > 0, torch.ones(1) > 0],
        "rewards": torch.ones(2),
    }
)


def test_only_skips_in_a_row_end_a_run(tmp_path):
    skipped = Skipped(2, tmp_path)
    for role, bad in (("actor", True), ("critic", True), ("actor", False), ("actor", True), ("critic", False)):
        skipped.look(role, bad, float("nan"), BATCH, 7)
    with pytest.raises(
        TooManySkipped, match=r"2 updates of the actor in a row .*run.max_skipped=2.* norm of nan; .*step-7-actor"
    ):
        skipped.look("actor", True, float("nan"), BATCH, 7)
    kept = load_batch(tmp_path / "step-7-actor.safetensors")
    assert set(kept.names) == set(BATCH.names) and len(kept) == 2
    for name in ("tokens", "loss_mask"):
        assert all(torch.equal(a, b) for a, b in zip(kept.rows(name), BATCH.rows(name), strict=True))
    assert torch.equal(kept["rewards"], BATCH["rewards"])


def test_no_limit(tmp_path):
    skipped = Skipped(0, tmp_path)
    for _ in range(100):
        skipped.look("actor", True, float("inf"), BATCH, 1)
    assert not list(tmp_path.iterdir())


def test_a_run_ends_with_the_batch_of_its_last_update(tmp_path):
    run, _ = fake_run(tmp_path, "run.max_skipped=3")
    bad = {"tokens": 4, "loss_count": 4, "loss": float("nan"), "grad_norm": float("nan"), "lr": 0.1, "skipped": True}
    run.actor.update = lambda *args: Answered([bad])
    for _ in range(2):
        assert run.update(BATCH.only("tokens", "loss_mask"), None)["skipped"]
    with pytest.raises(TooManySkipped):
        run.update(BATCH.only("tokens", "loss_mask"), None)
    assert len(load_batch(tmp_path / "run/skipped/step-0-actor.safetensors")) == 2
