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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comm.inflight import DONE, Inflight, TimedWait
from ..errors import StateError, TierError
from .tier import Meter

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


_mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h

HUGE_BYTES = 2 << 20
"""Size of a huge page on x86 and most of ARM. Less memory cannot become one."""
_HUGE_PAGE: int = getattr(mmap, "MADV_HUGEPAGE", 0)  # Linux has it
_madvise: Callable[[int, int, int], int] | None = None
if _HUGE_PAGE:
    _prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _madvise = _prototype(("madvise", ctypes.CDLL(None)))


_GLIBC, _AT_ONCE, _KEPT = (32 << 20, 64 << 20), (1 << 20, 1 << 20), (1 << 30, 1 << 30)
"""Bytes above which malloc maps memory of its own, and returns free memory at the heap's end. glibc's are its highest."""
_thresholds = _GLIBC
_lock = threading.Lock()


def return_freed_memory() -> None:
    """Make this process return freed host memory of 1 MiB or more to the system at once, from now on.

    For models that are mostly on disk: in malloc's heap every full parameter, and every gradient in training, would leave a
    hole that the next one does not fit. The heap would grow to the size of the data on disk.
    """
    _set_thresholds(_AT_ONCE)  # a process may have called `keep_freed_memory` before


@contextlib.contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Apply `return_freed_memory` inside the block, so that long-lived memory leaves no holes in malloc's heap."""
    before = _thresholds
    if not _is_chosen():
        _set_thresholds(_AT_ONCE)
    try:
        yield
    finally:
        if _thresholds == _AT_ONCE and not _is_chosen():
            _set_thresholds(before)


def _set_thresholds(found: tuple[int, int]) -> None:
    global _thresholds
    with _lock:
        if _mallopt is not None:
            _mallopt(_MMAP_THRESHOLD, found[0])
            _mallopt(_TRIM_THRESHOLD, found[1])
        _thresholds = found


