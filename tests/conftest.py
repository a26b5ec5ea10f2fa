"""Worlds of real ranks, started once per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kit.pool import RankPool

torch.set_num_threads(1)
LONG = ("runtime", "scripts")
"""Folders with the longest files. They come first, so that several pytest processes end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] not in LONG)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    worlds = {world: RankPool(world) for world in (1, 2, 3, 4)}
    yield worlds
    for pool in worlds.values():
        pool.stop()


@pytest.fixture
def two(pools: dict[int, RankPool]) -> RankPool:
    return pools[2]
