"""Memory that training holds on the device between its calls, and how it leaves the device while somebody else needs the room.

Storages shrink to nothing and grow again: every view of them (parameters, gradients, buckets) stays the tensor that it is, and
only its address may change. What a storage held is copied to the host before (`HostMemory`), or made again afterwards.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_ext import device
from megatron_ext.optimizer import Optimizer

ALIGNMENT = 512  # bytes
# What torch's allocator takes from CUDA for a tensor if its cache has nothing as large: from 10 MiB on a block for it alone, of
# whole pages. A rest of over 1 MiB goes to other tensors.
OWN_BLOCK = 10 << 20
PAGE = 2 << 20


class HostMemory:
    """A place on the host for tensors of the device: one block of page-locked memory, allocated once and reused.

    `take` moves tensors here, `give_back` returns them; in between they are empty and must not be touched.
    """

    def __init__(self):
        self._block = torch.empty(0, dtype=torch.uint8)
        self._resting: list[tuple[torch.UntypedStorage, Tensor]] = []  # and its part of the block

    @property
    def nbytes(self) -> int:
        """Of the block."""
        return len(self._block)

    @property
    def in_use(self) -> bool:
        """Whether tensors rest here."""
        return bool(self._resting)

    def take(self, tensors: Iterable[Tensor], reserve: int = 0, copy: bool = True) -> None:
        """Move the tensors' storages here. Waits until the copy is done.

        Args:
            tensors: on the device; those that share a storage move together, with all of it.
            reserve: bytes that the block should have at least, for more tensors to come.
            copy: False where they hold what they held when they were given back: they are dropped only.
        """
        if self._resting:
            raise RuntimeError("tensors rest on the host already: give_back() first")
        storages = distinct_storages(tensors)
        starts, end = [], 0
        for storage in storages:
            starts.append(end)
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if end > len(self._block):
            if not copy:
                raise RuntimeError("the host holds no copy of these tensors yet: take() them with copy=True first")
            self._allocate(max(end, reserve))
        for storage, start in zip(storages, starts, strict=True):
            place = self._block[start : start + storage.nbytes()]
            if copy:
                place.copy_(_bytes(storage), non_blocking=True)
            self._resting.append((storage, place))
        device.synchronize()
        for storage in storages:
            storage.resize_(0)

    def give_back(self) -> None:
        """Return everything to the device. Queued on the current stream; the block keeps its copy until the next `take`."""
        for storage, place in self._resting:
            storage.resize_(len(place))
            _bytes(storage).copy_(place, non_blocking=True)
        self._resting = []

    def _allocate(self, nbytes: int) -> None:
        """torch's own page-locked memory comes in powers of two, and stays with torch for good."""
        cuda = torch.cuda.is_available()
        if cuda and len(self._block):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr()))
        self._block = torch.empty(0, dtype=torch.uint8)  # frees the old one before there is a new one
        self._block = torch.empty(nbytes, dtype=torch.uint8)
        if cuda:
            self._block.fill_(0)  # on all cores; the driver would fetch the pages one by one
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), nbytes, 0))


def distinct_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages under the tensors, each once, in the tensors' order; empty ones left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def is_empty(tensor: Tensor) -> bool:
    """Whether the tensor's memory is away: it must not be touched."""
    return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def weights_are_away(parameters: Mapping[str, Tensor]) -> bool:
    """Whether a model's weights have left the device; they go all together, so the first one tells."""
    return any(is_empty(parameter) for parameter in itertools.islice(parameters.values(), 1))


class TrainingMemory:
    """Gradients, weights and optimizer states of one model, which leave the device and come back with `restore`.

    Gradients carry nothing from one update to the next and are never copied. 16-bit weights are either copied to the host, or
    dropped and rebuilt from the optimizer's fp32 masters, whose rounding they are: no copy, no host memory (the "zero
    redundancy" of the HybridFlow paper, arXiv 2409.19256). After each of the methods the memory belongs to torch's cache;
    `hand_over` gives it to the device.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]):
        self._wrapped = wrapped
        self._fill_blocks()
        self._states, self._weights = HostMemory(), HostMemory()
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []  # of weights, and their bytes
        self._rebuilt_by: Optimizer | None = None

    @torch.no_grad()
    def _fill_blocks(self) -> None:
        """Storages grow to whole blocks: torch would give the rest of a block to some small tensor that stays, and could not
        return the block when the storage leaves. The optimizer's states, many and smaller, are left as they are."""
        gradients = [buffer.grad_data for buffer in self._buffers()]
        for data in gradients:
            data.untyped_storage().resize_(0)  # makes room for the weights to move, and there is nothing to keep
        for data in (*self._parameter_data(), *gradients):
            self.hand_over()  # or the new block would be a part of the one that the storage before has left
            size = data.nbytes if data.nbytes < OWN_BLOCK else -(-data.nbytes // PAGE) * PAGE
            data.untyped_storage().resize_(max(size, data.untyped_storage().nbytes()))
        for data in gradients:
            data.zero_()

    def release_gradients(self) -> None:
        device.synchronize()
        for chunk in self._wrapped:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)

    def offload_optimizer(self, optimizer: Optimizer) -> None:
        """Masters and moments, as far as there are any yet."""
        optimizer.check_masters()  # while the masters are here: the weights may be dropped next
        self._states.take(optimizer.states(), reserve=optimizer.state_bytes())

    def offload_weights(self) -> None:
        self._weights.take(self._parameter_data())

    def drop_weights(self, optimizer: Optimizer) -> None:
        """Let go of the 16-bit weights; fp32 weights are their own masters and stay.

        Raises:
            RuntimeError: `optimizer` would rebuild other weights than these.
        """
        optimizer.check_masters()
        device.synchronize()
        for storage in distinct_storages(data for data in self._parameter_data() if data.itemsize == 2):
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)
        self._rebuilt_by = optimizer

    def hand_over(self) -> None:
        """What was let go of, and whatever else torch keeps for later, goes to the device: others can have it."""
        torch.cuda.empty_cache()

    def make_free(self, nbytes: int) -> None:
        """`hand_over` where less than `nbytes` of the device's memory is free: activations of an update that torch keeps for
        the next one cost nothing there, but are no use to an engine."""
        if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < nbytes:
            self.hand_over()

    def restore(self) -> None:
        """Everything that is away comes back, bit for bit, gradients as zeros. Collective where weights were dropped."""
        buffers = [*self._parameter_data(), *(buffer.grad_data for buffer in self._buffers())]
        if self._states.in_use or any(is_empty(data) for data in buffers):
            self.hand_over()  # or blocks would be parts of those that torch keeps of the engine's activations
        self._states.give_back()
        self._weights.give_back()
        if self._rebuilt_by is not None:
            for storage, size in self._dropped:
                storage.resize_(size)
            self._rebuilt_by.write_parameters()
            self._dropped, self._rebuilt_by = [], None
        for chunk in self._wrapped:
            chunk.restore_grad_buffers(synchronize=False)

    def _parameter_data(self) -> list[Tensor]:
        """The contiguous buffers that all parameters are views of."""
        return [buffer.param_data for buffer in self._buffers()]

    def _buffers(self) -> list:
        return [buffer for chunk in self._wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
