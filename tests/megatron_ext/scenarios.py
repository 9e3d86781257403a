"""What several tests of megatron_ext run on each rank: a filled model, ragged data, and HF's answer to the same data.

Imported by the ranks themselves, so nothing heavy is imported at the top.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.layout import Layout

LENGTHS = [5, 17, 9, 2, 26, 12, 7, 30, 3, 21]  # of the sequences of a step, over all data-parallel ranks
ROW = 64  # tokens of a packed micro-batch


@dataclass
class Role:
    """A Megatron model with an HF twin of the same weights."""

    state: object
    layout: Layout
    hf: object
    config: object
    chunks: list
    wrapped: list


def make_role(
    reference: torch.nn.Module,
    layout: Layout,
    dtype=torch.float32,
    name="actor",
    seed=1,
    spec="local",
    overlap_grad_reduce=False,
    ranks=None,
    **config,
) -> Role | None:
    """Build, fill and wrap; collective over the world. `spec` None: what the device's own would be. `ranks`: where it lives, if
    not on all; None elsewhere."""
    from megatron_ext.model import build_model, transformer_config
    from megatron_ext.optimizer import wrap
    from megatron_ext.parallel import ParallelState
    from tests.megatron_ext.hf_layout import fill, hf_config

    hf = hf_config(reference)
    state = ParallelState(name, layout, seed, ranks)
    if state.rank is None:
        return None
    with state.current():
        settings = transformer_config(hf, layout, dtype, **config)
        chunks = build_model(hf, layout, settings, spec)
        fill(chunks, reference.state_dict(), hf, layout, state.rank)
        wrapped = wrap(chunks, settings, overlap_grad_reduce)
    return Role(state, layout, hf, settings, chunks, wrapped)


def sequences(vocab_size: int, lengths=LENGTHS, seed: int = 5) -> list[dict[str, Tensor]]:
    """Random sequences, each with a mask of the tokens that count and a weight per token."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "tokens": torch.randint(0, vocab_size, (n,), generator=generator),
            "loss_mask": torch.rand(n, generator=generator) > 0.25,
            "advantages": torch.randn(n, generator=generator),
        }
        for n in lengths
    ]


def share(items: list, layout: Layout, dp: int) -> list:
    """Unequal shares over data-parallel ranks: the first gets two thirds of the sequences, the others take turns."""
    if layout.dp == 1:
        return items
    cut = len(items) * 2 // 3
    return items[:cut] if dp == 0 else items[cut:][dp - 1 :: layout.dp - 1]


def micro_batches(items: list, packed: bool, layout: Layout, count: int = 0) -> list:
    """Packed greedily in order, or one sequence each; filled up."""
    from megatron_ext.step import fill_up, pack

    groups = [[]]
    for item in items:
        if groups[-1] and (not packed or sum(len(s["tokens"]) for s in groups[-1]) + len(item["tokens"]) > ROW):
            groups.append([])
        groups[-1].append(item)
    return fill_up([pack(group, ROW) for group in groups], layout, count)


def gradients(role: Role) -> dict[str, Tensor]:
    """This rank's reduced gradients by name. Each data-parallel rank holds a part of them: the parts are gathered first."""
    from tests.megatron_ext.hf_layout import named_parameters

    for wrapped in role.wrapped:
        for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                parts = bucket.grad_data.chunk(group.size())
                torch.distributed.all_gather(list(parts), parts[group.rank()].clone(), group=group)
    return {name: parameter.main_grad for name, parameter in named_parameters(role.wrapped)}


def policy_loss(log_probs: Tensor, entropy: Tensor, micro_batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    mask = micro_batch.fields["loss_mask"]
    total = -(log_probs * micro_batch.fields["advantages"] * mask).sum()
    return total, mask.sum(), {"loss": total.detach(), "count": mask.sum(), "entropy": (entropy * mask).sum()}


def hf_log_probs(reference: torch.nn.Module, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [L - 1] of the tokens after the first."""
    logits = reference(tokens[None]).logits[0, :-1].float() / temperature
    table = logits.log_softmax(-1)
    return table.gather(1, tokens[1:, None]).squeeze(1), -(table.exp() * table).sum(-1)


def hf_gradients(reference: torch.nn.Module, items: list, temperature: float) -> tuple[float, float, dict[str, Tensor]]:
    """The loss per token, the sum of entropies, and the gradients of the loss, one sequence at a time."""
    reference.zero_grad()
    count = sum(item["loss_mask"][1:].sum() for item in items)
    loss = entropies = 0.0
    for item in items:
        if len(item["tokens"]) > 1:
            log_probs, entropy = hf_log_probs(reference, item["tokens"], temperature)
            part = -(log_probs * item["advantages"][1:] * item["loss_mask"][1:]).sum() / count
            part.backward()
            loss += part.item()
            entropies += (entropy * item["loss_mask"][1:]).sum().item()
    return loss, entropies, {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}
