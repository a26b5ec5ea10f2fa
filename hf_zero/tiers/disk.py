"""One file without a name: its regions, positional reads and writes, around the page cache where possible (O_DIRECT).

Transfers are made by a few threads of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from torch import Tensor

from ..comm.inflight import Inflight, Latch, Timed
from ..errors import ConfigError, StateError, TierError
from .host import Bytes, pages
from .tier import ALIGN_BYTES, PIECE_BYTES, THREADS, Meter, padded

# Threads ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Job:
    """A call in one of the threads.

    Attributes:
        call: None once it has ended; `error` is what it raised.
        on_done: called in the thread when it has.
    """

    call: Callable[[], None] | None
    on_done: Callable[[], object] | None
    ended: Latch = field(default_factory=Latch)
    error: BaseException | None = None


class _Workers:
    """A few threads for blocking calls. They start when first needed and never hold up the end of the process."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """After a fork, which threads do not survive: what was queued is the parent's."""
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        with self._lock:
            while len(self._threads) < THREADS:
                self._threads.append(threading.Thread(target=self._run, name="hf_zero disk", daemon=True))
                self._threads[-1].start()
        self._queue.put(job)

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
            try:
                if job.call is not None:
                    job.call()
            except BaseException as error:
                job.error = error
            # Before anybody goes on who waits: whoever then closes the file closes it, and an idle thread holds no buffer.
            job.call = None
            job.ended.set()
            if job.on_done is not None:
                job.on_done()
            del job


_WORKERS = _Workers()
atexit.register(_WORKERS.stop)
os.register_at_fork(after_in_child=_WORKERS.renew)


def submit(call: Callable[[], None], on_done: Callable[[], object] | None = None) -> Job:
    """Call it in one of the threads."""
    job = Job(call, on_done)
    _WORKERS.submit(job)
    return job


def inflight(jobs: Sequence[Job], meter: Meter, kind: str) -> Inflight:
    """Over when all of them are; the time that anybody waits is counted."""

    def wait() -> None:
        for job in jobs:  # all, so that after an error no buffer is in use any more
            job.ended.wait()
        for job in jobs:
            if job.error is not None:
                raise job.error

    return Inflight((Timed(wait, meter, kind),), ready=lambda: all(job.ended.is_set for job in jobs))


_ADVICE = {
    errno.ENOSPC: "free space there, or set offload_dir to a folder on a larger disk",
    errno.EDQUOT: "the quota is used up: free space, or set offload_dir to a folder on another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f unlimited), or set offload_dir to a folder on another file system",
    errno.EIO: "the disk failed: see the kernel's log, set offload_dir to a folder on another disk",
}
_ENDED = "something else cut the file short: no other process may write to it while training runs"


def move(kind: str, fd: int, array: Bytes, offset: int, grain: int, where: str) -> None:
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
        raise failed(error, f"{where}: a {kind} of {len(array)} bytes at byte {offset} failed after {done}") from error


def failed(error: OSError, what: str) -> TierError:
    """The error to raise, with what may be done about it."""
    advice = _ADVICE.get(error.errno or 0, "set offload_dir to another folder")
    return TierError(f"{what}: {error.strerror or error}; {advice}")


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


