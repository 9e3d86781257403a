"""One set of process groups per role: several Megatron layouts alive in the same processes.

Megatron keeps its groups and its RNG states in module globals. A `ParallelState` holds a role's copy of them and makes it
current around a call:

    actor = ParallelState("actor", Layout(world_size=4, tp=2, pp=2), seed=1)
    with actor.current():
        ...  # build, forward and backward, optimizer step, checkpoint

Equal lists of ranks share one communicator over all roles (compat.py). Current is process-wide, since autograd's own
threads read the globals too; a second thread that enters meanwhile is an error.
"""

import contextlib
import copy
import threading
import types
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_ext import compat, device
from megatron_ext.layout import Coordinates, Layout

_RNG_NAMES = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")
_SCRATCH = "_GLOBAL_MEMORY_BUFFER"  # holds nothing between calls, so all roles use one


class ParallelState:
    """The groups, RNG tracker and default RNG state of one role on this rank.

    Attributes:
        ranks: of the default world, on which the role lives.
        rank: this one's number among them, which is its rank in the layout; None where the role does not live.
        group: over them; None where they are the default world.
    """

    _lock = threading.RLock()
    _entered: list["ParallelState"] = []
    _fresh: dict[str, object] = {}
    _scratch: object = None

    def __init__(self, name: str, layout: Layout, seed: int, ranks: Sequence[int] | None = None):
        """Collective over the default world.

        Args:
            ranks: those of the default world over which `layout` is laid, in its order; by default all of them. The other
                ranks take part in making the groups and get none: their state cannot be made current.

        Raises:
            ValueError: the layout has another number of ranks than it is given.
        """
        device.install()
        compat.patch()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        self.ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        size = len(self.ranks)
        if layout.world_size != size or layout.dp * layout.tp * layout.pp * layout.cp != size:
            raise ValueError(
                f"roles.{name}: a layout of {layout.world_size} ranks ({layout.describe()}) in a world of {size}: "
                "tp x pp x cp must divide the number of processes"
            )
        self.name, self.layout, self.seed = name, layout, seed
        self.rank = self.ranks.index(dist.get_rank()) if dist.get_rank() in self.ranks else None
        self.group: dist.ProcessGroup | None = None
        self._modules = (parallel_state, random)
        if not ParallelState._fresh:
            ParallelState._fresh = _mutable_globals(parallel_state)
        self._groups = {key: copy.copy(value) for key, value in ParallelState._fresh.items()}
        self._tracker = {_RNG_NAMES[0]: None, _RNG_NAMES[1]: False}
        self._rng = _rng_state()
        with self._swapped():
            self._initialize()
        if ParallelState._scratch is None and self.rank is not None:
            ParallelState._scratch = self._groups[_SCRATCH]

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands in the layout."""
        return self.layout.coordinates(self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp == self.layout.pp - 1

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self._groups["_TENSOR_MODEL_PARALLEL_GROUP"]

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The data-parallel group, context-parallel ranks included: over it losses and token counts add up."""
        return self._groups["_DATA_PARALLEL_GROUP_WITH_CP"]

    @contextlib.contextmanager
    def current(self) -> Iterator["ParallelState"]:
        """Make this role current, and enter `device.scope()`. Free when it is current already; roles may nest.

        Raises:
            RuntimeError: another thread is inside a role, this role is suspended further out, or it does not live on this rank.
        """
        if self.rank is None:
            raise RuntimeError(f"role {self.name} lives on ranks {list(self.ranks)} of its world, not on {dist.get_rank()}")
        entered = ParallelState._entered
        if not ParallelState._lock.acquire(blocking=False):
            raise RuntimeError(f"role {self.name}: another thread is inside role {entered[-1].name if entered else '(none)'}")
        try:
            if entered and entered[-1] is self:
                yield self
            elif self in entered:
                raise RuntimeError(f"role {self.name} is suspended while {entered[-1].name} runs: its RNG state would fork")
            else:
                with self._swapped(), device.scope():
                    entered.append(self)
                    try:
                        yield self
                    finally:
                        entered.pop()
        finally:
            ParallelState._lock.release()

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        parallel_globals, random_globals = (vars(module) for module in self._modules)
        outer_groups = {key: parallel_globals[key] for key in self._groups}
        outer_tracker = {key: random_globals[key] for key in _RNG_NAMES}
        outer_rng = _rng_state()
        parallel_globals.update(self._groups)
        if ParallelState._scratch is not None and self._groups[_SCRATCH] is not None:
            parallel_globals[_SCRATCH] = ParallelState._scratch
        random_globals.update(self._tracker)
        _set_rng_state(self._rng)
        try:
            yield
        finally:
            self._groups = {key: parallel_globals[key] for key in self._groups}
            self._tracker = {key: random_globals[key] for key in _RNG_NAMES}
            self._rng = _rng_state()
            parallel_globals.update(outer_groups)
            random_globals.update(outer_tracker)
            _set_rng_state(outer_rng)

    def _initialize(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        layout = self.layout
        everywhere = self.ranks == tuple(range(dist.get_world_size()))
        with contextlib.nullcontext() if everywhere else compat.world_of(self.ranks, self.rank):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
            )
            if not everywhere:
                self.group = parallel_state.create_group(list(range(layout.world_size)))
        if self.rank is None:
            return
        if not everywhere:
            _number_as_in_the_world(vars(parallel_state), self.ranks)
        seed = self.seed + 100 * self.coordinates.pp  # as Megatron's own training loop: stages differ, TP peers agree
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)


def _number_as_in_the_world(state: dict[str, object], ranks: Sequence[int]) -> None:
    """Turn the lists of ranks that Megatron keeps beside its groups from the role's numbers into those of the default world,
    with which it compares this rank's, and names others for a broadcast."""
    for name, value in state.items():
        if "GLOBAL_RANKS" in name and value is not None:
            state[name] = [ranks[rank] for rank in value]


def _mutable_globals(module: types.ModuleType) -> dict[str, object]:
    """All private state of `parallel_state`, whatever names a version adds, as it is before anything is initialised."""
    found = {
        name: value
        for name, value in vars(module).items()
        if name.startswith("_")
        and not name.startswith("__")
        and not callable(value)
        and not isinstance(value, types.ModuleType)
    }
    taken = sorted(name for name, value in found.items() if value is not None and value != {})
    if taken:
        raise RuntimeError(
            f"Megatron's parallel state is initialised already ({taken[0]}): create every role as a ParallelState"
        )
    return found


def _rng_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _set_rng_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
