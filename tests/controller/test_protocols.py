"""Splitting and merging of batches; pure."""

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.protocols import MICRO_DP, ONE_TO_ALL, THREE_D, remote, split
from hybridflow.controller.role import Role
from hybridflow.rollout.grouping import EngineLayout
from megatron_ext.layout import Layout


def batch(lengths):
    return Batch(
        {
            "tokens": [torch.full((length,), i) for i, length in enumerate(lengths)],
            "loss_mask": [torch.ones(length, dtype=torch.bool) for length in lengths],
            "rewards": torch.arange(len(lengths), dtype=torch.float32),
        }
    )


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("size, count", [(8, 4), (10, 4), (3, 3), (2, 4), (1, 3)])
def test_merge_gives_back_the_callers_order(size, count, balance):
    whole = batch([(7 * i) % 11 + 1 for i in range(size)])
    parts = split(whole, count, balance)
    merged = parts.merge(parts.shards)
    assert torch.equal(merged["rewards"], whole["rewards"])
    assert all(torch.equal(a, b) for a, b in zip(merged.rows("tokens"), whole.rows("tokens"), strict=True))


def test_every_shard_has_a_row_and_fillers_have_no_loss():
    parts = split(batch([5, 3]), 4, balance=True)
    assert [len(shard) for shard in parts.shards] == [1, 1, 1, 1]
    masks = [bool(shard.values("loss_mask").any()) for shard in parts.shards]
    assert masks == [bool(origin) for origin in parts.origins]
    assert sum(masks) == 2


def test_balanced_shards_have_about_equal_tokens():
    lengths = [100, 1, 1, 1, 50, 50, 40, 60]
    parts = split(batch(lengths), 2, balance=True)
    tokens = [sum(lengths[i] for i in origin) for origin in parts.origins]
    assert [len(origin) for origin in parts.origins] == [4, 4]
    assert abs(tokens[0] - tokens[1]) <= 5


def test_contiguous_shards_keep_neighbours_together():
    assert split(batch([1] * 8), 2, balance=False).origins == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_collecting_ranks_hold_the_output_of_their_replica():
    layout = Layout(world_size=8, tp=2, pp=2)
    # Megatron's rank order is tp-dp-pp: the last stage is ranks 4..7, one TP rank 0 in each replica
    assert THREE_D.collecting_ranks(layout) == [4, 6]
    assert [layout.coordinates(rank).dp for rank in THREE_D.collecting_ranks(layout)] == [0, 1]
    assert MICRO_DP.collecting_ranks(Layout(world_size=8, tp=2)) == [0, 2, 4, 6]
    assert ONE_TO_ALL.collecting_ranks(layout) == list(range(8))


class Echo(Role):
    @remote(MICRO_DP)
    def shards(self, rows: Batch) -> Batch:
        """Its share, as it came."""


class Loopback:
    """A transport whose ranks reply with what they are given."""

    def phase(self) -> str:
        return ""

    def submit(self, calls):
        self.given = {rank: call.args[0]["rewards"].tolist() for rank, call in calls.items()}
        return lambda: {rank: call.args[0] for rank, call in calls.items() if call.reply}


def test_engines_of_ranks_in_any_order_get_one_share_each_and_give_it_back_in_the_callers_order():
    """Ranks 3 and 1 are the first engine, 0 and 2 the second."""
    transport, whole = Loopback(), batch([4, 2, 3, 1])
    handle = RoleHandle("echo", Echo, EngineLayout(4, 2, order=(3, 1, 0, 2)), transport)
    merged = handle.shards(whole).result()
    assert transport.given == {0: [2.0, 3.0], 1: [0.0, 1.0], 2: [2.0, 3.0], 3: [0.0, 1.0]}
    assert torch.equal(merged["rewards"], whole["rewards"])
