"""The disk tier's unnamed file: regions, and reads and writes at offsets that bypass the page cache if possible (O_DIRECT).

A few threads of the process run the transfers.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from torch import Tensor

from ..comm.inflight import Call, Inflight, TimedWait
from ..errors import ConfigError, StateError, TierError
from .host import Bytes, pages
from .tier import ALIGN_BYTES, PIECE_BYTES, THREADS, Meter, padded

# Threads ------------------------------------------------------------------------------------------------------------


class _Workers:
    """A few threads for blocking calls. They start at the first call, and do not delay the end of the process."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Start over, after a fork: threads do not survive it, and queued calls belong to the parent."""
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._live: dict[Call, None] = {}  # not ended
        self._waiting: dict[Call, None] = {}  # not begun
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Call) -> None:
        with self._lock:
            while len(self._threads) < THREADS:
                self._threads.append(threading.Thread(target=self._run, name="hf_zero disk", daemon=True))
                self._threads[-1].start()
        self._live[job] = self._waiting[job] = None
        self._queue.put(job)

    def wait_for_calls(self) -> None:
        for job in list(self._waiting):  # Ctrl-C may have come before it was queued
            self._queue.put(job)
        for job in list(self._live):
            job.ended.wait()

    def stop(self) -> None:
        """Drop queued calls and wait for running ones, for a limited time.

        A thread that frees a tensor while the interpreter shuts down would abort the process.
        """
        with self._lock, contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads.clear()
        self._live.clear()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._waiting.pop(job, job) is None:  # else another thread runs it
                job.run()
                del self._live[job]
            del job


_WORKERS = _Workers()
atexit.register(_WORKERS.stop)
os.register_at_fork(after_in_child=_WORKERS.renew)


def submit(call: Callable[[], None]) -> Call:
    """Run a call in one of the threads."""
    job = Call(call)
    _WORKERS.submit(job)
    return job


def wait_for_transfers() -> None:
    """Wait until all transfers so far have ended, also those whose caller Ctrl-C kept from waiting.

    They use memory that may be freed, or written again, after this.
    """
    _WORKERS.wait_for_calls()


def inflight(jobs: Sequence[Call], meter: Meter, kind: str) -> Inflight:
    """Return a transfer that ends with the last of the jobs. The time of waits is counted."""

    def wait() -> None:
        for job in jobs:  # all jobs: no buffer may be in use after an error
            job.ended.wait()
        for job in jobs:
            if job.error is not None:
                raise job.error

    return Inflight((TimedWait(wait, meter, kind),), ready=lambda: all(job.ended.is_set for job in jobs))


_ADVICE = {
    errno.ENOSPC: "Free some space there, or set offload_dir to a folder on a larger disk",
    errno.EDQUOT: "The quota is used up: free some space, or set offload_dir to a folder on another disk",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f unlimited), or set offload_dir to a folder on another file system",
    errno.EIO: "The disk failed: check the kernel's log, and set offload_dir to a folder on another disk",
}
_ENDED = "the file was truncated: no other process may write to it during training"


def move(kind: str, fd: int, array: Bytes, offset: int, grain: int, where: str) -> None:
    """Read into `array` or write it, at byte `offset`. Short transfers continue; pieces stay multiples of `grain`."""
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
    """Return the error to raise for a failed system call, with advice."""
    advice = _ADVICE.get(error.errno or 0, "Set offload_dir to another folder")
    return TierError(f"{what}: {error.strerror or error}. {advice}")


