"""Programs over the wire that CUDA uses, here with gloo's own collectives, and in small units, equal plain training."""

from __future__ import annotations

import pytest

from tests.kit.pool import RankPool
from tests.programs.architectures import ARCHITECTURES
from tests.settings import Setting
from tests.test_programs import check

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_collectives(pools: dict[int, RankPool], world: int) -> None:
    rows = [
        Setting(world, stage, precision=each, roads="collectives") for stage in range(4) for each in ("fp32", "bf16")
    ]
    check(pools, "loops.gpt2_clipped_and_accumulated", rows)


@pytest.mark.wide
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_that_are_split(pools: dict[int, RankPool], name: str) -> None:
    check(pools, f"architectures.{name}", [Setting(stage=stage, roads="small units") for stage in (2, 3)])
