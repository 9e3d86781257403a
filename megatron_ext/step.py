"""Micro-batches through Megatron's own pipeline schedule, forward only or forward and backward.

A micro-batch is one packed (THD) row. All micro-batches of a call are padded to one length, so that every transfer between
stages has a known shape. A policy's outputs are log-probs and entropies, a value model's are values; a loss is a function of
them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext import device
from megatron_ext.layers import PackedSequences
from megatron_ext.layout import Layout
from megatron_ext.log_probs import vocab_parallel_log_probs

PADDING_SEQUENCE = 256  # padding is cut into sequences of at most this many tokens: attention is quadratic in their length


@dataclass
class MicroBatch:
    """One packed row of T tokens: the sequences, then padding as sequences of its own."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each sequence
    labels: Tensor  # [T] int64: the next token of the sequence; 0 at a sequence's last token and in padding
    packed: PackedSequences
    lengths: list[int]  # of the sequences, padding left out
    real: bool = True  # False: fills up the schedule only; no loss, no outputs
    fields: dict[str, Tensor] = field(default_factory=dict)  # [T] each, aligned with labels; 0 where labels stand for nothing

    @property
    def cu_seqlens(self) -> Tensor:
        """Where the sequences start, padding's included, int32, from 0 to T."""
        return self.packed.cu_seqlens_q

    @property
    def max_seqlen(self) -> int:
        return self.packed.max_seqlen_q

    @property
    def segments(self) -> Tensor:
        """[T] int64: which sequence a token belongs to, padding's counted on."""
        lengths = self.cu_seqlens.diff().long()
        index = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(index, lengths, output_size=len(self.tokens))

    def rows(self, values: Tensor) -> list[Tensor]:
        """`values` [T], aligned with labels, as one tensor per sequence, aligned with its tokens: 0 for the first token."""
        moved = values.new_zeros(sum(self.lengths))
        moved[1:] = values[: len(moved) - 1]
        moved[torch.tensor([0, *accumulate(self.lengths[:-1])], device=values.device)] = 0
        return list(moved.split(self.lengths))

    def last(self, values: Tensor) -> list[Tensor]:
        """Of `values` [T], aligned with tokens, those at the last token of every sequence, [1] each."""
        return [values[end - 1 : end] for end in accumulate(self.lengths)]


LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Tensor, dict[str, Tensor]]]
ValueLossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, dict[str, Tensor]]]
# (model, what its last stage returns, micro-batch) -> vectors [T], aligned with labels
Outputs = Callable[[torch.nn.Module, Tensor, MicroBatch], tuple[Tensor, ...]]