def _is_chosen() -> bool:
    """Return True if the environment sets malloc's thresholds."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name}_THRESHOLD_" in os.environ or f"malloc.{name.lower()}_threshold" in tunables
        for name in ("MMAP", "TRIM")
    )


def keep_freed_memory() -> None:
    """Make this process keep freed host memory below 1 GiB mapped for the next allocation, from now on.

    For ranks that compute on CPUs: gradients and buckets are temporary, and filling newly mapped memory takes seven times as
    long (a page fault for every 4 KiB). The price is resident memory, including holes in the heap. Thresholds set in the
    environment take precedence.
    """
    if not _is_chosen():
        _set_thresholds(_KEPT)


def use_huge_pages(address: int, nbytes: int) -> None:
    """Ask the system for huge pages: new memory then costs one page fault per 2 MiB instead of per 4 KiB.

    For memory that an engine allocates and frees in every step on CPU ranks. A hint: a system that ignores it changes nothing
    (Linux, `transparent_hugepage` at `madvise` or `always`).
    """
    if _madvise is None or nbytes < HUGE_BYTES:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE  # only pages that have no other data
    _madvise(begin, (address + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE, _HUGE_PAGE)


def pages(nbytes: int) -> Bytes:
    """Return zeroed memory of whole pages. The system gets it back with the last tensor on it."""
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TierError(
            f"{nbytes} bytes of host memory were refused: {error.strerror or error}. Free host memory, raise this "
            "process's limit (ulimit -v), or keep less on the host (host_memory, offload to disk)"
        ) from error
    whole = np.frombuffer(memory, np.uint8)
    use_huge_pages(whole.ctypes.data, whole.nbytes)
    return whole[:nbytes]


class _OnStream:
    """A wait of the current stream, not of the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class Link:
    """Copies between host memory and `device`. On a CPU device both are host memory, and copies are made at once.

    Attributes:
        shares_memory: computations can use values in host memory directly.
    """

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.device = device
        self.meter = meter
        self.page_locked_bytes = 0
        self.shares_memory = device.type == "cpu"
        self._locks_pages = device.type == "cuda"
        self._lock = threading.Lock()
        if device.type == "cuda":
            self._down, self._up, self._work = (torch.cuda.Stream(device) for _ in range(3))

    def empty(self, numel: int, dtype: torch.dtype, pin: bool = True) -> Tensor:
        """Return host memory, 1-D, of exactly this size, page-aligned; page-locked for CUDA, so that copies are asynchronous.

        torch's allocator of page-locked memory rounds up to powers of two and keeps freed memory.

        Args:
            numel: number of elements.
            dtype: of the elements.
            pin: page-lock it on CUDA: it will be copied to or from the device.
        """
        memory = pages(numel * dtype.itemsize)
        if pin and self._locks_pages and memory.nbytes:
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
            # CUDA also reports the error at the next kernel launch: it must be cleared here.
            with contextlib.suppress(RuntimeError):
                torch.ones((), device=self.device)
        self._locks_pages = False
        warnings.warn(
            f"{nbytes} bytes of host memory could not be page-locked ({cudart.cudaGetErrorString(answer)}; "
            f"{self.page_locked_bytes} are). Pageable memory is used from now on: copies to and from {self.device} are slower "
            "and do not overlap with computation. Raise the limit of locked memory (ulimit -l unlimited; docker run --ulimit "
            "memlock=-1), or free host memory",
            stacklevel=3,
        )

    def _unlock_pages(self, address: int, nbytes: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)
        with self._lock:
            self.page_locked_bytes -= nbytes

    @contextlib.contextmanager
    def computing(self, after: Any) -> Iterator[None]:
        """Compute on the device in a thread other than the training thread, after `after`. Waits for the work at the end."""
        if self.device.type != "cuda":
            yield
            return
        if after is not None:
            self._work.wait_event(after)
        with torch.cuda.device(self.device), torch.cuda.stream(self._work):
            yield
        self._work.synchronize()

    def mark(self) -> Any:
        """Record an event in the current stream, for `copy_to_device(after=)` from another thread; None on a CPU device."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def copy_to_host(self, source: Tensor, target: Tensor) -> Inflight:
        """Copy `source` (device) to `target` (host) after the current stream's work. Waiting blocks the host.

        The memory of `source` may be freed at once: it is reused only after it has been read.

        Raises:
            StateError: dtypes or lengths differ.
        """
        self._count("down", source, target)
        if self.device.type != "cuda":
            target.copy_(source)
            return DONE
        event = self._copy(self._down, source, target, None)
        source.record_stream(self._down)
        return Inflight((TimedWait(event.synchronize, self.meter, "down", target),), ready=event.query)

    def copy_to_device(self, source: Tensor, target: Tensor, after: Any = None) -> Inflight:
        """Copy `source` (host) to `target` (device) after `after`, else after the current stream's work.

        Waiting blocks the current stream only. Closing blocks the host until `source` may be written again. The memory of
        `target` must not be freed before either. (`record_stream` would keep every freed block while the host runs ahead of
        the device.)

        Raises:
            StateError: dtypes or lengths differ.
        """
        self._count("up", source, target)
        if self.device.type != "cuda":
            target.copy_(source)
            return DONE
        event = self._copy(self._up, source, target, after)
        arrived = _OnStream(event, self.device)
        return Inflight((arrived,), (TimedWait(event.synchronize, self.meter, "up", source),), ready=event.query)

    def wait_for_copies_to_host(self) -> None:
        """Make the current stream wait for all copies to the host so far: then their sources may be written or freed."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(self._down)

    def _count(self, kind: str, source: Tensor, target: Tensor) -> None:
        if source.dtype != target.dtype or source.numel() != target.numel():
            raise StateError(
                f"a copy {kind} the link needs equal dtypes and lengths, found {source.numel()} x {source.dtype} and "
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
    """Return cached memory of torch's allocator to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
