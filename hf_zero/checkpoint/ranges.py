"""Move byte ranges between the files of a folder and this rank's memory, with a digest per segment.

A checkpoint sees a run as elements of named parameters, and the arrays that hold them. The engine
implements these protocols, `Parameters` and `OptimizerState`. A `RangeWriter` computes the digests of what
it writes; a `RangeReader` compares what it reads with the manifest's.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.layout import Extent, ParamSpec
from ..core.precision import dtype_of
from ..errors import CheckpointError
from ..tiers.array import OnDisk, Values, fetch
from ..tiers.disk import bytes_of as memory_of
from .files import named_os_errors, open_regular
from .manifest import SEGMENT_BYTES, Manifest, Segment, check_segment, digest_of
from .safetensors import StoredTensor, read_fully, start_writeback, write_fully

MASTER = "master"
"""The optimizer state that stores a master of higher precision than its parameter."""

NamedPiece = tuple[str, Extent[Values]]
"""A parameter's first name, and some of its elements: 1-D views of this rank's memory or disk. `start` counts in it."""


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The optimizer's state of one parameter.

    Attributes:
        shape: the parameter's.
        arrays: state -> dtype and shape.
        scalars: state -> value, for states that are one value per parameter.
    """

    shape: tuple[int, ...]
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    scalars: Mapping[str, Any]


class Fillable(Protocol):
    """Parameters of one model, by their first names, that a load fills."""

    def to_fill(self) -> Iterable[NamedPiece]:
        """Return the pieces of each master that a load fills: this rank's."""
        ...


class Parameters(Fillable, Protocol):
    """The parameters of one model, by their first names."""

    def spec(self, name: str) -> ParamSpec:
        """Return shape and dtypes of a parameter."""
        ...

    def written(self, rank: int, size: int) -> Iterable[NamedPiece]:
        """Return the pieces of each master that this rank writes. All ranks together write every element once."""
        ...

    def shares(self, name: str) -> Iterable[tuple[int, Extent[Callable[[], Tensor]]]]:
        """Return which rank holds which elements of a parameter; the same on every rank.

        Only the rank itself may call the source, which returns a 1-D tensor of the master's dtype, or raises a ZeroError
        if the values cannot be read.
        """
        ...


class OptimizerState(Protocol):
    """An optimizer's state by parameter, and its groups' options."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer, for facts about its class."""
        ...

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Return the options of each group, with the parameters' names under `params`."""
        ...

    def parameters(self) -> Iterator[tuple[ParamSpec, bool]]:
        """Yield each trained parameter, and whether its state arrays have shapes other than the parameter's."""
        ...

    def written(self, rank: int, size: int) -> Mapping[str, Iterable[NamedPiece]]:
        """Return state -> the pieces that this rank writes. Includes states of which it writes nothing.

        Raises:
            CheckpointError: a state cannot be stored by parameter.
        """
        ...

    def described(self) -> Mapping[str, ParameterState]:
        """Return the existing state, by parameter."""
        ...

    def allocate(self, saved: Mapping[str, ParameterState]) -> Iterable[tuple[str, NamedPiece]]:
        """Allocate memory for a saved state. Returns (state, piece to fill). The optimizer keeps its own until `put`."""
        ...

    def put(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Make the memory of `allocate` the optimizer's state, and `options` those of its groups."""
        ...


_DIRECT_BYTES = 1 << 20
"""Ranges of at least this size are written from their own memory; smaller ones are joined first."""
_AHEAD_BYTES = 48 << 20
"""Bytes that the kernel reads ahead."""
_LARGE_BYTES = 256 << 10
"""Smaller ranges are not announced to the kernel."""


@dataclass(slots=True)
class Range:
    """Elements of a stored tensor, from its element `start`, and their memory: 1-D, of any dtype, on any tier."""

    stored: StoredTensor
    start: int
    values: Values

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in the file."""
        return dtype_of(self.stored.dtype)

    @property
    def offset(self) -> int:
        """Return the first byte in the file."""
        return self.stored.start + self.start * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Return the number of bytes in the file."""
        return self.values.numel() * self.dtype.itemsize


def ranges_of(pieces: Iterable[NamedPiece], places: Mapping[str, Sequence[Extent[StoredTensor]]]) -> Iterator[Range]:
    """Yield the byte ranges of a rank's pieces of parameters.

    Args:
        pieces: of parameters.
        places: parameter -> where files store its elements; `start` counts in the parameter.
    """
    for name, piece in pieces:
        for extent in places.get(name, ()):
            stored, mine = extent.intersect(piece.start, piece.stop), piece.intersect(extent.start, extent.stop)
            if stored is not None and mine is not None:
                yield Range(stored.source, stored.source_start, mine.source[mine.source_slice])


class _Files:
    """Opens files at their first use, and owns a scratch buffer."""

    def __init__(self, done: str, open_file: Callable[[Path], int]) -> None:
        self._done, self._open_file = done, open_file
        self._fds: dict[Path, int] = {}

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fd(self, path: Path) -> int:
        if path not in self._fds:
            with named_os_errors(path, self._done):
                self._fds[path] = self._open_file(path)
        return self._fds[path]

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device="cpu")


