"""The plan's promises over random models and random pairs of layouts, all ranks in one process.

Both sides are written out by hand (`shards.py`), each element of the model as a number of its own, so that neither the values
nor the bounds come from a tile map. The least that a rank must receive is what it needs and does not hold. The least that the
busiest sender must send follows from Hall's theorem for fractional assignments: the largest average, over all sets of ranks,
of what only ranks of the set can send.
"""

import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.resharding.plan import Plan, make_plan
from hybridflow.rollout import tiles as rollout
from megatron_ext import weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split
from megatron_ext.tiles import as_index
from tests import hf_models
from tests.resharding.shards import training_shard, vllm_shard

ITEMSIZE = 2
UNPACKED_FROM = 64  # bytes


@dataclass(frozen=True)
class World:
    """A model, a pair of layouts, and where its ranks are."""

    fields: dict
    layout: Layout
    rollout_tp: int
    expert_parallel: bool
    ranks_per_node: int

    def plans(self) -> list[Plan]:
        hf, ranks = HFConfig.from_dict(self.fields), range(self.layout.world_size)
        sources = [weights.tile_map(hf, self.layout, r) for r in ranks]
        destinations = [rollout.tile_map(hf, self.rollout_tp, r % self.rollout_tp, self.expert_parallel) for r in ranks]
        return [make_plan(r, sources, destinations, ITEMSIZE, self.ranks_per_node, UNPACKED_FROM) for r in ranks]

    def shards(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """What the ranks hold in training and in the rollout: numbers from 1; padding is 0 or -1."""
        shapes, model, count = weights.hf_shapes(HFConfig.from_dict(self.fields)), {}, 1
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            model[name] = torch.arange(count, count + size).view(shape)
            count += size
        ranks = range(self.layout.world_size)
        training = [training_shard(model, self.fields, self.layout, r) for r in ranks]
        tp = self.rollout_tp
        return training, [vllm_shard(model, self.fields, tp, r % tp, self.expert_parallel) for r in ranks]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def models(draw: st.DrawFn) -> dict:
    heads = draw(st.sampled_from([4, 8]))
    changes = {
        "hidden_size": draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.sampled_from([16, 24])),
        "num_hidden_layers": draw(st.integers(1, 6)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from(divisors(heads))),
        "head_dim": draw(st.sampled_from([2, 4])),
    }
    family = draw(st.sampled_from(list(hf_models.ARCHITECTURES)))
    if family == "qwen3_moe":
        changes |= {"num_experts": draw(st.sampled_from([4, 6, 8])), "moe_intermediate_size": 8}
    return hf_models.config(family, draw(st.booleans()), draw(st.integers(1, 300)), **changes)


