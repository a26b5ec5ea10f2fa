"""Byte ranges of one rank, between the files of a folder and its memory, with the digest of every stretch of bytes.

A `Writer` notes the digests of what it writes; a `Reader` compares what it reads with those of the manifest.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Extent
from ..core.precision import dtype_of
from ..errors import CheckpointError
from ..tiers.array import OnDisk, Values, fetch
from ..tiers.disk import bytes_of as memory_of
from .files import open_plain
from .manifest import SEGMENT_BYTES, FileDigest, Manifest, Segment, check_segment, digest_of
from .pieces import Held
from .safetensors import Stored, read_fully, start_writeback, write_fully

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


class Reader:
    """Reads a folder's files, checked against its manifest where there is one. One buffer of memory or two."""

    def __init__(self, folder: Path, manifest: Manifest | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._fds: dict[Path, int] = {}
        self._cached: tuple[Path, Segment] | None = None
        self._segment: Tensor | None = None
        self._scratch: Tensor | None = None
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
        value = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
        self._fill_elements(Range(stored, 0, value.view(-1)))
        return value

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fill_elements(self, item: Range) -> None:
        dtype, place = item.dtype, item.values
        if not place.numel():
            return
        if isinstance(place, Tensor) and place.dtype == dtype and place.device.type == "cpu" and place.is_contiguous():
            self._fill(item.stored.file, item.offset, bytes_of(place))
            return
        if self._scratch is None:
            self._scratch = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)
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
        file = self._digest_of(path)
        stop = offset + len(out)
        index = bisect_right(file.segments, offset, key=lambda segment: segment[0]) - 1
        while index < len(file.segments) and file.segments[index][0] < stop:
            segment = file.segments[index]
            begin, end = max(offset, segment[0]), min(stop, segment[0] + segment[1])
            part = out[begin - offset : end - offset]
            if len(part) == segment[1]:
                self._pread(path, begin, part)
                check_segment(path, segment, part)
            else:
                part[:] = self._checked(path, segment)[begin - segment[0] : end - segment[0]]
            index += 1

    def _checked(self, path: Path, segment: Segment) -> memoryview:
        if self._segment is None:
            self._segment = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)
        data = bytes_of(self._segment)[: segment[1]]
        if self._cached != (path, segment):
            self._cached = None
            self._pread(path, segment[0], data)
            check_segment(path, segment, data)
            self._cached = (path, segment)
        return data

    def _pread(self, path: Path, offset: int, out: memoryview) -> None:
        read_fully(self._fd(path), out, offset, path)
        self.bytes_read += len(out)

    def _fd(self, path: Path) -> int:
        if path not in self._fds:
            try:
                self._fds[path] = open_plain(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._fds[path]

    def _digest_of(self, path: Path) -> FileDigest:
        name = path.relative_to(self._folder).as_posix()
        file = self._manifest.files.get(name) if self._manifest is not None else None
        if file is None:
            raise CheckpointError(f"{path} is not in the manifest: it is of another save")
        return file


class Writer:
    """Writes into files that are there, of their final size."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._segments: dict[Path, list[Segment]] = {}
        self._scratch: Tensor | None = None

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
        """Everything written is on disk afterwards. Returns the digests by file."""
        try:
            for path, fd in self._files.items():
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise CheckpointError(f"{path}: fsync failed: {error}") from error
        finally:
            self.close()
        return self._segments

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _write_direct(self, item: Range) -> None:
        dtype, offset = item.dtype, item.offset
        step = SEGMENT_BYTES // dtype.itemsize
        for start in range(0, item.values.numel(), step):
            part = item.values[start : start + step]
            if isinstance(part, OnDisk) or part.dtype != dtype or part.device.type != "cpu":
                part = copy_to(part, self._buffer()[: part.numel() * dtype.itemsize].view(dtype))
            self._put(item.stored.file, offset + start * dtype.itemsize, part)

    def _write_together(self, items: list[Range], total: int) -> None:
        if len(items) == 1:
            return self._write_direct(items[0])
        scratch = self._buffer()
        at = 0
        for item in items:
            # Slices of the scratch need not be aligned for their type: bytes are copied.
            source = fetch(item.values).to(item.dtype)
            scratch[at : at + item.length].copy_(source.contiguous().view(torch.uint8))
            at += item.length
        return self._put(items[0].stored.file, items[0].offset, scratch[:total])

    def _buffer(self) -> Tensor:
        if self._scratch is None:
            self._scratch = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)
        return self._scratch

    def _put(self, path: Path, offset: int, values: Tensor) -> None:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_WRONLY)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be written: {error}") from error
        data = bytes_of(values.contiguous())
        digest = digest_of(data)
        write_fully(self._files[path], data, offset, path)
        start_writeback(self._files[path], offset, len(data))
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
