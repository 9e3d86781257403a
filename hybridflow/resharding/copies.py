"""Many copies between fixed views of memory, made at once.

On CUDA one kernel makes them all: a launch per copy would cost more than the copy where tensors are small, and torch's own
kernels copy rows of a strided view at a fraction of the memory's bandwidth. Elsewhere, and where the dtype changes, torch
copies.
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes that one program of the kernel copies: enough for full bandwidth, small enough that the last ones end together.
PROGRAM_BYTES = 64 << 10
_MOST_BYTES = 1 << 31  # of one copy: the kernel counts in 32 bits
_WORDS = (16, 8, 4, 2, 1)  # bytes; the widest that divides every address, stride and row is used


class _Rows(NamedTuple):
    """`rows` rows of `length` bytes at two addresses; strides from row to row in bytes."""

    target: int
    source: int
    rows: int
    length: int
    target_stride: int
    source_stride: int

    @property
    def word(self) -> int:
        numbers = self.target | self.source | self.length
        if self.rows > 1:
            numbers |= self.target_stride | self.source_stride
        return next(word for word in _WORDS if numbers % word == 0)


class Copies:
    """Add pairs of equally shaped views of at most two dimensions, then `run` as often as needed.

    A storage may move between runs if `refresh` is called. `run` waits for nothing; on CUDA it is queued on the current stream.
    """

    def __init__(self):
        self._by_torch: list[tuple[Tensor, Tensor]] = []
        self._fused: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._by_kernel: list[tuple[Tensor, Tensor]] = []
        self._launches: list[_Launch] | None = None

    def add(self, target: Tensor, source: Tensor) -> None:
        if target.dtype != source.dtype:
            self._by_torch.append((target, source))
        elif target.is_cuda:
            _check(target, source)
            self._by_kernel.append((target, source))
            self._launches = None
        elif target.is_contiguous() and source.is_contiguous():
            # flat, since the fused copy wants equal strides and those of dimensions of size 1 are arbitrary
            self._fused[0].append(target.view(-1))
            self._fused[1].append(source.view(-1))
        else:
            self._by_torch.append((target, source))

    def run(self) -> None:
        for target, source in self._by_torch:
            target.copy_(source, non_blocking=True)
        if self._fused[0]:
            torch._foreach_copy_(*self._fused)
        if self._launches is None:
            self._launches = _launches(self._by_kernel)
        for launch in self._launches:
            launch.run()

    def refresh(self) -> None:
        """The views' storages have moved."""
        for launch in self._launches or ():
            launch.refresh()

    def table_bytes(self) -> int:
        """Device memory of the kernel's tables."""
        return sum(launch.table.nbytes + launch.programs.nbytes for launch in self._launches or ())


def _check(target: Tensor, source: Tensor) -> None:
    if target.shape != source.shape or target.dim() > 2:
        raise ValueError(f"cannot copy {tuple(source.shape)} to {tuple(target.shape)}: equal shapes of at most 2 dimensions")
    gaps = any(tensor.stride(-1) != 1 for tensor in (target, source) if not tensor.is_contiguous())
    if gaps or target.numel() * target.itemsize > _MOST_BYTES:
        raise ValueError(
            f"cannot copy {tuple(source.shape)} elements at strides {source.stride()} to {target.stride()}: rows without gaps,"
            f" of at most {_MOST_BYTES} bytes in all"
        )


def _rows(target: Tensor, source: Tensor) -> _Rows:
    size = target.itemsize
    both = target.data_ptr(), source.data_ptr()
    if target.is_contiguous() and source.is_contiguous():
        return _Rows(*both, 1, target.numel() * size, 0, 0)
    rows, length = target.shape
    return _Rows(*both, rows, length * size, target.stride(0) * size, source.stride(0) * size)


class _Launch(NamedTuple):
    """The kernel's arguments for copies of one word size."""

    word: int
    table: Tensor  # int64 [copies, 6]: _Rows, all but the addresses counted in words
    programs: Tensor  # int32 [programs, 2]: the copy and the program's number within it
    views: list[tuple[Tensor, Tensor]]

    def run(self) -> None:
        from hybridflow.resharding.copy_kernel import launch

        launch(self.word, self.table, self.programs, PROGRAM_BYTES)

    def refresh(self) -> None:
        addresses = [(target.data_ptr(), source.data_ptr()) for target, source in self.views]
        self.table[:, :2] = torch.tensor(addresses, dtype=torch.int64)


def _launches(views: list[tuple[Tensor, Tensor]]) -> list[_Launch]:
    by_word: dict[int, list[tuple[_Rows, tuple[Tensor, Tensor]]]] = defaultdict(list)
    for pair in views:
        rows = _rows(*pair)
        by_word[rows.word].append((rows, pair))
    launches = []
    for word, group in by_word.items():
        device = group[0][1][0].device
        table = torch.tensor([rows for rows, _ in group], dtype=torch.int64)
        table[:, 3:] //= word
        counts = (table[:, 2] * table[:, 3] * word + PROGRAM_BYTES - 1) // PROGRAM_BYTES
        number = torch.repeat_interleave(torch.arange(len(group)), counts)
        within = torch.arange(len(number)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        programs = torch.stack([number, within], dim=1).to(torch.int32)
        launches.append(_Launch(word, table.to(device), programs.to(device), [pair for _, pair in group]))
    return launches
