"""Bytes at rest and on the move: what was written is read, whatever the alignment, the faults and the neighbours."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_zero.checkpoint.safetensors import read_header
from hf_zero.errors import ConfigError, StateError, TierError
from hf_zero.tiers.array import DiskArray, FileSource, OnDisk, fetch
from hf_zero.tiers.disk import Disk, Region, file_system
from hf_zero.tiers.host import Link, pages
from hf_zero.tiers.pool import Storage
from hf_zero.tiers.tier import ALIGN_BYTES, PIECE_BYTES, THREADS, Meter, padded
from tests.kit.common import holders, nameless_files
from tests.kit.injection import Forked, calls, fails, instead

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def make(folder: Path, rank: int = 0) -> Disk:
    return Disk(str(folder), rank, Meter())


def without_direct() -> AbstractContextManager[None]:
    """A file system that refuses O_DIRECT."""

    def refuse(real: Any, fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    return instead(fcntl, fcntl=refuse)


@pytest.fixture(scope="module", params=["direct", "buffered"])
def shared_disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """For property tests: 64 KiB of it are taken for good, at byte 0."""
    with without_direct() if request.param == "buffered" else nullcontext():
        disk = make(tmp_path_factory.mktemp("disk"))
    if request.param == "direct" and not disk.direct:
        pytest.skip("no O_DIRECT on this file system")
    assert disk.direct == (request.param == "direct")
    assert disk.take(65536) == Region(0, 65536)
    yield disk
    disk.close()


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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_written_is_read(shared_disk: Disk, data: st.DataObject) -> None:
    """Random writes and reads, of any offset, length and address, against a model in memory."""
    model = pattern(65536, data.draw(st.integers(0, 9)))
    shared_disk.write(0, model.clone()).wait()
    edge = st.sampled_from([0, 1, 511, 512, 4095, 4096, 4097, 8192, 40960, 65535, 65536])
    for seed in range(data.draw(st.integers(1, 6))):
        start, stop = sorted((data.draw(edge | st.integers(0, 65536)), data.draw(edge | st.integers(0, 65536))))
        buffer = page_aligned(stop - start, data.draw(st.sampled_from([0, 1, 64, 512])))
        if data.draw(st.booleans()):
            buffer.copy_(pattern(stop - start, seed + 100))
            model[start:stop] = buffer
            shared_disk.write(start, buffer).wait()
        else:
            shared_disk.read(start, buffer).wait()
            assert torch.equal(buffer, model[start:stop])
    whole = page_aligned(65536)
    shared_disk.read(0, whole).wait()
    assert torch.equal(whole, model)


def test_many_in_flight_beside_each_other(shared_disk: Disk) -> None:
    """Neighbours within one block are written at the same time; no one's bytes are brought back by another."""
    whole = pattern(65536)
    for _ in range(5):
        shared_disk.write(0, torch.zeros(65536, dtype=torch.uint8)).wait()
        writes = [shared_disk.write(at, whole[at : at + 999]) for at in range(0, 65536, 999)]
        for write in writes:
            write.wait()
        back = torch.empty_like(whole)
        reads = [shared_disk.read(at, back[at : at + 777]) for at in range(0, 65536, 777)]
        for read in reads:
            read.wait()
        assert torch.equal(back, whole)


@pytest.mark.parametrize("shift", [0, 64])
def test_longer_than_a_piece(disk: Disk, shift: int) -> None:
    nbytes = 2 * PIECE_BYTES + 12345
    region = disk.take(nbytes)
    values, back = page_aligned(nbytes, shift), page_aligned(nbytes, shift)
    values.copy_(pattern(nbytes))
    disk.write(region.offset, values).wait()
    disk.read(region.offset, back).wait()
    assert torch.equal(back, values)
    assert Path(f"/proc/self/fd/{disk.fileno()}").read_bytes()[:nbytes] == values.numpy().tobytes()
    assert disk.meter.to_dict()["write"]["calls"] == 1
    assert disk.meter["write"].bytes == disk.meter["read"].bytes == nbytes
    assert disk.meter["read"].wait_s > 0


