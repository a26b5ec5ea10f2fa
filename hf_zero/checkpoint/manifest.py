"""`zero_manifest.json`: every file of a checkpoint, its size and digests. A folder without it is not a checkpoint.

    {"format": "hf_zero", "version": 1, "world_size": 2, "stage": 3, …,
     "files": {"model.safetensors": {"size": 1234, "segments": [[0, 96, "91ab…"], [96, 1138, "c03f…"]]}, …},
     "digest": "…"}

Segments are contiguous and cover the file. Each is one write of one rank, at most `SEGMENT_BYTES`.
Digests are XXH3 (64 bits, https://xxhash.com). `digest` covers the manifest's other content, as compact
JSON with sorted keys.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from ..errors import CheckpointError
from .files import MAX_JSON_BYTES, inside, named_os_errors, open_regular, parse_json, read_bounded
from .safetensors import read_fully

MANIFEST = "zero_manifest.json"
SEGMENT_BYTES = 8 << 20
_FORMAT, _VERSION = "hf_zero", 1

Segment = tuple[int, int, str]
"""(first byte, bytes, digest)."""


def digest_of(data: Any) -> str:
    """Return the XXH3-64 of a bytes-like object, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's size, and segments that cover it."""

    size: int
    segments: tuple[Segment, ...]

    @staticmethod
    def of(size: int, segments: Iterable[Segment], name: str) -> FileDigest:
        """Build from segments in any order.

        Raises:
            CheckpointError: they overlap, or leave bytes out.
        """
        ordered = tuple(sorted(segments))
        at = 0
        for start, length, _ in ordered:
            # Readers find segments by bisection: they would neither read nor check a gap.
            if start != at or length <= 0:
                raise CheckpointError(f"{name}: bytes {at} to {start} of {size} are covered by no segment, or by two")
            at = start + length
        if at != size:
            raise CheckpointError(f"{name}: bytes {at} to {size} are covered by no segment")
        return FileDigest(size, ordered)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        files: name relative to the folder, with forward slashes -> size and digests.
        facts: world size, stage and the like, for people and for a Trainer that resumes. Loads do not need them.
    """

    files: dict[str, FileDigest]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the manifest's file."""
        body = {
            **self.facts,
            "format": _FORMAT,
            "version": _VERSION,
            "files": {n: {"size": f.size, "segments": [list(s) for s in f.segments]} for n, f in self.files.items()},
        }
        body["digest"] = digest_of(_canonical(body))
        return _canonical(body)

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> Manifest:
        """Read the manifest of `folder` and check its own digest. Opens no other file.

        Raises:
            CheckpointError: it is missing or altered, or of a version that this code does not know.
        """
        path = inside(folder, MANIFEST)
        try:
            text = read_bounded(path, MAX_JSON_BYTES)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: {folder} is no complete checkpoint (an unfinished save leaves no manifest)"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        try:
            body = parse_json(text)
            # Every byte must be as written, also those without meaning (a space, the case of an escape).
            altered = _canonical(body) != text
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: it is not valid JSON ({error})") from None
        return _parse(path, body, altered)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _parse(path: Path, body: Any, altered: bool) -> Manifest:
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a manifest of hf_zero")
    check_version(path, body, _VERSION)
    digest = body.pop("digest", None)  # not part of the content that it covers
    if altered or digest != digest_of(_canonical(body)):
        raise CheckpointError(f"{path} is damaged: its digest does not match its content")
    files = body.pop("files", None)
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is damaged: it lists no files")
    out = {}
    for name, entry in files.items():
        check_name(path, name)
        try:
            segments = [(_size(a), _size(b), str(c)) for a, b, c in entry["segments"]]
            out[name] = FileDigest.of(_size(entry["size"]), segments, f"{path}: {name}")
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: its entry {name!r} is malformed ({error})") from None
        if any(length > SEGMENT_BYTES for _, length, _ in segments):
            raise CheckpointError(f"{path} is damaged: {name!r} has a segment of more than {SEGMENT_BYTES} bytes")
    return Manifest(out, {k: v for k, v in body.items() if k not in ("format", "version")})


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a size")
    return value


