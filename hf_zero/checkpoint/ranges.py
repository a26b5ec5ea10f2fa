"""Byte ranges of one rank, between the files of a folder and its memory, with the digest of every stretch of bytes.

What a checkpoint sees of a run are elements of named parameters, and the arrays they are read from and written into:
`Parameters` and `OptimizerState`, implemented where units and shards are known. A `Writer` notes the digests of what it writes;
a `Reader` compares what it reads with those of the manifest.
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
from .files import open_plain
from .manifest import SEGMENT_BYTES, Manifest, Segment, check_segment, digest_of
from .safetensors import Stored, read_fully, start_writeback, write_fully

MASTER = "master"
"""The state that a master finer than its parameter is stored as."""


Held = tuple[str, Extent[Values]]
"""A parameter's first name, and elements of it: 1-D views of this rank's memory, or of its disk. "Here" is the parameter."""


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The optimizer's state of one parameter: the arrays by type and shape only, the rest by value."""

    shape: tuple[int, ...]
    """The parameter's."""
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    scalars: Mapping[str, Any]


class Parameters(Protocol):
    """The parameters of one model, by their first names."""

    def spec(self, name: str) -> ParamSpec: ...

    def written(self, rank: int, size: int) -> Iterable[Held]:
        """The pieces of each master that this rank writes: over all ranks, every element once."""
        ...

    def held(self) -> Iterable[Held]:
        """The pieces of each master that this rank has, to be filled."""
        ...

    def shares(self, name: str) -> Iterable[tuple[int, Extent[Callable[[], Tensor]]]]:
        """Which rank has which elements of one parameter, the same on every rank. Only the rank itself may call the source.

        It answers with a 1-D tensor of the master's type, and raises a ZeroError where the values cannot be read.
        """
        ...


class OptimizerState(Protocol):
    """An optimizer's state by parameter, and its groups' options."""

    @property
    def kind(self) -> str:
        """The name of the optimizer's class."""
        ...

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The options of each group, and under `params` the parameters' names."""
        ...

    def names(self) -> set[str] | None:
        """The states that a parameter has after a step; None where that cannot be known."""
        ...

    def refusal(self, group: int, options: Mapping[str, Any]) -> str | None:
        """Why the optimizer would not have been built with such options; None where it would, or cannot say."""
        ...

    def added(self) -> set[str]:
        """The options that a step adds to the groups."""
        ...

    def parameters(self) -> Iterator[tuple[ParamSpec, bool]]:
        """The parameters that are trained; whether the arrays of their states have shapes of their own."""
        ...

    def written(self, rank: int, size: int) -> Mapping[str, Iterable[Held]]:
        """State -> the pieces that this rank writes. Every state is named, also where this rank writes nothing.

        Raises:
            CheckpointError: a state that cannot be stored by parameter.
        """
        ...

    def described(self) -> Mapping[str, ParameterState]:
        """By parameter, the state there is."""
        ...

    def room(self, saved: Mapping[str, ParameterState]) -> Iterable[tuple[str, Held]]:
        """Memory for a saved state: the state, and a piece to be filled. The optimizer keeps its own until `put`."""
        ...

    def put(self, options: Sequence[Mapping[str, Any]]) -> None:
        """What `room` gave becomes the optimizer's state, `options` those of its groups."""
        ...


_DIRECT_BYTES = 1 << 20
"""From here on a range is written from where it lies; smaller ones are put together first."""
_AHEAD_BYTES = 48 << 20
_LARGE_BYTES = 256 << 10