class RangeReader(_Files):
    """Reads files of a folder and checks them against its manifest, if it has one. Uses one or two buffers."""

    def __init__(self, folder: Path, manifest: Manifest | None) -> None:
        super().__init__("read", open_regular)
        self._folder = folder
        self._manifest = manifest
        self._cached: tuple[Path, Segment] | None = None
        self.bytes_read = 0

    def read(self, ranges: Iterable[Range]) -> None:
        """Fill ranges in file order, while the kernel reads the next ones ahead."""
        items = sorted(ranges, key=lambda item: (item.stored.file, item.offset))
        ahead, waiting_bytes = 0, 0  # items announced to the kernel, and their bytes beyond the current one
        try:
            for index, item in enumerate(items):
                while ahead < len(items) and (waiting_bytes < _AHEAD_BYTES or ahead <= index):
                    waiting_bytes += items[ahead].length
                    if items[ahead].length >= _LARGE_BYTES:
                        os.posix_fadvise(
                            self._fd(items[ahead].stored.file),
                            items[ahead].offset,
                            items[ahead].length,
                            os.POSIX_FADV_WILLNEED,
                        )
                    ahead += 1
                self._fill_elements(item)
                waiting_bytes -= item.length
        finally:
            self.close()

    def read_tensor(self, stored: StoredTensor) -> Tensor:
        """Read a complete tensor, in its stored dtype and shape, to CPU memory."""
        value = torch.empty(stored.shape, dtype=dtype_of(stored.dtype), device="cpu")
        self._fill_elements(Range(stored, 0, value.view(-1)))
        return value

    def _fill_elements(self, item: Range) -> None:
        dtype, values = item.dtype, item.values
        if not values.numel():
            return
        if (
            isinstance(values, Tensor)
            and values.dtype == dtype
            and values.device.type == "cpu"
            and values.is_contiguous()
        ):
            self._fill(item.stored.file, item.offset, bytes_of(values))
            return
        step = SEGMENT_BYTES // dtype.itemsize
        for start in range(0, values.numel(), step):
            part = values[start : start + step]
            buffer = self._scratch[: part.numel() * dtype.itemsize]
            self._fill(item.stored.file, item.offset + start * dtype.itemsize, bytes_of(buffer))
            part.copy_(buffer.view(dtype))

    def _fill(self, path: Path, offset: int, out: memoryview) -> None:
        if self._manifest is None:
            self._pread(path, offset, out)
            return
        file = self._manifest.files.get(path.relative_to(self._folder).as_posix())
        if file is None:
            raise CheckpointError(f"{path} is not in the manifest: it belongs to another save")
        stop = offset + len(out)
        index = bisect_right(file.segments, offset, key=lambda segment: segment[0]) - 1
        while index < len(file.segments) and file.segments[index][0] < stop:
            segment = file.segments[index]
            begin, end = max(offset, segment[0]), min(stop, segment[0] + segment[1])
            part = out[begin - offset : end - offset]
            # No copy before the check: a wrong digest raises, so the values are never used.
            if len(part) == segment[1]:
                self._pread(path, begin, part)
                check_segment(path, segment, part)
            else:
                part[:] = self._checked(path, segment)[begin - segment[0] : end - segment[0]]
            index += 1

    @cached_property
    def _segment(self) -> Tensor:
        return torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device="cpu")

    def _checked(self, path: Path, segment: Segment) -> memoryview:
        data = bytes_of(self._segment)[: segment[1]]
        if self._cached != (path, segment):
            self._cached = None  # if the read or the check fails, the buffer holds neither segment
            self._pread(path, segment[0], data)
            check_segment(path, segment, data)
            self._cached = (path, segment)
        return data

    def _pread(self, path: Path, offset: int, out: memoryview) -> None:
        read_fully(self._fd(path), out, offset, path)
        self.bytes_read += len(out)


