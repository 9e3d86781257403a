"""The plan's promises, checked over real and over random tile maps. Pure: no process is started."""

import itertools
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from hybridflow.resharding.cover import IncompleteSource, find_cover
from hybridflow.resharding.grouping import best_grouping
from hybridflow.resharding.plan import Plan, make_plan, merge
from hybridflow.resharding.rectangles import split, subtract, volume
from hybridflow.rollout import tiles as rollout
from megatron_ext import weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split
from megatron_ext.tiles import Tile, TileMap, as_index
from tests import hf_models

UNEVEN = [Layout(4, pp=2, split=Split((3, 1))), Layout(4, pp=4, split=Split((0, 3, 1, 0)))]
LAYOUTS = [Layout(4), Layout(4, tp=2, pp=2), Layout(4, pp=4), Layout(4, tp=4), Layout(4, pp=2), Layout(4, pp=2, vpp=2), *UNEVEN]


def config(family: str = "qwen2", tied: bool = True, **changes) -> HFConfig:
    return HFConfig.from_dict(hf_models.config(family, tied, **changes))


def maps(hf: HFConfig, layout: Layout, rollout_tp: int) -> tuple[list[TileMap], list[TileMap]]:
    ranks = range(layout.world_size)
    return [weights.tile_map(hf, layout, r) for r in ranks], [rollout.tile_map(hf, rollout_tp, r % rollout_tp) for r in ranks]


def plans(sources: list[TileMap], destinations: list[TileMap], ranks_per_node: int, itemsize: int = 4) -> list[Plan]:
    return [make_plan(rank, sources, destinations, itemsize, ranks_per_node) for rank in range(len(sources))]


