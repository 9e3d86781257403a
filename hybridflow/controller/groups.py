"""Process groups between ranks that need not be in one torch.distributed world: weights go from pool to pool over them.

Every rank of the job reaches one store (torchrun's, or the one that a launcher opens); the members of a group meet there.
"""

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_ext import device

_TIMEOUT = datetime.timedelta(minutes=10)

_store: dist.Store | None = None
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def use_store(store: dist.Store) -> None:
    """Let the groups of this process meet at this store, which all ranks of the job reach."""
    global _store
    _store = store
    _groups.clear()


def group_of(ranks: Sequence[int], rank: int) -> dist.ProcessGroup:
    """The group of these global ranks, of which `rank` is this one: NCCL on CUDA, gloo on a CPU. Made once.

    Collective over the members alone, at the first call and for good. It has its members' places in `ranks` for numbers, and
    `dist`'s functions take it with `group_src`, `group_dst` and `group_peer`. `dist.get_rank(group)` does not, since it looks
    for the number that this process has in its own world: ask `group.rank()`.
    """
    key = tuple(ranks)
    if key not in _groups:
        # in a world that no launcher has given a store, its own is the one that all ranks reach
        store = _store if _store is not None else distributed_c10d._get_default_store()
        name = f"ranks {'-'.join(map(str, key))}"
        _groups[key] = _build(dist.PrefixStore(name, store), key.index(rank), len(key), name)
    return _groups[key]


def _build(store: dist.Store, rank: int, size: int, name: str) -> dist.ProcessGroup:
    """What torch builds in new_group, which would take the members from this process's own world, and under NCCL split that
    world's communicator."""
    backend = device.backend()
    group = dist.ProcessGroup(store, rank, size)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # as the default world: device.world_arguments
        options._timeout = _TIMEOUT
        made, kind = dist.ProcessGroupNCCL(store, rank, size, options), dist.ProcessGroup.BackendType.NCCL
    else:
        made, kind = dist.ProcessGroupGloo(store, rank, size, _TIMEOUT), dist.ProcessGroup.BackendType.GLOO
    made._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.current().type), kind, made)
    group._set_group_name(name)
    # where dist's functions, and destroy_process_group at the end, look for a group
    world = distributed_c10d._world
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group