@st.composite
def splits(draw: st.DrawFn, layers: int, chunks: int) -> Split:
    """Layers split as the layout derives it, or at random with every chunk but the first and the last above 0."""
    inner = max(0, chunks - 2)
    if draw(st.booleans()) or layers < inner:
        return Split()
    cuts = sorted(draw(st.lists(st.integers(0, layers - inner), min_size=chunks - 1, max_size=chunks - 1)))
    counts = [b - a for a, b in itertools.pairwise([0, *cuts, layers - inner])]
    return Split(tuple(n + (0 < i < chunks - 1) for i, n in enumerate(counts)))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    fields = draw(models())
    hf = HFConfig.from_dict(fields)
    ranks_per_node = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    size = ranks_per_node * draw(st.sampled_from([n for n in (1, 2, 3, 4) if n * ranks_per_node <= 12]))
    expert_parallel = hf.is_moe and draw(st.booleans())
    fits = [n for n in divisors(ranks_per_node) if rollout._splits(hf, n, rollout._split_evenly(hf, expert_parallel))]
    rollout_tp = draw(st.sampled_from(fits))
    tp = draw(st.sampled_from([n for n in divisors(size) if hf.num_kv_heads % n == 0 and hf.intermediate_size % n == 0]))
    pp = draw(st.sampled_from([n for n in divisors(size // tp) if n <= hf.num_layers]))
    cp = draw(st.sampled_from(divisors(size // tp // pp)))
    vpp = draw(st.sampled_from([n for n in (1, 2) if n == 1 or pp > 1 and pp * n <= hf.num_layers]))
    ep = draw(st.sampled_from([n for n in divisors(size // pp) if hf.num_experts % n == 0] if hf.is_moe else [1]))
    etp = draw(
        st.sampled_from([n for n in divisors(size // pp // ep) if hf.moe_intermediate_size % n == 0] if hf.is_moe else [1])
    )
    layout = Layout(size, tp, pp, vpp, cp, ep, etp, split=draw(splits(hf.num_layers, pp * vpp)))
    return World(fields, layout, rollout_tp, expert_parallel, ranks_per_node)


def missing(needed: dict[str, Tensor], held: dict[str, Tensor]) -> np.ndarray:
    """The elements that are needed and not held."""
    wanted, present = (np.concatenate([t.flatten().numpy() for t in side.values()]) for side in (needed, held))
    return wanted[(wanted > 0) & ~np.isin(wanted, present)]


def check_every_element_once(plans: list[Plan], training: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """Carry the plans out; what is sent comes from the sender's plan, where it goes to from the receiver's."""
    for rank, plan in enumerate(plans):
        got = {name: torch.full_like(tensor, -1) for name, tensor in expected[rank].items()}
        times = {name: torch.zeros_like(tensor) for name, tensor in got.items()}
        arriving = [(rank, copy.source, copy.destination) for copy in plan.local]
        for peer, pieces in plan.receives.items():
            arriving += [(peer, sent, piece) for sent, piece in zip(plans[peer].sends[rank], pieces, strict=True)]
        for peer, source, destination in arriving:
            assert source.shape == destination.shape
            at = as_index(destination.slices)
            got[destination.name][at] = training[peer][source.name][as_index(source.slices)]
            times[destination.name][at] += 1
        for name, tensor in expected[rank].items():
            assert torch.equal(got[name], tensor), (rank, name)
            assert torch.equal(times[name], (tensor > 0).long()), (rank, name)
        assert set(plan.sends) == {other.rank for other in plans if rank in other.receives}


def check_unpacked(plans: list[Plan], training: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """Both ends agree on what goes unpacked: what is contiguous in both parameters and not too small."""
    for plan in plans:
        for peer, pieces in plan.receives.items():
            pair = peer, plan.rank
            assert plans[peer].unpacked[pair] == plan.unpacked[pair]
            for index, (sent, piece) in enumerate(zip(plans[peer].sends[plan.rank], pieces, strict=True)):
                ends = (training[peer][sent.name], sent), (expected[plan.rank][piece.name], piece)
                large = ITEMSIZE * piece.numel >= UNPACKED_FROM
                whole_rows = all(piece.shape[1:] == tensor.shape[1:] for tensor, piece in ends)
                assert (index in plan.unpacked[pair]) == (large and whole_rows)
                if index in plan.unpacked[pair]:
                    assert all(tensor.contiguous()[as_index(piece.slices)].is_contiguous() for tensor, piece in ends)


def check_sizes(plans: list[Plan]) -> None:
    """What the plans say of all ranks is what is in them."""
    sent = [ITEMSIZE * sum(piece.numel for pieces in plan.sends.values() for piece in pieces) for plan in plans]
    received = [ITEMSIZE * sum(piece.numel for pieces in plan.receives.values() for piece in pieces) for plan in plans]
    local = [ITEMSIZE * sum(copy.numel for copy in plan.local) for plan in plans]
    messages = [pieces for plan in plans for pieces in plan.sends.values()]
    for plan in plans:
        assert (list(plan.sent_bytes), list(plan.received_bytes), list(plan.local_bytes)) == (sent, received, local)
        assert plan.max_peers == max(len(p.sends) + len(p.receives) for p in plans)
        largest = max((sum(piece.numel for piece in pieces) for pieces in messages), default=0)
        assert plan.max_message_bytes == ITEMSIZE * largest


def least_of_the_busiest(world: World, training: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> float:
    """Elements that the busiest rank must send at least, if ranks of a node are asked first; see the module's docstring."""
    size, per_node = world.layout.world_size, world.ranks_per_node
    holders = np.zeros(1 + max(int(t.max()) for side in expected for t in side.values() if t.numel()), np.int64)
    for rank, shard in enumerate(training):
        for tensor in shard.values():
            holders[tensor.flatten().numpy()] |= 1 << rank
    demand: Counter[int] = Counter()
    for rank in range(size):
        can = holders[missing(expected[rank], training[rank])]
        node = ((1 << per_node) - 1) << (rank // per_node * per_node)
        values, counts = np.unique(np.where(can & node, can & node, can), return_counts=True)
        demand.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    sets = np.arange(1, 1 << size)
    only = sum((np.where(can & ~sets, 0, count) for can, count in demand.items()), np.zeros(len(sets)))
    return float((only / np.bitwise_count(sets)).max())


def least_over_groupings(world: World, training: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> int:
    """Elements received in all when each node's rollout shards are dealt to its ranks in the best way: by dynamic programming
    over the sets of shards that the node's first ranks have taken."""
    total = 0
    for first in range(0, world.layout.world_size, world.ranks_per_node):
        node = range(first, first + world.ranks_per_node)
        cost = [[len(missing(expected[other], training[rank])) for other in node] for rank in node]
        best = {0: 0}
        for row in cost:
            after: dict[int, int] = {}
            for taken, so_far in best.items():
                for column, more in enumerate(row):
                    if not taken >> column & 1:
                        key = taken | 1 << column
                        after[key] = min(after.get(key, so_far + more), so_far + more)
            best = after
        total += best[(1 << world.ranks_per_node) - 1]
    return total


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(worlds())
def test_random_models_and_layouts(world: World):
    note(f"{world.layout.describe()} -> TP{world.rollout_tp}")
    plans, (training, expected) = world.plans(), world.shards()
    check_every_element_once(plans, training, expected)
    check_sizes(plans)
    check_unpacked(plans, training, expected)
    least = [ITEMSIZE * len(missing(needed, held)) for needed, held in zip(expected, training, strict=True)]
    assert list(plans[0].received_bytes) == least
    assert sum(plans[0].least_received_bytes) == ITEMSIZE * least_over_groupings(world, training, expected)
    optimum = ITEMSIZE * least_of_the_busiest(world, training, expected)
    row = ITEMSIZE * max(world.fields["hidden_size"], world.fields["intermediate_size"])  # messages are cut between rows
    assert max(plans[0].sent_bytes) <= 1.1 * optimum + row


SIZES = [(4, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 1), (1, 1)]


@pytest.mark.parametrize("rollout_tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("tp", "pp"), SIZES, ids=[f"TP{tp}PP{pp}" for tp, pp in SIZES])
def test_the_best_grouping_receives_what_the_papers_formula_says(tp: int, pp: int, rollout_tp: int):
    """(tp - t_g p_g) / (t_g p_g t p) of the model where t_g divides t (HybridFlow, EuroSys 2025, section 5.3): all that a rank
    needs, less its training shard. Where t divides t_g, its rollout shard of its own stage is part of that shard instead.
    Norms, which the paper leaves out, are whole on every rank of a stage."""
    hf = HFConfig.from_dict(hf_models.config("llama", False, 512, num_key_value_heads=8))
    sizes = {name: torch.Size(shape).numel() for name, shape in weights.hf_shapes(hf).items()}
    norms = {name: size for name, size in sizes.items() if "norm" in name}
    split = sum(sizes.values()) - sum(norms.values())
    sources = [weights.tile_map(hf, Layout(8, tp, pp), r) for r in range(8)]
    destinations = [rollout.tile_map(hf, rollout_tp, r % rollout_tp) for r in range(8)]
    plan = make_plan(0, sources, destinations, ITEMSIZE, 8)
    if rollout_tp <= tp:
        per_rank = split * (tp * pp - rollout_tp) // (rollout_tp * tp * pp)
    else:
        per_rank = split * (pp - 1) // (rollout_tp * pp)
    of_stage = sum(norms.values()) - norms["model.norm.weight"]
    away = [of_stage * (pp - 1) // pp + (norms["model.norm.weight"] if rank * pp // 8 < pp - 1 else 0) for rank in range(8)]
    assert list(plan.least_received_bytes) == [ITEMSIZE * (per_rank + norm) for norm in away]


QWEN3_30B_A3B = json.loads((Path(__file__).parents[2] / "configs" / "models" / "qwen3_30b_a3b.json").read_text())


def shares_of_a_stage(hf: HFConfig, stage: int) -> int:
    """Elements of a PP2 stage that TP4 x EP8 rank r and TP8 rollout rank r % 8 have in common, for r = 0 (and 7)."""
    layers, eighth = hf.num_layers // 2, hf.moe_intermediate_size // 8
    experts = hf.num_experts // 8 * 3 * eighth * hf.hidden_size  # an eighth of each that the rank holds whole
    attention = (2 * hf.num_heads // 8 + 2) * hf.head_dim * hf.hidden_size  # queries and their output; a key and a value head
    whole = 2 * hf.hidden_size + 2 * hf.head_dim + hf.num_experts * hf.hidden_size
    return layers * (experts + attention + whole) + (hf.hidden_size if stage else 0)


@pytest.mark.parametrize(("layout", "rollout_tp"), [(Layout(1024, 4, 2, ep=8), 8), (Layout(1024, 4, 2, ep=8), 4)])
def test_1024_ranks_of_a_30b_model_with_experts(layout: Layout, rollout_tp: int):
    """The plan and the tile maps it is made from, in seconds of a core: a busy machine takes longer, not more of them."""
    hf = HFConfig.from_dict(QWEN3_30B_A3B)
    weights._tiles.cache_clear()
    rollout.tile_map.cache_clear()
    start = time.process_time()
    sources = [weights.tile_map(hf, layout, r) for r in range(1024)]
    destinations = [rollout.tile_map(hf, rollout_tp, r % rollout_tp) for r in range(1024)]
    plan = make_plan(515, sources, destinations, ITEMSIZE, 8)
    assert time.process_time() - start < 10
    needed = sum(tile.numel for held in destinations[0].values() for tile in held)
    assert plan.local_bytes[0] + plan.received_bytes[0] == ITEMSIZE * needed
    if rollout_tp == 8:
        embedding = ITEMSIZE * 18_992 * hf.hidden_size  # an eighth of it, which lies in the first quarter of the padded one
        assert plan.local_bytes[0] == ITEMSIZE * shares_of_a_stage(hf, 0) + embedding
    assert max(plan.sent_bytes) <= 1.1 * sum(plan.sent_bytes) / 1024  # the optimum is not below the mean
    assert plan.max_peers < 64