def test_memoryviews_and_empty_transfers(disk: Disk) -> None:
    disk.take(4096)
    disk.write(5, memoryview(b"exactly these")).wait()
    out = bytearray(13)
    disk.read(5, memoryview(out)).wait()
    disk.read(4096, torch.empty(0)).wait()
    assert out == b"exactly these"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50_000), st.integers(0, 99)), max_size=40))
def test_regions_never_overlap_and_all_space_returns(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[bool, int, int]]
) -> None:
    disk = make(tmp_path_factory.mktemp("regions"))
    held: list[Region] = []
    for takes, nbytes, choice in moves:
        if takes or not held:
            region = disk.take(nbytes)
            assert region.offset % ALIGN_BYTES == region.nbytes % ALIGN_BYTES == 0
            assert nbytes <= region.nbytes < nbytes + ALIGN_BYTES
            assert all(r.offset + r.nbytes <= region.offset or region.offset + region.nbytes <= r.offset for r in held)
            held.append(region)
        else:
            disk.give_back(held.pop(choice % len(held)))
        end = max((r.offset + r.nbytes for r in held), default=0)
        assert disk.nbytes == end == os.fstat(disk.fileno()).st_size
    for region in held:
        disk.give_back(region)
    assert disk.nbytes == os.fstat(disk.fileno()).st_blocks == 0
    disk.close()


def test_holes_are_filled_first_fit(disk: Disk) -> None:
    a, b, c, _ = (disk.take(nbytes) for nbytes in (8192, 4096, 16384, 4096))
    disk.give_back(a)
    disk.give_back(c)
    assert disk.take(12288) == Region(c.offset, 12288)
    disk.give_back(b)
    assert disk.take(12288) == Region(0, 12288)  # a and b are one
    assert disk.take(4096) == Region(c.offset + 12288, 4096)


def test_space_is_allocated_at_once(disk: Disk) -> None:
    disk.take(1 << 20)
    assert os.fstat(disk.fileno()).st_blocks * 512 >= 1 << 20


