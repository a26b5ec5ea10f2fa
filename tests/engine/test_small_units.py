"""Models whose blocks are split into small units equal the same models in plain training."""

from __future__ import annotations

import pytest

from tests.kit.pool import RankPool
from tests.programs.architectures import ARCHITECTURES
from tests.settings import Setting
from tests.test_programs import check

pytestmark = pytest.mark.gloo


@pytest.mark.wide
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_small_units(pools: dict[int, RankPool], name: str) -> None:
    check(pools, f"architectures.{name}", [Setting(stage=stage, roads="small units") for stage in (2, 3)])
