"""Where bytes rest, and the roads between: device, host memory, disk.

* `Link`: host memory and copies between it and the device.
* `Disk`: one file of this rank, its regions, positional reads and writes by a few threads, around the page cache where the
  file system lets us (O_DIRECT).
* `Records`: arrays of equal length at rest in a file, cut so that one read brings a stretch of all of them.
* `OnDisk`: one 1-D array at rest in a file, sliced like a tensor.
* `FileSource`, `FilePieces`: arrays at rest in files that are somebody else's, and stay there until they are written.

Every road counts into a `Meter`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import re
import stat
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .errors import ConfigError, StateError, TierError, ZeroError
from .inflight import DONE, Inflight

BLOCK_NUMEL = 1 << 19
"""Elements that the host optimizer updates at a time in mixed precision, so that they stay in the processor's cache."""
SLAB_NUMEL = 1 << 20
"""Elements of one record of the disk tier: what is read, updated and written at a time."""
ALIGN_BYTES = 4096
"""O_DIRECT asks for file offsets, lengths and addresses that are multiples of the disk's block; this serves all of them."""
PIECE_BYTES = 4 << 20
"""A longer transfer is cut into pieces of this size, which move at the same time."""
THREADS = 4
"""Pieces under way at once. Unaligned ones go through memory of their own, so that takes `THREADS * PIECE_BYTES` at most."""

_Array = np.ndarray[Any, np.dtype[np.uint8]]


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


