"""Patches of vLLM whose effect can be seen without an engine."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybridflow.rollout import vllm_compat


@pytest.mark.parametrize("before", [None, "/some/lib.so"])
def test_vllm_leaves_no_preloads_behind(monkeypatch, before):
    """From a path with a space every process that started later printed an error of the loader."""
    if before is None:
        monkeypatch.delenv("LD_PRELOAD", raising=False)
    else:
        monkeypatch.setenv("LD_PRELOAD", before)
    seen = []

    def original(config: object) -> None:
        seen.append(config)
        os.environ["LD_PRELOAD"] = "/a path/libgomp.so"

    vllm_compat._without_preloads(type(None), "config", original=original)
    assert seen == ["config"]
    assert os.environ.get("LD_PRELOAD") == before


def scenario_order_of_members(order: list[int], old_torch: bool) -> tuple[int, list[int]]:
    """This rank's number in a group of all ranks, and the ranks as an all-gather returns them."""
    torchs = dist.new_group
    if old_torch:
        dist.new_group = lambda ranks: torchs(ranks)  # as before 2.13: nothing to ask for the order with
    try:
        before = dist.new_group
        with vllm_compat.groups_numbered_as_listed():
            group = dist.new_group(order)
        assert dist.new_group is before and distributed_c10d.__dict__.get("sorted") is None
        assert dist.get_process_group_ranks(dist.new_group(order)) == sorted(order)
    finally:
        dist.new_group = torchs
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in order]
    dist.all_gather(gathered, torch.tensor([dist.get_rank()]), group=group)
    return dist.get_rank(group), [int(rank) for rank in gathered]


@pytest.mark.parametrize("old_torch", [False, True])
def test_members_of_a_group_are_numbered_as_they_are_listed(worlds, old_torch):
    order = [2, 0, 3, 1]
    results = worlds(4).run(scenario_order_of_members, order, old_torch)
    assert results == [(order.index(rank), order) for rank in range(4)]