def pack(sequences: Sequence[Mapping[str, Tensor]], length: int, on: torch.device | None = None) -> MicroBatch:
    """One row of `length` tokens from sequences, each a dict of `tokens` [L] and fields [L] aligned with the tokens.

    Args:
        sequences: one or more, all with the same fields, each of at least one token.
        length: T, the same for all micro-batches of a call and a multiple of tp under sequence parallelism.
        on: where the tensors go; the current device by default.

    Raises:
        ValueError: there is no sequence, one is empty, or they don't fit.
    """
    lengths = [len(sequence["tokens"]) for sequence in sequences]
    used = sum(lengths)
    if not lengths or min(lengths) == 0:
        raise ValueError(f"a micro-batch of sequences of {lengths} tokens: it needs at least one, none of them empty")
    if used > length:
        raise ValueError(f"sequences of {used} tokens do not fit into a micro-batch of {length}: raise micro_batch_tokens")
    on = on or device.current()
    padding = [PADDING_SEQUENCE] * ((length - used) // PADDING_SEQUENCE)
    if (length - used) % PADDING_SEQUENCE:
        padding.append((length - used) % PADDING_SEQUENCE)
    positions = torch.cat([torch.arange(n) for n in lengths + padding])
    names = [name for name in sequences[0] if name != "tokens"]
    return MicroBatch(
        tokens=_row([sequence["tokens"] for sequence in sequences], length, shifted=False).to(on),
        positions=positions.to(on),
        labels=_row([sequence["tokens"] for sequence in sequences], length, shifted=True).to(on),
        packed=PackedSequences.of(lengths + padding, on),
        lengths=lengths,
        fields={name: _row([sequence[name] for sequence in sequences], length, shifted=True).to(on) for name in names},
    )


def fill_up(micro_batches: Sequence[MicroBatch], layout: Layout, count: int = 0) -> list[MicroBatch]:
    """`micro_batches`, followed by as many fill-ups as make them `count` at least and a number that the schedule takes.

    The number must be equal on all data-parallel ranks, so pass the largest of theirs as `count`. A fill-up holds one real
    sequence, so that it runs like any other micro-batch.
    """
    if not micro_batches:
        raise ValueError("a data-parallel rank without a micro-batch cannot fill up the schedule: give each one sequence")
    missing = layout.schedulable(max(len(micro_batches), count)) - len(micro_batches)
    return [*micro_batches, *[_filler(micro_batches[0])] * missing]


def forward(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], temperature: float = 1.0
) -> list[dict[str, Tensor]] | None:
    """Log-probs and entropies of all sequences, without gradients.

    Returns:
        On the last stage, for each sequence in order, `log_probs` and `entropy` [L] float32 on the CPU: those of token t given
        the tokens before it, and 0 at token 0. None on the other stages.
    """
    return _forward(chunks, micro_batches, ("log_probs", "entropy"), partial(_log_probs, temperature=temperature))


def forward_values(chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]] | None:
    """Values of all sequences of a model with a value head, without gradients.

    Returns:
        As `forward`: `values` [L]. That of token t is what is expected before the token is chosen, from the tokens before it.
    """
    return _forward(chunks, micro_batches, ("values",), _values)


def forward_scores(chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]] | None:
    """Scores of all sequences of a model with a head of one number, without gradients.

    Returns:
        As `forward`: `scores` [1] for each sequence, what the head says at its last token.
    """
    return _forward(chunks, micro_batches, ("scores",), _values, MicroBatch.last)


def _forward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    names: Sequence[str],
    outputs: Outputs,
    rows_of: Callable[[MicroBatch, Tensor], list[Tensor]] = MicroBatch.rows,
) -> list[dict[str, Tensor]] | None:
    def keep(*columns_and_micro_batch):
        *columns, micro_batch = columns_and_micro_batch
        kept = micro_batch, *columns
        return columns[0].new_zeros(()), torch.zeros((), dtype=torch.int, device=columns[0].device), kept

    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()  # nothing is recomputed where nothing is kept
    with torch.no_grad():
        kept = _run(chunks, micro_batches, outputs, keep, forward_only=True)
    for chunk, was_training in zip(chunks, training, strict=True):
        chunk.train(was_training)
    if not _on_last_stage():
        return None
    rows = []
    for micro_batch, *values in kept:
        columns = (rows_of(micro_batch, value.cpu()) for value in values)
        rows += [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return rows


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    temperature: float = 1.0,
) -> dict[str, Tensor] | None:
    """Gradients of sum(loss) / sum(count) over all micro-batches and data-parallel ranks, into the parameters' main_grad.

    Args:
        chunks: wrapped by `optimizer.wrap`, gradients zeroed.
        micro_batches: the same number on all data-parallel ranks (`fill_up`).
        loss_function: (log_probs [T] with gradient, entropy [T], micro_batch) -> (sum of the loss, its count as an integer
            tensor, sums to report); called for real micro-batches only, on the last stage.

    Returns:
        On the last stage the reported sums, added up over this rank's micro-batches (names ending in `_max`: the largest);
        None on the other stages.
    """
    return _forward_backward(chunks, micro_batches, loss_function, partial(_log_probs, temperature=temperature))


def forward_backward_values(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], loss_function: ValueLossFunction
) -> dict[str, Tensor] | None:
    """`forward_backward` of a model with a value head: the loss is a function of (values [T] with gradient, micro_batch)."""
    return _forward_backward(chunks, micro_batches, loss_function, _values)


