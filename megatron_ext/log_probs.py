"""Log-probs and entropy from logits that are split over the vocabulary, without gathering them.

With z = logits / temperature over the true vocabulary: log p(label) = z[label] - logsumexp(z), and the entropy is
logsumexp(z) - sum(softmax(z) z). Two reductions over the TP group, of one and of three numbers per token.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24  # of a float32 temporary: 64 MiB


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels, and the entropy of each token's distribution.

    Args:
        logits: [T, padded vocabulary / tp], this rank's columns, any floating dtype.
        labels: [T] int64, the same on all ranks of the group, all below vocab_size.
        vocab_size: the true size; padded columns beyond it take no part and get a gradient of zero.
        temperature: divides the logits.
        overwrite_logits: the backward pass may write the gradient over `logits`, which saves as much memory as they take.
            Safe where nothing else reads them any more, as with a linear layer's output.

    Returns:
        log_probs [T] float32 with gradient, entropy [T] float32 without; the same on all ranks of the group.
    """
    return _VocabParallelLogProbs.apply(logits, labels, vocab_size, temperature, tp_group, overwrite_logits)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab_size, temperature, tp_group, overwrite_logits):
        width = logits.shape[1]
        first = tp_group.rank() * width
        valid = min(max(vocab_size - first, 0), width)
        local = labels - first
        mine = (local >= 0) & (local < valid)
        local = torch.where(mine, local, 0)

        largest = logits.new_full((len(logits),), float("-inf"), dtype=torch.float32)
        if valid:
            largest = logits[:, :valid].amax(1).float() / temperature
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)

        sums = logits.new_zeros((3, len(logits)), dtype=torch.float32)  # exp(z), exp(z) z, z[label]; z less its maximum
        for rows in _chunks(logits) if valid else ():
            z = _scaled(logits[rows, :valid], temperature).sub_(largest[rows, None])
            sums[2, rows] = torch.where(mine[rows], z.gather(1, local[rows, None]).squeeze(1), 0.0)
            weights = z.exp()
            sums[0, rows] = weights.sum(1)
            sums[1, rows] = weights.mul_(z).sum(1)
        dist.all_reduce(sums, group=tp_group)

        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, mine, largest + log_total)
        ctx.valid, ctx.temperature, ctx.overwrite = valid, temperature, overwrite_logits
        ctx.mark_non_differentiable(entropy)
        return sums[2] - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, _):
        logits, local, mine, log_normalizer = ctx.saved_tensors
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        scale = grad_log_probs.float() / ctx.temperature
        for rows in _chunks(logits):
            if ctx.valid:
                z = _scaled(logits[rows, : ctx.valid], ctx.temperature)
                part = z.sub_(log_normalizer[rows, None]).exp_().mul_(-scale[rows, None])  # -softmax x gradient
                part.scatter_add_(1, local[rows, None], (mine[rows] * scale[rows])[:, None])
                grad[rows, : ctx.valid] = part
            grad[rows, ctx.valid :] = 0
        return grad, None, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of rows whose float32 copy stays within CHUNK_ELEMENTS."""
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature as a float32 copy, also of float32: the caller goes on in place."""
    return logits.to(torch.float32, copy=True).div_(temperature)