def check_version(path: Path, body: Any, known: int) -> None:
    """Refuse a JSON object of a later version. New fields do not change the version: readers ignore unknown ones.

    Raises:
        CheckpointError: with the file, the version found and the known one.
    """
    found = body.get("version") if isinstance(body, dict) else None
    if type(found) is not int or found < 1:
        raise CheckpointError(f"{path} is damaged: expected version {known}, found {found!r}")
    if found > known:
        raise CheckpointError(f"{path}: expected version {known}, found {found}: update hf_zero")


def check_name(path: Path, name: str) -> None:
    """Refuse a file name that leads out of the folder, or that no file can have.

    Raises:
        CheckpointError: with the list `path` that holds the name, and the name.
    """
    pure = PurePosixPath(name)
    odd = "\\" in name or "\0" in name or any("\ud800" <= char <= "\udfff" for char in name)
    if pure.is_absolute() or ".." in pure.parts or odd or str(pure) != name or name == ".":
        raise CheckpointError(f"{path}: the file name {name!r} leads out of the folder or is malformed")


def digest_file(path: Path) -> FileDigest:
    """Compute the digests of a file as it is on disk now."""
    size = path.stat().st_size
    parts = [(start, min(SEGMENT_BYTES, size - start)) for start in range(0, size, SEGMENT_BYTES)]
    return FileDigest(size, tuple((*part, digest_of(data)) for data, part in zip(_read(path, parts), parts)))


def _read(path: Path, parts: Iterable[tuple[Any, ...]]) -> Iterator[memoryview]:
    """Yield the bytes of parts (first byte, bytes, …) of a file, all in one buffer.

    Raises:
        CheckpointError: the file cannot be read, or is too short.
    """
    buffer = memoryview(mmap.mmap(-1, SEGMENT_BYTES))
    with named_os_errors(path, "read"):
        fd = open_regular(path)
    try:
        for start, length, *_ in parts:
            read_fully(fd, buffer[:length], start, path)
            yield buffer[:length]
    finally:
        os.close(fd)


def check_sizes(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of `folder`, and check that every file exists with its size. Reads no other content.

    Raises:
        CheckpointError: a file is missing, has another size or lies elsewhere, or there is no manifest.
    """
    manifest = Manifest.read(folder)
    for name, file in manifest.files.items():
        path = inside(folder, name)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the manifest lists it with {file.size} bytes") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if size != file.size:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {file.size}: it was cut or replaced")
    return manifest


def check_segment(path: Path, segment: Segment, data: Any) -> None:
    """Raise a CheckpointError if `data`, read from `segment` of `path`, has another digest."""
    start, length, expected = segment
    if digest_of(data) != expected:
        raise CheckpointError(
            f"{path} is damaged: bytes {start} to {start + length} are not those that were saved (digest mismatch). Take "
            "an older checkpoint, or restore the file from a copy"
        )


def check_segments(path: Path, segments: Sequence[Segment], done: Callable[[int], None] = lambda _: None) -> None:
    """Read segments of a file and compare their digests. Uses one buffer.

    Args:
        path: the file.
        segments: from the manifest.
        done: called with the bytes of each segment after its check.

    Raises:
        CheckpointError: with the file and the bytes.
    """
    for data, segment in zip(_read(path, segments), segments):
        check_segment(path, segment, data)
        done(segment[1])


def share(manifest: Manifest, part: int, parts: int) -> dict[str, list[Segment]]:
    """Return the segments that one of `parts` workers checks, by file. All parts together are all segments."""
    out: dict[str, list[Segment]] = {}
    stride = max(1, -(-sum(len(f.segments) for f in manifest.files.values()) // (parts * 16)))
    index = 0
    for name, file in manifest.files.items():
        for segment in file.segments:
            if index // stride % parts == part:
                out.setdefault(name, []).append(segment)
            index += 1
    return out
