"""Worlds of real ranks, started once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kit.pool import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    worlds = {world: RankPool(world) for world in (1, 2, 3, 4)}
    yield worlds
    for pool in worlds.values():
        pool.stop()


@pytest.fixture
def two(pools: dict[int, RankPool]) -> RankPool:
    return pools[2]
