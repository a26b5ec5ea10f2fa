"""1-D arrays at rest in files.

* `OnDisk`: one array, sliced like a tensor.
* `FileSource`, `FilePieces`: arrays in files that are somebody else's, and stay there until they are written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..comm.inflight import Inflight
from ..errors import StateError, TierError, ZeroError
from .host import Bytes, pages
from .tier import PIECE_BYTES, Meter, Waiting
from .transfer import bytes_of, inflight, move, submit


class Source(Protocol):
    """A 1-D array in a file, as `OnDisk` needs it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def numel(self) -> int: ...

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where elements [start, stop) lie: byte offsets in the file and numbers of elements, in order."""
        ...

    def read(self, offset: int, values: Tensor) -> Inflight: ...

    def write(self, offset: int, values: Tensor) -> Inflight: ...


class OnDisk:
    """1-D values at rest in a file. A slice is a view: it costs nothing and writes to the same place."""

    __slots__ = ("_source", "_start", "_stop")

    def __init__(self, source: Source, start: int = 0, stop: int | None = None) -> None:
        self._source = source
        self._start = start
        self._stop = source.numel if stop is None else stop

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.numel(),))

    def numel(self) -> int:
        return self._stop - self._start

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
        """A new CPU tensor."""
        values = torch.from_numpy(pages(self.numel() * self.element_size())).view(self.dtype)
        self.begin_read(values).wait()
        return values

    def begin_read(self, target: Tensor) -> Inflight:
        """Start to fill `target`: CPU, contiguous, of this type and length.

        Raises:
            StateError: it is not.
            TierError: (when waiting) the read failed.
        """
        self._check(target)
        if target.dtype != self.dtype:
            raise StateError(
                f"values of {self.dtype} on disk cannot be read into a tensor of {target.dtype} while under way"
            )
        return self._each(self._source.read, target)

    def begin_write(self, values: Tensor) -> Inflight:
        """Start to write `values`: CPU, contiguous, of this type and length; they must not change until waited for."""
        return self._each(self._source.write, values)

    def read_into(self, target: Tensor) -> Tensor:
        """Fill `target` (this length; any type and device), chunk by chunk.

        Raises:
            StateError: of another length.
            TierError: the read failed.
        """
        self._check(target)
        if target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous():
            self.begin_read(target).wait()
            return target
        for part, place in self._chunks(target):
            place.copy_(part.read())
        return target

    def copy_(self, values: Values) -> OnDisk:
        """Write `values` (this length; any type and device), chunk by chunk.

        Raises:
            StateError: of another length, or these values are read-only.
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
            for part, place in self._chunks(values):
                part.begin_write(place.to(device="cpu", dtype=self.dtype).contiguous()).wait()
        return self

    def zero_(self) -> OnDisk:
        return self.copy_(torch.zeros((), dtype=self.dtype).expand(self.numel()))

    @property
    def _chunk_numel(self) -> int:
        return PIECE_BYTES // self.element_size()

    def _chunks(self, values: Tensor) -> Iterator[tuple[OnDisk, Tensor]]:
        for start in range(0, self.numel(), self._chunk_numel):
            chunk = slice(start, start + self._chunk_numel)
            yield self[chunk], values[chunk]

    def _each(self, move: Callable[[int, Tensor], Inflight], values: Tensor) -> Inflight:
        transfers, done = [], 0
        for offset, numel in self._source.extents(self._start, self._stop):
            transfers.append(move(offset, values[done : done + numel]))
            done += numel
        return Inflight(transfers)

    def _check(self, values: Values) -> None:
        if values.dim() != 1 or values.numel() != self.numel():
            raise StateError(f"{self.numel()} values on disk met a tensor of shape {tuple(values.shape)}")


Values = Tensor | OnDisk
"""1-D values, wherever they rest."""


def fetch(values: Values) -> Tensor:
    """The values as a tensor: themselves where they are one, else read from disk."""
    return values.read() if isinstance(values, OnDisk) else values


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells a file from another that took its place, and from itself after it was written to."""

    inode: int
    nbytes: int
    modified_ns: int

    @staticmethod
    def of(file: int | str | os.PathLike[str]) -> Stamp:
        """Of a path or a descriptor.

        Raises:
            OSError: it is not there.
        """
        about = os.stat(file)
        return Stamp(about.st_ino, about.st_size, about.st_mtime_ns)


class FileSource:
    """`numel` elements from byte `offset` of a file that is somebody else's, read-only: weights in a safetensors file.

    Opened for each read, so that thousands of tensors hold no descriptors.

    Args:
        stamp: the file's when `offset` was found. Reading it raises TierError once it has another.
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

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield self._offset + start * self.dtype.itemsize, stop - start

    def read(self, offset: int, values: Tensor) -> Inflight:
        array = bytes_of(values)
        self._meter.moved("read", len(array))
        pieces = range(0, len(array), PIECE_BYTES)
        futures = [submit(self._piece, array[at : at + PIECE_BYTES], offset + at) for at in pieces]
        return inflight(futures, self._meter, "read")

    def _piece(self, array: Bytes, offset: int) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise TierError(
                f"{self.path} cannot be opened: {error.strerror or error}; weights rest in this file while training runs: "
                "leave it in place"
            ) from error
        try:
            move("read", fd, array, offset, 1, str(self.path))
            found = Stamp.of(fd)  # after the read: also what changed meanwhile is noticed
        finally:
            os.close(fd)
        if self._stamp is not None and found != self._stamp:
            raise TierError(
                f"{self.path} is not what the model was loaded from any more (found {found}, expected {self._stamp}); weights "
                "rest in this file while training runs: leave it as it is, or load the model again"
            )

    def write(self, offset: int, values: Tensor) -> Inflight:
        raise StateError(f"{self.path}: frozen values at rest in a model's own file cannot be written")


class FilePieces:
    """`numel` elements put together from other arrays at rest, read-only: parameters in a model's own files. Gaps are zeros.

    Args:
        parts: of each its first element here, and its values, of type `dtype`; in order, without overlap.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, parts: Sequence[tuple[int, OnDisk]], meter: Meter | None = None
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self._parts = parts
        self._meter = meter or Meter()

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield start, stop - start

    def read(self, offset: int, values: Tensor) -> Inflight:
        stop, done = offset + values.numel(), offset
        transfers = []
        for at, part in self._parts:
            low, high = max(offset, at), min(stop, at + part.numel())
            if low < high:
                values[done - offset : low - offset].zero_()
                transfers.append(part[low - at : high - at].begin_read(values[low - offset : high - offset]))
                self._meter.moved("read", (high - low) * self.dtype.itemsize)
                done = high
        values[done - offset :].zero_()

        def wait() -> None:
            failure: ZeroError | None = None
            for transfer in transfers:  # all, so that after an error `values` is not in use any more
                try:
                    transfer.wait()
                except ZeroError as error:
                    failure = failure or error
            if failure is not None:
                raise failure

        return Inflight((Waiting(wait, self._meter, "read"),))

    def write(self, offset: int, values: Tensor) -> Inflight:
        raise StateError("frozen values at rest in a model's own files cannot be written")
