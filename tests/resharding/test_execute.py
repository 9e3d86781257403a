"""Resharding over four gloo ranks, against both sides written out by hand."""

import pytest
import torch
import torch.distributed as dist

from hybridflow.resharding.execute import Resharder
from hybridflow.resharding.plan import make_plan
from megatron_ext.layout import Layout
from megatron_ext.tiles import Tile
from tests import hf_models
from tests.resharding.shards import Case

LAYOUTS = [Layout(4), Layout(4, tp=2, pp=2), Layout(4, pp=4), Layout(4, tp=4), Layout(4, pp=2, vpp=2)]
FIELDS = {
    "qwen2 tied": hf_models.config("qwen2", True),
    "llama untied": hf_models.config("llama", False, 300),
    "qwen3 replicated": hf_models.config("qwen3", True, 300, num_key_value_heads=2),
}
pytestmark = pytest.mark.timeout(240)


def scenario_exact(fields: dict, rollout_tp: int) -> list[str]:
    """Every layout, three updates in a row through one resharder; returns what is wrong."""
    problems = []
    for layout in LAYOUTS:
        case = Case(fields, layout, rollout_tp, nodes=2 if layout.pp == 4 else 1, unpacked_from=1024)
        resharder = case.resharder()
        for update in range(3):
            case.fill(seed=update)
            resharder.run()
            problems += [f"{layout.describe()} update {update}: {name}" for name in case.wrong()]
            problems += [text for text in [case.verify()] if text]
    return problems


@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
@pytest.mark.parametrize("model", FIELDS)
def test_bit_exact(worlds, model, rollout_tp):
    assert worlds(4).run(scenario_exact, FIELDS[model], rollout_tp) == [[]] * 4


def scenario_small_bucket(bucket_bytes: int) -> tuple[list[str], int, int]:
    case = Case(FIELDS["qwen2 tied"], Layout(4, tp=2, pp=2), 1)
    resharder = case.resharder(bucket_bytes)
    resharder.run()
    return case.wrong(), len(resharder._rounds), resharder.buffer_bytes()


def test_bucket_smaller_than_the_largest_tensor(worlds):
    """The embedding's larger shard is 128 x 64 x 4 = 32 KiB; a bucket is a fraction of the budget, down to a few rows."""
    for bucket_bytes in (16 << 10, 4 << 10):
        for wrong, rounds, used in worlds(4).run(scenario_small_bucket, bucket_bytes):
            assert not wrong and rounds > 10 and used <= bucket_bytes
    assert all(not wrong and rounds == 1 for wrong, rounds, _ in worlds(4).run(scenario_small_bucket, 16 << 20))


def scenario_too_small() -> str:
    try:
        Case(FIELDS["qwen2 tied"], Layout(4, tp=2, pp=2), 1).resharder(100)
    except ValueError as error:
        return str(error)
    return ""


def test_bucket_without_room_is_refused(worlds):
    assert all("bucket_bytes=100 is too small" in message for message in worlds(4).run(scenario_too_small))


def scenario_cast() -> tuple[list[str], str]:
    case = Case(FIELDS["qwen2 tied"], Layout(4, tp=2, pp=2), 2, dtype=torch.bfloat16)
    case.resharder().run()
    return case.wrong(), case.verify()


def test_cast_at_the_source(worlds):
    """fp32 training weights into bf16 rollout weights."""
    assert worlds(4).run(scenario_cast) == [([], "")] * 4


def scenario_moved_storage() -> list[str]:
    """Weights that were freed and made again elsewhere must not be read through old views."""
    case = Case(FIELDS["qwen2 tied"], Layout(4, pp=4), 2)
    case.source = {name: torch.nn.Parameter(tensor) for name, tensor in case.source.items()}
    resharder = case.resharder()
    resharder.run()
    for parameter in case.source.values():
        old, parameter.data = parameter.data, parameter.data + 1.0
        old.zero_()
    resharder.release()
    resharder.run()
    resharder.run()
    return [
        name for name, t in case.expected.items() if not torch.equal(case.destination[name], torch.where(t == -1, t, t + 1))
    ]


