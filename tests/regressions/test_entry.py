"""Ranks that do not know of each other, or that accelerate counts otherwise: a ConfigError before the first batch."""

from __future__ import annotations

import pytest

from tests.kit.launch import Results, launch

ENTRANCES = [
    "stock train 0",
    "stock train 3",
    "stock evaluate 2",
    "stock predict 3",
    "ZeroTrainer",
    "Accelerator",
    "ZeroAccelerator",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("entry_job", tmp_path_factory.mktemp("entry"), timeout=200)


@pytest.mark.gloo
@pytest.mark.parametrize("case", ["0", "1", "2", "3", "Init", "latest", "prune", "mpi"])
def test_several_processes_without_a_group_are_refused(results: Results, case: str) -> None:
    """`torchrun --nproc-per-node 2` without `init_process_group` trained two models."""
    for rank in (0, 1):
        said = results(f"no group {case}", rank)
        assert said.startswith("ConfigError")
        assert "init_process_group" in said
        assert ("OMPI_COMM_WORLD_SIZE is 2" if case == "mpi" else "WORLD_SIZE is 2") in said


@pytest.mark.gloo
def test_a_group_of_one_is_taken_at_its_word(results: Results) -> None:
    assert results("alone on purpose") == results("alone on purpose", 1) == [1]


@pytest.mark.gloo
@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_counts_as_many_ranks(results: Results, when: str, entrance: str) -> None:
    """Without `use_cpu=True` or `cpu=True`, accelerate saw one process: all ranks had the same rows.

    Args:
        when: whether the program opens the process group before or after it builds the Accelerator.
    """
    for rank in (0, 1):
        said = results(f"{when} {entrance}", rank)
        assert said.startswith("ConfigError")
        assert "ACCELERATE_USE_CPU=true" in said
        assert ("cpu=True" if "Accelerator" in entrance else "use_cpu=True") in said


@pytest.mark.gloo
def test_a_group_that_is_opened_after_the_accelerator(results: Results) -> None:
    assert results("joined late").startswith("ConfigError")


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("first", ["shard", "accelerator"])
def test_data_of_a_stock_accelerator(results: Results, first: str, train: bool, stage: int) -> None:
    said = results(f"loop {first} {train} {stage}")
    assert said.startswith("ConfigError")
    assert "cpu=True" in said
    assert "[0 batches seen]" in said


@pytest.mark.gloo
def test_a_stock_trainer_of_a_sharded_model(results: Results) -> None:
    said = results("bare trainer")
    assert said.startswith("ConfigError")
    assert "use_cpu=True" in said


@pytest.mark.gloo
@pytest.mark.parametrize("case", ["own rows", "right loop", "right trainer", "right evaluation"])
def test_what_deals_its_rows_rightly_runs(results: Results, case: str) -> None:
    assert results(case) == ""