@dataclass(slots=True)
class Range:
    """Elements of a stored tensor, from its element `start`, and the memory (1-D, any type, wherever it rests) for them."""

    stored: Stored
    start: int
    values: Values

    @property
    def dtype(self) -> torch.dtype:
        """In the file."""
        return dtype_of(self.stored.dtype)

    @property
    def offset(self) -> int:
        """The first byte in the file."""
        return self.stored.start + self.start * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Bytes in the file."""
        return self.values.numel() * self.dtype.itemsize


def ranges_of(held: Iterable[Held], places: Mapping[str, Sequence[Extent[Stored]]]) -> Iterator[Range]:
    """Where a rank's pieces of parameters lie in files.

    Args:
        places: parameter -> where its elements are stored; "here" is the parameter.
    """
    for name, piece in held:
        for place in places.get(name, ()):
            stored, mine = place.cut(piece.start, piece.stop), piece.cut(place.start, place.stop)
            if stored is not None and mine is not None:
                yield Range(stored.source, stored.source_start, mine.source[mine.there])


class _Files:
    """Files that are open from their first use on, and a buffer."""

    def __init__(self, done: str, open_file: Callable[[Path], int]) -> None:
        self._done, self._open_file = done, open_file
        self._fds: dict[Path, int] = {}

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fd(self, path: Path) -> int:
        if path not in self._fds:
            try:
                self._fds[path] = self._open_file(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be {self._done}: {error}") from error
        return self._fds[path]

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device="cpu")


class Reader(_Files):
    """Reads a folder's files, checked against its manifest where there is one. One buffer of memory or two."""

    def __init__(self, folder: Path, manifest: Manifest | None) -> None:
        super().__init__("read", open_plain)
        self._folder = folder
        self._manifest = manifest
        self._cached: tuple[Path, Segment] | None = None
        self.bytes_read = 0

    def read(self, ranges: Iterable[Range]) -> None:
        """In file order; the disk is kept busy with what comes next while this rank checks and copies."""
        items = sorted(ranges, key=lambda item: (item.stored.file, item.offset))
        ahead = 0  # items that the kernel was told to fetch, and their bytes beyond the one at hand
        waiting_bytes = 0
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

    def whole(self, stored: Stored) -> Tensor:
        """One tensor, in its own type and shape, on CPU."""
        value = torch.empty(stored.shape, dtype=dtype_of(stored.dtype), device="cpu")
        self._fill_elements(Range(stored, 0, value.view(-1)))
        return value

    def _fill_elements(self, item: Range) -> None:
        dtype, place = item.dtype, item.values
        if not place.numel():
            return
        if isinstance(place, Tensor) and place.dtype == dtype and place.device.type == "cpu" and place.is_contiguous():
            self._fill(item.stored.file, item.offset, bytes_of(place))
            return
        step = SEGMENT_BYTES // dtype.itemsize
        for start in range(0, place.numel(), step):
            part = place[start : start + step]
            landing = self._scratch[: part.numel() * dtype.itemsize]
            self._fill(item.stored.file, item.offset + start * dtype.itemsize, bytes_of(landing))
            part.copy_(landing.view(dtype))

    def _fill(self, path: Path, offset: int, out: memoryview) -> None:
        if self._manifest is None:
            self._pread(path, offset, out)
            return
        file = self._manifest.files.get(path.relative_to(self._folder).as_posix())
        if file is None:
            raise CheckpointError(f"{path} is not in the manifest: it is of another save")
        stop = offset + len(out)
        index = bisect_right(file.segments, offset, key=lambda segment: segment[0]) - 1
        while index < len(file.segments) and file.segments[index][0] < stop:
            segment = file.segments[index]
            begin, end = max(offset, segment[0]), min(stop, segment[0] + segment[1])
            part = out[begin - offset : end - offset]
            # Straight to where it belongs; a digest that does not fit is raised for, so nobody goes on with what is there then.
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
            self._cached = None  # should the read or the check fail, the buffer is of neither segment
            self._pread(path, segment[0], data)
            check_segment(path, segment, data)
            self._cached = (path, segment)
        return data

    def _pread(self, path: Path, offset: int, out: memoryview) -> None:
        read_fully(self._fd(path), out, offset, path)
        self.bytes_read += len(out)


class Writer(_Files):
    """Writes into files that are there, of their final size."""

    def __init__(self) -> None:
        super().__init__("written", lambda path: os.open(path, os.O_WRONLY))
        self._segments: dict[Path, list[Segment]] = {}

    def write(self, ranges: Iterable[Range]) -> None:
        """In file order; neighbours that are small go out together."""
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
        """Everything written is on disk afterwards.

        Returns:
            The digests, by file.
        """
        try:
            for path, fd in self._fds.items():
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise CheckpointError(f"{path}: fsync failed: {error}") from error
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
            return self._write_direct(items[0])
        scratch, at = self._scratch, 0
        for item in items:
            # Slices of the scratch need not be aligned for their type: bytes are copied.
            source = fetch(item.values).to(item.dtype)
            scratch[at : at + item.length].copy_(source.contiguous().view(torch.uint8))
            at += item.length
        return self._put(items[0].stored.file, items[0].offset, scratch[:total])

    def _put(self, path: Path, offset: int, values: Tensor) -> None:
        fd = self._fd(path)
        data = bytes_of(values.contiguous())
        # Of the memory that is written, at once: of the file, read back, it would vouch for what a bad disk made of it.
        digest = digest_of(data)
        write_fully(fd, data, offset, path)
        start_writeback(fd, offset, len(data))
        self._segments.setdefault(path, []).append((offset, len(data), digest))


def copy_to(values: Values, target: Tensor) -> Tensor:
    """`values`, wherever they rest, into `target` (as long; any type and device).

    Raises:
        TierError: they rest on disk and could not be read.
    """
    return values.read_into(target) if isinstance(values, OnDisk) else target.copy_(values.detach())


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor, whose storage may still be resized once this is gone."""
    array: Any = memory_of(values)
    return memoryview(array)
