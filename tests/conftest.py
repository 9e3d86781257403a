"""Fixtures that several test modules share, and the marks that say what hardware a test needs."""

import pytest
import torch

from tests.world import World


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # for tiny models a second one only spins, on a core that the ranks of a world have use for
    config.addinivalue_line("markers", "gpu(count=1): needs so many CUDA devices")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = (marker.args or (1,))[0] if marker else 0
        if torch.cuda.device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device{'s' * (needed > 1)}"))


class _Worlds:
    """Starts a world of a size when a test first asks for it, and a fresh one after a failure."""

    def __init__(self):
        self._worlds: dict[tuple[int, str], World] = {}

    def __call__(self, size: int, name: str = "", cuda: bool = False) -> World:
        world = self._worlds.get((size, name))
        if world is None or not world.alive:
            world = self._worlds[size, name] = World(size, cuda)
        return world

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="session")
def worlds():
    """`worlds(4)`: a running world of 4 ranks, shared by all tests; `worlds(4, "engine")`: another one; `worlds(1, "gpu",
    cuda=True)`: with a GPU for each rank."""
    shared = _Worlds()
    yield shared
    shared.close()
