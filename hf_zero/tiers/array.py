"""Arrays stored in files.

* `OnDisk`: a view of an array, sliced like a tensor. It views a `Source`:
* `DiskArray`: an array in this rank's own file.
* `FileSource`, `JoinedSource`: read-only arrays in a model's own files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.inflight import Inflight, TimedWait, join_transfers
from ..errors import StateError, TierError, ZeroError
from .disk import Disk, Region, bytes_of, inflight, move, submit
from .host import Bytes, pages
from .tier import PIECE_BYTES, Meter


class Source(Protocol):
    """A 1-D array in a file."""

    dtype: torch.dtype
    numel: int

    def read(self, start: int, values: Tensor) -> Inflight:
        """Start to fill `values` (CPU, contiguous, same dtype) from element `start`."""
        ...

    def write(self, start: int, values: Tensor) -> Inflight:
        """Start to write `values` (CPU, contiguous, same dtype) from element `start` on."""
        ...


_READ_WHOLE = (
    "an optimizer's state on disk is not a tensor. Read it with zero.full_optimizer_state(param, name), a collective, or "
    "zero.local_optimizer_state(param, name)"
)


class OnDisk:
    """1-D values in a file. A slice is a view: it reads nothing, and writes to the same file.

    Args:
        source: the array.
        start, stop: the elements of the source that are viewed.
    """

    __slots__ = ("_numel", "_source", "_start")

    def __init__(self, source: Source, start: int = 0, stop: int | None = None) -> None:
        self._source = source
        self._start = start
        self._numel = (source.numel if stop is None else stop) - start

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Tensor, name):
            raise StateError(f"{name} of values on disk: {_READ_WHOLE}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StateError(f"{getattr(func, '__name__', func)} of values on disk: {_READ_WHOLE}")

    @property
    def source(self) -> Source:
        """Return the array that is viewed."""
        return self._source

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._numel,))

    def numel(self) -> int:
        return self._numel

    def dim(self) -> int:
        return 1

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.numel()

    def __getitem__(self, part: slice) -> OnDisk:
        start, stop, step = part.indices(self.numel())
        if step != 1:
            raise StateError(f"values on disk are sliced in steps of 1, found {step}")
        return OnDisk(self._source, self._start + start, self._start + max(start, stop))

    def read(self) -> Tensor:
        """Return the values as a new CPU tensor."""
        values = torch.from_numpy(pages(self.numel() * self.element_size())).view(self.dtype)
        self.begin_read(values).wait()
        return values

    def begin_read(self, target: Tensor) -> Inflight:
        """Start to fill `target`: CPU, contiguous, same dtype and shape.

        Raises:
            StateError: `target` has another dtype or shape.
            TierError: while waiting: the read failed.
        """
        self._check(target)
        if target.dtype != self.dtype:
            raise StateError(f"values of {self.dtype} on disk cannot be read into a tensor of {target.dtype}")
        return self._source.read(self._start, target)

    def begin_write(self, values: Tensor) -> Inflight:
        """Start to write `values`: CPU, contiguous, same dtype and shape. They must not change until waited for."""
        return self._source.write(self._start, values)

    def read_into(self, target: Tensor) -> Tensor:
        """Fill `target` (same shape; any dtype and device), in chunks.

        Raises:
            StateError: another shape.
            TierError: the read failed.
        """
        self._check(target)
        if target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous():
            self.begin_read(target).wait()
            return target
        for part, place in self._chunks(target.view(-1)):
            place.copy_(part.read())
        return target

    def copy_(self, values: Values) -> OnDisk:
        """Write `values` (same shape; any dtype and device), in chunks.

        Raises:
            StateError: another shape, or the array is read-only.
            TierError: the write failed.
        """
        self._check(values)
        if isinstance(values, OnDisk):
            for start in range(0, self.numel(), self._chunk_numel):
                chunk = slice(start, start + self._chunk_numel)
                self[chunk].copy_(values[chunk].read())
        elif values.dtype == self.dtype and values.device.type == "cpu" and values.is_contiguous():
            self.begin_write(values).wait()
        else:
            for part, place in self._chunks(values.reshape(-1)):
                part.begin_write(place.to(device="cpu", dtype=self.dtype).contiguous()).wait()
        return self

    def zero_(self) -> OnDisk:
        return self.copy_(torch.zeros((), dtype=self.dtype, device="cpu").expand(self._numel))

    @property
    def _chunk_numel(self) -> int:
        return PIECE_BYTES // self.element_size()

    def _chunks(self, values: Tensor) -> Iterator[tuple[OnDisk, Tensor]]:
        for start in range(0, self.numel(), self._chunk_numel):
            chunk = slice(start, start + self._chunk_numel)
            yield self[chunk], values[chunk]

    def _check(self, values: Values) -> None:
        if values.shape != self.shape:
            raise StateError(f"{self.numel()} values on disk met a tensor of shape {tuple(values.shape)}")


Values = Tensor | OnDisk
"""Values on any tier. 1-D, except for states of full matrices."""


def flat_of(values: Values) -> Values:
    """Return the same values as 1-D. Copies only tensors that are not contiguous."""
    return values.detach().reshape(-1) if isinstance(values, Tensor) else values


def is_array(value: Any) -> bool:
    """Return True if an optimizer's state is an array of at least one dimension."""
    return isinstance(value, (Tensor, OnDisk)) and value.dim() > 0