class _Memory:
    """A tensor's bytes for numpy. `Tensor.numpy()` would prevent the storage from ever being resized."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # numpy keeps this object, and so the memory, alive
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
                f"the disk needs contiguous CPU memory, found a tensor on {buffer.device} with strides {buffer.stride()}"
            )
        return np.asarray(_Memory(buffer.detach()))
    return np.frombuffer(buffer, np.uint8)


# The file -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """A range of the file: first byte and length, multiples of `ALIGN_BYTES`."""

    offset: int
    nbytes: int


def _allocate(fd: int, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        # Some file systems cannot. The C library's substitute writes single bytes, which O_DIRECT refuses.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(fd, offset + nbytes)


class _Descriptor:
    """An open file without a name. It is truncated and closed after its last transfer and its last owner.

    Must be truncated: a forked child (a data loader's worker) also has the file open, and would keep its space allocated.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, _discard, number, os.getpid()).atexit = False  # type: ignore[misc]


MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
"""File systems in memory."""


def file_system(folder: str | os.PathLike[str]) -> str:
    """Return the kind of file system that a folder is on, or would be: `ext4`, `tmpfs`; empty if unknown."""
    import psutil  # here: most processes that import hf_zero do not need it

    path = Path(os.path.realpath(folder))
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next((kinds[str(place)] for place in (path, *path.parents) if str(place) in kinds), "")


class Disk:
    """The file of one rank. It has no name, so its space is free again however the process ends.

    Transfers that overlap in the file must not be concurrent if one of them writes. A forked child may read and write while
    the process that created the file keeps it.

    Args:
        folder: holds the file; created, accessible to this user only, if it is missing. None: the system's temporary folder.
        rank: this rank, for messages.
        meter: counts the transfers.

    Attributes:
        where: rank and folder, for messages: the file has no path.
        direct: transfers bypass the page cache; determined by a trial.

    Raises:
        ConfigError: the folder cannot be created or written, or is a file.
    """

    def __init__(self, folder: str | None, rank: int, meter: Meter) -> None:
        self.meter = meter
        path = _make_folder(folder)
        self.where = f"disk tier of rank {rank} in {path}"
        try:
            # O_TMPFILE; on file systems without it, a file that is unlinked as soon as it is open.
            with tempfile.TemporaryFile(dir=path, prefix="hf_zero-", buffering=0) as file:
                self._file: _Descriptor | None = _Descriptor(os.dup(file.fileno()))
        except OSError as error:
            raise ConfigError(
                f"offload_dir {path} cannot be used on rank {rank}: {error.strerror or error}. Choose a folder on a local disk "
                "that this user may write to"
            ) from error
        kind = file_system(path)
        if kind in MEMORY_FILE_SYSTEMS:
            default = ", the temporary folder, because offload_dir is not set" if folder is None else ""
            warnings.warn(
                f"rank {rank}: the disk tier is in {path}{default}: that is {kind}, which is memory. Offloading there takes as "
                "much memory. Set offload_dir to a folder on a disk, or offload to 'cpu'",
                RuntimeWarning,
                stacklevel=2,
            )
        self._end = 0
        self._free: list[Region] = []  # ordered by offset, no two adjacent, none at the end
        self._lock = threading.Lock()
        self._edges = threading.Lock()
        self.direct = self._supports_direct_io()

    @property
    def nbytes(self) -> int:
        """Return the bytes of disk that the file takes."""
        return self._end

    @property
    def free_bytes(self) -> int:
        """Return the bytes that this user may still write to the folder's file system."""
        about = os.fstatvfs(self.fileno())
        return about.f_bavail * about.f_frsize

    def fileno(self) -> int:
        """Return the descriptor.

        Raises:
            StateError: the file is closed.
        """
        return self._open().number

    def close(self) -> None:
        """Release the file and its content. Transfers under way still complete. May be called again."""
        self._file = None

    # Space ------------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        """Allocate a region of at least `nbytes`. Its content is undefined.

        Raises:
            TierError: the disk has no space; with the bytes needed and free.
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
                os.ftruncate(fd, self._end)  # a failed allocation may have grown the file
            raise failed(
                error,
                f"{self.where} needs {nbytes} bytes more than its {self._end}, {self.free_bytes} are free there",
            ) from error
        self._end += nbytes

    def free(self, region: Region) -> None:
        """Return a region for reuse by `allocate`. Shrinks the file at its end. No transfer of the region may be under way."""
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
        """Start to fill `buffer` (CPU, contiguous, any dtype) from byte `offset` of the file.

        Raises:
            TierError: while waiting: the read failed or the file is too short.
            StateError: the file is closed, the buffer is unsuitable, or the range is outside the file.
        """
        return self._start("read", offset, buffer)

    def write(self, offset: int, buffer: Tensor | memoryview) -> Inflight:
        """Start to write `buffer` (CPU, contiguous, any dtype) at byte `offset`. It must not change until waited for.

        Raises:
            TierError: while waiting: the write failed.
            StateError: the file is closed, the buffer is unsuitable, or the range is outside the file.
        """
        return self._start("write", offset, buffer)

    def _start(self, kind: str, offset: int, buffer: Tensor | memoryview) -> Inflight:
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
                jobs.append(submit(partial(self._piece, file, kind, piece[:body], offset + start)))
            if body < len(piece):
                jobs.append(submit(partial(self._unaligned, file, kind, piece[body:], offset + start + body)))
        return inflight(jobs, self.meter, kind)

    def _piece(self, file: _Descriptor, kind: str, array: Bytes, offset: int) -> None:
        move(kind, file.number, array, offset, ALIGN_BYTES if self.direct else 1, self.where)

    def _unaligned(self, file: _Descriptor, kind: str, array: Bytes, offset: int) -> None:
        """Move bytes through an aligned buffer that covers them: O_DIRECT moves whole blocks.

        A second descriptor without O_DIRECT would be simpler, but the page cache works in larger units: its late write could
        undo a direct write to a neighbouring block.
        """
        low, high = offset - offset % ALIGN_BYTES, padded(offset + len(array))
        cover = pages(high - low)
        inner = cover[offset - low :][: len(array)]
        if kind == "read":
            self._piece(file, "read", cover, low)
            array[:] = inner
            return
        with self._edges:  # two writes to one block would each restore the other's old bytes
            if offset > low:
                self._piece(file, "read", cover[:ALIGN_BYTES], low)
            if offset + len(array) < high:
                self._piece(file, "read", cover[-ALIGN_BYTES:], high - ALIGN_BYTES)
            inner[:] = array
            self._piece(file, "write", cover, low)

    def _open(self) -> _Descriptor:
        if self._file is None:
            raise StateError(f"{self.where}: the file is closed")
        return self._file

    def _supports_direct_io(self) -> bool:
        """Try an aligned write and read with O_DIRECT. If both succeed, the file stays in that mode."""
        fd = self.fileno()
        mode = fcntl.fcntl(fd, fcntl.F_GETFL)
        region = self.allocate(ALIGN_BYTES)
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
            self.free(region)
        fcntl.fcntl(fd, fcntl.F_SETFL, mode)
        return False


def _make_folder(folder: str | None) -> Path:
    path = Path(folder or tempfile.gettempdir()).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"offload_dir {path} is a file, expected a folder. Remove it, or choose another") from None
    except OSError as error:
        raise ConfigError(
            f"offload_dir {path} cannot be created: {error.strerror or error}. Choose a folder on a local disk that this user "
            "may write to"
        ) from error
    return path


def _discard(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not truncate the parent's file
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    os.close(fd)
