"""A process that is forked hundreds of times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.pool import RankPool


@pytest.fixture(scope="session")
def small() -> Iterator[RankPool]:
    """One rank without transformers: a fork takes as long as the process is large. pytest's own takes four times as long."""
    pool = RankPool(1, executed=True)
    yield pool
    pool.stop()
