"""Reads and writes of files by a few threads."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from torch import Tensor

from ..comm.inflight import Inflight
from ..errors import StateError, TierError
from .host import Bytes
from .tier import THREADS, Meter, Waiting

_Job = tuple["Future[None]", Callable[..., None], tuple[Any, ...]]


class _Workers:
    """A few threads for blocking calls. They start when first needed and never hold up the end of the process."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """After a fork, which threads do not survive: what was queued is the parent's."""
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


_WORKERS = _Workers()
atexit.register(_WORKERS.stop)
os.register_at_fork(after_in_child=_WORKERS.renew)


def submit(function: Callable[..., None], *args: Any) -> Future[None]:
    """Call it in one of the threads."""
    return _WORKERS.submit(function, *args)


def inflight(
    futures: Sequence[Future[None]], meter: Meter | None, kind: str, tell: Callable[[], object] | None = None
) -> Inflight:
    """Over when all of them are; the time that anybody waits is counted.

    Args:
        tell: called when one of them ends, in its thread.
    """
    if tell is not None:
        for future in futures:
            future.add_done_callback(lambda _: tell())

    def wait() -> None:
        wait_for_all(futures)  # all, so that after an error no buffer is in use any more
        for future in futures:
            future.result()

    return Inflight((Waiting(wait, meter, kind),), ready=lambda: all(future.done() for future in futures))


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
