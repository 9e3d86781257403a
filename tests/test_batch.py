"""Batches travel between processes as numpy arrays."""

import pickle

import pytest
import torch

from hybridflow.batch import Batch


@pytest.mark.parametrize("shared", [False, True], ids=["in one string", "arrays apart, read-only"])
def test_a_batch_comes_back_as_it_was_and_can_be_written(shared):
    batch = Batch(
        {
            "tokens": [torch.arange(3), torch.arange(0), torch.arange(2)],
            "loss_mask": [torch.tensor([True, False, True]), torch.zeros(0, dtype=torch.bool), torch.ones(2, dtype=torch.bool)],
            "halves": torch.randn(3, 2).bfloat16(),
            "rewards": torch.randn(3),
            "columns": torch.arange(6).reshape(2, 3).T,
        }
    )
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=arrays.append if shared else None)
    assert len(arrays) == (7 if shared else 0)
    found = pickle.loads(data, buffers=[bytes(array.raw()) for array in arrays])
    assert found.names == batch.names and len(found) == 3
    for name in batch.names:
        assert found[name].dtype == batch[name].dtype
        for ours, theirs in zip(found.rows(name), batch.rows(name), strict=True):
            assert torch.equal(ours, theirs)
            ours.zero_()
    assert batch["rewards"].abs().sum() > 0
