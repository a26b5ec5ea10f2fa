"""The gradient of one shard on disk: an array in this rank's file, in host memory only on its way there and while it is read.

Reduced gradients come down into memory that the pool lends, are added to what the array has, and are written in the
background. At most two are under way at a time (`Storage.land`). What is read back stays in memory until another shard's
gradient is (`Storage.look_at`); nothing that a caller still holds is taken away from it.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ...comm.inflight import Inflight
from ...errors import TierError
from ...tiers.array import DiskArray, OnDisk, Values
from ...tiers.pool import Storage

IN_FLIGHT = 2
"""Gradients under way to disk at a time."""


class DiskGradient:
    """See the module's text. Used by the thread that trains only; the step reads the array in its own.

    Args:
        dtype: the master's. Gradients of a narrower type keep it until two are added, or `Storage.wide` is set.

    Attributes:
        numbers: by key, `Storage.gradient_numbers` of the values.
        version: changes whenever the values do.
    """

    def __init__(self, storage: Storage, numel: int, dtype: torch.dtype) -> None:
        self._storage, self._numel, self._dtype = storage, numel, dtype
        self._array: DiskArray | None = None
        self._is_stored = False  # the array has a gradient, though perhaps not the latest values
        self._memory: Tensor | None = None  # lent by the pool
        self._references = 0  # to it, while nothing outside holds it
        self._is_changed = False  # the memory has values that the array has not
        self._arriving: tuple[Tensor, Inflight] | None = None  # a reduced gradient, to be added
        self._read: tuple[Tensor, Inflight] | None = None
        self._write: Inflight | None = None
        self.numbers: dict[Hashable, Tensor] = {}
        self.version = 0

    @property
    def is_there(self) -> bool:
        return self._is_stored or self._memory is not None or self._arriving is not None

    @property
    def arrays(self) -> list[DiskArray]:
        return [] if self._array is None else [self._array]

    # Arriving -----------------------------------------------------------------------------------------------------------

    def add(self, piece: Tensor) -> None:
        """Add a reduced gradient, 1-D on the device. A failure of the disk is in `Storage.failure` then."""
        self.land()
        self._storage.land(self, IN_FLIGHT)
        self._change()
        landing = self._storage.scratch(piece.numel(), piece.dtype)
        self._arriving = landing, self._storage.link.down(piece, landing)
        if self._memory is None and self._is_stored:
            self._begin_read()
        self.advance()

    def advance(self) -> None:
        """Begin to write what has arrived, without waiting for it."""
        if self._arriving is not None and self._arriving[1].ready and (self._read is None or self._read[1].ready):
            self._try_to_store()

    def land(self) -> None:
        """What has arrived is on disk afterwards. A failure is in `Storage.failure`, and the values stay in memory."""
        if self._arriving is not None:
            self._try_to_store()
        self._end_write()
        if self._memory is not None and not self._is_changed:
            self._release()

    def _try_to_store(self) -> None:
        try:
            self._take_in()
            self._begin_write()
        except TierError as error:
            self._storage.failure = self._storage.failure or error

    def _take_in(self) -> None:
        """Add what has arrived to what there was."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        landing, move = arriving
        move.close()
        is_wide = self._storage.wide or (self._array is not None and self._array.dtype == self._dtype)
        try:
            former = self._in_memory()
        except TierError:
            self._storage.give_back(landing)
            raise
        if former is None and (landing.dtype == self._dtype or not is_wide):
            self._hold(landing)
        elif former is None:
            self._hold(self._storage.scratch(self._numel, self._dtype).copy_(landing))
            self._storage.give_back(landing)
        else:
            self._widened(former).add_(landing)
            self._storage.give_back(landing)
        self._is_changed = True

    # Looking ------------------------------------------------------------------------------------------------------------

    def look(self, *, writes: bool = False) -> Tensor | None:
        """The values in host memory, an alias; with `writes` to write to, in the master's type. None where there are none.

        Raises:
            TierError: they cannot be read.
        """
        self._take_in()
        grad = self._in_memory()
        if grad is None:
            return None
        self._end_write()
        if writes:
            grad = self._widened(grad)
            self._is_changed = True
            self._change()
        self._storage.look_at(self)
        return grad.detach()

    def number(self, key: Hashable) -> Tensor | None:
        """What `Storage.gradient_numbers` has for `key`, of these values; None where that is not known."""
        self.land()
        return self.numbers.get(key)

    def put_back(self) -> bool:
        """Write what was changed, and give the memory up. False while something outside holds it."""
        if self._memory is None:
            return True
        if self._is_held:
            return False
        if not self._is_changed:
            self._release()
        elif self._write is None:
            self._storage.land(self, IN_FLIGHT)
            self._try_to_store()
        return True

    def fill(self, grad: Tensor | None) -> None:
        """The values are those of `grad` from now on; None: zeros."""
        self.drop()
        new = self._storage.scratch(self._numel, self._dtype)
        self._hold(new.zero_() if grad is None else new.copy_(grad))
        self._is_changed = True
        self._storage.look_at(self)

    def claim(self) -> Values | None:
        """For a step, which may read it in another thread until it is over."""
        self.land()
        if self._memory is not None and self._is_changed:
            self._try_to_store()
            self.land()
        if self._memory is not None and self._is_changed:  # it could not be written: this memory is the step's now
            memory, self._memory = self._memory, None
            self._storage.forget(memory)
            self._is_stored = self._is_changed = False
            return memory
        return OnDisk(self._array) if self._array is not None and self._is_stored else None

    def drop(self) -> None:
        """There is no gradient afterwards. Its space on disk is kept for the next."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving[1].close()
            self._storage.give_back(arriving[0])
        read, self._read = self._read, None
        if read is not None:
            self._wait(read[1])
            self._storage.give_back(read[0])
        self._end_write()
        if self._memory is not None:
            self._release()
        self._is_stored = self._is_changed = False
        self._change()

    def close(self) -> None:
        """The space on disk is given up, too."""
        self.drop()
        array, self._array = self._array, None
        if array is not None:
            array.close()

    # Memory and array ---------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        self.version += 1
        self.numbers.clear()

    def _hold(self, memory: Tensor) -> None:
        self._memory, self._references = memory, _references(memory)

    @property
    def _is_held(self) -> bool:
        return self._memory is not None and _references(self._memory) > self._references

    def _release(self) -> None:
        memory = self._memory
        if memory is None:
            return
        is_held = self._is_held
        self._memory, self._is_changed = None, False
        if is_held:
            self._storage.forget(memory)
        else:
            self._storage.give_back(memory)

    def _widened(self, grad: Tensor) -> Tensor:
        """The memory, in the master's type."""
        if grad.dtype == self._dtype:
            return grad
        self._end_write()
        wide = self._storage.scratch(self._numel, self._dtype).copy_(grad)
        self._release()
        self._hold(wide)
        self._is_changed = True
        return wide

    def _in_memory(self) -> Tensor | None:
        if self._memory is None and self._is_stored:
            if self._read is None:
                self._begin_read()
            read, self._read = self._read, None
            if read is not None:
                try:
                    read[1].close()
                except TierError:
                    self._storage.give_back(read[0])
                    raise
                self._hold(read[0])
                self._is_changed = False
        return self._memory

    def _begin_read(self) -> None:
        if self._array is not None:
            landing = self._storage.scratch(self._numel, self._array.dtype)
            self._read = landing, self._array.read(0, landing)

    def _begin_write(self) -> None:
        memory = self._memory
        if memory is None:
            return
        self._end_write()
        if self._array is None or self._array.dtype != memory.dtype:
            new = DiskArray(self._storage.disk, self._numel, memory.dtype)
            if self._array is not None:
                self._array.close()
            self._array, self._is_stored = new, False
        self.numbers = {key: of(memory) for key, of in self._storage.gradient_numbers.items()}
        self._write = self._array.write(0, memory)

    def _end_write(self) -> None:
        write, self._write = self._write, None
        if write is not None and self._wait(write):
            self._is_stored, self._is_changed = True, False

    def _wait(self, transfer: Inflight) -> bool:
        try:
            transfer.close()
        except TierError as error:
            self._storage.failure = self._storage.failure or error
            return False
        return True


def _references(tensor: Tensor) -> int:
    """How many tensors have this memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
