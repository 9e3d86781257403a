"""Copies of random rectangles, on the CPU and by the CUDA kernel, against torch's own copies one by one."""

import random

import pytest
import torch

from hybridflow.resharding.copies import Copies

DTYPES = (torch.bfloat16, torch.float32, torch.int8)


def _rectangles(shape: tuple[int, int], generator: random.Random) -> list[tuple[slice, slice]]:
    """Disjoint rectangles: rows cut at random, every band cut into two at a random column, so that few are aligned."""
    cuts = sorted({0, shape[0], *(generator.randrange(shape[0]) for _ in range(6))})
    found = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        columns = sorted({0, generator.randrange(shape[1]), shape[1]})
        found += [(slice(start, stop), slice(*band)) for band in zip(columns, columns[1:], strict=False)]
    return found


def _check(device: str, shapes: list[tuple[int, int]]) -> None:
    generator = random.Random(0)
    copies, pairs = Copies(), []
    for dtype in DTYPES:
        for source_shape in shapes:
            source = torch.randint(-100, 100, source_shape, device=device).to(dtype)
            extra = generator.choice([0, 1, 8])
            for cast in (dtype, torch.bfloat16):
                target, expected = (
                    torch.zeros(source_shape[0], source_shape[1] + extra, dtype=cast, device=device) for _ in "ab"
                )
                for index in _rectangles(source_shape, generator):
                    copies.add(target[index], source[index])
                    expected[index] = source[index].to(cast)
                pairs.append((target, expected))
            flat = torch.zeros(source.numel() + 3, dtype=dtype, device=device)
            copies.add(flat[3:], source.view(-1))
            pairs.append((flat, torch.cat([flat.new_zeros(3), source.view(-1)])))
    for _ in range(2):
        for target, _ in pairs:
            target.zero_()
        copies.run()
        for target, expected in pairs:
            assert torch.equal(target, expected)


def test_on_the_cpu():
    _check("cpu", [(64, 96), (33, 7), (2, 1000), (64, 1), (1, 5)])


@pytest.mark.gpu
def test_by_the_kernel():
    _check("cuda", [(64, 96), (33, 7), (2, 1000), (3000, 4096), (1024, 1), (1, 5)])


@pytest.mark.gpu
def test_unequal_shapes_are_refused():
    tensor = torch.zeros(4, 4, device="cuda")
    with pytest.raises(ValueError, match="equal shapes"):
        Copies().add(tensor, tensor[:2])
