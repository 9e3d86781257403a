"""Patches of vLLM whose effect can be seen without an engine."""

import os
import sys
from types import SimpleNamespace

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


@pytest.mark.parametrize(("free", "emptied", "wakes"), [(4, 0, True), (3, 1, True), (2, 1, False)])
def test_waking_takes_torchs_cache_only_at_need_and_says_what_lacks(monkeypatch, free, emptied, wakes):
    """Of 3 GiB for the KV cache and one to spare; torch has half a GiB in its cache."""
    memory, woken = {"free": free << 30, "emptied": 0}, []
    pieces = {1: SimpleNamespace(tag="weights", handle=(0, 7 << 30)), 2: SimpleNamespace(tag="kv_cache", handle=(0, 3 << 30))}
    allocator = SimpleNamespace(get_instance=lambda: SimpleNamespace(pointer_to_data=pieces))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(CuMemAllocator=allocator))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (memory["free"], 100 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 6 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 << 30)

    def empty_cache() -> None:
        memory["emptied"] += 1
        memory["free"] += (1 << 30) // 2

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    engine = SimpleNamespace(wake_up=lambda tags: woken.extend(tags))
    if wakes:
        vllm_compat.wake_up(engine, "kv_cache")
    else:
        lacking = r"kv_cache needs 3.0 GiB, 2.5 are free on the GPU \(torch cannot return 1.0 more, in blocks .*: lower roles"
        with pytest.raises(RuntimeError, match=lacking):
            vllm_compat.wake_up(engine, "kv_cache")
    assert woken == ["kv_cache"] * wakes
    assert memory["emptied"] == emptied


def test_no_step_of_the_engine_is_left_behind():
    """vLLM begins a step before it knows that the last response has ended (GPUs only)."""
    core = SimpleNamespace(batch_queue=["begun", "begun before"])
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), step=lambda: core.batch_queue.pop())
    vllm_compat.finish_steps(engine)
    assert core.batch_queue == []
    core.batch_queue = None  # on a CPU
    vllm_compat.finish_steps(engine)
