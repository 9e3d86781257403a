"""The pure pieces of a run: what happens to metric sums, memory notes and per-sequence values on the driver."""

import torch

from hybridflow.algorithms.objectives import mismatch_sums
from hybridflow.algorithms.run import _by_phase, merge_sums, per_token
from hybridflow.batch import Batch


def test_sums_add_up_over_ranks_and_maxima_stay_maxima():
    shards = [
        {"loss": 1.0, "tokens": 4, "mismatch_abs_max": 0.5, "grad_norm": 2.0, "lr": 0.1, "skipped": False},
        {"loss": 2.5, "tokens": 6, "mismatch_abs_max": 0.2, "grad_norm": 2.0, "lr": 0.1, "skipped": False},
    ]
    assert merge_sums(shards) == {"loss": 3.5, "tokens": 10, "mismatch_abs_max": 0.5}


def test_a_sequences_value_stands_at_each_of_its_tokens():
    samples = Batch({"tokens": [torch.arange(n) for n in (3, 1, 2)]})
    rows = per_token(torch.tensor([0.5, -1.0, 2.0]), samples)
    assert [row.tolist() for row in rows] == [[0.5] * 3, [-1.0], [2.0] * 2]


def test_memory_is_told_by_phase():
    memory = {"rollout.wake_weights": 3, "rollout.wake_kv_cache": 7, "actor.update": 5, "actor.export": 1}
    assert _by_phase(memory) == {"wake_weights": 3, "wake": 7, "update": 5, "actor.export": 1}


def test_mismatch_is_measured_on_the_sampled_tokens_only():
    ours = torch.tensor([0.0, -1.0, -2.0, -3.0])
    theirs = torch.tensor([9.0, -1.5, -2.0, -2.9])
    found = mismatch_sums(ours, theirs, torch.tensor([False, True, True, True]))
    assert torch.allclose(found["mismatch_abs"], torch.tensor(0.6))
    assert torch.allclose(found["mismatch_abs_max"], torch.tensor(0.5))
    d = torch.tensor([-0.5, 0.0, 0.1])
    assert torch.allclose(found["mismatch_kl"], ((-d).exp() - 1 + d).sum())
    empty = mismatch_sums(ours, theirs, torch.zeros(4, dtype=torch.bool))
    assert [value.item() for value in empty.values()] == [0.0, 0.0, 0.0]
