"""TRL's trainers with one argument more: what they log, train and save under plain data parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import Results, launch
from tests.kit.same import assert_same_logs, assert_same_or_named, assert_same_run

pytestmark = pytest.mark.wide

CASES = (
    "sft", "sft tied", "sft packing", "sft checkpointing", "sft lora", "sft lora head", "sft lora tokens", "dpo given",
    "dpo implicit", "dpo lora", "kto", "reward", "grpo", "grpo twice", "rloo",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out: Path = tmp_path_factory.mktemp("trl")
    return launch("trl_job", out, timeout=280)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_equals_data_parallel(found: Results, case: str, stage: int) -> None:
    assert_same_run(found, case, stage)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16(found: Results, stage: int) -> None:
    """TRL's default. Weights follow to rounding, of which Adam makes steps; what is logged follows closely."""
    assert_same_logs(found(f"sft bf16 {stage}"), found("sft bf16 plain"), 5e-3)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reference_that_is_written_between_steps(found: Results, stage: int) -> None:
    """`sync_ref_model` mixes the model into its reference, parameter by parameter."""
    assert_same_or_named(found, "dpo synced", stage)
