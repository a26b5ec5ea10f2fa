"""LoRA through the stock Trainer on two real ranks: the adapter that plain data parallel trains and saves."""

from __future__ import annotations

import pytest

from tests.kit.launch import Results, launch

pytestmark = [pytest.mark.gloo, pytest.mark.wide]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("trainer_job", tmp_path_factory.mktemp("peft"), "adapters")


CHECKS = [
    *(f"stage {stage}" for stage in range(4)),
    "resume",
    "resume newest",
    "bf16 1",
    "bf16 3",
    "bf16 resume",
    "checkpointing",
    "generate",
]


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(found: Results, check: str) -> None:
    """What each of them does and asserts is in `trainer_job.py`, under this name."""
    found(check)