class RangeWriter(_Files):
    """Writes into existing files of their final size, and computes digests."""

    def __init__(self) -> None:
        super().__init__("written", lambda path: os.open(path, os.O_WRONLY))
        self._segments: dict[Path, list[Segment]] = {}

    def write(self, ranges: Iterable[Range]) -> None:
        """Write ranges in file order. Small neighbours are joined into one write."""
        waiting: list[Range] = []
        waiting_bytes, end = 0, 0
        for item in sorted(ranges, key=lambda item: (item.stored.file, item.offset)):
            offset, length = item.offset, item.length
            if not length:
                continue
            joins = waiting and (waiting[-1].stored.file, end) == (item.stored.file, offset)
            if waiting and not (joins and waiting_bytes + length <= SEGMENT_BYTES and length < _DIRECT_BYTES):
                self._write_together(waiting, waiting_bytes)
                waiting, waiting_bytes = [], 0
            if length >= _DIRECT_BYTES:
                self._write_direct(item)
            else:
                waiting.append(item)
                waiting_bytes, end = waiting_bytes + length, offset + length
        if waiting:
            self._write_together(waiting, waiting_bytes)

    def finish(self) -> dict[Path, list[Segment]]:
        """Fsync all files. Returns the digests of what was written, by file."""
        try:
            for path, fd in self._fds.items():
                with named_os_errors(path):
                    os.fsync(fd)
        finally:
            self.close()
        return self._segments

    def _write_direct(self, item: Range) -> None:
        dtype, offset = item.dtype, item.offset
        step = SEGMENT_BYTES // dtype.itemsize
        for start in range(0, item.values.numel(), step):
            part = item.values[start : start + step]
            if isinstance(part, OnDisk) or part.dtype != dtype or part.device.type != "cpu":
                part = copy_to(part, self._scratch[: part.numel() * dtype.itemsize].view(dtype))
            self._put(item.stored.file, offset + start * dtype.itemsize, part)

    def _write_together(self, items: list[Range], total: int) -> None:
        if len(items) == 1:
            self._write_direct(items[0])
            return
        scratch, at = self._scratch, 0
        for item in items:
            # As bytes: slices of the buffer need not be aligned for the dtype.
            source = fetch(item.values).to(item.dtype)
            scratch[at : at + item.length].copy_(source.contiguous().view(torch.uint8))
            at += item.length
        self._put(items[0].stored.file, items[0].offset, scratch[:total])

    def _put(self, path: Path, offset: int, values: Tensor) -> None:
        fd = self._fd(path)
        data = bytes_of(values.contiguous())
        # Digest the memory, not the file read back: that digest would vouch for what a bad disk stored.
        digest = digest_of(data)
        write_fully(fd, data, offset, path)
        start_writeback(fd, offset, len(data))
        self._segments.setdefault(path, []).append((offset, len(data), digest))


def copy_to(values: Values, target: Tensor) -> Tensor:
    """Copy `values` from any tier into `target`, which has the same length and any dtype and device.

    Raises:
        TierError: values on disk could not be read.
    """
    return values.read_into(target) if isinstance(values, OnDisk) else target.copy_(values.detach())


def bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D CPU tensor. Does not prevent a resize of its storage."""
    array: Any = memory_of(values)
    return memoryview(array)
