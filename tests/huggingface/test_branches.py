"""Ranks that run different parts of a model in one step: missing images, dropped layers, more forwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import Results, launch
from tests.kit.same import assert_same_or_named, assert_same_run

pytestmark = pytest.mark.wide

APART = ("images on one rank", "images anywhere", "layers on one rank", "layers on no rank", "forwards")
TOGETHER = ("images on all ranks or none", "layers on all ranks or none", "half a unit on all ranks or none")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out: Path = tmp_path_factory.mktemp("branches")
    return launch("branches_job", out, timeout=280)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("case", APART)
def test_ranks_that_differ(found: Results, case: str, stage: int) -> None:
    assert_same_run(found, case, stage)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2])
def test_half_a_unit_that_no_rank_uses(found: Results, stage: int) -> None:
    """What no rank uses of a unit that is used has no gradient, and Adam does not move it."""
    assert_same_run(found, "half a unit on no rank", stage)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", TOGETHER)
def test_ranks_that_agree(found: Results, case: str, stage: int) -> None:
    """What no rank uses in a step does not move in it."""
    assert_same_run(found, case, stage)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out: Path = tmp_path_factory.mktemp("branches3")
    return launch("branches_job", out, "plain,3", *APART, timeout=280)


@pytest.mark.gloo
@pytest.mark.wide
@pytest.mark.parametrize("case", APART)
def test_ranks_that_differ_at_stage_3(sharded: Results, case: str) -> None:
    """A unit that only some ranks run in forward: the others join in, or it is refused by name."""
    assert_same_or_named(sharded, case, 3)
