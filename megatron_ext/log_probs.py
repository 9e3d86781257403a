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

        largest, total, weighted = _statistics(logits, valid, temperature)
        own = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
        drop = (own - largest).masked_fill_(own.isneginf(), 0.0)  # of a rank with nothing but padding: its sums are 0
        shrink = drop.exp()
        at_label = logits.gather(1, local[:, None]).squeeze(1).float() / temperature - largest
        sums = torch.stack([shrink * total, shrink * (weighted + drop * total), torch.where(mine, at_label, 0.0)])
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
        _gradient(logits, grad, ctx.valid, ctx.temperature, local, log_normalizer, scale, mine * scale)
        return grad, None, None, None, None, None


def _statistics(logits: Tensor, valid: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of z = logits[:, :valid] / temperature, by rows: the largest, and with z less it the sums of exp(z) and of exp(z) z.

    All [T] float32; minus infinity, 0 and 0 where `valid` is 0.
    """
    largest = logits.new_full((len(logits),), float("-inf"), dtype=torch.float32)
    total, weighted = torch.zeros_like(largest), torch.zeros_like(largest)
    if not valid:
        return largest, total, weighted
    if logits.is_cuda:
        from megatron_ext import log_prob_kernel  # Triton comes with torch for GPUs alone

        log_prob_kernel.statistics(logits, valid, temperature, largest, total, weighted)
        return largest, total, weighted
    for rows in _chunks(logits):
        z = _scaled(logits[rows, :valid], temperature)
        largest[rows] = z.amax(1)
        weights = z.sub_(largest[rows, None]).exp()
        total[rows] = weights.sum(1)
        weighted[rows] = weights.mul_(z).sum(1)
    return largest, total, weighted


def _gradient(
    logits: Tensor,
    grad: Tensor,
    valid: int,
    temperature: float,
    labels: Tensor,
    normalizer: Tensor,
    scale: Tensor,
    of_label: Tensor,
) -> None:
    """grad = -softmax(logits[:, :valid] / temperature) x scale, plus `of_label` at the label's column; 0 from `valid` on.

    By rows: `normalizer` is the logsumexp over all ranks, `scale` the gradient on the log-prob over the temperature, `of_label`
    the same, or 0 where the label is another rank's. `grad` may be `logits`.
    """
    if logits.is_cuda:
        from megatron_ext import log_prob_kernel

        log_prob_kernel.gradient(logits, grad, valid, temperature, labels, normalizer, scale, of_label)
        return
    for rows in _chunks(logits):
        if valid:
            z = _scaled(logits[rows, :valid], temperature)
            part = z.sub_(normalizer[rows, None]).exp_().mul_(-scale[rows, None])
            grad[rows, :valid] = part.scatter_add_(1, labels[rows, None], of_label[rows, None])
        grad[rows, valid:] = 0


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of rows whose float32 copy stays within CHUNK_ELEMENTS."""
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature as a float32 copy, also of float32: the caller goes on in place."""
    return logits.to(torch.float32, copy=True).div_(temperature)
