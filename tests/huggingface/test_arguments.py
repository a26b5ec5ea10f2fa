"""Arguments and calls of the stock Trainer and Accelerator that touch how a model is held, on two real ranks."""

from __future__ import annotations

import pytest

from tests.kit.launch import Results, launch

pytestmark = [pytest.mark.gloo, pytest.mark.wide]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("arguments_job", tmp_path_factory.mktemp("arguments"), timeout=250)


CHECKS = [
    "bf16_full_eval 1",
    "bf16_full_eval 3",
    "bf16_full_eval 0",
    "bf16_full_eval 2",
    "bf16_full_eval offloaded to cpu",
    "bf16_full_eval offloaded to disk",
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


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(found: Results, check: str) -> None:
    """What each of them does and asserts is in `arguments_job.py`, under this name."""
    found(check)


@pytest.mark.wide
def test_compiled_by_inductor(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs a C++ compiler, as inductor does on CPU."""
    monkeypatch.setenv("ONLY", "inductor")
    launch("arguments_job", tmp_path_factory.mktemp("inductor"), timeout=300)("compiled inductor 3")
