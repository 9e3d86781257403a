"""The kernels behind `log_probs` on CUDA: one pass over a rank's logits forward, one backward, with nothing in between.

In torch the same takes a dozen passes over float32 copies, which cost a 7B model with 152k words as much as two of its layers.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # columns that a program holds at a time
_WARPS = 8


@triton.jit
def _statistics(logits, stride, valid, temperature, largest, total, weighted, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # each lane keeps sums of its own, relative to the largest it saw; they come together behind the loop
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    exps = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)  # of exp(z - top) (z - top)
    for start in range(0, valid, BLOCK):
        inside = start + columns < valid
        z = tl.load(logits + row * stride + start + columns, mask=inside, other=0.0).to(tl.float32) / temperature
        higher = tl.maximum(top, tl.where(inside, z, top))
        drop = tl.where(top > float("-inf"), top - higher, 0.0)  # of a lane's first value: its sums are 0
        shrink = tl.exp(drop)
        moments = shrink * (moments + drop * exps)
        exps = shrink * exps
        offset = tl.where(inside, z - higher, 0.0)
        weight = tl.where(inside, tl.exp(offset), 0.0)
        exps += weight
        moments += weight * offset
        top = higher
    highest = tl.max(top, 0)
    drop = tl.where(top > float("-inf"), top - highest, 0.0)
    shrink = tl.exp(drop)
    tl.store(largest + row, highest)
    tl.store(total + row, tl.sum(shrink * exps, 0))
    tl.store(weighted + row, tl.sum(shrink * (moments + drop * exps), 0))


@triton.jit
def _gradient(
    logits, stride, grad, grad_stride, width, valid, temperature, labels, normalizer, scale, of_label, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    z = tl.load(logits + row * stride + columns, mask=columns < valid, other=0.0).to(tl.float32) / temperature
    value = -tl.exp(z - tl.load(normalizer + row)) * tl.load(scale + row)
    value = tl.where(columns == label, value + tl.load(of_label + row), value)
    value = tl.where(columns < valid, value, 0.0)
    tl.store(grad + row * grad_stride + columns, value.to(grad.dtype.element_ty), mask=columns < width)


def statistics(logits: Tensor, valid: int, temperature: float, largest: Tensor, total: Tensor, weighted: Tensor) -> None:
    """Fill `largest`, `total` and `weighted` [T] float32: see `log_probs._statistics`. `valid` > 0."""
    _statistics[(len(logits),)](
        logits, logits.stride(0), valid, temperature, largest, total, weighted, BLOCK=_BLOCK, num_warps=_WARPS
    )


def gradient(
    logits: Tensor,
    grad: Tensor,
    valid: int,
    temperature: float,
    labels: Tensor,
    normalizer: Tensor,
    scale: Tensor,
    of_label: Tensor,
) -> None:
    """Fill `grad`, which may be `logits`: see `log_probs._gradient`."""
    width = logits.shape[1]
    _gradient[(len(logits), triton.cdiv(width, _BLOCK))](
        logits,
        logits.stride(0),
        grad,
        grad.stride(0),
        width,
        valid,
        temperature,
        labels,
        normalizer,
        scale,
        of_label,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
