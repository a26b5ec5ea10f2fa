"""Disk and host tiers beyond `tests/conformance`: messages, folders, the ends of processes, views of arrays, memory."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import StateError, TierError
from hf_zero.tiers.array import DiskArray, FileSource, JoinedSource, OnDisk, Stamp
from hf_zero.tiers.disk import Disk, Region, file_system
from hf_zero.tiers.host import Link, pages
from hf_zero.tiers.storage import Storage
from hf_zero.tiers.tier import ALIGN_BYTES, PIECE_BYTES, THREADS, Meter
from tests.kit.common import holders, nameless_files
from tests.kit.injection import Forked, instead

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def make(folder: Path, rank: int = 0) -> Disk:
    return Disk(str(folder), rank, Meter())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = make(tmp_path)
    yield disk
    disk.close()


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def page_aligned(nbytes: int, shift: int = 0) -> torch.Tensor:
    """Memory that begins `shift` bytes after a page's start."""
    return Link(CPU, Meter()).empty(nbytes + shift, torch.uint8)[shift:]


# The file -------------------------------------------------------------------------------------------------------------


def test_space_is_allocated_at_once_and_holes_are_filled_first_fit(disk: Disk) -> None:
    a, b, c, _ = (disk.allocate(nbytes) for nbytes in (8192, 4096, 16384, 4096))
    assert os.fstat(disk.fileno()).st_blocks * 512 >= 32768
    disk.free(a)
    disk.free(c)
    assert disk.allocate(12288) == Region(c.offset, 12288)
    disk.free(b)
    assert disk.allocate(12288) == Region(0, 12288)  # a and b are one
    assert disk.allocate(4096) == Region(c.offset + 12288, 4096)


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number", "advice"),
    [
        ("read", errno.EIO, "The disk failed: check the kernel's log"),
        ("write", errno.EIO, "The disk failed"),
        ("write", errno.ENOSPC, "Free some space there"),
        ("write", errno.EROFS, "Set offload_dir to another folder"),
    ],
)
def test_a_failed_call_is_named_in_the_waiting_thread(tmp_path: Path, kind: str, number: int, advice: str) -> None:
    disk = make(tmp_path, rank=3)
    region = disk.allocate(4 * PIECE_BYTES)
    lock, ends = threading.Lock(), []

    def fail(real: Any, fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == region.offset + PIECE_BYTES:
            raise OSError(number, os.strerror(number))
        time.sleep(0.05)
        count: int = real(fd, buffers, offset)
        with lock:
            ends.append(offset)
        return count

    where = rf"disk tier of rank 3 in {re.escape(str(tmp_path))}: a {kind} of {PIECE_BYTES} bytes at byte {PIECE_BYTES} failed"
    with instead(os, **{"preadv" if kind == "read" else "pwritev": fail}):
        move = getattr(disk, kind)(region.offset, page_aligned(4 * PIECE_BYTES))
        with pytest.raises(TierError, match=rf"{where}.*{re.escape(os.strerror(number))}\. {advice}"):
            move.wait()
    assert len(ends) == 3, "the buffer was still in use when the error was raised"
    with pytest.raises(TierError):  # of whoever waits next, too
        move.close()
    getattr(disk, kind)(region.offset, page_aligned(4 * PIECE_BYTES)).wait()
    disk.close()


def test_more_than_the_disk_has(disk: Disk) -> None:
    needed = (disk.free_bytes // ALIGN_BYTES + (1 << 20)) * ALIGN_BYTES
    with pytest.raises(TierError, match=rf"rank 0 in .* needs {needed} bytes more.*\d+ are free there.*larger disk"):
        disk.allocate(needed)

    def halfway(real: Any, fd: int, offset: int, nbytes: int) -> None:
        real(fd, offset, nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with instead(os, posix_fallocate=halfway), pytest.raises(TierError, match="needs 8192 bytes more"):
        disk.allocate(8192)
    assert disk.nbytes == os.fstat(disk.fileno()).st_size == 0
    assert disk.allocate(4096) == Region(0, 4096)


@pytest.mark.skipif(file_system("/dev/shm") != "tmpfs", reason="no folder that is memory")
def test_a_folder_that_is_memory_is_warned_of(tmp_path: Path) -> None:
    """On every rank: it is its own disk tier that takes memory. Not of a disk."""
    with pytest.warns(RuntimeWarning, match=r"rank 3: the disk tier is in /dev/shm: that is tmpfs, which is memory"):
        Disk("/dev/shm", 3, Meter()).close()
    with (
        instead(tempfile, gettempdir=lambda _: "/dev/shm"),
        pytest.warns(RuntimeWarning, match="because offload_dir is not set"),
    ):
        Disk(None, 0, Meter()).close()
    if file_system(tmp_path) != "tmpfs":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Disk(str(tmp_path), 0, Meter()).close()


def test_the_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    make(tmp_path / "not" / "there").close()
    assert os.stat(tmp_path / "not" / "there").st_mode & 0o777 == 0o700
    with instead(tempfile, gettempdir=lambda _: str(tmp_path)):
        disk = Disk(None, 0, Meter())
    assert f"in {tmp_path}" in disk.where
    assert os.fstat(disk.fileno()).st_mode & 0o777 == 0o600
    assert os.fstat(disk.fileno()).st_dev == os.stat(tmp_path).st_dev
    disk.close()


# The end of a process -------------------------------------------------------------------------------------------------


def _hold(folder: str, ready: Any, go: Any, ending: str) -> None:
    disk = make(Path(folder), rank=7)
    disk.allocate(8 << 20)
    disk.write(0, pattern(1 << 20)).wait()
    ready.set()
    go.wait(60)
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


@pytest.mark.parametrize(("method", "ending"), [("fork", "killed"), ("fork", "exits"), ("spawn", "exits")])
def test_a_process_that_skips_exit_handlers_leaves_nothing(tmp_path: Path, method: str, ending: str) -> None:
    context = torch.multiprocessing.get_context(method)
    ready, go = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(str(tmp_path), ready, go, ending))
    child.start()
    assert ready.wait(60)
    assert (holders(tmp_path), os.listdir(tmp_path)) == (1, [])
    go.set()
    child.join(60)
    assert child.exitcode == (-signal.SIGKILL if ending == "killed" else 0)
    assert (holders(tmp_path), os.listdir(tmp_path)) == (0, [])


def test_a_file_is_closed_once_its_transfers_were_waited_for(tmp_path: Path) -> None:
    """A thread that has just ended a transfer keeps nothing of it while others go on."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            disk = make(tmp_path)
            disk.allocate(ALIGN_BYTES)
            disk.write(0, pattern(ALIGN_BYTES)).wait()
            disk.close()
            assert nameless_files(tmp_path) == 0
    finally:
        sys.setswitchinterval(interval)


ENDINGS = ("", "raise SystemExit(3)", "disk.close()", "del disk")


def test_nothing_is_left_after_exit(tmp_path: Path) -> None:
    """Even with transfers under way, the process ends by itself and says nothing: a fork of one interpreter for each ending.

    A thread that lives on while the interpreter is taken down may abort the process. What is registered first runs last.
    """
    script = f"""
        import atexit, os, sys, threading
        atexit.register(lambda: print(*threading.enumerate()[1:], sep="", end="", file=sys.stderr))
        import torch
        from hf_zero.tiers.disk import Disk
        from hf_zero.tiers.tier import Meter
        for ending in {ENDINGS!r}:
            if os.fork() == 0:
                break
            print(os.waitstatus_to_exitcode(os.wait()[1]), os.listdir({str(tmp_path)!r}), flush=True)
        else:
            sys.exit()
        disk = Disk({str(tmp_path)!r}, 0, Meter())
        region = disk.allocate(256 << 20)
        moves = [disk.write(region.offset + at, torch.zeros(8 << 20, dtype=torch.uint8)) for at in range(0, 256 << 20, 8 << 20)]
        assert disk.nbytes == 256 << 20
        exec(ending)
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{3 if '3' in ending else 0} []" for ending in ENDINGS]
    assert not done.stderr


# Arrays at rest -------------------------------------------------------------------------------------------------------


def test_a_models_own_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    numel = PIECE_BYTES // 4 + 3000
    path.write_bytes(torch.arange(float(numel)).numpy().tobytes())
    whole = OnDisk(FileSource(path, 4, torch.float32, numel - 1))
    assert torch.equal(whole.read(), torch.arange(1.0, numel)), "in pieces"
    meter = Meter()
    values = OnDisk(FileSource(path, 4000, torch.float32, 2000, meter))
    assert torch.equal(values[500:1500].read(), torch.arange(1500.0, 2500.0))
    assert (meter["read"].calls, meter["read"].bytes) == (1, 4000)
    joined = OnDisk(JoinedSource(9, torch.float32, [(2, values[:2]), (6, values[5:6])]))
    assert joined.read_into(torch.ones(9)).tolist() == [0, 0, 1000, 1001, 0, 0, 1005, 0, 0]
    part = OnDisk(JoinedSource(9, torch.float32, [(2, values[:2]), (6, values[5:6])], counted := Meter()))[3:7]
    assert (part.read().tolist(), counted["read"].bytes) == ([1001, 0, 0, 1005], 8)
    with pytest.raises(StateError, match=rf"{path}.*cannot be written"):
        values.zero_()
    stamped = OnDisk(FileSource(path, 4000, torch.float32, 2000, stamp=Stamp.of(path)))
    assert torch.equal(stamped.read(), values.read())

    def changing(real: Any, *args: Any) -> Any:
        count = real(*args)
        os.utime(path, ns=(1, 1))
        return count

    with instead(os, preadv=changing), pytest.raises(TierError, match=rf"{path} has changed since"):
        stamped.read()
    os.truncate(path, 10_000)
    with pytest.raises(TierError, match=rf"{path}: a read of 8000 bytes at byte 4000 ended after 6000"):
        values.read()
    path.unlink()
    with pytest.raises(TierError, match=rf"{path} cannot be opened: No such file.*leave it in place"):
        values.read()


def test_an_array_that_cannot_leave_its_base_keeps_no_space(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    array = DiskArray(disk, 3000, torch.float32, base=FileSource(path, 0, torch.float32, 3000))
    with pytest.raises(TierError, match="cannot be opened"):
        array.write(0, torch.ones(1))
    assert disk.nbytes == 0
    path.write_bytes(torch.arange(3000.0).numpy().tobytes())
    array.write(1, torch.ones(1)).close()
    assert OnDisk(array).read()[:3].tolist() == [0, 1, 2]
    assert Forked(disk.close).wait()[0] == 0
    assert OnDisk(array).read()[-1] == 2999, "a child that ends leaves the file as it is"


# Host memory and the device -------------------------------------------------------------------------------------------


class Buffer(bytearray):
    """Memory whose end can be seen."""


def test_idle_threads_hold_no_buffer(disk: Disk) -> None:
    disk.allocate(4096)
    seen = []
    for _ in range(THREADS):
        buffer = Buffer(4096)
        seen.append(weakref.ref(buffer))
        disk.read(0, memoryview(buffer)).wait()
        del buffer
    deadline = time.monotonic() + 10
    while any(reference() is not None for reference in seen) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [reference() for reference in seen] == [None] * THREADS


def test_an_interrupted_wait_is_made_again(disk: Disk) -> None:
    """Ctrl-C at any moment of a wait is nothing but that: neither another error, nor a thread that waits for ever."""
    disk.allocate(4096)

    def slow(real: Any, *args: Any) -> Any:
        time.sleep(2e-4)
        return real(*args)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    moments, hit, buffer = random.Random(0), 0, Buffer(4096)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with instead(os, preadv=slow):
            for _ in range(1500):
                transfer = disk.read(0, memoryview(buffer))
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, 4e-4))
                        transfer.wait()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hit += 1
                transfer.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hit


def resident_bytes() -> int:
    torch.empty(1 << 16).fill_(1)  # the code that fills is read in, and not counted
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_host_memory_is_given_back_with_its_last_tensor() -> None:
    """What is unlocked when the memory goes is unlocked no sooner."""
    link = Link(CPU, Meter())
    assert link.empty(0, torch.bfloat16).shape == (0,)
    assert link.empty(1000, torch.bfloat16).data_ptr() % ALIGN_BYTES == 0
    assert link.page_locked_bytes == 0
    gc.collect()
    before = resident_bytes()
    memory = link.empty(16 << 20, torch.float32).fill_(1)
    part, storage = memory[5:], memory[3:7].untyped_storage()
    del memory
    assert part[0] == 1
    del part
    again = torch.empty(0, dtype=torch.uint8).set_(storage)
    del storage
    gc.collect()
    assert resident_bytes() - before > 60 << 20
    assert again.numel() == 64 << 20
    del again
    assert resident_bytes() - before < 8 << 20


def _asks_for_huge_pages(address: int) -> bool:
    """Whether the system was advised to back this place with huge pages."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        ends = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if ends:
            found = int(ends[1], 16) <= address < int(ends[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the system has no transparent huge pages"
)
def test_large_memory_is_on_huge_pages(tmp_path: Path) -> None:
    """What an engine gives back and allocates again in every step costs a page fault per 2 MiB; what is small is left alone."""
    host = Link(CPU, Meter()).empty(8 << 20, torch.float32)
    assert _asks_for_huge_pages(host.data_ptr() + host.nbytes // 2)
    storage = Storage(CPU, 0, str(tmp_path))
    kept = storage.allocate("gathered", "a unit", 64 << 20, lambda: torch.empty(16 << 20))
    assert _asks_for_huge_pages(kept.data_ptr() + kept.nbytes // 2)
    memory = kept.untyped_storage()
    memory.resize_(0)
    storage.allocate("gathered", "a unit", 64 << 20, lambda: memory.resize_(64 << 20))
    assert _asks_for_huge_pages(memory.data_ptr() + memory.nbytes() // 2)
    plain = torch.empty(16 << 20)
    assert not _asks_for_huge_pages(plain.data_ptr() + plain.nbytes // 2)
    small = Link(CPU, Meter()).empty(1000, torch.float32)
    assert not _asks_for_huge_pages(small.data_ptr())


FREED = """
    import torch
    from hf_zero.tiers.host import keep_freed_memory

    def resident_mib() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 >> 20

    keep_freed_memory()
    before = resident_mib()
    torch.ones(16 << 20)  # 64 MiB, dropped at once
    print(resident_mib() - before)
"""


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072"}, False),
    ],
)
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(chosen: dict[str, str], kept: bool) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    program = [sys.executable, "-c", textwrap.dedent(FREED)]
    done = subprocess.run(program, env={**clean, **chosen}, capture_output=True, text=True, timeout=120, check=True)
    assert (int(done.stdout) > 48) is kept


def test_copies_on_a_cpu_device() -> None:
    meter = Meter()
    link = Link(CPU, meter)
    source, target = torch.randn(100), link.empty(100, torch.float32)
    link.copy_to_host(source, target).wait()
    assert torch.equal(source, target)
    link.copy_to_device(target.mul_(2), source, after=link.mark()).close()
    assert torch.equal(source, target)
    assert [(meter[kind].calls, meter[kind].bytes) for kind in ("down", "up")] == [(1, 400), (1, 400)]
    for wrong in (torch.empty(99), torch.empty(100, dtype=torch.bfloat16)):
        with pytest.raises(
            StateError, match=r"copy down the link needs equal dtypes and lengths, found 100 x torch.float32"
        ):
            link.copy_to_host(source, wrong)
    assert meter["down"].calls == 1


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.gpu
@needs_cuda
def test_memory_is_page_locked_exactly() -> None:
    link = Link(torch.device("cuda"), Meter())
    memory = link.empty(12345, torch.float32)
    assert memory.is_pinned()
    assert link.page_locked_bytes == 4 * 12345
    part = memory[5:]
    del memory
    assert part.is_pinned()
    del part
    assert link.page_locked_bytes == 0


@pytest.mark.gpu
@needs_cuda
def test_copies_wait_for_the_stream_and_the_stream_for_them() -> None:
    link = Link(torch.device("cuda"), Meter())
    host = link.empty(4 << 20, torch.float32)
    busy = torch.randn(4096, 4096, device="cuda")
    for turn in range(10):
        values = torch.zeros(4 << 20, device="cuda")
        for _ in range(5):
            busy = (busy @ busy).div_(64)
        values += turn
        down = link.copy_to_host(values, host)
        del values  # its memory may be used again only when the copy is through
        torch.full((4 << 20,), -1.0, device="cuda")
        down.wait()
        assert bool((host == turn).all())
        arrived = torch.empty(4 << 20, device="cuda")
        mark, moves = link.mark(), []
        thread = threading.Thread(target=lambda: moves.append(link.copy_to_device(host, arrived, after=mark)))  # noqa: B023
        thread.start()
        thread.join()
        moves[0].wait()
        doubled = arrived * 2
        moves[0].close()
        host.zero_()
        assert bool((doubled == 2 * turn).all())
    assert link.meter["down"].bytes == link.meter["up"].bytes == 10 * (16 << 20)
    assert link.meter["down"].wait_s > 0


@pytest.mark.gpu
@needs_cuda
def test_page_locking_is_refused_once_with_a_warning() -> None:
    link = Link(torch.device("cuda"), Meter())
    memory = pages(1 << 20)
    link.lock_pages(memory)
    with pytest.warns(
        UserWarning, match=r"1048576 bytes of host memory could not be page-locked .*1048576 are\).*ulimit -l"
    ):
        link.lock_pages(memory)  # CUDA refuses what is locked already
    assert not link.empty(1000, torch.float32).is_pinned()
    assert float(torch.ones(3, device="cuda").sum()) == 3
