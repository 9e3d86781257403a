"""What differs between Megatron-core 0.16 and 0.19, and the patches it needs, each with its reason and when it can go."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import queue
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

OLDEST, FIRST_UNTESTED = Version("0.16"), Version("0.20")

_patched = False


def check_version() -> Version:
    """The version of Megatron-core that is importable.

    Raises:
        RuntimeError: it is outside the range that this code was written for.
    """
    import megatron.core

    found = Version(megatron.core.__version__)
    if not OLDEST <= found < FIRST_UNTESTED:
        raise RuntimeError(
            f"megatron-core {found} is not supported: install megatron-core>={OLDEST},<{FIRST_UNTESTED} (pip install -e .)"
        )
    return found


def accepted(target: Callable, arguments: dict) -> dict:
    """Those of `arguments` that `target`, a dataclass or a function, has in the installed version.

    For arguments whose absence means the same as the value given here; never for what a user asked for.
    """
    if dataclasses.is_dataclass(target):
        names = {field.name for field in dataclasses.fields(target)}
    else:
        names = set(inspect.signature(target).parameters)
    return {name: value for name, value in arguments.items() if name in names}


def patch() -> None:
    """Apply all patches to Megatron-core. Idempotent."""
    global _patched
    if _patched:
        return
    _patched = True
    check_version()
    _rotate_packed_sequences_at_once()
    _share_equal_groups()
    _route_without_transformer_engine()
    _gather_unequal_rows_over_gloo()
    _add_weight_gradients_without_apex()
    _quieten()


@contextlib.contextmanager
def around_steps(forward: Callable, backward: Callable) -> Iterator[None]:
    """Meanwhile the schedules call `forward` and `backward`, each with the upstream function before its own arguments.

    Upstream's own timers (0.16 .. 0.19) synchronise the device at every step, which changes what they measure, and don't know
    which micro-batch they time. Stays until it has hooks around a step.
    """
    from megatron.core.pipeline_parallel import schedules

    steps = schedules.forward_step, schedules.backward_step
    schedules.forward_step, schedules.backward_step = (
        functools.partial(own, step) for own, step in zip((forward, backward), steps, strict=True)
    )
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = steps


def mark_experts(chunks: Iterable[torch.nn.Module], own_groups: bool) -> None:
    """Say of the experts' weights how their gradients are reduced; call it before the chunks are wrapped.

    Without this 0.16 reduces the gradients of experts that tensor-parallel ranks hold whole (ep=1, etp < tp) over the dense
    data-parallel group, which leaves the tensor-parallel peers' tokens out, and with Transformer Engine counts only the first
    tensor-parallel rank's experts in the gradient's norm. 0.19 says the same by itself; goes with 0.16.

    Args:
        own_groups: reduce over the expert data-parallel group, not the dense one.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = not own_groups
                parameter.tensor_model_parallel = True


# ---------------------------------------------------------------------------------------------------- dist_checkpointing


def sharded_tensor(key: str, data: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> Any:
    """Megatron's word for "`data` is the rectangle at `offset` of the tensor `key` of this `shape`". Rectangles of one tensor
    may have any sizes (no regular grid), which Megatron leaves to torch's own format since 0.14."""
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor(key, data, data.dtype, tuple(data.shape), tuple(shape), tuple(offset), axis_fragmentations=None)


def sharded_object(key: str, data: object, shape: Sequence[int], offset: Sequence[int]) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(key, data, tuple(shape), tuple(offset))


def start_save(pieces: dict[str, Any], folder: Path, background: bool) -> Any:
    """Plan a save and return Megatron's request: for `write_here`, or with `background` for an `async_calls_queue`.

    0.19 asks for another package ("nvrx") by default, for saves that wait as well; "mcore" is what 0.16 has. The check that
    every element is written once is left to torch's planner, which knows rectangles; Megatron's is for regular grids.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    how = accepted(dist_checkpointing.save, {"async_strategy": "mcore"})
    names = ("_get_write_results_queue", "get_write_results_queue")  # 0.16, 0.19
    name = next(name for name in names if hasattr(filesystem_async, name))
    upstream = getattr(filesystem_async, name)
    if not background:
        setattr(filesystem_async, name, queue.Queue)
    try:
        return dist_checkpointing.save(pieces, str(folder), validate_access_integrity=False, async_sharded_save=True, **how)
    finally:
        setattr(filesystem_async, name, upstream)


def write_here(request: Any) -> None:
    """Execute a request in this process, down to the disk.

    Upstream's `execute_sync` starts a manager and, in 0.16, forks a writer for every file, beside the threads of gloo, OpenMP
    and vLLM. Goes when it writes by itself where nothing is to be overlapped.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if request.async_fn is not None:
        transforms = request.async_fn.args[0]
        results = request.async_fn_args[2]
        written: dict[int, list] | Exception = {}
        for number, bucket in enumerate(request.preload_fn()):
            found, counted = queue.Queue(), queue.Queue()
            counted.put(number)
            FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, found, counted, use_fsync=True)
            _, outcome = found.get()
            if isinstance(outcome, Exception):
                written = outcome
                break
            written[number] = outcome
        results.put(written)
    torch.distributed.barrier()
    for finalize in request.finalize_fns:
        finalize()


