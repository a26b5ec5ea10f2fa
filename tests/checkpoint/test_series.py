"""A run's checkpoints without the Trainer: the newest whole one, and which go."""

from __future__ import annotations

import fcntl
import os
import warnings
from pathlib import Path

import pytest
import torch

import hf_zero as zero
from hf_zero.checkpoint.manifest import MANIFEST
from tests.kit.pool import RankPool


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints; names whose numbers sort otherwise as text."""
    model = torch.nn.Linear(3, 2)
    engine = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in (4, 10, 9):
        engine.save(tmp_path / f"checkpoint-{step}")
    engine.save(tmp_path / "other_99")
    engine.detach()
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_the_one_with_the_highest_number(run: Path) -> None:
    assert zero.latest_checkpoint(run) == run / "checkpoint-10"
    assert zero.latest_checkpoint(run, prefix="other_") == run / "other_99"
    assert zero.latest_checkpoint(run / "nothing") is None


@pytest.mark.parametrize("damage", ["a byte", "half", "no manifest", "empty"])
def test_a_damaged_one_is_passed_over_by_name(run: Path, damage: str) -> None:
    newest = run / "checkpoint-10"
    weights = newest / "model.safetensors"
    if damage == "a byte":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    elif damage == "half":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "no manifest":
        (newest / MANIFEST).unlink()
    else:
        for path in sorted(newest.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    with pytest.warns(UserWarning, match=r"resuming from .*checkpoint-9. Passed over: checkpoint-10: .+") as caught:
        assert zero.latest_checkpoint(run) == run / "checkpoint-9"
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)


def test_where_none_is_whole_it_is_an_error_and_no_new_start(run: Path) -> None:
    for step in (4, 9, 10):
        (run / f"checkpoint-{step}" / MANIFEST).unlink()
    with pytest.raises(zero.CheckpointError, match="holds 3 checkpoint folders and none is complete"):
        zero.latest_checkpoint(run)


def test_the_oldest_go_and_a_damaged_one_before_them(run: Path) -> None:
    zero.prune_checkpoints(run, keep=3)
    assert len(names(run)) == 4
    (run / "checkpoint-10" / MANIFEST).unlink()
    zero.prune_checkpoints(run, keep=2)
    assert names(run) == ["checkpoint-4", "checkpoint-9", "other_99"]
    zero.prune_checkpoints(run, keep=1)
    assert names(run) == ["checkpoint-9", "other_99"]
    staging = run / "checkpoint-11" / ".zero_saving-x"
    staging.mkdir(parents=True)
    lock = os.open(staging, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # another job writes it
    zero.prune_checkpoints(run, keep=1)
    assert names(run) == ["checkpoint-11", "checkpoint-9", "other_99"]
    os.close(lock)  # and dies
    zero.prune_checkpoints(run, keep=1)
    assert names(run) == ["checkpoint-9", "other_99"]
    with pytest.raises(zero.CheckpointError, match="at least 1 checkpoint, found keep=0"):
        zero.prune_checkpoints(run, keep=0)


def damaged_in_turn(rank: int, world: int, folder: Path) -> None:
    model = torch.nn.Linear(3, 2)
    engine = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in (1, 2):
        engine.save(folder / f"checkpoint-{step}")
    for name in zero.verify(folder / "checkpoint-2").files:
        path = folder / "checkpoint-2" / name
        raw = path.read_bytes()
        for data, newest in ((raw[:-1] + bytes([raw[-1] ^ 1]), 1), (raw, 2)):
            engine.exchange(None)
            if rank == 0:
                path.write_bytes(data)
            engine.exchange(None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert zero.latest_checkpoint(folder) == folder / f"checkpoint-{newest}", name


def test_ranks_that_check_a_part_each_find_what_any_of_them_finds(two: RankPool, tmp_path: Path) -> None:
    two.run(damaged_in_turn, tmp_path)
