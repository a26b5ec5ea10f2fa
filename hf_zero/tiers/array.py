"""Arrays at rest in files.

* `OnDisk`: a view of one array, sliced like a tensor. What it views is a `Source`:
* `DiskArray`: an array in this rank's own file.
* `FileSource`, `FilePieces`: arrays in files that are somebody else's, read-only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.inflight import Inflight, Timed, together
from ..errors import StateError, TierError, ZeroError
from .disk import Disk, Region, bytes_of, inflight, move, submit
from .host import Bytes, pages
from .tier import PIECE_BYTES, Meter

OnDone = Callable[[], object] | None
"""Called from another thread when a part of a transfer has ended, the last one among them."""


class Source(Protocol):
    """A 1-D array in a file, as `OnDisk` needs it."""

    dtype: torch.dtype
    numel: int

    def read(self, start: int, values: Tensor, on_done: OnDone = None) -> Inflight:
        """Fill `values` (CPU, contiguous, of this type) from element `start`."""
        ...

    def write(self, start: int, values: Tensor, on_done: OnDone = None) -> Inflight:
        """Write `values` (CPU, contiguous, of this type) from element `start` on."""
        ...


_READ_WHOLE = (
    "an optimizer's state that rests on disk is no tensor. Read it by zero.full_optimizer_state(param, name), a collective, or "
    "zero.local_optimizer_state(param, name)"
)


class OnDisk:
    """Values at rest in a file, in row-major order. A slice is a view: it costs nothing and writes to the same place.

    Args:
        start, stop: of the source's elements, these.
        shape: 1-D where it is not given. Slices are 1-D, of the elements one after another.
    """

    __slots__ = ("_numel", "_shape", "_source", "_start")

    def __init__(
        self, source: Source, start: int = 0, stop: int | None = None, shape: Sequence[int] | None = None
    ) -> None:
        self._source = source
        self._start = start
        self._numel = (source.numel if stop is None else stop) - start
        self._shape = torch.Size((self._numel,) if shape is None else shape)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Tensor, name):
            raise StateError(f"{name} of values on disk: {_READ_WHOLE}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StateError(f"{getattr(func, '__name__', func)} of values on disk: {_READ_WHOLE}")

    @property
    def source(self) -> Source:
        """The whole array."""
        return self._source

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return self._shape

    def numel(self) -> int:
        return self._numel

    def dim(self) -> int:
        return len(self._shape)

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
        values = values.view(self._shape)
        self.begin_read(values).wait()
        return values

    def begin_read(self, target: Tensor, on_done: OnDone = None) -> Inflight:
        """Start to fill `target`: CPU, contiguous, of this type and shape.

        Raises:
            StateError: it is not.
            TierError: (when waiting) the read failed.
        """
        self._check(target)
        if target.dtype != self.dtype:
            raise StateError(
                f"values of {self.dtype} on disk cannot be read into a tensor of {target.dtype} while under way"
            )
        return self._source.read(self._start, target, on_done)

    def begin_write(self, values: Tensor, on_done: OnDone = None) -> Inflight:
        """Start to write `values`: CPU, contiguous, of this type and shape; they must not change until waited for."""
        return self._source.write(self._start, values, on_done)

    def read_into(self, target: Tensor) -> Tensor:
        """Fill `target` (this shape; any type and device), chunk by chunk.

        Raises:
            StateError: of another shape.
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
        """Write `values` (this shape; any type and device), chunk by chunk.

        Raises:
            StateError: of another shape, or these values are read-only.
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
        return self.copy_(torch.zeros((), dtype=self.dtype, device="cpu").expand(self._shape))

    @property
    def _chunk_numel(self) -> int:
        return PIECE_BYTES // self.element_size()

    def _chunks(self, values: Tensor) -> Iterator[tuple[OnDisk, Tensor]]:
        for start in range(0, self.numel(), self._chunk_numel):
            chunk = slice(start, start + self._chunk_numel)
            yield self[chunk], values[chunk]

    def _check(self, values: Values) -> None:
        if values.shape != self._shape:
            raise StateError(f"{self.numel()} values on disk met a tensor of shape {tuple(values.shape)}")


Values = Tensor | OnDisk
"""Values, wherever they rest; 1-D, but for states of parameters of true shape."""


def flat_of(values: Values) -> Values:
    """The same values, 1-D; those on disk, and contiguous ones, are not copied."""
    return values.detach().reshape(-1) if isinstance(values, Tensor) else values[:]


def is_array(value: Any) -> bool:
    """Whether a state of an optimizer is a tensor of numbers, and not one number."""
    return isinstance(value, (Tensor, OnDisk)) and value.dim() > 0


def fetch(values: Values) -> Tensor:
    """The values as a tensor: themselves where they are one, else read from disk."""
    return values.read() if isinstance(values, OnDisk) else values


class DiskArray:
    """`numel` elements in this rank's file, one after another from a page's start. The content of a new one is undefined.

    Args:
        base: values at rest elsewhere, which are read there. They move here, and take space, when they are first written.

    Raises:
        TierError: no space.
    """

    def __init__(self, disk: Disk, numel: int, dtype: torch.dtype, base: Source | None = None) -> None:
        self.numel = numel
        self.dtype = dtype
        self._disk = disk
        self._base = base
        self._lock = threading.Lock()
        self._region = self._take() if base is None else None

    def _take(self) -> Region:
        return self._disk.take(self.numel * self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of disk taken."""
        return 0 if self._region is None else self._region.nbytes

    @property
    def base(self) -> Source | None:
        """Where the values are as long as nothing was written."""
        return self._base

    def read(self, start: int, values: Tensor, on_done: OnDone = None) -> Inflight:
        base = self._base
        if base is not None:
            return base.read(start, values, on_done)
        return self._disk.read(self._offset(start), values, on_done)

    def write(self, start: int, values: Tensor, on_done: OnDone = None) -> Inflight:
        self._leave_base()
        return self._disk.write(self._offset(start), values, on_done)

    def close(self) -> None:
        """Give the space back. Transfers must be over. Safe to call again."""
        self._base = None
        region, self._region = self._region, None
        if region is not None:
            self._disk.give_back(region)

    def _leave_base(self) -> None:
        """The base's values rest here from now on. If they cannot be read, or there is no space, the base stays the base."""
        with self._lock:
            base = self._base
            if base is None:
                return
            whole = DiskArray(self._disk, self.numel, self.dtype)
            try:
                OnDisk(whole).copy_(OnDisk(base))
            except ZeroError:
                whole.close()
                raise
            self._region, self._base = whole._region, None

    def _offset(self, start: int) -> int:
        if self._region is None:
            raise StateError(f"{self._disk.where}: an array of {self.numel} elements was used after it was closed")
        return self._region.offset + start * self.dtype.itemsize


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

    def read(self, start: int, values: Tensor, on_done: OnDone = None) -> Inflight:
        array, offset = bytes_of(values), self._offset + start * self.dtype.itemsize
        self._meter.moved("read", len(array))
        pieces = range(0, len(array), PIECE_BYTES)
        jobs = [submit(partial(self._piece, array[at : at + PIECE_BYTES], offset + at), on_done) for at in pieces]
        return inflight(jobs, self._meter, "read")

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

    def write(self, start: int, values: Tensor, on_done: OnDone = None) -> Inflight:
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

    def read(self, start: int, values: Tensor, on_done: OnDone = None) -> Inflight:
        stop, done = start + values.numel(), start
        transfers = []
        for at, part in self._parts:
            low, high = max(start, at), min(stop, at + part.numel())
            if low < high:
                values[done - start : low - start].zero_()
                transfers.append(part[low - at : high - at].begin_read(values[low - start : high - start], on_done))
                self._meter.moved("read", (high - low) * self.dtype.itemsize)
                done = high
        values[done - start :].zero_()
        return Inflight((Timed(together(transfers).close, self._meter, "read"),))

    def write(self, start: int, values: Tensor, on_done: OnDone = None) -> Inflight:
        raise StateError("frozen values at rest in a model's own files cannot be written")
