"""Each transfer protocol against its row of the table, splitting and merging of batches; pure."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.batch import Batch
from hybridflow.controller import protocols
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.protocols import (
    ALL_TO_ALL,
    DP,
    MICRO_DP,
    ONE_TO_ALL,
    PP_ONLY,
    PROTOCOLS,
    THREE_D,
    Protocol,
    balanced,
    contiguous,
    register,
    remote,
    split,
)
from hybridflow.controller.role import Role
from hybridflow.controller.worker import Reply
from hybridflow.rollout.grouping import EngineLayout
from megatron_ext.layout import Layout

# dp 4 and 2 with pipelines, context parallel, and data-parallel numbers that don't divide 10
LAYOUTS = [Layout(8, 2, 2), Layout(4), Layout(1), Layout(16, tp=2, pp=2, cp=2), Layout(12, tp=2, pp=2), Layout(8, pp=4, vpp=2)]
CUTS = {"balanced": balanced, "contiguous": contiguous}


def batch(lengths):
    return Batch(
        {
            "tokens": [torch.full((length,), i) for i, length in enumerate(lengths)],
            "loss_mask": [torch.ones(length, dtype=torch.bool) for length in lengths],
            "rewards": torch.arange(len(lengths), dtype=torch.float32),
        }
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 9), st.sampled_from(sorted(CUTS)))
def test_split_and_merge_are_the_identity_and_shares_are_balanced(lengths, count, cut):
    whole = batch(lengths)
    parts = split(whole, count, CUTS[cut])
    merged = parts.merge(parts.shares)
    assert torch.equal(merged["rewards"], whole["rewards"])
    assert torch.equal(merged.values("tokens"), whole.values("tokens"))
    assert torch.equal(merged.lengths(), whole.lengths())
    assert sorted(row for origin in parts.origins for row in origin) == list(range(len(lengths)))
    assert all(len(share) == max(len(origin), 1) for share, origin in zip(parts.shares, parts.origins, strict=True))
    trained = [bool(share.values("loss_mask").any()) for share in parts.shares]
    assert all(origin or not any_loss for origin, any_loss in zip(parts.origins, trained, strict=True))
    if cut == "balanced":  # moving any one row would not bring the fullest and the emptiest share closer
        tokens = [sum(lengths[row] for row in origin) for origin in parts.origins]
        assert max(tokens) - min(tokens) <= max(lengths)
    else:
        sizes = [len(origin) for origin in parts.origins]
        assert max(sizes) - min(sizes) <= 1
        assert [row for origin in parts.origins for row in origin] == list(range(len(lengths)))


def test_shares_of_very_unequal_rows_have_equal_tokens_not_equal_rows():
    origins = balanced(batch([100, *[10] * 9]), 2)
    assert origins == [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def test_a_batch_without_tokens_is_balanced_by_rows():
    assert balanced(Batch({"rewards": torch.zeros(5)}), 2) == [[0, 1], [2, 3, 4]]


def test_what_cannot_be_split_or_merged():
    with pytest.raises(ValueError, match="a batch without rows"):
        split(Batch({"rewards": torch.zeros(0)}), 2, balanced)
    parts = split(batch([1, 2, 3]), 2, contiguous)
    with pytest.raises(ValueError, match="1 results of 2 shares"):
        parts.merge(parts.shares[:1])
    with pytest.raises(ValueError, match="share 1 of 2 has 2 rows, but its result 1"):
        parts.merge([parts.shares[0], parts.shares[0]])


class Ranks:
    """A transport whose ranks run the calls here, one after the other."""

    def __init__(self, role: type[Role], layout: Layout):
        self._layout, self._role, self.given = layout, role, {}

    def phase(self) -> str:
        return ""

    def submit(self, calls):
        assert sorted(calls) == list(range(self._layout.world_size))
        self.given = {rank: call.args[0] for rank, call in calls.items()}
        replies = {}
        for rank, call in calls.items():
            role = self._role()
            role.rank, role.layout = rank, self._layout
            result = getattr(role, call.method)(*call.args, **call.kwargs)
            if call.reply:
                replies[rank] = Reply(result, seconds=float(rank))
        return lambda: replies


class Toy(Role):
    """Every protocol once; a rank answers with where it is, or with its rows."""

    def _where(self, argument) -> tuple:
        return self.rank, argument if isinstance(argument, str) else argument["rewards"].tolist()

    def _rows(self, rows: Batch) -> Batch:
        return rows.only("rewards").with_fields(rank=torch.full((len(rows),), self.rank))

    one_to_all = remote(ONE_TO_ALL)(lambda self, argument: self._where(argument))
    pp_only = remote(PP_ONLY)(lambda self, argument: self._where(argument))
    all_to_all = remote(ALL_TO_ALL)(lambda self, argument: self._where(argument))
    three_d = remote(THREE_D)(lambda self, argument: self._rows(argument))
    micro_dp = remote(MICRO_DP)(lambda self, argument: self._rows(argument))
    dp = remote(DP)(lambda self, argument: self._rows(argument))
    nothing = remote(THREE_D)(lambda self, argument: Batch({"found": [torch.zeros(0) for _ in range(len(argument))]}))
    scalars = remote(THREE_D)(lambda self, argument: self.rank)


def call(layout: Layout, method: str, argument):
    transport = Ranks(Toy, layout)
    return getattr(RoleHandle("toy", Toy, layout, transport), method)(argument).result(), transport.given


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_what_is_given_whole_and_collected_from_all_or_from_every_stage(layout):
    ranks = range(layout.world_size)
    found, given = call(layout, "one_to_all", "whole")
    assert found == [(rank, "whole") for rank in ranks]
    assert set(given.values()) == {"whole"}
    found, given = call(layout, "pp_only", "whole")
    # TP 0 (of context parallel 0) and DP 0 of every stage, in the order of the stages
    assert found == [(stage * layout.world_size // layout.pp, "whole") for stage in range(layout.pp)]
    assert set(given.values()) == {"whole"} and len(given) == layout.world_size
    found, given = call(layout, "all_to_all", [f"for {rank}" for rank in ranks])
    assert found == [(rank, f"for {rank}") for rank in ranks]


@pytest.mark.parametrize("rows", [10, 1, 3, 16], ids="{} rows".format)
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("method", ["three_d", "micro_dp", "dp"])
def test_what_is_split(layout, rows, method):
    """10 rows over 4 data-parallel ranks among them, and fewer rows than ranks."""
    whole = batch([(7 * i) % 11 + 1 for i in range(rows)])
    count = layout.world_size if method == "dp" else layout.dp
    found, given = call(layout, method, whole)
    assert torch.equal(found["rewards"], whole["rewards"])
    share_of = {rank: rank if method == "dp" else layout.coordinates(rank).dp for rank in given}
    origins = (contiguous if method == "micro_dp" else balanced)(whole, count)
    for rank, share in given.items():
        # the ranks of a replica are given the same share; one that would be empty is row 0, without a loss
        origin = origins[share_of[rank]]
        assert share["rewards"].tolist() == (origin or [0])
        assert bool(share.values("loss_mask").any()) == bool(origin)
    for row, rank in enumerate(found["rank"].tolist()):
        assert row in origins[share_of[rank]]
        at = layout.coordinates(rank)
        assert method == "dp" or (at.tp, at.cp, at.pp) == (0, 0, layout.pp - 1)


def test_results_that_are_empty_or_no_batches():
    whole = batch([2, 1, 3])
    found, _ = call(Layout(4, pp=2), "nothing", whole)
    assert found.lengths("found").tolist() == [0, 0, 0]
    found, _ = call(Layout(8, tp=2, pp=2), "scalars", whole)
    assert found == [4, 6]  # Megatron's rank order is tp-cp-dp-pp: the last stage is ranks 4 to 7


def test_collecting_ranks_hold_the_output_of_their_replica():
    layout = Layout(world_size=8, tp=2, pp=2)
    assert [layout.coordinates(rank).dp for rank in THREE_D.collecting_ranks(layout)] == [0, 1]
    assert MICRO_DP.collecting_ranks(Layout(world_size=8, tp=2)) == [0, 2, 4, 6]
    # with context parallel ranks, which share a replica's sequences
    assert THREE_D.collecting_ranks(Layout(world_size=16, tp=2, pp=2, cp=2)) == [8, 12]


def test_engines_of_ranks_in_any_order_get_one_share_each_and_give_it_back_in_the_callers_order():
    """Ranks 3 and 1 are the first engine, 0 and 2 the second."""
    whole = batch([4, 2, 3, 1])
    merged, given = call(EngineLayout(4, 2, order=(3, 1, 0, 2)), "micro_dp", whole)
    found = {rank: share["rewards"].tolist() for rank, share in given.items()}
    assert found == {0: [2.0, 3.0], 1: [0.0, 1.0], 2: [2.0, 3.0], 3: [0.0, 1.0]}
    assert torch.equal(merged["rewards"], whole["rewards"])


def test_a_calls_seconds_are_those_of_the_slowest_rank_that_replies():
    layout = Layout(8, tp=2, pp=2)
    pending = RoleHandle("toy", Toy, layout, Ranks(Toy, layout)).scalars(batch([2, 1, 3]))
    pending.result()
    assert pending.seconds == 6


def test_one_argument_is_needed_for_each_rank():
    with pytest.raises(ValueError, match="toy.all_to_all by protocol all_to_all: 3 shares for 4"):
        call(Layout(4), "all_to_all", ["a", "b", "c"])


def test_a_protocol_of_ones_own(monkeypatch):
    """Split over the pipeline stages, collected from the last rank of each."""
    monkeypatch.setattr(protocols, "PROTOCOLS", dict(PROTOCOLS))

    def last_of_its_stage(layout: Layout, rank: int) -> bool:
        return (rank + 1) % (layout.world_size // layout.pp) == 0

    by_stage = register(Protocol("by_stage", lambda layout, rank: layout.coordinates(rank).pp, last_of_its_stage, contiguous))

    class Mine(Toy):
        @remote(by_stage)
        def mine(self, rows: Batch) -> Batch:
            return self._rows(rows)

    layout = Layout(8, tp=2, pp=2)
    found = RoleHandle("mine", Mine, layout, Ranks(Mine, layout)).mine(batch([1, 2, 3])).result()
    assert found["rank"].tolist() == [3, 7, 7] and found["rewards"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="a transfer protocol '3d' already"):
        register(Protocol("3d", None, last_of_its_stage))


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
        return lambda: {rank: Reply(call.args[0], 0.0) for rank, call in calls.items() if call.reply}


def test_calls_go_to_the_roles_own_ranks_and_results_come_back_in_the_order_of_its_layout():
    transport, whole = Loopback(), batch([4, 2, 3, 1])
    handle = RoleHandle("echo", Echo, Layout(4, tp=2), transport, {"echo": (1, 4, 5, 6)})
    merged = handle.shards(whole).result()
    given = {rank: call.args[0]["rewards"].tolist() for rank, call in transport.calls.items()}
    assert given == {1: [0.0, 1.0], 4: [0.0, 1.0], 5: [2.0, 3.0], 6: [2.0, 3.0]}
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
