"""Saves that meet a full disk, another job, or the end of the program; behind training; seen by rank 0 alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.faults.faults import CALLS, faults
from tests.faults.operations import Job, hidden
from tests.kit.injection import instead
from tests.settings import Setting

pytestmark = pytest.mark.gloo
IN_MEMORY = {world: Setting(world, 3) for world in (1, 2)}


def job_with_old_target(rank: int, world: int, place: Path, start: str = "old") -> Job:
    """Its values are those of `new`."""
    job = Job(rank, world, place, IN_MEMORY[world])
    job.make_templates()
    job.restore_target(start)
    job.load(place / "new")
    return job


def fill_disk(rank: int, world: int, folder: Path) -> None:
    for kind, fits in ((torch.optim.SGD, True), (torch.optim.Adam, False)):
        model = nn.Linear(600, 1000)
        optimizer = kind(model.parameters())
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
        model(torch.ones(1, 600)).sum().backward()
        optimizer.step()
        for behind in (False, True):
            error = None
            try:
                engine.save(folder, async_save=behind)
                engine.wait_for_save()
            except zero.CheckpointError as raised:
                error = str(raised)
            assert (error is None) == fits, error
            assert fits or "No space left" in str(error) or "the disk has" in str(error), error
            engine.exchange(None)
            assert "optimizer/exp_avg.safetensors" not in zero.verify(folder).files
            assert not list(folder.parent.rglob(".*"))
            engine.exchange(None)


def test_a_full_disk(two, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        two.run(fill_disk, disk / "out" / "checkpoint")
    finally:
        subprocess.run(["umount", disk], check=True)


def behind(rank: int, world: int, place: Path) -> None:
    """What is saved behind training is what was there when the save began; its error is raised once, by what comes next."""
    job = job_with_old_target(rank, world, place, "nothing")

    def move_on(name: str) -> None:
        job.step(9)
        job.note.version = name
        job.known[job.digest()] = name

    changed = threading.Event()

    def wait(real: Any, *args: Any) -> Any:
        changed.wait(30)
        return real(*args)

    with instead(os, pwrite=wait):
        move_on("a")
        job.save(place / "a", async_save=True)
        move_on("b")
        assert not (place / "a").exists()
        threading.Timer(0.3, changed.set).start()
        job.save(place / "b", async_save=True)  # waits for the first
        zero.verify(place / "a")
        move_on("c")
        job.engine.wait_for_save()
    assert job.version(place / "a") == "a"
    assert job.version(place / "b") == "b"
    job.load(place / "a")
    for nexts in (job.engine.wait_for_save, lambda: job.save(place / "c"), lambda: job.load(place / "b")):
        with faults(place, CALLS["write"], 0, "error") if rank == 1 else nullcontext():
            job.save(place / "b", async_save=True)
            while any(thread.name.startswith("hf_zero save") for thread in threading.enumerate()):  # `wait` would tell
                time.sleep(0.01)
        with pytest.raises(zero.CheckpointError, match="No space left"):
            nexts()
        job.engine.wait_for_save()  # said once
        zero.verify(place / "b")
        job.everyone(None)
    assert not (place / "c").exists()
    job.save(place / "b", async_save=True)
    assert job.version(place / "b") == "a"


def test_behind_training(two, tmp_path):
    two.run(behind, tmp_path)


EXIT = """
import os, sys
import torch, hf_zero as zero
model = torch.nn.Linear(4, 4)
engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
def fail(*_):
    raise OSError(28, "No space left on device")
if sys.argv[2] == "fails":
    os.pwrite = fail
engine.save(sys.argv[1], async_save=True)
print("the end")
"""


@pytest.mark.parametrize("how", ["fails", pytest.param("works", marks=pytest.mark.wide)])
def test_a_process_does_not_end_as_if_its_last_save_had_worked(how, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, tmp_path / "out", how], capture_output=True, text=True, timeout=100, cwd=Path.cwd()
    )
    assert "the end" in done.stdout
    if how == "works":
        assert done.returncode == 0, done.stderr
        zero.verify(tmp_path / "out")
    else:
        assert done.returncode == 1
        assert "model.safetensors" in done.stderr
        assert "No space left" in done.stderr
        assert not list(tmp_path.iterdir())


def apart(rank: int, world: int, place: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1500, 3000), nn.Linear(7, 3), nn.Linear(4, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    (model[0].weight.sum() + model[1].weight.sum() + model[2].weight.float().sum()).backward()
    optimizer.step()
    engine.save(place / "seen")
    with hidden(rank):
        engine.save(place / "unseen")
        with pytest.raises(zero.CheckpointError, match=r"ranks \[1\] do not see .*shared file system"):
            engine.save(place / "behind", async_save=True)
    engine.exchange(None)
    assert not list(place.glob(".*"))
    engine.load(place / "unseen")


def test_ranks_that_do_not_see_the_folder_send_their_bytes(two, tmp_path):
    two.run(apart, tmp_path)
    seen, unseen = zero.verify(tmp_path / "seen"), zero.verify(tmp_path / "unseen")
    assert set(seen.files) == set(unseen.files)
    for name in seen.files:
        if not name.startswith("zero_state"):
            assert (tmp_path / "seen" / name).read_bytes() == (tmp_path / "unseen" / name).read_bytes(), name
    assert not (tmp_path / "behind").exists()