def test_wrong_use_is_refused(disk: Disk) -> None:
    disk.take(8192)
    with pytest.raises(StateError, match=r"5000 bytes at byte 4096 is not within the 8192 taken"):
        disk.read(4096, torch.empty(5000, dtype=torch.uint8))
    with pytest.raises(StateError, match="not within"):
        disk.write(-1, torch.empty(1, dtype=torch.uint8))
    with pytest.raises(StateError, match=r"contiguous CPU memory.*strides \(2,\)"):
        disk.write(0, torch.zeros(8)[::2])
    with pytest.raises(StateError, match="meta"):
        disk.write(0, torch.zeros(8, device="meta"))
    disk.close()
    with pytest.raises(StateError, match="closed"):
        disk.read(0, torch.empty(1))


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [4096, 5000, 100_000])
def test_short_reads_and_writes_go_on(disk: Disk, most: int) -> None:
    nbytes = 300_000
    region = disk.take(nbytes)
    values, back = page_aligned(nbytes), page_aligned(nbytes)
    values.copy_(pattern(nbytes))

    def short(real: Any, fd: int, buffers: list[memoryview], at: int) -> int:
        return real(fd, [buffers[0][: most // 512 * 512]], at)

    with instead(os, preadv=short, pwritev=short):
        disk.write(region.offset, values).wait()
        disk.read(region.offset, back).wait()
    assert torch.equal(back, values)


@pytest.mark.parametrize(
    ("kind", "number", "advice"),
    [
        ("read", errno.EIO, "the disk failed: see the kernel's log"),
        ("write", errno.EIO, "the disk failed"),
        ("write", errno.ENOSPC, "free space there"),
        ("write", errno.EROFS, "set offload_dir to another folder"),
    ],
)
def test_a_failed_call_is_named_in_the_waiting_thread(tmp_path: Path, kind: str, number: int, advice: str) -> None:
    disk = make(tmp_path, rank=3)
    region = disk.take(4 * PIECE_BYTES)
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
        with pytest.raises(TierError, match=rf"{where}.*{re.escape(os.strerror(number))}; {advice}"):
            move.wait()
    assert len(ends) == 3, "the buffer was still in use when the error was raised"
    with pytest.raises(TierError):  # of whoever waits next, too
        move.close()
    getattr(disk, kind)(region.offset, page_aligned(4 * PIECE_BYTES)).wait()
    disk.close()


def test_a_file_that_something_cut_short(disk: Disk) -> None:
    region = disk.take(65536)
    os.ftruncate(disk.fileno(), 20_000)
    with pytest.raises(
        TierError, match=r"a read of 65536 bytes at byte 0 ended after 16384.*no other process may write"
    ):
        disk.read(region.offset, page_aligned(65536)).wait()


def test_more_than_the_disk_has(disk: Disk) -> None:
    needed = (disk.free_bytes // ALIGN_BYTES + (1 << 20)) * ALIGN_BYTES
    with pytest.raises(TierError, match=rf"rank 0 in .* needs {needed} bytes more.*\d+ are free there.*larger disk"):
        disk.take(needed)
    assert disk.nbytes == os.fstat(disk.fileno()).st_size == 0
    assert disk.take(4096) == Region(0, 4096)


def test_an_allocation_that_ends_halfway_is_undone(disk: Disk) -> None:
    disk.take(4096)

    def half(real: Any, fd: int, offset: int, nbytes: int) -> None:
        real(fd, offset, nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with instead(os, posix_fallocate=half), pytest.raises(TierError, match="needs 1048576 bytes more beside its 4096"):
        disk.take(1 << 20)
    assert os.fstat(disk.fileno()).st_size == 4096


def test_a_file_system_without_preallocation(disk: Disk) -> None:
    with instead(os, posix_fallocate=fails(errno.EOPNOTSUPP)):
        region = disk.take(10_000)
        assert os.fstat(disk.fileno()).st_size == 12_288
        with pytest.raises(TierError, match="No space left"):
            disk.take(disk.free_bytes + (1 << 30))
    disk.write(region.offset, pattern(10_000)).wait()
    back = torch.empty(10_000, dtype=torch.uint8)
    disk.read(region.offset, back).wait()
    assert torch.equal(back, pattern(10_000))


def _beyond_the_limit(folder: Path) -> tuple[str, int]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    disk = make(folder, rank=1)
    disk.take(1 << 19)
    try:
        disk.take(1 << 20)
    except TierError as error:
        return str(error), os.fstat(disk.fileno()).st_size
    return "", 0


def test_the_limit_of_file_sizes(tmp_path: Path) -> None:
    status, answer = Forked(_beyond_the_limit, tmp_path).wait()
    assert status == 0
    assert f"disk tier of rank 1 in {tmp_path} needs 1048576 bytes more beside its 524288" in answer[0]
    assert "File too large; raise the limit of file sizes (ulimit -f" in answer[0]
    assert answer[1] == 1 << 19


@pytest.mark.parametrize("below", ["", "/inside"])
def test_a_file_where_the_folder_should_be(tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ConfigError, match=rf"offload_dir {tmp_path}/taken{below} (is a file|cannot be made)"):
        Disk(f"{tmp_path}/taken{below}", 0, Meter())
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_read_only_folder(tmp_path: Path) -> None:
    def refuse(index: int, call: tuple[str, str], arguments: Any) -> None:
        if call[0] == "open" and call[1].startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), call[1])

    with (
        calls(refuse),
        pytest.raises(ConfigError, match=rf"offload_dir {tmp_path} cannot be used on rank 2: Read-only"),
    ):
        make(tmp_path, rank=2)


@pytest.mark.skipif(file_system("/dev/shm") != "tmpfs", reason="no folder that is memory")
def test_a_folder_that_is_memory_is_warned_of(tmp_path: Path) -> None:
    """On every rank: it is its own disk tier that takes memory. Not of a disk."""
    with pytest.warns(RuntimeWarning, match=r"rank 3: the disk tier is in /dev/shm: that is tmpfs, which is memory"):
        Disk("/dev/shm", 3, Meter()).close()
    with (
        instead(tempfile, gettempdir=lambda _: "/dev/shm"),
        pytest.warns(RuntimeWarning, match="as no offload_dir is given"),
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


def test_the_folder_is_removed_while_in_use(tmp_path: Path) -> None:
    """The file lives on; the next one makes its folder again."""
    disk = make(tmp_path / "folder")
    region = disk.take(8192)
    shutil.rmtree(tmp_path / "folder")
    disk.write(region.offset, pattern(8192)).wait()
    back = torch.empty(8192, dtype=torch.uint8)
    disk.read(region.offset, back).wait()
    assert torch.equal(back, pattern(8192))
    disk.take(1 << 20)
    disk.close()
    make(tmp_path / "folder").close()


# Beginning and end of a process ---------------------------------------------------------------------------------------


HELD_BYTES = 8 << 20


def _gives_back(folder: Path, end: Callable[[], object]) -> None:
    """`end()` closes the one file in the folder, which has no name."""
    assert (holders(folder), os.listdir(folder)) == (1, [])
    end()
    assert (holders(folder), os.listdir(folder)) == (0, [])


def without_tmpfile() -> AbstractContextManager[None]:
    """A file system that has no O_TMPFILE."""

    def refuse(real: Any, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **options)

    return instead(os, open=refuse)


@pytest.fixture(params=["O_TMPFILE", "unlinked"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    with without_tmpfile() if request.param == "unlinked" else nullcontext():
        yield


@pytest.mark.usefixtures("either_way")
def test_the_file_has_no_name(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    assert os.listdir(tmp_path) == []
    assert [os.fstat(disk.fileno()).st_nlink for disk in (first, second)] == [0, 0]
    assert first.direct == second.direct
    for value, disk in enumerate((first, second)):
        disk.take(8192)
        disk.write(0, page_aligned(8192).fill_(value)).wait()
    for value, disk in enumerate((first, second)):
        back = page_aligned(8192)
        disk.read(0, back).wait()
        assert int(back.min()) == int(back.max()) == value


def _hold(folder: Path, ready: int) -> None:
    disk = make(folder, rank=7)
    disk.take(HELD_BYTES)
    disk.write(0, pattern(1 << 20)).wait()
    os.write(ready, b"!")
    time.sleep(100)


@pytest.mark.usefixtures("either_way")
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    ready, there = os.pipe()
    child = Forked(_hold, tmp_path, there)
    os.close(there)
    assert os.read(ready, 1) == b"!"
    os.close(ready)

    def kill() -> None:
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait()[0] == -signal.SIGKILL

    _gives_back(tmp_path, kill)


def test_a_file_is_closed_once_its_transfers_were_waited_for(tmp_path: Path) -> None:
    """A thread that has just ended a transfer keeps nothing of it while others go on."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            disk = make(tmp_path)
            disk.take(ALIGN_BYTES)
            disk.write(0, pattern(ALIGN_BYTES)).wait()
            disk.close()
            assert nameless_files(tmp_path) == 0
    finally:
        sys.setswitchinterval(interval)


def _leave(folder: str, ready: Any, go: Any) -> None:
    disk = make(Path(folder), rank=1)
    disk.take(HELD_BYTES)
    ready.set()
    go.wait(60)
    os._exit(0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_that_skips_exit_handlers_leaves_nothing(tmp_path: Path, method: str) -> None:
    context = torch.multiprocessing.get_context(method)
    ready, go = context.Event(), context.Event()
    child = context.Process(target=_leave, args=(str(tmp_path), ready, go))
    child.start()
    assert ready.wait(60)

    def end() -> None:
        go.set()
        child.join(60)
        assert child.exitcode == 0

    _gives_back(tmp_path, end)


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
        region = disk.take(256 << 20)
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


# Counting -------------------------------------------------------------------------------------------------------------


def test_every_thread_counts(disk: Disk) -> None:
    region = disk.take(64 * 4096)

    def work(index: int) -> None:
        buffer = page_aligned(4096)
        for turn in range(50):
            at = region.offset + 4096 * (index * 8 + turn % 8)
            disk.write(at, buffer.fill_(turn)).wait()
            disk.read(at, buffer).wait()
            assert int(buffer.min()) == int(buffer.max()) == turn

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind in ("read", "write"):
        count = disk.meter[kind]
        assert (count.calls, count.bytes) == (400, 400 * 4096)
        assert count.wait_s > 0
    disk.meter.reset()
    assert disk.meter.to_dict() == {
        kind: {"calls": 0, "bytes": 0, "wait_s": 0.0} for kind in ("down", "up", "read", "write")
    }


# Arrays at rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("numel", "block"), [(10_000, 4096), (8192, 4096), (100, 4096), (5000, 999), (0, 4096), (1, 1)]
)
def test_arrays_in_blocks(disk: Disk, numel: int, block: int, dtype: torch.dtype) -> None:
    """Read, updated and written through a ring of three buffers, beside a neighbour; all is what it would be in memory."""
    array, beside = DiskArray(disk, numel, dtype), DiskArray(disk, numel, torch.float32)
    assert array.nbytes == padded(numel * dtype.itemsize)
    assert disk.nbytes == array.nbytes + beside.nbytes
    expected = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    values = OnDisk(array).copy_(expected)
    OnDisk(beside).zero_()
    ring = [torch.empty(block, dtype=dtype) for _ in range(3)]
    disk.meter.reset()
    moves: list[Any] = []
    for index, start in enumerate(range(0, numel, block)):
        if index >= 3:
            moves[index - 3].close()
        part = ring[index % 3][: min(block, numel - start)]
        array.read(start, part).wait()
        moves.append(array.write(start, part.mul_(2)))
    for move in moves:
        move.close()
    assert disk.meter["read"].calls == disk.meter["write"].calls == len(moves)
    assert disk.meter["read"].bytes == disk.meter["write"].bytes == numel * dtype.itemsize
    assert torch.equal(values.read(), 2 * expected)
    assert not OnDisk(beside).read().any()
    for each in (array, array, beside):
        each.close()
    assert disk.nbytes == array.nbytes == 0


def test_arrays_end_with_their_space(disk: Disk) -> None:
    array = DiskArray(disk, 100, torch.float32)
    values = OnDisk(array)
    array.close()
    for use in (values.read, values.zero_):
        with pytest.raises(StateError, match="an array of 100 elements was used after it was closed"):
            use()
    kept = DiskArray(disk, 100, torch.float32)
    disk.close()
    kept.close()


def test_whoever_asks_is_told_of_every_part(disk: Disk) -> None:
    """A thread that waits for several transfers wakes when one of them has ended."""
    array = DiskArray(disk, 3 * PIECE_BYTES, torch.uint8)
    told = threading.Semaphore(0)
    buffer = page_aligned(3 * PIECE_BYTES)
    for move in (array.write, array.read):
        under_way = move(0, buffer, told.release)
        for _ in range(3):
            assert told.acquire(timeout=30)
        under_way.wait()
        assert under_way.ready


NUMEL = 7001


@pytest.fixture(scope="module", params=["own", "file"])
def at_rest(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OnDisk, torch.Tensor]]:
    """The same values on disk and in memory, of an array of our own and of a tensor in somebody's safetensors file."""
    folder = tmp_path_factory.mktemp("rest")
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).bfloat16()
    if request.param == "own":
        disk = make(folder)
        on_disk = OnDisk(DiskArray(disk, NUMEL, torch.bfloat16)).copy_(values)
        yield on_disk, values
        disk.close()
    else:
        path = folder / "model.safetensors"
        save_file({"other": torch.zeros(3, dtype=torch.uint8), "weight": values.view(1, -1)}, path)
        place = read_header(path).tensors["weight"]
        yield OnDisk(FileSource(path, place.start, torch.bfloat16, NUMEL)), values


bounds = st.none() | st.integers(-NUMEL - 5, NUMEL + 5) | st.sampled_from([2048, 2999, 3000, 3001, 6000, NUMEL])


@settings(max_examples=80, deadline=None)
@given(bounds, bounds, bounds, bounds)
def test_slices_are_those_of_a_tensor(
    at_rest: tuple[OnDisk, torch.Tensor], a: int | None, b: int | None, c: int | None, d: int | None
) -> None:
    on_disk, values = at_rest
    part, expected = on_disk[a:b][c:d], values[a:b][c:d]
    assert (part.numel(), part.shape, part.dtype, part.dim(), part.device) == (
        expected.numel(), expected.shape, expected.dtype, 1, CPU,
    )  # fmt: skip
    assert len(part) == len(expected)
    assert part.element_size() == 2
    assert torch.equal(part.read(), expected)
    assert torch.equal(fetch(part), fetch(expected))
    as_float = torch.full((2 * part.numel(),), 7.0, dtype=torch.float64)
    part.read_into(as_float[::2])
    assert torch.equal(as_float[::2], expected.double())
    assert bool((as_float[1::2] == 7).all())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_written_slices(shared_disk: Disk, data: st.DataObject) -> None:
    """Pieces from tensors of other types and strides and from other values on disk, over what is there."""
    arrays = [DiskArray(shared_disk, NUMEL, torch.float32) for _ in range(2)]
    model = torch.arange(NUMEL).float()
    values, beside = OnDisk(arrays[0]).copy_(model.double()), OnDisk(arrays[1]).zero_()
    for seed in range(data.draw(st.integers(1, 4))):
        start, stop = sorted((data.draw(st.integers(0, NUMEL)), data.draw(st.integers(0, NUMEL))))
        source = torch.randn(2 * NUMEL, generator=torch.Generator().manual_seed(seed))[: 2 * (stop - start) : 2]
        kind = data.draw(st.sampled_from(["strided", "bfloat16", "contiguous", "zero", "disk"]))
        if kind == "zero":
            values[start:stop].zero_()
            model[start:stop] = 0
        elif kind == "disk":
            other = DiskArray(shared_disk, stop - start, torch.float32)
            values[start:stop].copy_(OnDisk(other).copy_(source))
            model[start:stop] = source
            other.close()
        else:
            source = (
                source.bfloat16() if kind == "bfloat16" else source.contiguous() if kind == "contiguous" else source
            )
            values[start:stop].copy_(source)
            model[start:stop] = source.float()
    assert torch.equal(values.read(), model)
    assert not beside.read().any()
    for array in arrays:
        array.close()


def test_reads_under_way(disk: Disk) -> None:
    values = OnDisk(DiskArray(disk, 5000, torch.float32)).copy_(torch.arange(5000.0))
    target = torch.empty(3000)
    move = values[1000:4000].begin_read(target)
    move.wait()
    assert torch.equal(target, torch.arange(1000.0, 4000.0))
    with pytest.raises(StateError, match=r"float32 on disk cannot be read into a tensor of torch.bfloat16"):
        values[:10].begin_read(torch.empty(10, dtype=torch.bfloat16))


def test_longer_than_a_chunk(disk: Disk) -> None:
    numel = PIECE_BYTES // 2 + 1000
    values = torch.arange(numel, dtype=torch.int32)
    first = OnDisk(DiskArray(disk, numel, torch.int32)).copy_(values.long())
    second = OnDisk(DiskArray(disk, numel, torch.int32)).copy_(first)
    assert torch.equal(second.read(), values)
    assert torch.equal(second.read_into(torch.empty(numel, dtype=torch.float64)), values.double())


def test_shapes_must_fit(disk: Disk) -> None:
    values = OnDisk(DiskArray(disk, 10, torch.float32))
    for wrong in (torch.zeros(9), torch.zeros(2, 5), values[:9]):
        with pytest.raises(StateError, match="10 values on disk met"):
            values.copy_(wrong)
    with pytest.raises(StateError, match="10 values on disk met"):
        values.read_into(torch.zeros(11))
    with pytest.raises(StateError, match="steps of 1, found 2"):
        values[::2]


def test_a_models_own_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(torch.arange(3000.0).numpy().tobytes())
    meter = Meter()
    values = OnDisk(FileSource(path, 4000, torch.float32, 2000, meter))
    assert torch.equal(values[500:1500].read(), torch.arange(1500.0, 2500.0))
    assert (meter["read"].calls, meter["read"].bytes) == (1, 4000)
    with pytest.raises(StateError, match=rf"{path}.*cannot be written"):
        values.zero_()
    os.truncate(path, 10_000)
    with pytest.raises(TierError, match=rf"{path}: a read of 8000 bytes at byte 4000 ended after 6000"):
        values.read()
    path.unlink()
    with pytest.raises(TierError, match=rf"{path} cannot be opened: No such file.*leave it in place"):
        values.read()


# Host memory and the device -------------------------------------------------------------------------------------------


class Buffer(bytearray):
    """Memory whose end can be seen."""


def test_idle_threads_hold_no_buffer(disk: Disk) -> None:
    disk.take(4096)
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
    disk.take(4096)

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


def test_host_memory_is_exact_and_given_back() -> None:
    link = Link(CPU, Meter())
    assert link.empty(0, torch.bfloat16).shape == (0,)
    memory = link.empty(1000, torch.bfloat16)
    assert (memory.numel(), memory.dtype, memory.untyped_storage().nbytes()) == (1000, torch.bfloat16, 2000)
    assert memory.data_ptr() % ALIGN_BYTES == 0
    assert link.page_locked_bytes == 0

    before = resident_bytes()
    large = link.empty(16 << 20, torch.float32).fill_(1)
    part = large[5:]
    del large
    assert resident_bytes() - before > 60 << 20
    assert part[0] == 1
    del part
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
    from hf_zero.tiers.host import keep_freed

    def resident_mib() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 >> 20

    keep_freed()
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


def test_memory_outlives_its_first_tensor() -> None:
    """What is unlocked when the memory goes is unlocked no sooner."""
    before = resident_bytes()
    storage = Link(CPU, Meter()).empty(16 << 20, torch.float32).fill_(1)[3:7].untyped_storage()
    again = torch.empty(0, dtype=torch.uint8).set_(storage)
    del storage
    gc.collect()
    assert resident_bytes() - before > 60 << 20
    assert again.numel() == 64 << 20
    del again
    assert resident_bytes() - before < 8 << 20


def _with_little_memory() -> str:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
    try:
        Link(CPU, Meter()).empty(64 << 20, torch.float32)
    except TierError as error:
        return str(error)
    return ""


def test_host_memory_is_refused() -> None:
    status, message = Forked(_with_little_memory).wait()
    assert status == 0
    assert message.startswith("268435456 bytes of host memory were refused: Cannot allocate memory; free host memory")


def test_copies_on_a_cpu_device() -> None:
    meter = Meter()
    link = Link(CPU, meter)
    source, target = torch.randn(100), link.empty(100, torch.float32)
    link.down(source, target).wait()
    assert torch.equal(source, target)
    link.up(target.mul_(2), source, after=link.mark()).close()
    assert torch.equal(source, target)
    assert [(meter[kind].calls, meter[kind].bytes) for kind in ("down", "up")] == [(1, 400), (1, 400)]
    for wrong in (torch.empty(99), torch.empty(100, dtype=torch.bfloat16)):
        with pytest.raises(
            StateError, match=r"copy down the link needs equal types and lengths, found 100 x torch.float32"
        ):
            link.down(source, wrong)
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
        down = link.down(values, host)
        del values  # its memory may be used again only when the copy is through
        torch.full((4 << 20,), -1.0, device="cuda")
        down.wait()
        assert bool((host == turn).all())
        arrived = torch.empty(4 << 20, device="cuda")
        mark, moves = link.mark(), []
        thread = threading.Thread(target=lambda: moves.append(link.up(host, arrived, after=mark)))  # noqa: B023
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