def padded(nbytes: int) -> int:
    """The next multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


# Counting -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Count:
    """One road since the last reset: transfers asked for, their bytes, and how long the host stood waiting for them."""

    calls: int = 0
    bytes: int = 0
    wait_s: float = 0.0


class Meter:
    """Counters by road: `down` (device to host), `up` (host to device), `read` and `write` (disk). Any thread may count."""

    def __init__(self) -> None:
        self.kinds = {kind: Count() for kind in ("down", "up", "read", "write")}
        self._lock = threading.Lock()

    def __getitem__(self, kind: str) -> Count:
        return self.kinds[kind]

    def moved(self, kind: str, bytes_: int) -> None:
        with self._lock:
            self.kinds[kind].calls += 1
            self.kinds[kind].bytes += bytes_

    def waited(self, kind: str, wait_s: float) -> None:
        with self._lock:
            self.kinds[kind].wait_s += wait_s

    def reset(self) -> None:
        with self._lock:
            for count in self.kinds.values():
                count.calls = count.bytes = 0
                count.wait_s = 0.0

    def to_dict(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return {kind: asdict(count) for kind, count in self.kinds.items()}


class _Waiting:
    """`wait` of anything, its time counted."""

    def __init__(self, wait: Callable[[], object], meter: Meter | None, kind: str, *kept: object) -> None:
        self._wait = wait
        self._meter = meter
        self._kind = kind
        self._kept = kept  # memory that must outlive the transfer

    def wait(self) -> None:
        start = time.perf_counter()
        try:
            self._wait()
        finally:
            if self._meter is not None:
                self._meter.waited(self._kind, time.perf_counter() - start)


# Host memory and the device -----------------------------------------------------------------------------------------


def _pages(nbytes: int) -> _Array:
    """Zeroed memory of whole pages, given back to the system when the last tensor on it is gone."""
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TierError(
            f"{nbytes} bytes of host memory were refused: {error.strerror or error}; free host memory, raise this "
            "process's limit (ulimit -v), or let less rest on the host (host_memory, offload to disk)"
        ) from error
    return np.frombuffer(memory, np.uint8)[:nbytes]


class Link:
    """The road between host memory and `device`. On a CPU device both ends are host memory and copies are made at once."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.device = device
        self.meter = meter
        self.page_locked_bytes = 0
        self._locks_pages = device.type == "cuda"
        self._lock = threading.Lock()
        if device.type == "cuda":
            self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def empty(self, numel: int, dtype: torch.dtype, travels: bool = True) -> Tensor:
        """Host memory, 1-D, of exactly the size asked for, page-aligned; page-locked for CUDA, so that copies run on their own.

        torch's allocator of page-locked memory rounds up to powers of two and keeps what it has.

        Args:
            travels: it is copied from or to the device.
        """
        memory = _pages(numel * dtype.itemsize)
        if travels and self._locks_pages and memory.nbytes:
            self._lock_pages(memory)
        return torch.from_numpy(memory).view(dtype)

    def _lock_pages(self, memory: _Array) -> None:
        address, nbytes = memory.ctypes.data, memory.nbytes
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            answer = cudart.cudaHostRegister(address, nbytes, 0)
            if int(answer) == 0:
                with self._lock:
                    self.page_locked_bytes += nbytes
                weakref.finalize(memory, self._unlock_pages, address, nbytes).atexit = False  # type: ignore[misc]
                return
            # CUDA also keeps the error for whoever launches the next kernel.
            with contextlib.suppress(RuntimeError):
                torch.ones((), device=self.device)
        self._locks_pages = False
        warnings.warn(
            f"{nbytes} bytes of host memory could not be page-locked ({cudart.cudaGetErrorString(answer)}; "
            f"{self.page_locked_bytes} are): from here on pageable memory is used, copies to and from {self.device} are slower "
            "and do not overlap with computing. "
            "Raise the limit of locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1) or free host memory",
            stacklevel=3,
        )

    def _unlock_pages(self, address: int, nbytes: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)
        with self._lock:
            self.page_locked_bytes -= nbytes

    def behind_up(self) -> AbstractContextManager[object]:
        """What is started inside comes after all copies up so far, without the current stream's waiting for them."""
        return torch.cuda.stream(self._up) if self.device.type == "cuda" else contextlib.nullcontext()

    def mark(self) -> Any:
        """A point in the current stream's work, for `up(after=)` from another thread; None on a CPU device."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def down(self, source: Tensor, target: Tensor) -> Inflight:
        """Copy `source` (device) to `target` (host) after what the current stream has to do. Waiting holds the host up.

        Raises:
            StateError: of different type or length.
        """
        self._count("down", source, target)
        if self.device.type != "cuda":
            target.copy_(source)
            return DONE
        event = self._copy(self._down, source, target, source, None)
        return Inflight((_Waiting(event.synchronize, self.meter, "down", target),))

    def up(self, source: Tensor, target: Tensor, after: Any = None) -> Inflight:
        """Copy `source` (host) to `target` (device) after `after`, or after what the current stream has to do.

        Waiting holds up the current stream only; closing holds the host up until `source` may be written again.

        Raises:
            StateError: of different type or length.
        """
        self._count("up", source, target)
        if self.device.type != "cuda":
            target.copy_(source)
            return DONE
        event = self._copy(self._up, source, target, target, after)
        arrived = _Waiting(lambda: torch.cuda.current_stream(self.device).wait_event(event), None, "up")
        return Inflight((arrived,), (_Waiting(event.synchronize, self.meter, "up", source),))

    def _count(self, kind: str, source: Tensor, target: Tensor) -> None:
        if source.dtype != target.dtype or source.numel() != target.numel():
            raise StateError(
                f"a copy {kind} the link needs equal types and lengths, found {source.numel()} x {source.dtype} and "
                f"{target.numel()} x {target.dtype}"
            )
        self.meter.moved(kind, source.numel() * source.element_size())

    def _copy(self, stream: Any, source: Tensor, target: Tensor, on_device: Tensor, after: Any) -> torch.cuda.Event:
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        on_device.record_stream(stream)
        event: torch.cuda.Event = stream.record_event()
        return event


def empty_cache(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the device, for others to use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Threads that move bytes --------------------------------------------------------------------------------------------


_Job = tuple["Future[None]", Callable[..., None], tuple[Any, ...]]


class _Workers:
    """A few threads for blocking calls. They start when first needed and never hold up the end of the process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        with self._lock:
            while len(self._threads) < THREADS:
                self._threads.append(threading.Thread(target=self._run, name="hf_zero disk", daemon=True))
                self._threads[-1].start()
        future: Future[None] = Future()
        self._queue.put((future, function, args))
        return future

    def stop(self) -> None:
        """Forget what has not begun and see what has to its end, unless the disk hangs.

        A thread that frees a tensor while the interpreter is taken down aborts the process.
        """
        with self._lock, contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads.clear()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            future, function, args = job
            try:
                function(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del job, future, function, args  # an idle thread holds no buffer


_workers = _Workers()


def _renew_workers() -> None:
    global _workers
    _workers = _Workers()


atexit.register(lambda: _workers.stop())
os.register_at_fork(after_in_child=_renew_workers)  # threads do not survive a fork


def _inflight(futures: Sequence[Future[None]], meter: Meter | None, kind: str) -> Inflight:
    def wait() -> None:
        wait_for_all(futures)  # all, so that after an error no buffer is in use any more
        for future in futures:
            future.result()

    return Inflight((_Waiting(wait, meter, kind),))


_ADVICE = {
    errno.ENOSPC: "free space there, or set offload_dir to a folder on a larger disk",
    errno.EDQUOT: "the quota is used up: free space, or set offload_dir to a folder on another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f unlimited), or set offload_dir to a folder on another file system",
    errno.EIO: "the disk failed: see the kernel's log, set offload_dir to a folder on another disk",
}
_ENDED = "something else cut the file short: leave the files in this folder alone while training runs"


def _move(kind: str, fd: int, array: _Array, offset: int, grain: int, where: str) -> None:
    """Read into or write from `array` at byte `offset` until all is moved. With `grain`, pieces stay multiples of it."""
    call = os.preadv if kind == "read" else os.pwritev
    done = 0
    try:
        while done < len(array):
            count = call(fd, [array[done:].data], offset + done)
            count -= count % grain
            if count <= 0:
                raise TierError(
                    f"{where}: a {kind} of {len(array)} bytes at byte {offset} ended after {done}: {_ENDED}"
                )
            done += count
    except OSError as error:
        raise _failed(error, f"{where}: a {kind} of {len(array)} bytes at byte {offset} failed after {done}") from error


def _failed(error: OSError, what: str) -> TierError:
    advice = _ADVICE.get(error.errno or 0, "set offload_dir to another folder")
    return TierError(f"{what}: {error.strerror or error}; {advice}")


# The file -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of the file: first byte and length, multiples of `ALIGN_BYTES`."""

    offset: int
    nbytes: int


def _allocate(fd: int, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        # File systems that cannot: the C library's substitute writes single bytes, which O_DIRECT refuses.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(fd, offset + nbytes)


class _Descriptor:
    """An open file, closed when the last transfer and the last owner let go of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False  # type: ignore[misc]


class Disk:
    """The file of one rank. It is there to be looked at while the process lives, locked, and gone when the process ends.

    What killed processes left in the folder is removed first. Overlapping transfers must not be under way at the same
    time if one of them writes; any others may.

    Args:
        folder: None: a folder of this user in the system's temporary one. Made, for this user only, where it is missing.
        job: part of the file's name.
        link: its memory is used for `Records.buffer`.

    Attributes:
        path: the file.
        direct: transfers go around the page cache; found out by trying.

    Raises:
        ConfigError: the folder cannot be made or written, or is no folder.
    """

    def __init__(self, folder: str | None, job: str, rank: int, meter: Meter, link: Link | None = None) -> None:
        self.meter = meter
        self.link = link or Link(torch.device("cpu"), meter)
        self.rank = rank
        self.folder = _make_folder(folder)
        try:
            _remove_left_overs(self.folder)
            self.path, number = _create(self.folder, f"hf_zero-{re.sub(r'[^A-Za-z0-9_.]', '_', job)}-rank{rank}")
        except OSError as error:
            raise ConfigError(
                f"offload_dir {self.folder} cannot be used on rank {rank}: {error.strerror or error}; expected a folder on a "
                "local disk that this user may write to"
            ) from error
        self._file: _Descriptor | None = _Descriptor(number)
        self._remove = weakref.finalize(self, _unlink, self.path, os.getpid())
        self._end = 0
        self._free: list[Region] = []  # in order of offset, no two adjacent, none at the end
        self._lock = threading.Lock()
        self._edges = threading.Lock()
        self.direct = self._takes_direct()

    @property
    def nbytes(self) -> int:
        """Bytes of disk that the file takes."""
        return self._end

    @property
    def free_bytes(self) -> int:
        """Bytes that this user may still write to the folder's file system."""
        about = os.fstatvfs(self._open().number)
        return about.f_bavail * about.f_frsize

    def close(self) -> None:
        """Remove the file; what rests in it is lost. Transfers under way still end as they should. Safe to call again."""
        self._remove()
        self._file = None

    # Space ------------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Region:
        """A stretch of at least `nbytes`, its blocks allocated now, its content undefined.

        Raises:
            TierError: no space, with what is needed and what is free.
        """
        nbytes = padded(nbytes)
        with self._lock:
            for index, hole in enumerate(self._free):
                if hole.nbytes >= nbytes:
                    rest = Region(hole.offset + nbytes, hole.nbytes - nbytes)
                    self._free[index : index + 1] = [rest] if rest.nbytes else []
                    return Region(hole.offset, nbytes)
            region = Region(self._end, nbytes)
            self._grow(nbytes)
            return region

    def _grow(self, nbytes: int) -> None:
        fd = self._open().number
        try:
            if self.free_bytes < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if nbytes:
                _allocate(fd, self._end, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._end)  # of a failed allocation a part may be there
            raise _failed(
                error,
                f"{self.path}: rank {self.rank} needs {nbytes} bytes more for the disk tier beside its {self._end}, "
                f"{self.free_bytes} are free in {self.folder}",
            ) from error
        self._end += nbytes

    def give_back(self, region: Region) -> None:
        """For later use by `take`; at the file's end it shrinks the file. No transfer of it may be under way."""
        if not region.nbytes or self._file is None:
            return
        with self._lock:
            merged: list[Region] = []
            for hole in sorted([*self._free, region], key=lambda hole: hole.offset):
                if merged and merged[-1].offset + merged[-1].nbytes == hole.offset:
                    hole = Region(merged[-1].offset, merged.pop().nbytes + hole.nbytes)
                merged.append(hole)
            if merged[-1].offset + merged[-1].nbytes == self._end:
                self._end = merged.pop().offset
                os.ftruncate(self._file.number, self._end)
            self._free = merged

    # Transfers --------------------------------------------------------------------------------------------------------

    def read(self, offset: int, buffer: Tensor | memoryview) -> Inflight:
        """Fill `buffer` (CPU, contiguous, any type) from byte `offset` of the file. Waiting raises what went wrong.

        Raises:
            TierError: (when waiting) the read failed or the file is too short.
            StateError: closed, not such a buffer, or not within the file.
        """
        return self._start("read", offset, buffer)

    def write(self, offset: int, buffer: Tensor | memoryview) -> Inflight:
        """Write `buffer` (CPU, contiguous, any type), which must not change until waited for, to byte `offset` of the file.

        Raises:
            TierError: (when waiting) the write failed.
            StateError: closed, not such a buffer, or not within the file.
        """
        return self._start("write", offset, buffer)

    def _start(self, kind: str, offset: int, buffer: Tensor | memoryview) -> Inflight:
        file = self._open()
        array = _bytes_of(buffer)
        if offset < 0 or offset + len(array) > self._end:
            raise StateError(
                f"{self.path}: a {kind} of {len(array)} bytes at byte {offset} is not within the {self._end} taken"
            )
        self.meter.moved(kind, len(array))
        grain = ALIGN_BYTES if self.direct else 1
        fits = offset % grain == 0 and array.ctypes.data % grain == 0
        straight = len(array) - len(array) % grain if fits else 0
        futures = []
        for start in range(0, len(array), PIECE_BYTES):
            piece = array[start : min(start + PIECE_BYTES, len(array))]
            body = max(0, min(len(piece), straight - start))
            if body:
                futures.append(_workers.submit(self._piece, file, kind, piece[:body], offset + start))
            if body < len(piece):
                futures.append(_workers.submit(self._uneven, file, kind, piece[body:], offset + start + body))
        return _inflight(futures, self.meter, kind)

    def _piece(self, file: _Descriptor, kind: str, array: _Array, offset: int) -> None:
        _move(kind, file.number, array, offset, ALIGN_BYTES if self.direct else 1, f"{self.path} (rank {self.rank})")

    def _uneven(self, file: _Descriptor, kind: str, array: _Array, offset: int) -> None:
        """O_DIRECT moves whole aligned blocks: through memory that covers them.

        A second descriptor without O_DIRECT would be shorter, but the page cache works in units larger than our blocks, and
        its late writing can undo a direct write to the block beside.
        """
        low, high = offset - offset % ALIGN_BYTES, padded(offset + len(array))
        cover = _pages(high - low)
        inner = cover[offset - low :][: len(array)]
        if kind == "read":
            self._piece(file, "read", cover, low)
            array[:] = inner
            return
        with self._edges:  # two writes to one block would each bring back the other's old bytes
            if offset > low:
                self._piece(file, "read", cover[:ALIGN_BYTES], low)
            if offset + len(array) < high:
                self._piece(file, "read", cover[-ALIGN_BYTES:], high - ALIGN_BYTES)
            inner[:] = array
            self._piece(file, "write", cover, low)

    def _open(self) -> _Descriptor:
        if self._file is None:
            raise StateError(f"{self.path}: the disk tier is closed")
        return self._file

    def _takes_direct(self) -> bool:
        """Whether an aligned write and read with O_DIRECT succeed here; if so the file stays in that mode."""
        fd = self._open().number
        mode = fcntl.fcntl(fd, fcntl.F_GETFL)
        region = self.take(ALIGN_BYTES)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, mode | os.O_DIRECT)
            written, back = _pages(ALIGN_BYTES), _pages(ALIGN_BYTES)
            written[:] = 0xA5
            done = os.pwritev(fd, [written.data], region.offset), os.preadv(fd, [back.data], region.offset)
            if done == (ALIGN_BYTES, ALIGN_BYTES) and bool((back == written).all()):
                return True
        except OSError:
            pass
        finally:
            self.give_back(region)
        fcntl.fcntl(fd, fcntl.F_SETFL, mode)
        return False


class _Memory:
    """A tensor's bytes, for numpy. After `Tensor.numpy()` a storage could never be resized again."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # numpy keeps this object, and so the memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.numel() * tensor.element_size(),),
            "data": (tensor.data_ptr(), False),
        }


def _bytes_of(buffer: Tensor | memoryview) -> _Array:
    if isinstance(buffer, Tensor):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise StateError(
                f"the disk moves contiguous CPU memory, found a tensor on {buffer.device} with strides {buffer.stride()}"
            )
        return np.asarray(_Memory(buffer.detach()))
    return np.frombuffer(buffer, np.uint8)


def _make_folder(folder: str | None) -> Path:
    path = Path(folder or f"{tempfile.gettempdir()}/hf_zero-{os.getuid()}").expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"offload_dir {path} is a file, expected a folder: remove it or choose another") from None
    except OSError as error:
        raise ConfigError(
            f"offload_dir {path} cannot be made: {error.strerror or error}; choose a folder on a local disk that this user may "
            "write to"
        ) from error
    owner = os.lstat(path)
    if folder is None and (stat.S_ISLNK(owner.st_mode) or owner.st_uid != os.getuid()):
        raise ConfigError(f"{path} belongs to another user: set offload_dir to a folder of your own")
    return path


def _create(folder: Path, stem: str) -> tuple[Path, int]:
    """A new locked file. Another process may take it for a left-over between its making and its locking: then once more."""
    taken = 0
    while True:
        path = folder / f"{stem}-{os.getpid()}{f'.{taken}' if taken else ''}.tier"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            taken += 1
            continue
        _lock(fd)
        if _is_at(fd, path):
            return path, fd
        os.close(fd)


def _remove_left_overs(folder: Path) -> None:
    for path in folder.glob("hf_zero-*-rank*-*.tier"):
        with contextlib.suppress(OSError):  # gone meanwhile, another user's, or locked by a living process
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, path):
                    os.unlink(path)
            finally:
                os.close(fd)


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        # Without locks nobody can tell a left-over, so none is removed.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _unlink(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the parent's file alone
        with contextlib.suppress(OSError):
            os.unlink(path)


# Arrays at rest -----------------------------------------------------------------------------------------------------


class Source(Protocol):
    """A 1-D array in a file, as `OnDisk` needs it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def numel(self) -> int: ...

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where elements [start, stop) lie: byte offsets in the file and numbers of elements, in order."""
        ...

    def read(self, offset: int, values: Tensor) -> Inflight: ...

    def write(self, offset: int, values: Tensor) -> Inflight: ...


class OnDisk:
    """1-D values at rest in a file. A slice is a view: it costs nothing and writes to the same place."""

    __slots__ = ("_source", "_start", "_stop")

    def __init__(self, source: Source, start: int = 0, stop: int | None = None) -> None:
        self._source = source
        self._start = start
        self._stop = source.numel if stop is None else stop

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.numel(),))

    def numel(self) -> int:
        return self._stop - self._start

    def dim(self) -> int:
        return 1

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.numel()

    def __getitem__(self, part: slice) -> OnDisk:
        start, stop, step = part.indices(self.numel())
        if step != 1:
            raise StateError(f"values on disk are sliced in steps of 1, found {step}")
        return OnDisk(self._source, self._start + start, self._start + max(start, stop))

    def read(self) -> Tensor:
        """A new CPU tensor."""
        values = torch.from_numpy(_pages(self.numel() * self.element_size())).view(self.dtype)
        self.begin_read(values).wait()
        return values

    def begin_read(self, target: Tensor) -> Inflight:
        """Start to fill `target`: CPU, contiguous, of this type and length.

        Raises:
            StateError: it is not.
            TierError: (when waiting) the read failed.
        """
        self._check(target)
        if target.dtype != self.dtype:
            raise StateError(
                f"values of {self.dtype} on disk cannot be read into a tensor of {target.dtype} while under way"
            )
        return self._each(self._source.read, target)

    def begin_write(self, values: Tensor) -> Inflight:
        """Start to write `values`: CPU, contiguous, of this type and length; they must not change until waited for."""
        return self._each(self._source.write, values)

    def read_into(self, target: Tensor) -> Tensor:
        """Fill `target` (this length; any type and device), chunk by chunk.

        Raises:
            StateError: of another length.
            TierError: the read failed.
        """
        self._check(target)
        if target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous():
            self.begin_read(target).wait()
            return target
        for part, place in self._chunks(target):
            place.copy_(part.read())
        return target

    def copy_(self, values: Values) -> OnDisk:
        """Write `values` (this length; any type and device), chunk by chunk.

        Raises:
            StateError: of another length, or these values are read-only.
            TierError: the write failed.
        """
        self._check(values)
        if isinstance(values, OnDisk):
            for start in range(0, self.numel(), self._chunk_numel):
                chunk = slice(start, start + self._chunk_numel)
                self[chunk].copy_(values[chunk].read())
        elif values.dtype == self.dtype and values.device.type == "cpu" and values.is_contiguous():
            self.begin_write(values).wait()
        else:
            for part, place in self._chunks(values):
                part.begin_write(place.to(device="cpu", dtype=self.dtype).contiguous()).wait()
        return self

    def zero_(self) -> OnDisk:
        return self.copy_(torch.zeros((), dtype=self.dtype).expand(self.numel()))

    @property
    def _chunk_numel(self) -> int:
        return PIECE_BYTES // self.element_size()

    def _chunks(self, values: Tensor) -> Iterator[tuple[OnDisk, Tensor]]:
        for start in range(0, self.numel(), self._chunk_numel):
            chunk = slice(start, start + self._chunk_numel)
            yield self[chunk], values[chunk]

    def _each(self, move: Callable[[int, Tensor], Inflight], values: Tensor) -> Inflight:
        transfers, done = [], 0
        for offset, numel in self._source.extents(self._start, self._stop):
            transfers.append(move(offset, values[done : done + numel]))
            done += numel
        return Inflight(transfers)

    def _check(self, values: Values) -> None:
        if values.dim() != 1 or values.numel() != self.numel():
            raise StateError(f"{self.numel()} values on disk met a tensor of shape {tuple(values.shape)}")


Values = Tensor | OnDisk
"""1-D values, wherever they rest."""


def fetch(values: Values) -> Tensor:
    """The values as a tensor: themselves where they are one, else read from disk."""
    return values.read() if isinstance(values, OnDisk) else values


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells a file from another that took its place, and from itself after it was written to."""

    inode: int
    nbytes: int
    modified_ns: int

    @staticmethod
    def of(file: int | str | os.PathLike[str]) -> Stamp:
        """Of a path or a descriptor.

        Raises:
            OSError: it is not there.
        """
        about = os.stat(file)
        return Stamp(about.st_ino, about.st_size, about.st_mtime_ns)


class FileSource:
    """`numel` elements from byte `offset` of a file that is somebody else's, read-only: weights in a safetensors file.

    Opened for each read, so that thousands of tensors hold no descriptors.

    Args:
        stamp: the file's when `offset` was found. Reading it raises TierError once it has another.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int,
        dtype: torch.dtype,
        numel: int,
        meter: Meter | None = None,
        stamp: Stamp | None = None,
    ) -> None:
        self.path = Path(path)
        self.dtype = dtype
        self.numel = numel
        self._offset = offset
        self._meter = meter or Meter()
        self._stamp = stamp

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield self._offset + start * self.dtype.itemsize, stop - start

    def read(self, offset: int, values: Tensor) -> Inflight:
        array = _bytes_of(values)
        self._meter.moved("read", len(array))
        pieces = range(0, len(array), PIECE_BYTES)
        futures = [_workers.submit(self._piece, array[at : at + PIECE_BYTES], offset + at) for at in pieces]
        return _inflight(futures, self._meter, "read")

    def _piece(self, array: _Array, offset: int) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise TierError(
                f"{self.path} cannot be opened: {error.strerror or error}; weights rest in this file while training runs: "
                "leave it in place"
            ) from error
        try:
            _move("read", fd, array, offset, 1, str(self.path))
            found = Stamp.of(fd)  # after the read: also what changed meanwhile is noticed
        finally:
            os.close(fd)
        if self._stamp is not None and found != self._stamp:
            raise TierError(
                f"{self.path} is not what the model was loaded from any more (found {found}, expected {self._stamp}); weights "
                "rest in this file while training runs: leave it as it is, or load the model again"
            )

    def write(self, offset: int, values: Tensor) -> Inflight:
        raise StateError(f"{self.path}: frozen values at rest in a model's own file cannot be written")


class FilePieces:
    """`numel` elements put together from other arrays at rest, read-only: parameters in a model's own files. Gaps are zeros.

    Args:
        parts: of each its first element here, and its values, of type `dtype`; in order, without overlap.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, parts: Sequence[tuple[int, OnDisk]], meter: Meter | None = None
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self._parts = parts
        self._meter = meter or Meter()

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield start, stop - start

    def read(self, offset: int, values: Tensor) -> Inflight:
        stop, done = offset + values.numel(), offset
        transfers = []
        for at, part in self._parts:
            low, high = max(offset, at), min(stop, at + part.numel())
            if low < high:
                values[done - offset : low - offset].zero_()
                transfers.append(part[low - at : high - at].begin_read(values[low - offset : high - offset]))
                self._meter.moved("read", (high - low) * self.dtype.itemsize)
                done = high
        values[done - offset :].zero_()

        def wait() -> None:
            failure: ZeroError | None = None
            for transfer in transfers:  # all, so that after an error `values` is not in use any more
                try:
                    transfer.wait()
                except ZeroError as error:
                    failure = failure or error
            if failure is not None:
                raise failure

        return Inflight((_Waiting(wait, self._meter, "read"),))

    def write(self, offset: int, values: Tensor) -> Inflight:
        raise StateError("frozen values at rest in a model's own files cannot be written")


class Records:
    """Arrays of `numel` elements each at rest on disk, cut into records of `block_numel` elements of every array.

    Record i holds elements [i * block_numel, …), one field after another, each padded to `ALIGN_BYTES`: one read or write
    moves it. The last may be shorter. The content of new records is undefined.

    Args:
        fields: name and type of each array.
        base: the values of the one array there is, at rest elsewhere and read there. They move here, and take space, when
            they are first written.

    Raises:
        TierError: no space.
    """

    def __init__(
        self,
        disk: Disk,
        numel: int,
        block_numel: int,
        fields: Sequence[tuple[str, torch.dtype]],
        base: Source | None = None,
    ) -> None:
        if block_numel < 1 and numel:
            raise StateError(f"records of {block_numel} elements cannot hold {numel}")
        self.disk = disk
        self.numel = numel
        self.block_numel = min(block_numel, numel) or 1
        self.fields = dict(fields)
        self.count = -(-numel // self.block_numel)
        self.record_bytes = self._bytes_of(self.block_numel)
        if base is not None and [*self.fields.values()] != [base.dtype]:
            raise StateError(f"records of {self.fields} cannot begin as one array of {base.dtype}")
        self._base = base
        self._lock = threading.Lock()
        self._region = self._take() if base is None else None

    def _take(self) -> Region:
        itemsizes = [dtype.itemsize for dtype in self.fields.values()]
        return self.disk.take(records_bytes(self.numel, self.block_numel, itemsizes))

    def numel_of(self, index: int) -> int:
        """Elements of each field in record `index`."""
        return min(self.block_numel, self.numel - index * self.block_numel)

    @property
    def nbytes(self) -> int:
        """Bytes of disk taken."""
        return 0 if self._region is None else self._region.nbytes

    def buffer(self) -> Tensor:
        """Host memory for any one record: uint8, `record_bytes` long, page-aligned, page-locked for CUDA."""
        return self.disk.link.empty(self.record_bytes, torch.uint8)

    def read(self, index: int, buffer: Tensor) -> Inflight:
        """Record `index` into the first bytes of `buffer`."""
        return self.disk.read(self._offset(index), buffer[: self._bytes_of(self.numel_of(index))])

    def write(self, index: int, buffer: Tensor) -> Inflight:
        """Record `index` from the first bytes of `buffer`, which must not change until waited for."""
        return self.disk.write(self._offset(index), buffer[: self._bytes_of(self.numel_of(index))])

    def views(self, index: int, buffer: Tensor) -> dict[str, Tensor]:
        """The fields in a buffer that holds record `index`, 1-D, `numel_of(index)` elements each."""
        numel, out, start = self.numel_of(index), {}, 0
        for name, dtype in self.fields.items():
            out[name] = buffer[start : start + numel * dtype.itemsize].view(dtype)
            start += padded(numel * dtype.itemsize)
        return out

    def values(self, field: str) -> OnDisk:
        """One array, whole. It must not be written while transfers of records are under way."""
        return OnDisk(_Field(self, field) if self._base is None else _Based(self, field))

    @property
    def base(self) -> Source | None:
        """Where the values are as long as nothing was written."""
        return self._base

    def settle(self) -> None:
        """The base's values rest here from now on.

        Raises:
            TierError: no space, or the base cannot be read; it stays the base then.
        """
        with self._lock:
            base = self._base
            if base is None:
                return
            self._region = self._take()
            try:
                for name in self.fields:
                    OnDisk(_Field(self, name)).copy_(OnDisk(base))
            except ZeroError:
                region, self._region = self._region, None
                self.disk.give_back(region)
                raise
            self._base = None

    def close(self) -> None:
        """Give the space back. Transfers must be over. Safe to call again."""
        self._base = None
        region, self._region = self._region, None
        if region is not None:
            self.disk.give_back(region)

    def _offset(self, index: int) -> int:
        if self._region is None or not 0 <= index < self.count:
            raise StateError(f"record {index} of {self.count if self._region else 'closed records'} was asked for")
        return self._region.offset + index * self.record_bytes

    def _bytes_of(self, numel: int) -> int:
        return sum(padded(numel * dtype.itemsize) for dtype in self.fields.values())


def records_bytes(numel: int, block_numel: int, itemsizes: Sequence[int]) -> int:
    """Bytes of disk that `Records` of fields with these bytes per element take."""
    block = min(block_numel, numel) or 1
    whole, rest = divmod(numel, block)
    return sum(whole * padded(block * itemsize) + padded(rest * itemsize) for itemsize in itemsizes)


class _Field:
    """One array of `Records`."""

    def __init__(self, records: Records, name: str) -> None:
        self.dtype = records.fields[name]
        self.numel = records.numel
        self._records = records
        self._before = [
            dtype.itemsize for dtype in itertools.islice(records.fields.values(), list(records.fields).index(name))
        ]
        self.read = records.disk.read
        self.write = records.disk.write

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        records, block = self._records, self._records.block_numel
        while start < stop:
            index, inside = divmod(start, block)
            numel = min(stop - start, block - inside)
            base = sum(padded(records.numel_of(index) * itemsize) for itemsize in self._before)
            yield records._offset(index) + base + inside * self.dtype.itemsize, numel
            start += numel


class _Based:
    """The array of `Records` with a base: read there until it is written, here from then on. Offsets are elements."""

    def __init__(self, records: Records, name: str) -> None:
        self.dtype = records.fields[name]
        self.numel = records.numel
        self._records = records
        self._name = name

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield start, stop - start

    def read(self, offset: int, values: Tensor) -> Inflight:
        source = self._records.base or _Field(self._records, self._name)
        return OnDisk(source, offset, offset + values.numel()).begin_read(values)

    def write(self, offset: int, values: Tensor) -> Inflight:
        self._records.settle()
        return OnDisk(_Field(self._records, self._name), offset, offset + values.numel()).begin_write(values)
