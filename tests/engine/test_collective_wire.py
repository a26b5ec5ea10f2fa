"""The wire that CUDA uses, here over gloo's own collectives, trains as plain data parallel training does."""

from __future__ import annotations

import pytest

from tests.kit.pool import RankPool
from tests.settings import Setting
from tests.test_programs import check

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_collective_wire(pools: dict[int, RankPool], world: int) -> None:
    rows = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]
    check(
        pools,
        "loops.gpt2_clipped_and_accumulated",
        [Setting(ranks=world, stage=s, precision=p, roads="collectives") for s, p in rows],
    )
