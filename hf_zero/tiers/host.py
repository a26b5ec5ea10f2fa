"""Host memory, and copies between it and the device."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comm.inflight import DONE, Inflight, Timed
from ..errors import StateError, TierError
from .tier import Meter

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


_mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h

HUGE_BYTES = 2 << 20
"""A huge page on x86 and most of ARM; less than one cannot become one."""
_HUGE_PAGE: int = getattr(mmap, "MADV_HUGEPAGE", 0)  # Linux has it
_madvise: Callable[[int, int, int], int] | None = None
if _HUGE_PAGE:
    _prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _madvise = _prototype(("madvise", ctypes.CDLL(None)))


def free_at_once(above_bytes: int = 1 << 20) -> None:
    """From now on host memory of that size or more is the system's again as soon as it is freed. For this process.

    For models that are mostly on disk: in malloc's heap every whole parameter, and in training every gradient, leaves a hole in
    which the next one does not fit, and the heap grows to the size of what rests on disk.
    """
    _set_thresholds((above_bytes, above_bytes))  # a process may have called `keep_freed` before


@contextlib.contextmanager
def freeing_at_once(above_bytes: int = 1 << 20) -> Iterator[None]:
    """As `free_at_once`, inside: memory that stays is not allocated in malloc's heap, between the holes of what is freed."""
    before, within = _thresholds, (above_bytes, above_bytes)
    if not _is_chosen():
        _set_thresholds(within)
    try:
        yield
    finally:
        if _thresholds == within and not _is_chosen():
            _set_thresholds(before)


_thresholds = 32 << 20, 64 << 20  # of mmap and trim: the highest that glibc sets by itself, as large memory is freed
_lock = threading.Lock()


def _set_thresholds(found: tuple[int, int]) -> None:
    global _thresholds
    with _lock:
        if _mallopt is not None:
            _mallopt(_MMAP_THRESHOLD, found[0])
            _mallopt(_TRIM_THRESHOLD, found[1])
        _thresholds = found


def _is_chosen() -> bool:
    """malloc's thresholds are set in the environment."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name}_THRESHOLD_" in os.environ or f"malloc.{name.lower()}_threshold" in tunables
        for name in ("MMAP", "TRIM")
    )


def keep_freed(most_bytes: int = 1 << 30) -> None:
    """From now on freed host memory below that size stays mapped, for what is allocated next. For this process.

    For ranks that compute on CPUs: gradients and buckets come and go in each step, and memory that is mapped anew costs seven
    times as much to fill (a page fault for every 4 KiB). Whoever sets malloc's thresholds in the environment keeps them: its
    price is resident memory, the holes in the heap among it.
    """
    if not _is_chosen():
        _set_thresholds((most_bytes, most_bytes))


def use_huge_pages(address: int, nbytes: int) -> None:
    """Ask the system for huge pages under this memory: fresh memory costs a page fault per 2 MiB then, not one per 4 KiB.

    For what an engine allocates and gives back in every step on CPU ranks. Advice: where the system does not take it, nothing
    changes (Linux, `transparent_hugepage` at `madvise` or `always`).
    """
    if _madvise is None or nbytes < HUGE_BYTES:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE  # only pages that hold nothing else
    _madvise(begin, (address + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE, _HUGE_PAGE)


def pages(nbytes: int) -> Bytes:
    """Zeroed memory of whole pages, given back to the system when the last tensor on it is gone."""
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TierError(
            f"{nbytes} bytes of host memory were refused: {error.strerror or error}; free host memory, raise this "
            "process's limit (ulimit -v), or let less rest on the host (host_memory, offload to disk)"
        ) from error
    whole = np.frombuffer(memory, np.uint8)
    use_huge_pages(whole.ctypes.data, whole.nbytes)
    return whole[:nbytes]


class _OnStream:
    """What the current stream waits for, and the host does not."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class Link:
    """The road between host memory and `device`. On a CPU device both ends are host memory and copies are made at once.

    Attributes:
        is_one_memory: what is in host memory can be computed with where it is.
    """

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.device = device
        self.meter = meter
        self.page_locked_bytes = 0
        self.is_one_memory = device.type == "cpu"
        self._locks_pages = device.type == "cuda"
        self._lock = threading.Lock()
        if device.type == "cuda":
            self._down, self._up, self._work = (torch.cuda.Stream(device) for _ in range(3))

    def empty(self, numel: int, dtype: torch.dtype, travels: bool = True) -> Tensor:
        """Host memory, 1-D, of exactly the size asked for, page-aligned; page-locked for CUDA, so that copies run on their own.

        torch's allocator of page-locked memory rounds up to powers of two and keeps what it has.

        Args:
            travels: it is copied from or to the device.
        """
        memory = pages(numel * dtype.itemsize)
        if travels and self._locks_pages and memory.nbytes:
            self.lock_pages(memory)
        return torch.from_numpy(memory).view(dtype)

    def lock_pages(self, memory: Bytes) -> None:
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

    @contextlib.contextmanager
    def computing(self, after: Any) -> Iterator[None]:
        """Inside, another thread than the one that trains computes on the device, after `after`; at the end that is done."""
        if self.device.type != "cuda":
            yield
            return
        if after is not None:
            self._work.wait_event(after)
        with torch.cuda.device(self.device), torch.cuda.stream(self._work):
            yield
        self._work.synchronize()

    def mark(self) -> Any:
        """A point in the current stream's work, for `up(after=)` from another thread; None on a CPU device."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def down(self, source: Tensor, target: Tensor) -> Inflight:
        """Copy `source` (device) to `target` (host) after what the current stream has to do. Waiting holds the host up.

        The memory of `source` may be given back at once, and comes to use again when it has been read.

        Raises:
            StateError: of different type or length.
        """
        self._count("down", source, target)
        if self.device.type != "cuda":
            target.copy_(source)
            return DONE
        event = self._copy(self._down, source, target, None)
        source.record_stream(self._down)
        return Inflight((Timed(event.synchronize, self.meter, "down", target),), ready=event.query)

    def up(self, source: Tensor, target: Tensor, after: Any = None) -> Inflight:
        """Copy `source` (host) to `target` (device) after `after`, or after what the current stream has to do.

        Waiting holds up the current stream only; closing holds the host up until `source` may be written again.
        The memory of `target` must not be given back before one of them. (The allocator could be told of the copy by
        `record_stream`, but would then keep every block given back while the host runs ahead of the device.)

        Raises:
            StateError: of different type or length.
        """
        self._count("up", source, target)
        if self.device.type != "cuda":
            target.copy_(source)
            return DONE
        event = self._copy(self._up, source, target, after)
        arrived = _OnStream(event, self.device)
        return Inflight((arrived,), (Timed(event.synchronize, self.meter, "up", source),), ready=event.query)

    def _count(self, kind: str, source: Tensor, target: Tensor) -> None:
        if source.dtype != target.dtype or source.numel() != target.numel():
            raise StateError(
                f"a copy {kind} the link needs equal types and lengths, found {source.numel()} x {source.dtype} and "
                f"{target.numel()} x {target.dtype}"
            )
        self.meter.moved(kind, source.numel() * source.element_size())

    def _copy(self, stream: Any, source: Tensor, target: Tensor, after: Any) -> torch.cuda.Event:
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
        return event


def empty_cache(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the device, for others to use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
