"""`check_tier` over every tier, and over disks that lack something or answer oddly."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero import StateError
from hf_zero.comm.inflight import Inflight
from hf_zero.tiers.array import DiskArray
from hf_zero.tiers.disk import Disk
from hf_zero.tiers.host import Link
from hf_zero.tiers.tier import Meter
from tests.conformance.tier import HUGE_NUMEL, check_tier
from tests.kit.injection import fails, instead

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class DiskTier:
    can_fail = ("read", "write")

    def __init__(self, folder: Path) -> None:
        self.disk = Disk(str(folder / "tier"), 0, Meter())

    @property
    def nbytes(self) -> int:
        assert os.fstat(self.disk.fileno()).st_size == self.disk.nbytes
        return self.disk.nbytes

    def array(self, numel: int, dtype: torch.dtype) -> DiskArray:
        return DiskArray(self.disk, numel, dtype)

    def full(self) -> AbstractContextManager[None]:
        return instead(os, posix_fallocate=half_allocated)

    def failing(self, kind: str) -> AbstractContextManager[None]:
        return instead(os, **{"preadv" if kind == "read" else "pwritev": fails(errno.EIO)})


@dataclass
class HostArray:
    """Host memory, and the link to the device."""

    tier: HostTier
    memory: Tensor | None

    def write(self, start: int, values: Tensor) -> Inflight:
        return self.tier.link.copy_to_host(values, self.part(start, values))

    def read(self, start: int, values: Tensor) -> Inflight:
        return self.tier.link.copy_to_device(self.part(start, values), values)

    def part(self, start: int, values: Tensor) -> Tensor:
        assert self.memory is not None
        return self.memory[start : start + values.numel()]

    def close(self) -> None:
        if self.memory is not None:
            self.tier.nbytes -= self.memory.nbytes
        self.memory = None


class HostTier:
    can_fail = ()

    def __init__(self) -> None:
        self.link, self.nbytes = Link(torch.device("cpu"), Meter()), 0

    def array(self, numel: int, dtype: torch.dtype) -> HostArray:
        memory = self.link.empty(numel, dtype)
        assert memory.untyped_storage().nbytes() == numel * dtype.itemsize
        self.nbytes += memory.nbytes
        return HostArray(self, memory)

    @contextmanager
    def full(self) -> Iterator[None]:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + HUGE_NUMEL, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def failing(self, kind: str) -> AbstractContextManager[None]:
        raise NotImplementedError


# Disks ----------------------------------------------------------------------------------------------------------------


def half_allocated(real: Any, fd: int, offset: int, nbytes: int) -> None:
    """The disk is full in the middle of an allocation."""
    if nbytes >= 4 * HUGE_NUMEL:
        real(fd, offset, nbytes // 64)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real(fd, offset, nbytes)


def no_direct(real: Any, fd: int, command: int, argument: Any = 0) -> Any:
    if command == fcntl.F_SETFL and argument & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return real(fd, command, argument)


def no_tmpfile(real: Any, path: Any, flags: int, *args: Any, **options: Any) -> int:
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return int(real(path, flags, *args, **options))


def no_allocation(real: Any, fd: int, offset: int, nbytes: int) -> None:
    if nbytes >= 4 * HUGE_NUMEL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def short(most: int) -> Callable[..., int]:
    def move(real: Any, fd: int, buffers: list[memoryview], at: int) -> int:
        return int(real(fd, [buffers[0][: most // 512 * 512]], at))

    return move


def slow(real: Any, *args: Any) -> int:
    time.sleep(2e-4)
    return int(real(*args))


DISKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "without O_DIRECT": lambda: instead(fcntl, fcntl=no_direct),
    "without O_TMPFILE": lambda: instead(os, open=no_tmpfile),
    "without preallocation": lambda: instead(os, posix_fallocate=no_allocation),
    "slow": lambda: instead(os, preadv=slow, pwritev=slow),
    **{
        f"at most {most} bytes a call": lambda most=most: instead(os, preadv=short(most), pwritev=short(most))  # type: ignore[misc]
        for most in (20_000, 100_000)
    },
}


@pytest.mark.parametrize("kind", DISKS)
def test_disk(kind: str, tmp_path: Path) -> None:
    with DISKS[kind]():
        tier = DiskTier(tmp_path)
        if kind == "without preallocation":
            tier.full = nullcontext  # type: ignore[method-assign]
        if kind == "without O_DIRECT":
            assert not tier.disk.direct
        check_tier(tier)
    tier.disk.close()
    assert os.listdir(tmp_path / "tier") == [], "a disk tier's file has no name"


def test_disk_whose_folder_is_gone(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    shutil.rmtree(tmp_path / "tier")
    check_tier(tier)
    tier.disk.close()
    DiskTier(tmp_path).disk.close()  # makes the folder again


def test_two_disks_in_one_folder(tmp_path: Path) -> None:
    """Each has its own bytes."""
    one, other = DiskTier(tmp_path), DiskTier(tmp_path)
    mark, found = torch.arange(5000.0), torch.empty(5000)
    array = other.array(5000, torch.float32)
    array.write(0, mark).close()
    check_tier(one)
    array.read(0, found).wait()
    assert torch.equal(found, mark)
    array.close()
    with pytest.raises(StateError, match="an array of 5000 elements was used after it was closed"):
        array.read(0, found)
    other.disk.close()
    with pytest.raises(StateError, match="closed"):
        other.array(1, torch.uint8)
    one.disk.close()


def test_host() -> None:
    check_tier(HostTier())
