"""Byte ranges of the files of a folder into memory, each compared with the manifest's digests as it comes in."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..core.precision import dtype_of
from ..errors import CheckpointError
from ..tiers.array import Values
from .manifest import SEGMENT_BYTES, FileDigest, Manifest, Segment, check_segment
from .safetensors import read_fully
from .weights import Stored
from .writer import bytes_of

_AHEAD_BYTES = 48 << 20
_LARGE_BYTES = 256 << 10


@dataclass(slots=True)
class Wanted:
    """Elements of a stored tensor, from `key_start`, that go to `place` (1-D, any type, wherever it rests)."""

    stored: Stored
    key_start: int
    place: Values

    @property
    def offset(self) -> int:
        return self.stored.start + self.key_start * dtype_of(self.stored.dtype).itemsize

    @property
    def length(self) -> int:
        """Bytes in the file."""
        return self.place.numel() * dtype_of(self.stored.dtype).itemsize


class Reader:
    """Byte ranges of a folder's files, checked against its manifest where there is one. One buffer of memory or two."""

    def __init__(self, folder: Path, manifest: Manifest | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._fds: dict[Path, int] = {}
        self._cached: tuple[Path, Segment] | None = None
        self._segment: Tensor | None = None
        self._scratch: Tensor | None = None
        self.bytes_read = 0

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill every place, in file order; the disk is kept busy with what comes next while this rank checks and copies."""
        items = sorted(wanted, key=lambda item: (item.stored.file, item.offset))
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
        self._fill_elements(Wanted(stored, 0, value.view(-1)))
        return value

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fill_elements(self, item: Wanted) -> None:
        dtype, place = dtype_of(item.stored.dtype), item.place
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
                self._fds[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._fds[path]

    def _digest_of(self, path: Path) -> FileDigest:
        name = path.relative_to(self._folder).as_posix()
        file = self._manifest.files.get(name) if self._manifest is not None else None
        if file is None:
            raise CheckpointError(f"{path} is not in the manifest: it is of another save")
        return file


__all__ = ["Reader", "Wanted"]