def test_moved_storage(worlds):
    assert worlds(4).run(scenario_moved_storage) == [[]] * 4


def scenario_storage_that_goes_and_comes_back() -> tuple[list[str], int, int]:
    """As training's weights do that are released during the rollout: same tensors, memory elsewhere; the buffers stay."""
    case = Case(FIELDS["qwen2 tied"], Layout(4, tp=2, pp=2), 4, unpacked_from=1024)
    unpacked = sum(map(len, case.plan.unpacked.values()))
    resharder = case.resharder()
    resharder.run()
    buffers, kept = [buffer.data_ptr() for buffer in resharder._buffers], []
    for name, tensor in case.source.items():
        values, storage = tensor + 1, tensor.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        kept.append(torch.zeros(size, dtype=torch.uint8))  # takes the place that became free
        storage.resize_(size)
        case.source[name].copy_(values)
    resharder.run()
    assert buffers == [buffer.data_ptr() for buffer in resharder._buffers]
    wrong = [
        name for name, t in case.expected.items() if not torch.equal(case.destination[name], torch.where(t == -1, t, t + 1))
    ]
    return wrong, unpacked, len(resharder._rounds)


def test_storage_that_goes_and_comes_back(worlds):
    results = worlds(4).run(scenario_storage_that_goes_and_comes_back)
    assert [wrong for wrong, _, _ in results] == [[]] * 4 and all(unpacked for _, unpacked, _ in results)


def scenario_subgroup() -> list[float]:
    """Ranks 3 and 1 as a world of their own: ranks of the plan are the group's; one has no destination, one no source."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return []
    rank, square = dist.get_rank(group), ((0, 4), (0, 4))
    sources, destinations = [{"a": [Tile("t", square, square)]}, {}], [{}, {"b": [Tile("t", square, square)]}]
    tensors = {"a": torch.arange(16.0).view(4, 4)}, {"b": torch.zeros(4, 4)}
    plan = make_plan(rank, sources, destinations, 4, 2)
    source, destination = (tensors[0], {}) if rank == 0 else ({}, tensors[1])
    Resharder(plan, source, destination, 1 << 16, group, dtype=torch.float32).run()
    return destination["b"].flatten().tolist() if destination else []


def test_group_ranks_and_ranks_without_a_side(worlds):
    results = worlds(4).run(scenario_subgroup)
    assert results[3] == [float(i) for i in range(16)] and results[0] == results[1] == results[2] == []


def test_wrong_parameters_are_refused():
    square = ((0, 4), (0, 4))
    plan = make_plan(0, [{"a": [Tile("t", square, square)]}], [{"b": [Tile("t", square, square)]}], 4, 1)
    with pytest.raises(ValueError, match="source a is not among the parameters"):
        Resharder(plan, {}, {"b": torch.zeros(4, 4)})
    with pytest.raises(ValueError, match=r"destination b has shape \(4, 3\)"):
        Resharder(plan, {"a": torch.zeros(4, 4)}, {"b": torch.zeros(4, 3)})
    with pytest.raises(ValueError, match="elements of 4 bytes, the destination has torch.bfloat16"):
        Resharder(plan, {"a": torch.zeros(4, 4)}, {"b": torch.zeros(4, 4, dtype=torch.bfloat16)})


def test_one_rank_needs_no_group():
    square = ((0, 4), (0, 4))
    plan = make_plan(0, [{"a": [Tile("t", square, square)]}], [{"b": [Tile("t", square, square)]}], 2, 1)
    source, destination = torch.randn(4, 4), torch.zeros(4, 4, dtype=torch.bfloat16)
    Resharder(plan, {"a": source}, {"b": destination}).run()
    assert torch.equal(destination, source.to(torch.bfloat16))
