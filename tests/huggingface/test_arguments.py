"""Arguments and calls of the stock Trainer and Accelerator that touch how a model is held, and LoRA; on two real ranks."""

from __future__ import annotations

import pytest

from tests.kit.launch import Results, launch

pytestmark = [pytest.mark.gloo, pytest.mark.wide]

ARGUMENTS = [
    *(f"bf16_full_eval {how}" for how in (0, 1, 2, 3, "offloaded to cpu", "offloaded to disk")),
    "fp16_full_eval 1",
    "fp16_full_eval 3",
    "compiled eager 2",
    "compiled aot_eager 1",
    "compiled aot_eager 3",
    "compiled bf16 3",
    "freezing 1",
    "freezing 3",
    "generates 1 bf16",
    "generates 3 bf16",
    "generates 3 no",
]
ADAPTERS = [
    *(f"stage {stage}" for stage in range(4)),
    "resume",
    "resume newest",
    "bf16 1",
    "bf16 3",
    "bf16 resume",
    "checkpointing",
    "generate",
]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("arguments_job", tmp_path_factory.mktemp("arguments"), timeout=250)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("peft_job", tmp_path_factory.mktemp("peft"))


@pytest.mark.parametrize("check", ARGUMENTS)
def test_arguments(arguments: Results, check: str) -> None:
    """What each of them does and asserts is in `arguments_job.py`, under this name."""
    arguments(check)


@pytest.mark.parametrize("check", ADAPTERS)
def test_adapters(adapters: Results, check: str) -> None:
    """What each of them does and asserts is in `peft_job.py`, under this name."""
    adapters(check)


def test_compiled_by_inductor(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs a C++ compiler, as inductor does on CPU."""
    monkeypatch.setenv("ONLY", "inductor")
    launch("arguments_job", tmp_path_factory.mktemp("inductor"), timeout=300)("compiled inductor 3")
