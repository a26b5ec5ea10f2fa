"""Byte ranges of one rank into files that another has made, with the digest of every stretch that is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..tiers.array import OnDisk, Values, fetch
from ..tiers.disk import bytes_of as memory_of
from .manifest import SEGMENT_BYTES, Segment, digest_of
from .safetensors import start_writeback, write_fully

_DIRECT_BYTES = 1 << 20  # from here on a piece is written from where it lies; smaller ones are put together first


@dataclass(slots=True)
class Job:
    """Bytes of this rank: `values` (1-D, wherever they rest), as `dtype`, at byte `offset` of a staged file."""

    file: str
    offset: int
    values: Values
    dtype: torch.dtype

    @property
    def length(self) -> int:
        return self.values.numel() * self.dtype.itemsize


class Writer:
    """Writes one rank's jobs and notes the digest of every stretch of bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._segments: dict[str, list[Segment]] = {}
        self._scratch: Tensor | None = None

    def write(self, jobs: Iterable[Job]) -> None:
        """In file order; neighbours that are small go out together."""
        waiting: list[Job] = []
        waiting_bytes = 0
        for job in sorted(jobs, key=lambda job: (job.file, job.offset)):
            if not job.length:
                continue
            joins = waiting and (waiting[-1].file, waiting[-1].offset + waiting[-1].length) == (job.file, job.offset)
            if waiting and not (joins and waiting_bytes + job.length <= SEGMENT_BYTES and job.length < _DIRECT_BYTES):
                self._write_together(waiting, waiting_bytes)
                waiting, waiting_bytes = [], 0
            if job.length >= _DIRECT_BYTES:
                self._write_direct(job)
            else:
                waiting.append(job)
                waiting_bytes += job.length
        if waiting:
            self._write_together(waiting, waiting_bytes)

    def finish(self) -> dict[str, list[Segment]]:
        """Everything written is on disk afterwards. Returns the digests by file."""
        try:
            for name, fd in self._files.items():
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise CheckpointError(f"{self._folder / name}: fsync failed: {error}") from error
        finally:
            self.close()
        return self._segments

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _write_direct(self, job: Job) -> None:
        step = SEGMENT_BYTES // job.dtype.itemsize
        for start in range(0, job.values.numel(), step):
            part = job.values[start : start + step]
            if isinstance(part, OnDisk) or part.dtype != job.dtype or part.device.type != "cpu":
                part = copy_to(part, self._buffer()[: part.numel() * job.dtype.itemsize].view(job.dtype))
            self._put(job.file, job.offset + start * job.dtype.itemsize, part)

    def _write_together(self, jobs: list[Job], total: int) -> None:
        if len(jobs) == 1:
            return self._write_direct(jobs[0])
        scratch = self._buffer()
        at = 0
        for job in jobs:
            # Slices of the scratch need not be aligned for their type: bytes are copied.
            source = fetch(job.values).to(job.dtype)
            scratch[at : at + job.length].copy_(source.contiguous().view(torch.uint8))
            at += job.length
        return self._put(jobs[0].file, jobs[0].offset, scratch[:total])

    def _buffer(self) -> Tensor:
        if self._scratch is None:
            self._scratch = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)
        return self._scratch

    def _put(self, file: str, offset: int, values: Tensor) -> None:
        path = self._folder / file
        if file not in self._files:
            try:
                self._files[file] = os.open(path, os.O_WRONLY)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be written: {error}") from error
        data = bytes_of(values.contiguous())
        digest = digest_of(data)
        write_fully(self._files[file], data, offset, path)
        start_writeback(self._files[file], offset, len(data))
        self._segments.setdefault(file, []).append((offset, len(data), digest))


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


__all__ = ["Job", "Writer", "bytes_of", "copy_to"]
