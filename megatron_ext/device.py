"""Where tensors live: CUDA, or the CPU with a narrow shim that lets an unmodified Megatron-core run there over gloo.

The shim has two parts, and both only touch calls that could do nothing but raise on a host without CUDA:
`install()` gives `torch.cuda` and Megatron's RNG tracker answers for the CPU, process-wide and once; `scope()` rewrites
`device="cuda"`, `.cuda()` and `.type()` inside Megatron's own code, for the calling thread. On CUDA both do nothing to torch.
"""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
if not torch.cuda.is_available():
    # Megatron decorates small functions with torch.compile when imported; on a CPU compiling takes longer than it saves
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

_installed = False


def backend() -> str:
    """The torch.distributed backend that fits the device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def world_arguments() -> dict[str, Any]:
    """Arguments of init_process_group for the default group, once this process has chosen its device.

    NCCL's kernels are few blocks; at the same priority they would start only when the copies that a resharding has queued
    beside them are done, and the wire would idle.
    """
    if not torch.cuda.is_available():
        return {}
    return {"device_id": current(), "pg_options": dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)}


def current() -> torch.device:
    """The device of this process: the current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def synchronize() -> None:
    """Wait until the device has done everything it was asked to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_in_use() -> int:
    """Bytes in use on the device by its own count, all processes of a GPU included; resident bytes of this process on a CPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def install() -> None:
    """Make Megatron-core usable on this host. Idempotent; call it before anything of Megatron is built."""
    global _installed
    if _installed:
        return
    _installed = True
    if torch.cuda.is_available():
        # sequence parallelism counts on kernels starting in the order they were launched in; must precede CUDA's own start
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return
    _answer_for_cuda()
    _track_cpu_rng()


def scope() -> contextlib.AbstractContextManager:
    """Enter around building, running and stepping a Megatron model; `ParallelState.current()` does so by itself."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaMeansCpu()


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites what Megatron hard-codes about CUDA in calls of torch functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # optimizers compare the name with "torch.cuda.FloatTensor"
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _cpu_for_cuda(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _cpu_for_cuda(device: object) -> object:
    name = device.type if isinstance(device, torch.device) else device
    return CPU if isinstance(name, str) and name.startswith("cuda") else device


class _OrderedByNature:
    """Stands in for CUDA streams and events: work on a CPU is done when the call returns."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args) -> None:
        pass

    def record_event(self, *args) -> "_OrderedByNature":
        return self

    wait = wait_stream = wait_event = synchronize = record


def _answer_for_cuda() -> None:
    stream = _OrderedByNature()
    answers = {
        "current_device": lambda: CPU,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "Stream": _OrderedByNature,
        "Event": _OrderedByNature,
        "current_stream": lambda *args, **kwargs: stream,
        "default_stream": lambda *args, **kwargs: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def _track_cpu_rng() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    class CpuRngTracker(random.CudaRNGStatesTracker):
        """Forks the CPU generator; upstream's warns when the CPU's state changes, which is what is tracked here."""

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME):
            if name not in self.states_:
                raise KeyError(f"rng state {name} is not added, only {sorted(self.states_)}")
            outer, outer_name = torch.get_rng_state(), self._current_state_name
            if outer_name != "default-rng":
                self.states_[outer_name] = outer
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(self.states_.get(outer_name, outer))
                self._current_state_name = outer_name

    random.CudaRNGStatesTracker = CpuRngTracker  # initialize_rng_tracker() looks it up by this name
    random.initialize_rng_tracker(force_reset=True)