def fetch(values: Values) -> Tensor:
    """Return the values as a tensor; those on disk are read."""
    return values.read() if isinstance(values, OnDisk) else values


class DiskArray:
    """`numel` elements in this rank's file, in a region of whole pages. A new array has undefined content.

    Args:
        base: another array with the values. They are read there until the first write, which copies them here and takes space.
            None afterwards.

    Raises:
        TierError: the disk has no space.
    """

    def __init__(self, disk: Disk, numel: int, dtype: torch.dtype, base: Source | None = None) -> None:
        self.numel = numel
        self.dtype = dtype
        self._disk = disk
        self.base = base
        self._lock = threading.Lock()
        self._region = self._take() if base is None else None

    def _take(self) -> Region:
        return self._disk.allocate(self.numel * self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Return the bytes of disk in use."""
        return 0 if self._region is None else self._region.nbytes

    def read(self, start: int, values: Tensor) -> Inflight:
        base = self.base
        if base is not None:
            return base.read(start, values)
        return self._disk.read(self._offset(start), values)

    def write(self, start: int, values: Tensor) -> Inflight:
        self._leave_base()
        return self._disk.write(self._offset(start), values)

    def close(self) -> None:
        """Release the space. No transfer may be under way. May be called again."""
        self.base = None
        region, self._region = self._region, None
        if region is not None:
            self._disk.free(region)

    def _leave_base(self) -> None:
        """Copy the base's values here. If they cannot be read, or the disk is full, the base remains."""
        with self._lock:
            base = self.base
            if base is None:
                return
            whole = DiskArray(self._disk, self.numel, self.dtype)
            try:
                OnDisk(whole).copy_(OnDisk(base))
            except ZeroError:
                whole.close()
                raise
            self._region, self.base = whole._region, None

    def _offset(self, start: int) -> int:
        if self._region is None:
            raise StateError(f"{self._disk.where}: an array of {self.numel} elements was used after it was closed")
        return self._region.offset + start * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies a file's content: it changes if the file is replaced or written."""

    inode: int
    nbytes: int
    modified_ns: int

    @staticmethod
    def of(file: int | str | os.PathLike[str]) -> Stamp:
        """Return the stamp of a path or descriptor.

        Raises:
            OSError: the file is missing.
        """
        about = os.stat(file)
        return Stamp(about.st_ino, about.st_size, about.st_mtime_ns)


class FileSource:
    """`numel` elements from byte `offset` of a model's own file, read-only: weights in a safetensors file.

    The file is opened for each read: thousands of tensors hold no descriptors.

    Args:
        offset: of the first element, in bytes.
        meter: counts the reads.
        stamp: of the file when `offset` was determined. A read of a file with another stamp raises TierError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int,
        dtype: torch.dtype,
        numel: int,
        meter: Meter | None = None,
        stamp: Stamp | None = None,
    ) -> None:
        self.path = Path(path)
        self.dtype = dtype
        self.numel = numel
        self._offset = offset
        self._meter = meter or Meter()
        self._stamp = stamp

    def read(self, start: int, values: Tensor) -> Inflight:
        array, offset = bytes_of(values), self._offset + start * self.dtype.itemsize
        self._meter.moved("read", len(array))
        pieces = range(0, len(array), PIECE_BYTES)
        jobs = [submit(partial(self._piece, array[at : at + PIECE_BYTES], offset + at)) for at in pieces]
        return inflight(jobs, self._meter, "read")

    def _piece(self, array: Bytes, offset: int) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise TierError(
                f"{self.path} cannot be opened: {error.strerror or error}. Weights are read from this file during training: "
                "leave it in place"
            ) from error
        try:
            move("read", fd, array, offset, 1, str(self.path))
            found = Stamp.of(fd)  # must follow the read, to detect changes during it
        finally:
            os.close(fd)
        if self._stamp is not None and found != self._stamp:
            raise TierError(
                f"{self.path} has changed since the model was loaded (found {found}, expected {self._stamp}). Weights are read "
                "from this file during training: leave it unchanged, or load the model again"
            )

    def write(self, start: int, values: Tensor) -> Inflight:
        raise StateError(f"{self.path}: frozen values in a model's own file cannot be written")


class JoinedSource:
    """`numel` elements joined from other arrays, read-only: parameters in a model's own files. Gaps are zeros.

    Args:
        parts: (first element here, values) of each part; in order, without overlap.
        meter: counts the reads.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, parts: Sequence[tuple[int, OnDisk]], meter: Meter | None = None
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self._parts = parts
        self._meter = meter or Meter()

    def read(self, start: int, values: Tensor) -> Inflight:
        stop, done = start + values.numel(), start
        transfers = []
        for at, part in self._parts:
            low, high = max(start, at), min(stop, at + part.numel())
            if low < high:
                values[done - start : low - start].zero_()
                transfers.append(part[low - at : high - at].begin_read(values[low - start : high - start]))
                self._meter.moved("read", (high - low) * self.dtype.itemsize)
                done = high
        values[done - start :].zero_()
        return Inflight((TimedWait(join_transfers(transfers).close, self._meter, "read"),))

    def write(self, start: int, values: Tensor) -> Inflight:
        raise StateError("frozen values in a model's own files cannot be written")
