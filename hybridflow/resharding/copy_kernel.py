"""The kernel behind `Copies` on CUDA: every program copies one block of one of many rectangles."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_BYTES = 16 << 10  # in registers of a program at a time
_WARPS = 8


@triton.jit
def _copy(table, programs, WORD: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0)
    copy = tl.load(programs + 2 * program)
    within = tl.load(programs + 2 * program + 1)
    entry = table + 6 * copy.to(tl.int64)
    rows, length = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32) * GROUP
    target_stride, source_stride = tl.load(entry + 4) * GROUP, tl.load(entry + 5) * GROUP
    pointer: tl.constexpr = tl.pointer_type(WORD)
    aligned: tl.constexpr = GROUP * WORD.primitive_bitwidth // 8
    target = tl.multiple_of(tl.load(entry), aligned).to(pointer)
    source = tl.multiple_of(tl.load(entry + 1), aligned).to(pointer)
    for block in range(BLOCKS):
        at = (within * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        row = at // length
        column = at - row * length
        # all numbers are multiples of GROUP, so that GROUP neighbours lie in one row and move in one access
        read = tl.max_contiguous(tl.multiple_of(row.to(tl.int64) * source_stride + column, GROUP), GROUP)
        write = tl.max_contiguous(tl.multiple_of(row.to(tl.int64) * target_stride + column, GROUP), GROUP)
        inside = at < rows * length
        tl.store(target + write, tl.load(source + read, mask=inside), mask=inside)


def launch(word: int, table: Tensor, programs: Tensor, program_bytes: int) -> None:
    """Run all copies of one word size (bytes: 16, 8, 4, 2 or 1) on the current stream; see `copies._Launch`."""
    element = min(word, 8)  # a word of 16 bytes is two elements that move together
    block = _BLOCK_BYTES // element
    _copy[(len(programs),)](
        table,
        programs,
        WORD={8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[element],
        GROUP=word // element,
        BLOCK=block,
        BLOCKS=program_bytes // _BLOCK_BYTES,
        num_warps=_WARPS,
    )
