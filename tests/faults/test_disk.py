"""A disk tier that cannot be used, is cut short, or cannot be read when an engine lets go of it: an error on every rank."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hf_zero as zero
from tests.faults.faults import CALLS, faults
from tests.faults.operations import ON_DISK, TAIL, Job, refusal
from tests.kit.injection import fails, instead
from tests.kit.pool import RankPool
from tests.programs.failures import Bomb, Failed
from tests.regressions.test_failed_steps import Loop

pytestmark = pytest.mark.gloo


def cut(rank: int, world: int, place: Path) -> None:
    """Another process truncates rank 1's file: an error everywhere; a new engine goes on from the checkpoint."""
    job = Job(rank, world, place)
    job.make_templates()
    if rank == 1:
        names = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
        (mine,) = [fd for fd, name in names.items() if name.startswith(f"{place}/tier/")]
        os.ftruncate(int(mine), 0)
    job.everyone(None)
    error = refusal(lambda: job.step(TAIL[0]))
    assert ("the file was truncated" if rank == 1 else "rank 1") in error
    again = Job(rank, world, place)
    again.load(place / "new")
    assert [again.step(step) for step in TAIL] == job.tail
    again.engine.detach()


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def let_go(rank: int, world: int, place: Path) -> None:
    """`detach` brings values back from a disk that fails: the engine stays as it was."""
    job = Job(rank, world, place)
    job.make_templates()
    job.load(place / "new")
    with faults(place, CALLS["read"], None, "error" if rank == 1 else ""):
        error = refusal(job.engine.detach)
    assert ("Input/output error" in error or "No space left" in error) if rank == 1 else "rank 1" in error, error
    assert job.known[job.digest()] == "new"
    assert [job.step(step) for step in TAIL] == job.tail
    job.engine.detach()


@pytest.mark.parametrize("work", [cut, let_go])
def test_a_disk_that_fails_an_engine(work: Callable[..., None], two: RankPool, tmp_path: Path) -> None:
    two.run(work, tmp_path)


@pytest.mark.filterwarnings("ignore:.*is memory")
def test_a_read_ahead_fails_in_a_backward_that_raises(tmp_path: Path) -> None:
    """Each later call raised the error of that read again, `load` too."""
    loop, fault = Loop(0, "disk, parameters too", str(tmp_path)), contextlib.ExitStack()
    loop.steps(0, 1)
    loop.engine.save(tmp_path / "saved")

    def break_disk(*_: Any) -> None:
        fault.enter_context(instead(os, preadv=fails(errno.EIO)))

    blocks = loop.model.body.blocks
    hooks = [
        blocks[1].register_full_backward_pre_hook(break_disk),
        blocks[1].up.register_forward_hook(lambda module, args, out: Bomb.apply(out)),
    ]
    with fault, pytest.raises(Failed):
        loop.micro(5)
    for hook in hooks:
        hook.remove()
    loop.engine.load(tmp_path / "saved")
    loop.optimizer.zero_grad()
    loop.steps(2)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Files of 4 KiB at most: room to look at, not for the states."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full() -> AbstractContextManager[None]:
    def refuse(real: Any, fd: int, offset: int, nbytes: int) -> None:
        if offset + nbytes > 1 << 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, nbytes)

    return instead(os, posix_fallocate=refuse)


def read_only() -> AbstractContextManager[None]:
    def refuse(real: Any, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_RDWR and "/tier" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return int(real(path, flags, *args, **options))

    return instead(os, open=refuse)


FOLDERS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "is a file, expected a folder": (nullcontext, "a file"),
    "cannot be created": (nullcontext, "a file/below"),
    "Read-only file system": (read_only, "tier"),
    "Raise the limit of file sizes": (limited, "tier"),
    "No space left": (full, "tier"),
}
"""What zero.shard says where the folder is of no use, to all ranks or to rank 1."""


def refused(rank: int, world: int, place: Path) -> None:
    if rank == 0:
        (place / "a file").touch()
    dist.barrier()
    for words, (fault, name) in FOLDERS.items():
        with fault() if rank == 1 else nullcontext(), pytest.raises(zero.ZeroError) as raised:
            Job(rank, world, place, ON_DISK, offload_dir=str(place / name))
        is_here = rank == 1 or fault is nullcontext
        assert (words if is_here else "rank 1") in str(raised.value), (words, str(raised.value))
    job = Job(rank, world, place)
    job.step(0)
    assert os.listdir(place / "tier") == []
    job.engine.detach()


def test_a_folder_that_cannot_be_used(two: RankPool, tmp_path: Path) -> None:
    two.run(refused, tmp_path)
