"""Gradients that move from the device to the tier that stores them."""

from __future__ import annotations

import threading

from torch import Tensor

from ..comm.inflight import DONE
from .array import Values
from .pool import Storage


class Arrival:
    """A reduced gradient on its way from the device to its span's tier. Any thread may land it.

    Args:
        mean: on the device, of the length and dtype of `home`. It must not change until this has landed.
        home: where the gradient is stored.
        adds: `home` has a gradient of this step already.
    """

    def __init__(self, storage: Storage, mean: Tensor, home: Values, *, adds: bool) -> None:
        self._storage, self._home, self._adds = storage, home, adds
        self._lock, self._is_over = threading.Lock(), False
        self._scratch: Tensor | None = None
        if storage.link.is_one_memory:
            self._values, self._move = mean, DONE
            return
        if isinstance(home, Tensor) and not adds:
            self._values = home
        else:
            self._values = self._scratch = storage.scratch(mean.numel(), mean.dtype)
        self._move = storage.link.down(mean, self._values)

    def land(self) -> None:
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
                    self._storage.give_back(self._scratch)

    def _store(self) -> None:
        self._move.close()
        if isinstance(self._home, Tensor):
            if self._adds:
                self._home.add_(self._values)
            return
        if self._adds:
            before = self._storage.scratch(self._values.numel(), self._values.dtype)
            try:
                self._values.add_(self._home.read_into(before))
            finally:
                self._storage.give_back(before)
        self._home.begin_write(self._values).close()
