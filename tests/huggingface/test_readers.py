"""Weights that are read by others than the module that holds them: fused heads, ties by hand, PEFT's wrappers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import Results, launch
from tests.kit.same import assert_same_or_named, assert_same_run

pytestmark = pytest.mark.slow

CASES = (
    "fused", "fused tied", "linear", "linear tied", "linear checkpointing", "read again", "read again tied", "embedding",
    "redirected", "redirected tied", "tokens", "tokens tied", "saved head", "saved head and embedding",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out: Path = tmp_path_factory.mktemp("readers")
    return launch("readers_job", out, timeout=280)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_equals_data_parallel(found: Results, case: str, stage: int) -> None:
    assert_same_run(found, case, stage)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", ["outside", "outside tied", "outside early"])
def test_read_after_the_forward(found: Results, case: str, stage: int) -> None:
    """The loss reads the weight when the model's forward is over: the value, or an error with the weight's name."""
    if stage < 3:
        assert_same_run(found, case, stage)
    else:
        assert_same_or_named(found, case, stage)