def simulate(plans_: list[Plan], sources: list[TileMap], destinations: list[TileMap]) -> None:
    """Run the plans on arrays of global indices: every element of every destination tile is written once, and rightly."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tile in (t for m in destinations + sources for held in m.values() for t in held):
        stops = tuple(stop for _, stop in tile.hf_slices)
        shapes[tile.hf_name] = tuple(map(max, shapes.get(tile.hf_name, stops), stops))
    truth = {name: np.arange(np.prod(shape)).reshape(shape) + 7 * i for i, (name, shape) in enumerate(shapes.items())}
    held = [_fill(m, truth) for m in sources]
    for rank, plan in enumerate(plans_):
        expected = _fill(destinations[rank], truth)
        got = {name: np.full(array.shape, -1) for name, array in expected.items()}
        count = {name: np.zeros(array.shape, int) for name, array in expected.items()}
        arriving = [(rank, copy.source, copy.destination) for copy in plan.local]
        for peer, pieces in plan.receives.items():
            sent = plans_[peer].sends[rank]
            assert [piece.shape for piece in sent] == [piece.shape for piece in pieces]
            arriving += [(peer, a, b) for a, b in zip(sent, pieces, strict=True)]
        for peer, source, destination in arriving:
            at = as_index(destination.slices)
            got[destination.name][at] = held[peer][source.name][as_index(source.slices)]
            count[destination.name][at] += 1
        for name, array in expected.items():
            assert (got[name] == array).all(), (rank, name)
            assert (count[name] == (array >= 0)).all(), (rank, name)
        assert plan.received_bytes[rank] == sum(4 * volume(p.slices) for ps in plan.receives.values() for p in ps)
        assert plan.sent_bytes[rank] == sum(4 * volume(p.slices) for ps in plan.sends.values() for p in ps)
        assert plan.local_bytes[rank] == sum(4 * copy.numel for copy in plan.local)
    assert all(set(p.sends) == {q.rank for q in plans_ if p.rank in q.receives} for p in plans_)


def _fill(tiles: TileMap, truth: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, held in tiles.items():
        stops = [tuple(stop for _, stop in tile.local_slices) for tile in held]
        arrays[name] = np.full(tuple(map(max, zip(*stops, strict=True))) if stops else (0,), -1)
        for tile in held:
            arrays[name][as_index(tile.local_slices)] = truth[tile.hf_name][as_index(tile.hf_slices)]
    return arrays


@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_every_element_is_written_once(layout, rollout_tp):
    for family, tied, nodes in (("qwen2", True, 4), ("qwen3", False, 2), ("llama", True, 1)):
        sources, destinations = maps(config(family, tied), layout, rollout_tp)
        simulate(plans(sources, destinations, nodes), sources, destinations)


def test_replicated_kv_heads():
    """Eight rollout ranks share four KV heads; eight training ranks hold two of them each, or a part of a group."""
    hf = config(num_key_value_heads=4)
    for layout in (Layout(8, tp=2, pp=2), Layout(8, tp=8), Layout(8)):
        sources, destinations = maps(hf, layout, 8)
        simulate(plans(sources, destinations, 8), sources, destinations)


def random_partition(rng: random.Random, shape: tuple[int, ...], parts: int) -> list:
    """Cut a rectangle into disjoint ones at random."""
    pieces = [tuple((0, n) for n in shape)]
    while len(pieces) < parts:
        victim = pieces.pop(rng.randrange(len(pieces)))
        dims = [d for d, (a, b) in enumerate(victim) if b - a > 1]
        if not dims:
            pieces.append(victim)
            return pieces
        dim = rng.choice(dims)
        start, stop = victim[dim]
        cut = rng.randrange(start + 1, stop)
        pieces += [(*victim[:dim], (a, b), *victim[dim + 1 :]) for a, b in ((start, cut), (cut, stop))]
    return pieces


def random_maps(rng: random.Random, ranks: int, tensors: dict[str, tuple[int, ...]]) -> list[TileMap]:
    """Every rectangle of random partitions on one to three ranks; a second, other partition overlaps the first at times."""
    maps_: list[TileMap] = [{} for _ in range(ranks)]
    for name, shape in tensors.items():
        for partition in range(rng.choice([1, 1, 2])):
            for number, slices in enumerate(random_partition(rng, shape, rng.randrange(1, 6))):
                for rank in rng.sample(range(ranks), rng.randrange(1, 4)):
                    local = tuple((0, stop - start) for start, stop in slices)
                    maps_[rank][f"{name}.{partition}.{number}"] = [Tile(name, slices, local)]
    return maps_


@pytest.mark.parametrize("seed", range(30))
def test_random_maps(seed):
    rng = random.Random(seed)
    tensors = {f"t{i}": tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4))) for i in range(6)}
    sources, destinations = random_maps(rng, 6, tensors), random_maps(rng, 6, tensors)
    simulate(plans(sources, destinations, rng.choice([1, 2, 3, 6])), sources, destinations)


def test_equal_layouts_move_nothing_and_copy_whole_parameters():
    """TP4 with one KV head a rank: fused tensors have the same rows on both sides, one copy per parameter."""
    sources, destinations = maps(config(vocab_size=256), Layout(4, tp=4), 4)
    for plan in plans(sources, destinations, 4):
        assert not plan.sends and not plan.receives
        assert len(plan.local) == len(destinations[plan.rank])


def test_one_rank_copies_gate_and_up_at_once():
    sources, destinations = maps(config(), Layout(1), 1)
    (plan,) = plans(sources, destinations, 1)
    copies = Counter(copy.destination.name for copy in plan.local)
    assert copies["model.layers.0.mlp.gate_up_proj.weight"] == 1
    assert copies["model.layers.0.self_attn.qkv_proj.weight"] == 3 * hf_models.KV_HEADS  # rows interleaved by group


def test_self_first_then_node():
    """DP4 x TP1 training holds everything everywhere: nothing moves. PP2 x DP2 on two nodes of two: a stage per node."""
    sources, destinations = maps(config(), Layout(4), 2)
    assert all(plan.received_bytes == (0, 0, 0, 0) for plan in plans(sources, destinations, 4))
    tensors = {f"t{i}": ((0, 8), (0, 8)) for i in range(12)}
    everything = {name: [Tile(name, slices, slices)] for name, slices in tensors.items()}
    near = plans([everything, {}, everything, {}], [{}, everything, {}, everything], 2)
    assert near[1].receives.keys() == {0} and near[3].receives.keys() == {2}


def test_replicas_share_the_sending():
    """PP2 x DP4, rollout TP1: each rank needs the other stage, which four replicas hold."""
    sources, destinations = maps(config(tied=False), Layout(8, pp=2), 1)
    plan = make_plan(0, sources, destinations, 2, 8)
    share = sum(plan.sent_bytes) / 8
    largest = 2 * 131 * hf_models.HIDDEN
    assert max(plan.sent_bytes) - share <= largest
    assert max(plan.sent_bytes) <= 1.1 * share
    assert len(plan.receives) == len(plan.sends) == 1  # each of the four asks another one for everything


def test_more_replicas_than_destinations_take_the_work_apart():
    """One rank needs what three others hold: each sends about a third."""
    tensors = {f"t{i}": ((0, 8), (0, 8)) for i in range(12)}
    everything = {name: [Tile(name, slices, slices)] for name, slices in tensors.items()}
    plan = make_plan(3, [everything] * 3 + [{}], [{}, {}, {}, everything], 2, 4)
    assert plan.sent_bytes == (4 * 128, 4 * 128, 4 * 128, 0)


def test_a_plan_within_a_group_has_the_groups_numbers():
    """Ranks 1 and 4 of 6 train, 4 and 5 roll out: numbers 0, 1 and 2 of their group."""
    whole, half = (0, 8), (0, 4)
    rest = (4, 8)
    sources = [{}, {"t": [Tile("t", (half,), (half,))]}, {}, {}, {"t": [Tile("t", (rest,), (half,))]}, {}]
    destinations = [{}, {}, {}, {}, {"t": [Tile("t", (whole,), (whole,))]}, {"t": [Tile("t", (whole,), (whole,))]}]
    made = [make_plan(rank, sources, destinations, 4, 3, unpacked_from=16).within([1, 4, 5]) for rank in (1, 4, 5)]
    assert [plan.rank for plan in made] == [0, 1, 2]
    assert [sorted(plan.sends) for plan in made] == [[1, 2], [2], []]
    assert [sorted(plan.receives) for plan in made] == [[], [0], [0, 1]]
    assert sorted(made[1].unpacked) == [(0, 1), (1, 2)]
    assert made[2].received_bytes == (0, 16, 32) and made[2].local_bytes == (0, 16, 0)


def test_tied_embedding_comes_from_both_stages():
    """PP2: both stages hold the embedding, so a rollout rank always has it at home."""
    sources, destinations = maps(config(tied=True), Layout(2, pp=2), 1)
    for plan in plans(sources, destinations, 2):
        (copy,) = [copy for copy in plan.local if copy.destination.name == "model.embed_tokens.weight"]
        assert copy.source.name == ("embedding.word_embeddings.weight", "output_layer.weight")[plan.rank]
        assert "model.embed_tokens.weight" not in {piece.name for pieces in plan.receives.values() for piece in pieces}


def test_incomplete_source_is_named():
    sources, destinations = maps(config(), Layout(2, pp=2), 1)
    missing = "decoder.layers.3.mlp.linear_fc2.weight"
    sources[1] = {name: tiles for name, tiles in sources[1].items() if name != missing}
    with pytest.raises(IncompleteSource, match=r"model.layers.3.mlp.down_proj.weight.*no rank has it"):
        make_plan(0, sources, destinations, 4, 2)


def test_plan_is_deterministic():
    sources, destinations = maps(config(), Layout(4, tp=2, pp=2), 2)
    assert plans(sources, destinations, 4) == plans(sources, destinations, 4)


def test_bound_and_report():
    """Numbers by hand: PP2 -> TP1 of one tensor a stage, 8 x 8 elements of 2 bytes."""
    square = ((0, 8), (0, 8))
    sources = [{"a": [Tile("a", square, square)]}, {"b": [Tile("b", square, square)]}]
    destinations = [{"a": [Tile("a", square, square)], "b": [Tile("b", square, square)]}] * 2
    plan = make_plan(0, sources, destinations, 2, 2)
    assert plan.received_bytes == plan.sent_bytes == plan.local_bytes == plan.least_received_bytes == (128, 128)
    assert plan.max_message_bytes == 128 and plan.max_peers == 2
    assert plan.bound_seconds(wire_bandwidth=64.0, memory_bandwidth=1e9) == 2.0
    assert plan.bound_seconds(wire_bandwidth=1e9, memory_bandwidth=64.0) == 8.0
    assert "0.000 GB received" in plan.describe()


def test_best_grouping_against_all_permutations():
    rng = random.Random(3)
    for layout, rollout_tp in ((Layout(4, tp=2, pp=2), 2), (Layout(4, tp=4), 2), (Layout(4, pp=4), 4), (Layout(4, pp=2), 2)):
        sources, destinations = maps(config(), layout, rollout_tp)
        rng.shuffle(destinations)
        best = min(_received(sources, [destinations[i] for i in order]) for order in itertools.permutations(range(4)))
        found = best_grouping(find_cover(sources, destinations), 4)
        assert sum(found.received) == best
        assert _received(sources, [destinations[i] for i in found.takes]) == best


def _received(sources: list[TileMap], destinations: list[TileMap]) -> int:
    return sum(make_plan(0, sources, destinations, 1, 4).received_bytes)


def test_contiguous_engines_may_receive_more_than_the_best_grouping():
    """Training TP4, rollout TP2 on contiguous ranks: rank 1 has the first half's quarter but the second half's engine rank."""
    sources, destinations = maps(config(vocab_size=256), Layout(4, tp=4), 2)
    plan = make_plan(0, sources, destinations, 4, 4)
    assert sum(plan.least_received_bytes) < sum(plan.received_bytes)


def test_merge_keeps_elements():
    """However a rectangle is cut, merging gives back as few copies as sending it whole would need."""
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, 16), 5))
        rows = list(itertools.pairwise([0, *cuts, 16]))
        tiles = [Tile("t", (row, column), (row, column)) for row in rows for column in ((0, 3), (3, 8))]
        rng.shuffle(tiles)
        whole = {"w": [Tile("t", ((0, 16), (0, 8)), ((0, 16), (0, 8)))]}
        (plan,) = plans([{"v": tiles}], [whole], 1)
        assert len(plan.local) == 1 and plan.local[0].source.slices == ((0, 16), (0, 8))
    assert merge([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_split_and_subtract(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4)))
    capacity = rng.randrange(1, 30)
    room = first_room = rng.randrange(0, capacity + 1)
    order, used = [], defaultdict(int)
    indices, bucket = np.arange(np.prod(shape)).reshape(shape), 0
    for block, fresh in split(shape, room, capacity):
        bucket += fresh
        used[bucket] += volume(block)
        order += indices[as_index(block)].ravel().tolist()
    assert order == indices.ravel().tolist()
    assert all(size <= (capacity if number else first_room) for number, size in used.items())
    hole = tuple(sorted(rng.sample(range(n + 1), 2)) for n in shape)
    counts = np.zeros(shape, int)
    for rectangle in [tuple(map(tuple, hole)), *subtract(tuple((0, n) for n in shape), tuple(map(tuple, hole)))]:
        counts[as_index(rectangle)] += 1
    assert (counts == 1).all()
