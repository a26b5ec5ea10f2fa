"""Host memory and disk behind one small interface, and gradients that move to them.

* `HostTier`: values are tensors in host memory, page-locked where the device is CUDA.
* `DiskTier`: values are `OnDisk`, in this rank's own file.
"""

from __future__ import annotations

import threading
from typing import Protocol, cast

import torch
from torch import Tensor

from ..comm.inflight import DONE, Inflight
from .array import DiskArray, OnDisk, Values
from .pool import Storage
from .tier import Tier


class StorageTier(Protocol):
    """A tier that stores values outside the device."""

    def empty(self, numel: int, dtype: torch.dtype) -> Values:
        """Return new 1-D values, undefined."""
        ...

    def store(self, values: Tensor) -> Values:
        """Return a copy of 1-D `values` (any device) in this tier."""
        ...

    def load(self, source: Values, target: Tensor) -> Inflight:
        """Start to copy `source`, which is in this tier, to `target` on the device; same dtype and length.

        Raises:
            TierError: while waiting: the read failed.
        """
        ...


class HostTier:
    """Host memory."""

    def __init__(self, storage: Storage) -> None:
        self._link = storage.link

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._link.empty(numel, dtype)

    def store(self, values: Tensor) -> Tensor:
        return self.empty(values.numel(), values.dtype).copy_(values)

    def load(self, source: Values, target: Tensor) -> Inflight:
        return self._link.up(cast(Tensor, source), target)


class DiskTier:
    """This rank's file."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def empty(self, numel: int, dtype: torch.dtype) -> OnDisk:
        return OnDisk(DiskArray(self._storage.disk, numel, dtype))

    def store(self, values: Tensor) -> OnDisk:
        return self.empty(values.numel(), values.dtype).copy_(values)

    def load(self, source: Values, target: Tensor) -> Inflight:
        storage, source = self._storage, cast(OnDisk, source)
        if storage.link.is_one_memory:
            return source.begin_read(target)
        memory, up = storage.scratch(source.numel(), source.dtype), DONE

        def send_up() -> None:
            nonlocal up
            up = storage.link.up(memory, target)
            up.wait()

        def release() -> None:
            up.close()
            storage.give_back(memory)

        return Inflight((source.begin_read(memory),), (Inflight(finish=release),), send_up)


def tier_of(storage: Storage, tier: Tier) -> StorageTier:
    """Return the interface of a tier that is not the device."""
    return HostTier(storage) if tier is Tier.HOST else DiskTier(storage)


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
        """Return when the gradient is stored.

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
