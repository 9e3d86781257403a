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

    @remote(ONE_TO_ALL, giver="hand_over")
    def take(self, source: str, amount: int) -> None:
        """From another role."""


class Loopback:
    """A transport whose ranks reply with what they are given."""

    def phase(self) -> str:
        return ""

    def submit(self, calls):
        self.calls = calls
        self.given = {rank: call.args[0]["rewards"].tolist() for rank, call in calls.items() if isinstance(call.args[0], Batch)}
        return lambda: {rank: call.args[0] for rank, call in calls.items() if call.reply}


def test_engines_of_ranks_in_any_order_get_one_share_each_and_give_it_back_in_the_callers_order():
    """Ranks 3 and 1 are the first engine, 0 and 2 the second."""
    transport, whole = Loopback(), batch([4, 2, 3, 1])
    handle = RoleHandle("echo", Echo, EngineLayout(4, 2, order=(3, 1, 0, 2)), transport)
    merged = handle.shards(whole).result()
    assert transport.given == {0: [2.0, 3.0], 1: [0.0, 1.0], 2: [2.0, 3.0], 3: [0.0, 1.0]}
    assert torch.equal(merged["rewards"], whole["rewards"])


def test_calls_go_to_the_roles_own_ranks_and_results_come_back_in_the_order_of_its_layout():
    transport, whole = Loopback(), batch([4, 2, 3, 1])
    handle = RoleHandle("echo", Echo, Layout(4, tp=2), transport, {"echo": (1, 4, 5, 6)})
    merged = handle.shards(whole).result()
    assert transport.given == {1: [0.0, 1.0], 4: [0.0, 1.0], 5: [2.0, 3.0], 6: [2.0, 3.0]}
    assert [rank for rank, call in transport.calls.items() if call.reply] == [1, 5]
    assert torch.equal(merged["rewards"], whole["rewards"])


def test_ranks_that_only_give_run_the_givers_part():
    transport = Loopback()
    placed = {"echo": (2, 3), "teacher": (0, 1, 2)}
    result = RoleHandle("echo", Echo, Layout(2), transport, placed).take("teacher", 7).result()
    asked = {rank: (call.role, call.method, call.args, call.reply) for rank, call in transport.calls.items()}
    mine, theirs = ("echo", "take", ("teacher", 7), True), ("teacher", "hand_over", ("echo", 7), False)
    assert asked == {0: theirs, 1: theirs, 2: mine, 3: mine}
    assert len(result) == 2
