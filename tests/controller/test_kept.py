"""Rows that stay on the ranks: what is sent of a batch whose fields are kept, and that every rank gets the same as without."""

import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.batch import Batch
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.kept import Courier, Partial
from hybridflow.controller.protocols import DP, MICRO_DP, ONE_TO_ALL, THREE_D, remote
from hybridflow.controller.role import Role
from hybridflow.controller.worker import Worker
from megatron_ext.layout import Layout

LAYOUTS = {"wide": Layout(4, tp=2), "deep": Layout(4, pp=4), "flat": Layout(4)}


class Toy(Role):
    def _fields(self, rows: Batch) -> dict:
        return {name: [row.tolist() for row in rows.rows(name)] for name in rows.names}

    by_dp = remote(THREE_D)(lambda self, rows: self._fields(rows))
    in_order = remote(MICRO_DP)(lambda self, rows: self._fields(rows))
    by_rank = remote(DP)(lambda self, rows: self._fields(rows))
    whole = remote(ONE_TO_ALL)(lambda self, rows: self._fields(rows))


class Ranks:
    """Four real workers with a role in each layout, called one after the other; what each was given by the latest call."""

    workers = functools.cache(lambda: [Worker(rank, {name: Toy() for name in LAYOUTS}) for rank in range(4)])

    def __init__(self):
        self.given = {}
        for worker in Ranks.workers():
            worker.forget_rows()
        self.courier = Courier()
        self.roles = {name: RoleHandle(name, Toy, layout, self, courier=self.courier) for name, layout in LAYOUTS.items()}

    def phase(self) -> str:
        return ""

    def submit(self, calls):
        replies = {rank: Ranks.workers()[rank].execute(call) for rank, call in calls.items()}
        self.given = {rank: (call.args[0], replies[rank].result) for rank, call in calls.items()}
        return lambda: {rank: reply for rank, reply in replies.items() if calls[rank].reply}


def batch(lengths, first: int = 0) -> Batch:
    return Batch(
        {
            "tokens": [torch.arange(n) + 100 * row + first for row, n in enumerate(lengths)],
            "loss_mask": [torch.arange(n) > 0 for n in lengths],
            "rewards": torch.arange(len(lengths)).float(),
        }
    )


def column(rows: Batch, value: float) -> dict:
    return {"values": [torch.full((int(n),), value) for n in rows.lengths()]}


def test_tokens_go_to_a_rank_once():
    ranks, rows = Ranks(), batch([5, 3, 4, 2])
    kept = rows.keep()
    ranks.roles["wide"].by_dp(kept.only("tokens", "loss_mask")).result()
    first = ranks.courier.bytes
    # to both ranks of a replica 9 bytes a token, where the two rows of each field begin and end, and the numbers of the rows
    assert first == 2 * (14 * 9 + 2 * 2 * 3 * 8 + 4 * 8)
    ranks.roles["wide"].by_dp(kept.with_fields(**column(kept, 0.5))).result()
    partial, seen = ranks.given[0]
    assert isinstance(partial, Partial) and partial.sent.names == ["rewards", "values"]
    assert partial.fresh == {}
    assert sorted(seen) == ["loss_mask", "rewards", "tokens", "values"] and seen["values"][0] == [0.5] * len(seen["tokens"][0])
    # another layout over the same ranks: every rank gets all four rows, of which it has its replica's
    ranks.roles["deep"].by_dp(kept.only("tokens")).result()
    assert [len(given.fresh["tokens"][0]) for given, _ in ranks.given.values()] == [2, 2, 2, 2]
    ranks.courier.forget()
    for worker in Ranks.workers():
        worker.forget_rows()
        assert not worker._kept._rows
    before = ranks.courier.bytes
    ranks.roles["wide"].by_dp(kept.only("tokens", "loss_mask")).result()
    assert ranks.courier.bytes - before == first


def test_a_field_that_is_replaced_is_sent_anew():
    ranks, rows = Ranks(), batch([5, 3, 4, 2])
    kept = rows.with_fields(**column(rows, 1.0)).keep()
    for value in (1.0, 2.0, 3.0):
        kept = kept.with_fields(**column(kept, value))
        assert "values" not in kept.kept.versions and "tokens" in kept.kept.versions
        ranks.roles["flat"].by_dp(kept.keep()).result()
        assert all(set(sum(seen["values"], [])) == {value} for _, seen in ranks.given.values())
    twice = kept.select([1, 1]).with_fields(values=[torch.zeros(3), torch.ones(3)]).keep()
    ranks.roles["flat"].whole(twice).result()
    assert ranks.given[2][1]["values"] == [[0.0] * 3, [1.0] * 3]


def test_what_is_made_from_a_kept_batch():
    kept = batch([5, 3, 4]).keep()
    assert kept.select([2, 0]).kept.rows.tolist() == [2, 0]
    assert list(kept.only("tokens").kept.versions) == ["tokens"]
    assert kept.only("rewards").kept is None and batch([1]).kept is None
    assert kept.renamed({"tokens": "t"}).kept.versions["t"] == kept.kept.versions["tokens"]
    assert kept.keep().kept.versions == kept.kept.versions
    assert Batch.concat([kept, kept]).kept is None
    assert kept.nbytes == 12 * 9 + 2 * 4 * 8 + 3 * 4


CALLS = st.tuples(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(["by_dp", "in_order", "by_rank", "whole"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=9),  # rows, some twice
    st.sampled_from(["as it is", "tokens only", "new values", "new values, kept", "new tokens"]),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(CALLS, min_size=1, max_size=8))
def test_every_rank_gets_what_it_would_get_without(calls):
    ranks, plain, samples = Ranks(), Ranks(), batch([5, 3, 4, 2, 6, 1, 3]).keep()
    for number, (role, method, chosen, how) in enumerate(calls):
        rows = samples.select(chosen)
        if how.startswith("new values"):
            rows = rows.with_fields(**column(rows, float(number)))
        if how == "new tokens":
            rows = rows.with_fields(tokens=[row + number for row in rows.rows("tokens")])
        if how == "tokens only":
            rows = rows.only("tokens")
        if how.endswith("kept"):
            rows = rows.keep()
        getattr(ranks.roles[role], method)(rows).result()
        unkept = Batch({name: rows[name] for name in rows.names})
        getattr(plain.roles[role], method)(unkept).result()
        assert {r: seen for r, (_, seen) in ranks.given.items()} == {r: seen for r, (_, seen) in plain.given.items()}
    assert plain.courier.bytes > 0 and not any(isinstance(given, Partial) for given, _ in plain.given.values())


def test_a_share_that_only_fills_up_has_no_loss_and_spoils_nothing():
    ranks, kept = Ranks(), batch([5, 3]).keep()
    ranks.roles["flat"].by_rank(kept).result()
    masks = [sum(seen["loss_mask"], []) for _, seen in ranks.given.values()]
    assert sum(map(any, masks)) == 2
    ranks.roles["wide"].whole(kept).result()
    assert all(seen["loss_mask"][0] == [False] + [True] * 4 for _, seen in ranks.given.values())


def test_arguments_that_are_no_batches():
    courier = Courier()
    assert courier.pack((), [0, 1]) == [((), [0, 1])]
    assert courier.pack(("actor", True), [0, 1]) == [(("actor", True), [0, 1])]
    assert courier.bytes == 0
