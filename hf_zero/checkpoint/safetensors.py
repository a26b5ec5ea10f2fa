"""The bytes of safetensors files: headers read with suspicion and written as the reference writer does, ranges moved whole.

Format: https://github.com/huggingface/safetensors#format. A little-endian u64 header length, a JSON object
`{"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}`, then the tensors' bytes, row-major.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the reference reader's own limit
_ALIGN_BYTES = 8

_NAMES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "U16": ("uint16", 2),
    "U32": ("uint32", 4), "U64": ("uint64", 8), "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1), "C64": ("complex64", 8),
}  # fmt: skip
_CODES = {name: code for code, (name, _) in _NAMES.items()}
# The reference writer puts wide types first, by its own order of types, then names.
_ORDER = [
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32",
    "U32", "F32", "C64", "F64", "I64", "U64",
]  # fmt: skip
_RANK = {code: place for place, code in enumerate(_ORDER)}


def itemsize(dtype: str) -> int:
    """Bytes per element of a torch dtype given by its bare name.

    Raises:
        CheckpointError: a type that safetensors does not have.
    """
    code = _CODES.get(dtype)
    if code is None:
        raise CheckpointError(f"safetensors has no type for torch.{dtype}; cast the tensor before saving")
    return _NAMES[code][1]


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One tensor of a file: torch dtype name, shape, absolute byte range."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds. `tensors` in payload order."""

    tensors: dict[str, TensorRange]
    metadata: dict[str, str] = field(default_factory=dict)
    header_bytes: int = 0  # where the payload begins
    file_bytes: int = 0


def build_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """The first bytes of a file with the tensors `(key, dtype, shape)`, and where each of them goes.

    Bytes equal those of `safetensors.torch.save_file`, given the same tensors and metadata.
    """
    listed = [(key, _code(key, dtype), tuple(shape)) for key, dtype, shape in entries]
    listed.sort(key=lambda item: (-_RANK[item[1]], item[0].encode()))
    table: dict[str, Any] = {}
    if metadata:
        table["__metadata__"] = dict(metadata)
    offset = 0
    places: list[tuple[str, str, tuple[int, ...], int, int]] = []
    for key, code, shape in listed:
        name, size = _NAMES[code]
        stop = offset + size * _numel(shape)
        if key in table:
            raise CheckpointError(f"two tensors are called {key!r} in one file")
        table[key] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, stop]}
        places.append((key, name, shape, offset, stop))
        offset = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    base = 8 + len(text)
    tensors = {key: TensorRange(name, shape, base + a, base + b) for key, name, shape, a, b in places}
    return struct.pack("<Q", len(text)) + text, Header(tensors, dict(metadata or {}), base, base + offset)


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a file that may be hostile: sizes are checked against the file before anything is read or made.

    Raises:
        CheckpointError: naming the file and what is wrong: missing, too short, no header, ranges that overlap, leave gaps
            or end beyond the file, a shape that does not fit its range, an unknown type.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes < 8:
                raise CheckpointError(f"{path} has {file_bytes} bytes, too few for a safetensors file: it is cut short")
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes, the file has {file_bytes} (limit {MAX_HEADER_BYTES}): it is "
                    "cut short or no safetensors file"
                )
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if len(text) != length:
        raise CheckpointError(f"{path}: {len(text)} of {length} header bytes could be read")
    return _parse(path, text, file_bytes)


def _parse(path: Path, text: bytes, file_bytes: int) -> Header:
    try:
        table = json.loads(text.decode(), object_pairs_hook=_no_duplicates)  # of bytes it would take UTF-16 too
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not valid JSON ({error})") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: its header is a JSON {type(table).__name__}, expected an object")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    base = 8 + len(text)
    found: list[tuple[str, TensorRange]] = []
    for key, entry in table.items():
        found.append((key, _range(path, key, entry, base, file_bytes)))
    found.sort(key=lambda item: (item[1].start, item[1].stop))
    at = base
    for key, place in found:
        if place.start != at:
            what = "overlaps the tensor before it" if place.start < at else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {key!r} at byte {place.start} {what} (expected {at})")
        at = place.stop
    if at != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, its header describes {at}: it is cut short or has a tail"
        )
    return Header(dict(found), metadata, base, file_bytes)


def _range(path: Path, key: str, entry: Any, base: int, file_bytes: int) -> TensorRange:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: the header's entry {key!r} is a {type(entry).__name__}, expected an object")
    known = _NAMES.get(str(entry.get("dtype")))
    if known is None:
        raise CheckpointError(f"{path}: tensor {key!r} has the unknown type {entry.get('dtype')!r}")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: tensor {key!r} has shape {shape!r} and data_offsets {offsets!r}, expected integers"
        )
    begin, end = offsets
    name, size = known
    numel = 0 if 0 in shape else 1
    for extent in shape:
        numel *= extent
        if numel > file_bytes:  # also ends a product of many large extents
            break
    if end - begin != numel * size:
        raise CheckpointError(
            f"{path}: tensor {key!r} of shape {shape[:8]} and type {name} does not fit its {end - begin} bytes"
        )
    if base + end > file_bytes:
        raise CheckpointError(
            f"{path} is cut short: tensor {key!r} ends at byte {base + end}, the file has {file_bytes}"
        )
    return TensorRange(name, tuple(shape), base + begin, base + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for extent in shape:
        numel *= extent
    return numel


def _code(key: str, dtype: str) -> str:
    code = _CODES.get(dtype)
    if code is None:
        raise CheckpointError(f"{key!r}: safetensors has no type for torch.{dtype}; cast the tensor before saving")
    return code


# Bytes --------------------------------------------------------------------------------------------------------------


def read_fully(fd: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` from byte `offset`, going on after short reads.

    Raises:
        CheckpointError: the file ends before, or the read fails.
    """
    done = 0
    while done < len(out):
        try:
            count = os.preadv(fd, [out[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: reading {len(out)} bytes at {offset} failed: {error}") from error
        if count == 0:
            raise CheckpointError(f"{path} is cut short: {len(out)} bytes expected at {offset}, {done} are there")
        done += count


_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the disk begin on bytes that were written, so that an fsync later finds little to do; where Linux has it."""
    call = getattr(_LIBC, "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def write_fully(fd: int, data: memoryview, offset: int, path: Path) -> None:
    """Write `data` at byte `offset`, going on after short writes.

    Raises:
        CheckpointError: the write fails (disk full, device error).
    """
    done = 0
    while done < len(data):
        try:
            count = os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: writing {len(data)} bytes at {offset} failed: {error}") from error
        if count == 0:
            raise CheckpointError(f"{path}: writing {len(data)} bytes at {offset} made no progress: is the disk full?")
        done += count