def load_pieces(pieces: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill the pieces' tensors in place."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load(pieces, str(folder), validate_access_integrity=False)


def async_calls_queue() -> Any:
    """What runs a request beside the training, in a forked process; to be asked on all ranks whether it is done."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    return AsyncCallsQueue()


def _route_without_transformer_engine() -> None:
    """Experts without Transformer Engine and on a CPU.

    The router asks for `te_general_gemm`, which 0.16 does not define then (0.19 does), and counts that are on the CPU already
    stay tensors where the dispatcher asks for numpy arrays (0.16 .. 0.19). Goes when the latter is fixed upstream.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    upstream = moe_utils.maybe_move_tensor_to_cpu

    def move(tensor, as_numpy: bool = False, record_stream: bool = False):
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy() if as_numpy else tensor
        return upstream(tensor, as_numpy, record_stream)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


def _gather_unequal_rows_over_gloo() -> None:
    """Gather and reduce-scatter rows of which the ranks of a group have unlike many, as experts split by etp ask for.

    gloo takes equal numbers only. Goes when it takes others; NCCL is left alone.
    """
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_rows(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or input_.is_cuda or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:rows] for part, rows in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_rows(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or input_.is_cuda or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return torch.split(total, input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_rows, reduce_scatter_rows


class _WeightGradients:
    """What Megatron calls apex's `fused_weight_gradient_mlp_cuda`: a product of matrices that is added to a gradient.

    `inputs` [T, in] and `gradient` [T, out] of the outputs have one dtype, `total` [out, in] that of the gradients' buffer.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        if inputs.is_cuda and inputs.dtype != total.dtype:
            torch.addmm(total, gradient.t(), inputs, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(gradient.t().to(total.dtype), inputs.to(total.dtype))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def _add_weight_gradients_without_apex() -> None:
    """Megatron's own linear layers, the output layer beside Transformer Engine's, can have `gradient_accumulation_fusion`.

    Upstream (0.16 .. 0.19) asks for apex, and refuses the option for the whole model without it. Goes when upstream has a
    kernel of its own.
    """
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _WeightGradients
        layers._grad_accum_fusion_available = True


def drop_placeholders() -> None:
    """Let go of the tensors that Transformer Engine keeps, one for each shape of a weight, to return as gradients that were
    added elsewhere: they hold nothing, and 1.6 GB for a 7B model on a rank. It makes new ones when it needs them.
    So in Transformer Engine 2.12; can go when it keeps none."""
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is not None:
        base._dummy_wgrads.clear()


def _quieten() -> None:
    """Drop notes that say nothing to a user of ours, and that each rank would print."""
    # 0.19 announces at every build that GPTModel will be replaced one day; goes when we build its successor
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(lambda record: "DEPRECATED" not in record.getMessage())
    # 0.19 says at every asynchronous save of its own that another package's will replace it; goes when we follow
    checkpointing = logging.getLogger("megatron.core.dist_checkpointing.strategies.torch")
    checkpointing.addFilter(lambda record: "async save is deprecated" not in record.getMessage())
    # 0.19 warns at every wrapped chunk that it lays the gradient buffers out itself; goes when upstream takes that for granted
    wrapping = logging.getLogger("megatron.core.distributed.distributed_data_parallel")
    wrapping.addFilter(lambda record: "full_param_layout not provided" not in record.getMessage())
    for message in (
        "The .grad attribute of a Tensor that is not a leaf",  # the optimizer asks its fp32 shards, 0.16 .. 0.19
        # CUDA_DEVICE_MAX_CONNECTIONS, which device.install() sets on CUDA
        "When using (async grad allreduce|sequence parallelism) it is recommended",
        "`load_state_dict` is deprecated",  # of torch's checkpoints, as 0.16 .. 0.19 load them
        "TypedStorage is deprecated",  # gradient buffers that are emptied and filled again, 0.16 .. 0.19
        "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # of experts that etp leaves whole
        r"`torch\.distributed\.\w+_tensor` is deprecated",  # collectives as 0.16 .. 0.19 call them, renamed in torch 2.13
    ):
        warnings.filterwarnings("ignore", message=message)


def _rotate_packed_sequences_at_once() -> None:
    """Unfused RoPE of packed sequences by one gather of the frequencies.

    Upstream copies cu_seqlens to the host and loops over the sequences, for queries and keys of every layer: a device
    synchronisation each on CUDA, most of a tiny model's time on a CPU. Goes when upstream (0.19.2 as well) stops doing so.
    """
    from megatron.core.models.common.embeddings import rope_utils

    upstream = rope_utils._apply_rotary_pos_emb_thd

    def apply(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args, cp_group=None, **kwargs) -> torch.Tensor:
        if cp_group is not None and cp_group.size() > 1:
            return upstream(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=len(t))
        positions = torch.arange(len(t), device=t.device) - starts
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], *args, **kwargs).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = apply


# While a role's groups are made: the ranks of the default world that its ranks 0, 1, 2, ... are; None: the very same.
_members: tuple[int, ...] | None = None


def _share_equal_groups() -> None:
    """One communicator per list of ranks, over all dimensions and roles, for roles on all or on some ranks of the world.

    Upstream creates about 20 groups per layout, many of them equal, and every NCCL communicator holds GPU memory. The
    default world is never returned in place of a group over all ranks: with two stages Megatron sends one direction over
    each, so that both are under way at once. Stays for as long as roles share processes. Groups made this way belong to all
    roles: never call destroy_model_parallel().
    """
    from megatron.core import parallel_state

    create, groups, worlds = parallel_state.create_group, {}, [None]

    def create_once(ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
        if ranks is not None and _members is not None:
            ranks = [_members[rank] for rank in ranks]
        if ranks is None or pg_options is not None:
            return create(ranks, timeout, backend, pg_options, *args, **kwargs)
        if worlds[0] is not torch.distributed.group.WORLD:  # groups end with the world that they were made in
            worlds[0] = torch.distributed.group.WORLD
            groups.clear()
        key = (tuple(ranks), backend or torch.distributed.get_backend())
        if key not in groups:
            groups[key] = create(ranks, timeout, backend, pg_options, *args, **kwargs)
        return groups[key]

    parallel_state.create_group = create_once


@contextlib.contextmanager
def world_of(members: Sequence[int], rank: int | None) -> Iterator[None]:
    """Around `initialize_model_parallel`, which takes the default world for the role's: within, it is asked for these ranks of
    it only, in which this one is number `rank` (None: it is none of them, and gets no groups).

    Still so in 0.19; can go when upstream lays groups over a list of ranks. Collective over the default world.
    """
    global _members
    get_rank, get_world_size = torch.distributed.get_rank, torch.distributed.get_world_size
    torch.distributed.get_rank = lambda group=None: (-1 if rank is None else rank) if group is None else get_rank(group)
    torch.distributed.get_world_size = lambda group=None: len(members) if group is None else get_world_size(group)
    _members = tuple(members)
    try:
        yield
    finally:
        torch.distributed.get_rank, torch.distributed.get_world_size = get_rank, get_world_size
        _members = None


@contextlib.contextmanager
def as_world(group: torch.distributed.ProcessGroup | None) -> Iterator[None]:
    """Around dist_checkpointing, which saves and loads over the default world: within, that is a role's group. None: it is so.

    Still so of saving in 0.19; can go when upstream saves over a group that it is given.
    """
    members = torch.distributed.distributed_c10d.GroupMember
    whole = members.WORLD
    if group is not None:
        members.WORLD = group
    try:
        yield
    finally:
        members.WORLD = whole


@contextlib.contextmanager
def gathering_over(group: torch.distributed.ProcessGroup | None) -> Iterator[None]:
    """Around building an optimizer, whose parameter groups are compared over the default world: within, over the role's ranks.

    Still so in 0.19; can go when upstream compares over a group that it is given. None: the default world.
    """
    gather, get_world_size = torch.distributed.all_gather_object, torch.distributed.get_world_size
    if group is not None:
        torch.distributed.all_gather_object = lambda found, value, **named: gather(found, value, **{"group": group} | named)
        torch.distributed.get_world_size = lambda other=None: get_world_size(other or group)
    try:
        yield
    finally:
        torch.distributed.all_gather_object, torch.distributed.get_world_size = gather, get_world_size
