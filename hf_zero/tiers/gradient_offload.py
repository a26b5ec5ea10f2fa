"""Asynchronous copies of reduced gradients from the device to the tier that stores them."""

from __future__ import annotations

import threading

from torch import Tensor

from ..comm.inflight import DONE
from .array import Values
from .storage import Storage


class GradientCopy:
    """The copy of a reduced gradient from the device to its span's tier. Any thread may wait for it.

    Args:
        mean: the gradient on the device, of `target`'s length and dtype. Must not change until the copy has ended.
        target: where the gradient is stored.
        adds: add to `target`, which already has a gradient of this step.
    """

    def __init__(self, storage: Storage, mean: Tensor, target: Values, *, adds: bool) -> None:
        self._storage, self._target, self._adds = storage, target, adds
        self._lock, self._is_over = threading.Lock(), False
        self._scratch: Tensor | None = None
        if storage.link.shares_memory:
            self._values, self._move = mean, DONE
            return
        if isinstance(target, Tensor) and not adds:
            self._values = target
        else:
            self._values = self._scratch = storage.scratch(mean.numel(), mean.dtype)
        self._move = storage.link.copy_to_host(mean, self._values)

    def wait(self) -> None:
        """Wait until the gradient is stored.

        Raises:
            TierError: it could not be read or written.
        """
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            try:
                self._store()
            finally:
                if self._scratch is not None:
                    self._storage.release_scratch(self._scratch)

    def _store(self) -> None:
        self._move.close()
        if isinstance(self._target, Tensor):
            if self._adds:
                self._target.add_(self._values)
            return
        if self._adds:
            before = self._storage.scratch(self._values.numel(), self._values.dtype)
            try:
                self._values.add_(self._target.read_into(before))
            finally:
                self._storage.release_scratch(before)
        self._target.begin_write(self._values).close()
