"""Verification catches what it must, and says where."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.resharding.kinds import Kinds
from hybridflow.resharding.verify import ReshardingMismatch, checksum, verify
from hybridflow.rollout import tiles as rollout
from megatron_ext import weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout
from megatron_ext.tiles import Tile
from tests import hf_models
from tests.resharding.shards import Case

FIELDS = hf_models.config("qwen2", True)
GATE_UP = "model.layers.1.mlp.gate_up_proj.weight"
ROOT = Path(__file__).parents[2]
MASK = (1 << 64) - 1


def reference_checksum(tensor: torch.Tensor, first: tuple[int, int], columns: int, integer: torch.dtype) -> int:
    """The same sum with Python's integers, element by element."""

    def signed(value: int) -> int:
        return value - (1 << 64) if value >= 1 << 63 else value

    total = 0
    for i, row in enumerate(tensor.view(integer).tolist()):
        for j, bits in enumerate(row):
            x = (((first[0] + i) * columns + first[1] + j) * 0x9E3779B97F4A7C15 + bits * 0xD6E8FEB86659FD93) & MASK
            for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
                x = ((x ^ (signed(x) >> 31)) * multiplier) & MASK
            total += x ^ ((signed(x) >> 32) & MASK)
    return total & MASK


@pytest.mark.parametrize(("dtype", "integer"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_checksum_equals_python_integers(dtype, integer):
    tensor = torch.randn(11, 17)
    part = tensor[3:9, 4:16]
    got = checksum(part, ((3, 9), (4, 16)), (11, 17), dtype).item() & MASK
    assert got == reference_checksum(part.to(dtype).contiguous(), (3, 4), 17, integer)


def test_checksums_add_up_however_a_tensor_is_cut(monkeypatch):
    tensor = torch.randn(700, 300)  # more than one chunk
    whole = checksum(tensor, ((0, 700), (0, 300)), (700, 300), torch.float32)
    parts = [((0, 500), (0, 100)), ((500, 700), (0, 100)), ((0, 700), (100, 300))]
    sums = [checksum(tensor[a:b, c:d], ((a, b), (c, d)), (700, 300), torch.float32) for (a, b), (c, d) in parts]
    assert sum(sums).item() == whole.item()
    vector = torch.randn(70_001)
    halves = [checksum(vector[a:b], ((a, b),), (70_001,), torch.float32) for a, b in ((0, 30_000), (30_000, 70_001))]
    assert sum(halves).item() == checksum(vector, ((0, 70_001),), (70_001,), torch.float32).item()


def test_checksum_sees_a_bit_and_an_order():
    tensor = torch.randn(8, 8)
    slices, shape = ((0, 8), (0, 8)), (8, 8)
    original = checksum(tensor, slices, shape, torch.float32).item()
    flipped = tensor.clone()
    flipped.view(torch.int32)[5, 5] ^= 1
    swapped = tensor[[0, 1, 2, 4, 3, 5, 6, 7]]
    others = [checksum(t, slices, shape, torch.float32).item() for t in (flipped, swapped, tensor.T)]
    assert len({original, *others}) == 4


def scenario_damage(damage: str, layout: Layout, rollout_tp: int, where: list[int]) -> str:
    """Reshard, damage the result on some ranks, verify: the message."""
    case = Case(FIELDS, layout, rollout_tp)
    case.resharder().run()
    if case.rank in where:
        if damage == "element":
            case.destination[GATE_UP][3, 5] += 1e-3
        elif damage == "swap":
            gate, up = case.destination[GATE_UP].chunk(2)
            kept = gate.clone()
            gate.copy_(up)
            up.copy_(kept)
        elif damage == "source":
            case.source["decoder.layers.2.mlp.linear_fc2.weight"][0, 0] += 1.0
    return case.verify()


@pytest.mark.timeout(240)
def test_a_wrong_element_is_found_and_located(worlds):
    """TP2 x PP2 into TP2: ranks 0 and 2 hold the first half, ranks 0 and 1 were its source."""
    messages = worlds(4).run(scenario_damage, "element", Layout(4, tp=2, pp=2), 2, [0, 2])
    assert len(set(messages)) == 1
    expected = (
        "model.layers.1.mlp.gate_proj.weight[(0, 48), (0, 64)]: "
        "training TP2 x PP2 (decoder.layers.1.mlp.linear_fc1.weight on rank 0) and "
        f"rollout TP2 ({GATE_UP} on ranks 0, 2) hold different values"
    )
    assert messages[0] == expected


@pytest.mark.timeout(240)
def test_swapped_tiles_are_found(worlds):
    message = worlds(4).run(scenario_damage, "swap", Layout(4, pp=4), 4, [0, 1, 2, 3])[0]
    assert "model.layers.1.mlp.gate_proj.weight" in message and "model.layers.1.mlp.up_proj.weight" in message


@pytest.mark.timeout(240)
def test_a_wrong_replica_is_named(worlds):
    message = worlds(4).run(scenario_damage, "element", Layout(4, tp=4), 1, [3])[1]
    assert f"replicas of rollout TP1 differ: {GATE_UP} on ranks 0, 1, 2 against {GATE_UP} on rank 3" in message
    message = worlds(4).run(scenario_damage, "source", Layout(4), 2, [2])[0]
    assert "down_proj.weight[(0, 64), (0, 96)]: replicas of training DP4 differ" in message
    assert "on ranks 0, 1, 3 against decoder.layers.2.mlp.linear_fc2.weight on rank 2" in message


def scenario_bit_in_a_spare_replica() -> tuple[list[str], str]:
    """TP2 x DP2 into TP4: rank 2 becomes the third quarter, so nobody takes the first one from its training weights."""
    case = Case(FIELDS, Layout(4, tp=2), 4)
    if case.rank == 2:
        case.source["decoder.layers.2.mlp.linear_fc2.weight"].view(torch.int32)[0, 0] ^= 1
    case.resharder().run()
    return case.wrong(), case.verify()


@pytest.mark.timeout(240)
def test_a_bit_in_a_replica_that_nothing_came_from_is_found(worlds):
    for wrong, message in worlds(4).run(scenario_bit_in_a_spare_replica):
        assert not wrong
        assert message == (
            "model.layers.2.mlp.down_proj.weight[(0, 64), (0, 48)]: replicas of training TP2 x DP2 differ: "
            "decoder.layers.2.mlp.linear_fc2.weight on rank 0 against decoder.layers.2.mlp.linear_fc2.weight on rank 2"
        )


def scenario_dropped_tile(rank: int, name: str) -> str:
    """One rank's plan lacks what it should copy into a parameter from its own weights."""
    case = Case(FIELDS, Layout(4, tp=2, pp=2), 2)
    if case.rank == rank:
        kept = tuple(copy for copy in case.plan.local if copy.destination.name != name)
        assert len(kept) < len(case.plan.local)
        case.plan = replace(case.plan, local=kept)
    case.resharder().run()
    return case.verify()


@pytest.mark.timeout(240)
def test_a_tile_dropped_from_the_plan_is_found(worlds):
    for message in worlds(4).run(scenario_dropped_tile, 1, GATE_UP):
        assert f"gate_proj.weight[(48, 96), (0, 64)]: replicas of rollout TP2 differ: {GATE_UP} on rank 1 against" in message


def test_a_wrong_replica_among_1024_ranks_is_named(monkeypatch):
    """Qwen3-30B-A3B, TP4 x PP2 x EP8 into TP8: made-up checksums that agree, and one of rank 777 that does not."""
    hf = HFConfig.from_dict(json.loads((ROOT / "configs" / "models" / "qwen3_30b_a3b.json").read_text()))
    layout, wrong = Layout(1024, 4, 2, ep=8), "decoder.layers.40.mlp.experts.local_experts.3.linear_fc1.weight"
    sources = [weights.tile_map(hf, layout, rank) for rank in range(1024)]
    destinations = [rollout.tile_map(hf, 8, rank % 8) for rank in range(1024)]

    def checksums(kinds: Kinds, *_) -> torch.Tensor:
        """Each tile's checksum is its number of elements: it adds up on both sides."""
        sums = torch.zeros(1024, max(sum(map(len, tile_map.values())) for tile_map in kinds.maps), dtype=torch.int64)
        for tile_map, ranks in zip(kinds.maps, kinds.ranks, strict=True):
            values = [tile.numel for held in tile_map.values() for tile in held]
            sums[list(ranks), : len(values)] = torch.tensor(values)
            if 777 in ranks and wrong in tile_map:
                names = [name for name, held in tile_map.items() for _ in held]
                sums[777, names.index(wrong)] += 1
        return sums

    monkeypatch.setattr("hybridflow.resharding.verify._checksums", checksums)
    tensors = {"any": torch.zeros(1)}
    start = time.process_time()
    with pytest.raises(ReshardingMismatch) as caught:
        verify(sources, tensors, destinations, tensors)
    assert time.process_time() - start < 10
    # rank 777 is the second of its stage's EP ranks: its expert 3 is the model's expert 19
    found = re.fullmatch(
        r"model.layers.40.mlp.experts.19.gate_proj.weight\[.*\]: replicas of training differ: "
        r".* on ranks (.*) against .* on rank 777",
        str(caught.value),
    )
    assert found[1].split(", ") == [str(rank) for rank in range(513, 1024, 8) if rank != 777]


def one(name: str, *rows: tuple[int, int]) -> dict[str, list[Tile]]:
    tiles, at = [], 0
    for start, stop in rows:
        tiles.append(Tile("t", ((start, stop), (0, 4)), ((at, at + stop - start), (0, 4))))
        at += stop - start
    return {name: tiles}


def test_ranks_are_named_by_the_numbers_that_they_are_given():
    tensor = torch.randn(8, 4)
    with pytest.raises(
        ReshardingMismatch, match="training \\(a on rank 5\\) and rollout \\(b on rank 5\\) hold different values"
    ):
        verify([one("a", (0, 8))], {"a": tensor}, [one("b", (0, 8))], {"b": tensor + 1}, numbers=[5])


def test_tiles_that_do_not_cover_the_tensor_are_refused():
    tensor = torch.randn(8, 4)
    with pytest.raises(ReshardingMismatch, match=r"t of shape \(8, 4\): the tiles of rollout cover 24 of 32 elements"):
        verify([one("a", (0, 8))], {"a": tensor}, [one("b", (0, 6))], {"b": tensor[:6]})
    with pytest.raises(ReshardingMismatch, match="the tiles of training overlap"):
        verify([one("a", (0, 5), (4, 8))], {"a": torch.randn(9, 4)}, [one("b", (0, 8))], {"b": tensor})
    with pytest.raises(ReshardingMismatch, match="cover 32 of 36 elements"):
        verify([one("a", (0, 8))], {"a": tensor}, [one("b", (0, 8))], {"b": tensor}, shapes={"t": (9, 4)})
    report = verify([one("a", (0, 8))], {"a": tensor}, [one("b", (4, 8), (0, 4))], {"b": tensor.roll(4, 0)})
    assert (report.tensors, report.elements, report.tiles) == (1, 32, 3)
