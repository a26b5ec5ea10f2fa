"""Read and write safetensors files by byte range; headers equal those of the reference writer.

The reference reader checks headers and refuses hostile ones; this module only takes the offsets.

Format: https://github.com/huggingface/safetensors#format. A little-endian u64 header length, a JSON object
`{"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}`, then the tensors' bytes, row-major.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..core.layout import itemsize
from ..errors import CheckpointError, RankMismatchError
from .files import open_regular, parse_json

_ALIGN_BYTES = 8
_SAMPLE_BYTES = 64

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32",
    "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
"""Types in files -> those of torch, in the reference writer's order: it writes the last type first."""
_CODES = {name: code for code, name in _NAMES.items()}
_RANK = {code: place for place, code in enumerate(_NAMES)}


def _code(dtype: str) -> str:
    code = _CODES.get(dtype)
    if code is None:
        raise CheckpointError(
            f"safetensors has no type for torch.{dtype}. Build the model in another type, or use torch.save(model.state_dict())"
        )
    return code


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: torch dtype name, shape, absolute byte range."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a file, in payload order.

    Attributes:
        header_bytes: where the payload begins.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str] = field(default_factory=dict)
    header_bytes: int = 0
    file_bytes: int = 0


def build_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    path: str | os.PathLike[str] = "",
) -> tuple[bytes, Header]:
    """Return the first bytes of a file, and where each tensor goes.

    Bytes equal those of `safetensors.torch.save_file`, given the same tensors and metadata.

    Args:
        entries: (key, dtype, shape) of each tensor.
        metadata: free text.
        path: the file, for the header's tensors.

    Raises:
        CheckpointError: a duplicate key, or a type that safetensors does not have.
    """
    listed = [(key, _code(dtype), dtype, tuple(shape)) for key, dtype, shape in entries]
    listed.sort(key=lambda item: (-_RANK[item[1]], item[0].encode()))
    table: dict[str, Any] = {}
    if metadata:
        table["__metadata__"] = dict(metadata)
    offset = 0
    for key, code, dtype, shape in listed:
        stop = offset + itemsize(dtype) * math.prod(shape)
        if key in table:
            raise CheckpointError(f"duplicate tensor {key!r} in one file")
        table[key] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return struct.pack("<Q", len(text)) + text, _header(Path(path), table, 8 + len(text), 8 + len(text) + offset)


def sample_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Return a digest of names, types, shapes and 64 bytes in the middle of each tensor, which identifies weights.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.blake2b(digest_size=16)
    files: dict[Path, int] = {}
    try:
        for name, stored in tensors.items():
            if stored.file not in files:
                files[stored.file] = open_regular(stored.file)
            found.update(f"{name} {stored.dtype} {stored.shape}".encode())
            start = max(stored.start, (stored.start + stored.stop - _SAMPLE_BYTES) // 2)
            found.update(os.pread(files[stored.file], min(_SAMPLE_BYTES, stored.stop - start), start))
    finally:
        for file in files.values():
            os.close(file)
    return found.hexdigest()


def check_same_files(digests: Sequence[str], what: str) -> None:
    """Compare digests of the files that ranks have, in rank order.

    Raises:
        RankMismatchError: they differ.
    """
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise RankMismatchError(
                f"{what}: the files of rank {rank} are not those of rank 0. Each rank reads its own part only: give every host "
                "the same files"
            )


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a file that may be hostile.

    Raises:
        CheckpointError: the file is missing or too short; ranges overlap, leave gaps or do not end with the file; a shape
            does not fit its range; a type is unknown.
    """
    path = Path(path)
    try:
        with open(open_regular(path), "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            # Must succeed before the table is used: no overlaps, no gaps, ranges that fit shapes and end
            # with the file. By descriptor: the path could name another file by now.
            with safe_open(f"/proc/self/fd/{file.fileno()}", framework="numpy"):
                pass
            (length,) = struct.unpack("<Q", file.read(8))
            table = parse_json(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes and is cut short, or not a safetensors file: {error}"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for key, entry in table.items():
        if key != "__metadata__" and entry["dtype"] not in _NAMES:
            raise CheckpointError(f"{path}: tensor {key!r} has the type {entry['dtype']!r}, which torch does not have")
    return _header(path, table, 8 + length, file_bytes)


def _header(path: Path, table: dict[str, Any], base: int, file_bytes: int) -> Header:
    """Build from a checked table, whose offsets count from byte `base`."""
    metadata = table.get("__metadata__") or {}
    tensors = {
        key: StoredTensor(path, _NAMES[entry["dtype"]], tuple(entry["shape"]), base + begin, base + end)
        for key, entry in table.items()
        if key != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    }
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    return Header(ordered, metadata, base, file_bytes)


def read_fully(fd: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` from byte `offset`; continue after short reads.

    Raises:
        CheckpointError: the file is too short, or the read fails.
    """
    done = _transfer("reading", lambda part, at: os.preadv(fd, [part], at), out, offset, path)
    if done < len(out):
        raise CheckpointError(f"{path} is cut short: expected {len(out)} bytes at {offset}, found {done}")


def write_fully(fd: int, data: memoryview, offset: int, path: Path) -> None:
    """Write `data` at byte `offset`; continue after short writes.

    Raises:
        CheckpointError: the write fails (disk full, device error).
    """
    if _transfer("writing", lambda part, at: os.pwrite(fd, part, at), data, offset, path) < len(data):
        raise CheckpointError(f"{path}: writing {len(data)} bytes at {offset} made no progress. Check for a full disk")


def _transfer(doing: str, call: Callable[[memoryview, int], int], data: memoryview, offset: int, path: Path) -> int:
    """Repeat `call` until all bytes are transferred or it transfers none. Returns the number of bytes."""
    done = 0
    while done < len(data):
        try:
            count = call(data[done:], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: {doing} {len(data)} bytes at {offset} failed: {error}") from error
        if count == 0:
            break
        done += count
    return done


_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Start writing dirty pages to disk (Linux only), so that a later fsync finds little to do."""
    call = getattr(_LIBC, "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)
