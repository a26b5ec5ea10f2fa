"""LoRA through the stock Trainer on two real ranks: the adapter that plain data parallel trains and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.launch import Results, launch

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out: Path = tmp_path_factory.mktemp("peft")
    return launch("peft_job", out)


def assert_run(mine: dict[str, Any], reference: dict[str, Any], rel: float) -> None:
    for name in ("loss", "grad_norm", "eval_loss"):
        assert mine[name] == pytest.approx(reference[name], rel=rel), name
    assert mine["frozen"] == 0.0, "the base model stays as it was"
    assert mine["reloaded"] == 0.0
    assert mine["config"] == "LORA"


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_the_adapter_equals_data_parallel(found: Results, stage: int) -> None:
    mine, reference = found(f"stage {stage}"), found("ddp")
    assert_run(mine, reference, 1e-6)
    ours = {"zero_manifest.json", "zero_run.json"}
    stock = [name for name in mine["files"] if "optimizer" not in name and name not in ours]
    assert stock == [name for name in reference["files"] if "optimizer" not in name]
    assert "model.safetensors" not in mine["files"], "the adapter only"
    assert mine["as stock"], "byte for byte what PEFT writes of the same adapter"
    assert mine["adapter_config"] == reference["adapter_config"]
    assert max(found(f"stage {stage} saved").values()) < 1e-6


@pytest.mark.gloo
@pytest.mark.parametrize("check", ["resume", "bf16 resume"])
def test_resume_equals_uninterrupted(found: Results, check: str) -> None:
    assert found(check) == 0.0


@pytest.mark.gloo
def test_resume_at_another_stage_from_the_newest_complete_one(found: Results) -> None:
    assert found("resume newest") < 1e-6


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16(found: Results, stage: int) -> None:
    """`load_best_model_at_end` loads the adapter into a sharded model, where PEFT would cast it."""
    assert_run(found(f"bf16 {stage}"), found("bf16 ddp"), 5e-3)
    assert max(found(f"bf16 {stage} saved").values()) < 1e-6


@pytest.mark.gloo
def test_gradient_checkpointing(found: Results) -> None:
    assert_run(found("checkpointing"), found("ddp"), 1e-6)
    assert max(found("checkpointing saved").values()) < 1e-6


@pytest.mark.gloo
@pytest.mark.parametrize("rank", [0, 1])
def test_generate(found: Results, rank: int) -> None:
    """Through the adapter's wrapper and through the base model."""
    assert found("generate", rank=rank) == {"equal": True, "inner": True}