def bytes_of(buffer: Tensor | memoryview) -> Bytes:
    if isinstance(buffer, Tensor):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise StateError(
                f"the disk moves contiguous CPU memory, found a tensor on {buffer.device} with strides {buffer.stride()}"
            )
        return np.asarray(_Memory(buffer.detach()))
    return np.frombuffer(buffer, np.uint8)


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
    """An open file without a name, emptied and closed when the last transfer and the last owner let go of it.

    Emptied, since a forked child (a worker of a data loader) has the file open, too, and its space would stay in use.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, _discard, number, os.getpid()).atexit = False  # type: ignore[misc]


MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
"""Folders that are memory."""


def file_system(folder: str | os.PathLike[str]) -> str:
    """The kind of file system that `folder` is on, or would be: `ext4`, `tmpfs`; empty where the system does not say."""
    import psutil  # here: not every process that imports hf_zero asks

    path = Path(os.path.realpath(folder))
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next((kinds[str(place)] for place in (path, *path.parents) if str(place) in kinds), "")


class Disk:
    """The file of one rank. It has no name from the start, so its space is free again however the process ends.

    Overlapping transfers must not be under way at the same time if one of them writes; any others may. A forked child may
    read and write while the process that made the file keeps it.

    Args:
        folder: None: the system's temporary one. Made, for this user only, where it is missing.

    Attributes:
        where: rank and folder, for messages: the file has no path that could be named.
        direct: transfers go around the page cache; found out by trying.

    Raises:
        ConfigError: the folder cannot be made or written, or is no folder.
    """

    def __init__(self, folder: str | None, rank: int, meter: Meter) -> None:
        self.meter = meter
        path = _make_folder(folder)
        self.where = f"disk tier of rank {rank} in {path}"
        try:
            # O_TMPFILE; where the file system lacks it, a file that is unlinked as soon as it is open.
            with tempfile.TemporaryFile(dir=path, prefix="hf_zero-", buffering=0) as file:
                self._file: _Descriptor | None = _Descriptor(os.dup(file.fileno()))
        except OSError as error:
            raise ConfigError(
                f"offload_dir {path} cannot be used on rank {rank}: {error.strerror or error}; expected a folder on a "
                "local disk that this user may write to"
            ) from error
        kind = file_system(path)
        if kind in MEMORY_FILE_SYSTEMS:
            default = ", the temporary folder, as no offload_dir is given" if folder is None else ""
            warnings.warn(
                f"rank {rank}: the disk tier is in {path}{default}: that is {kind}, which is memory. What is offloaded there "
                "still takes memory; give offload_dir a folder on a disk, or offload to 'cpu'",
                RuntimeWarning,
                stacklevel=2,
            )
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
        about = os.fstatvfs(self.fileno())
        return about.f_bavail * about.f_frsize

    def fileno(self) -> int:
        """Raises:
        StateError: closed.
        """
        return self._open().number

    def close(self) -> None:
        """Let go of the file; what rests in it is lost. Transfers under way still end as they should. Safe to call again."""
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
        fd = self.fileno()
        try:
            if self.free_bytes < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if nbytes:
                _allocate(fd, self._end, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._end)  # of a failed allocation a part may be there
            raise failed(
                error,
                f"{self.where} needs {nbytes} bytes more beside its {self._end}, {self.free_bytes} are free there",
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

    def read(self, offset: int, buffer: Tensor | memoryview, on_done: Callable[[], object] | None = None) -> Inflight:
        """Fill `buffer` (CPU, contiguous, any type) from byte `offset` of the file. Waiting raises what went wrong.

        Args:
            on_done: called from another thread when a part has ended, the last one among them.

        Raises:
            TierError: (when waiting) the read failed or the file is too short.
            StateError: closed, not such a buffer, or not within the file.
        """
        return self._start("read", offset, buffer, on_done)

    def write(self, offset: int, buffer: Tensor | memoryview, on_done: Callable[[], object] | None = None) -> Inflight:
        """Write `buffer` (CPU, contiguous, any type), which must not change until waited for, to byte `offset` of the file.

        Raises:
            TierError: (when waiting) the write failed.
            StateError: closed, not such a buffer, or not within the file.
        """
        return self._start("write", offset, buffer, on_done)

    def _start(
        self, kind: str, offset: int, buffer: Tensor | memoryview, on_done: Callable[[], object] | None
    ) -> Inflight:
        file = self._open()
        array = bytes_of(buffer)
        if offset < 0 or offset + len(array) > self._end:
            raise StateError(
                f"{self.where}: a {kind} of {len(array)} bytes at byte {offset} is not within the {self._end} taken"
            )
        self.meter.moved(kind, len(array))
        grain = ALIGN_BYTES if self.direct else 1
        fits = offset % grain == 0 and array.ctypes.data % grain == 0
        straight = len(array) - len(array) % grain if fits else 0
        jobs = []
        for start in range(0, len(array), PIECE_BYTES):
            piece = array[start : min(start + PIECE_BYTES, len(array))]
            body = max(0, min(len(piece), straight - start))
            if body:
                jobs.append(submit(partial(self._piece, file, kind, piece[:body], offset + start), on_done))
            if body < len(piece):
                jobs.append(submit(partial(self._uneven, file, kind, piece[body:], offset + start + body), on_done))
        return inflight(jobs, self.meter, kind)

    def _piece(self, file: _Descriptor, kind: str, array: Bytes, offset: int) -> None:
        move(kind, file.number, array, offset, ALIGN_BYTES if self.direct else 1, self.where)

    def _uneven(self, file: _Descriptor, kind: str, array: Bytes, offset: int) -> None:
        """O_DIRECT moves whole aligned blocks: through memory that covers them.

        A second descriptor without O_DIRECT would be shorter, but the page cache works in units larger than our blocks, and
        its late writing can undo a direct write to the block beside.
        """
        low, high = offset - offset % ALIGN_BYTES, padded(offset + len(array))
        cover = pages(high - low)
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
            raise StateError(f"{self.where}: closed")
        return self._file

    def _takes_direct(self) -> bool:
        """Whether an aligned write and read with O_DIRECT succeed here; if so the file stays in that mode."""
        fd = self.fileno()
        mode = fcntl.fcntl(fd, fcntl.F_GETFL)
        region = self.take(ALIGN_BYTES)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, mode | os.O_DIRECT)
            written, back = pages(ALIGN_BYTES), pages(ALIGN_BYTES)
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


def _make_folder(folder: str | None) -> Path:
    path = Path(folder or tempfile.gettempdir()).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"offload_dir {path} is a file, expected a folder: remove it or choose another") from None
    except OSError as error:
        raise ConfigError(
            f"offload_dir {path} cannot be made: {error.strerror or error}; choose a folder on a local disk that this user may "
            "write to"
        ) from error
    return path


def _discard(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the parent's values alone
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    os.close(fd)
