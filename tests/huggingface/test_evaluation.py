"""The Trainer's evaluations on two real ranks equal plain data parallel's: batch norms, and generation under bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import Results, launch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out: Path = tmp_path_factory.mktemp("evaluation")
    return launch("evaluation_job", out)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("task", [pytest.param("images", marks=pytest.mark.wide), "texts"])
def test_evaluations_equal_data_parallel(found: Results, task: str, stage: int) -> None:
    mine, reference = found(f"{task} {stage}"), found(f"{task} None")
    assert len(mine) == 2
    for ours, theirs in zip(mine, reference, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
