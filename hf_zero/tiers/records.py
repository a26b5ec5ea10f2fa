"""Arrays of equal length at rest in this rank's file, cut so that one read brings a stretch of all of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..comm.inflight import Inflight
from ..errors import StateError, ZeroError
from .array import OnDisk, Source
from .disk import Disk, Region
from .tier import padded


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

    def read(self, index: int, buffer: Tensor, tell: Callable[[], object] | None = None) -> Inflight:
        """Record `index` into the first bytes of `buffer`; `tell` as for `Disk.read`."""
        return self.disk.read(self._offset(index), buffer[: self._bytes_of(self.numel_of(index))], tell)

    def write(self, index: int, buffer: Tensor, tell: Callable[[], object] | None = None) -> Inflight:
        """Record `index` from the first bytes of `buffer`, which must not change until waited for."""
        return self.disk.write(self._offset(index), buffer[: self._bytes_of(self.numel_of(index))], tell)

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