def _forward_backward(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], loss_function: Callable, outputs: Outputs
) -> dict[str, Tensor] | None:
    reports = _run(chunks, micro_batches, outputs, loss_function, forward_only=False)
    if not _on_last_stage():
        return None
    totals: dict[str, Tensor] = {}
    for report in reports:
        for name, value in report.items():
            merge = torch.maximum if name.endswith("_max") else torch.add
            totals[name] = merge(totals[name], value.detach()) if name in totals else value.detach()
    return totals


def _run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    outputs: Outputs,
    loss_function: Callable,
    forward_only: bool,
) -> list:
    """One pass of the schedule; what `loss_function` returned third for each real micro-batch, empty off the last stage."""
    config = get_model_config(chunks[0])
    length = len(micro_batches[0].tokens)
    if any(len(micro_batch.tokens) != length for micro_batch in micro_batches):
        raise ValueError(f"micro-batches of {sorted({len(m.tokens) for m in micro_batches})} tokens: pad them to one length")
    if config.sequence_parallel and length % config.tensor_model_parallel_size:
        raise ValueError(f"micro-batches of {length} tokens do not divide by tp={config.tensor_model_parallel_size}")
    iterators = [iter(micro_batches) for _ in chunks]
    one = len(chunks) == 1
    reports = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, outputs=outputs, loss_function=loss_function),
        data_iterator=iterators[0] if one else iterators,
        model=chunks[0] if one else list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=length,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return [report for report in reports if report is not None]


def _forward_step(iterator, model: torch.nn.Module, *, outputs: Outputs, loss_function: Callable):
    """What the schedule calls per micro-batch and chunk: the output, and the loss as a function of it."""
    micro_batch = next(iterator)
    output = model(micro_batch.tokens[None], micro_batch.positions[None], None, packed_seq_params=micro_batch.packed)

    def loss(last: Tensor) -> tuple[Tensor, Tensor, object]:
        columns = outputs(model, last, micro_batch)
        if micro_batch.real:
            total, count, report = loss_function(*columns, micro_batch)
            return total, count.to(torch.int), report
        return columns[0].sum() * 0.0, torch.zeros((), dtype=torch.int, device=last.device), None

    return output, loss


def _log_probs(model: torch.nn.Module, logits: Tensor, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    return vocab_parallel_log_probs(
        logits.squeeze(0),
        micro_batch.labels,
        _vocab_size(model),
        temperature,
        parallel_state.get_tensor_model_parallel_group(),
        overwrite_logits=True,
    )


def _values(model: torch.nn.Module, values: Tensor, micro_batch: MicroBatch) -> tuple[Tensor]:
    """What the head says at a token is about the next one, as labels are."""
    return (values.view(-1),)


def _vocab_size(model: torch.nn.Module) -> int:
    while not hasattr(model, "true_vocab_size"):
        model = model.module
    return model.true_vocab_size


def _on_last_stage() -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def _row(values: Sequence[Tensor], length: int, shifted: bool) -> Tensor:
    """The sequences' values one after the other in a row of zeros; shifted: each moved to the place of the token before."""
    joined = torch.cat(list(values))
    row = joined.new_zeros(length)
    if not shifted:
        row[: len(joined)] = joined
        return row
    row[: len(joined) - 1] = joined[1:]
    row[torch.tensor([*accumulate(len(value) for value in values)], device=row.device) - 1] = 0
    return row


def _filler(micro_batch: MicroBatch) -> MicroBatch:
    """The first sequence of a micro-batch, with its fields zero, in a row as long."""
    first = {name: torch.zeros_like(values[: micro_batch.lengths[0]]) for name, values in micro_batch.fields.items()}
    sequence = {"tokens": micro_batch.tokens[: micro_batch.lengths[0]], **first}
    filler = pack([sequence], len(micro_batch.tokens), on=micro_batch.tokens.device)
    filler.real = False
    return filler
