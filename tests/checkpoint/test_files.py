"""Files of a checkpoint as bytes: headers equal the reference writer's; a damaged or hostile file is named in the error."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_zero import CheckpointError, verify
from hf_zero.checkpoint.files import MAX_JSON_BYTES, open_regular, read_json
from hf_zero.checkpoint.manifest import MANIFEST, FileDigest, Manifest, digest_of
from hf_zero.checkpoint.safetensors import build_header, read_header
from hf_zero.core.layout import itemsize

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64",
    "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64",
]  # fmt: skip
# Of what the reference writer escapes, and what it does not.
NAMES = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda n: n != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TABLES = st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=8)
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    numel = 1
    for extent in shape:
        numel *= extent
    raw = torch.zeros(numel * itemsize(dtype), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).view(shape)


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Fail if the block allocates more in Python."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes


# Whole files ----------------------------------------------------------------------------------------------------------


@QUICK
@given(table=TABLES, metadata=st.sampled_from([None, {"format": "pt"}]))
def test_headers_equal_the_reference_writers(table, metadata, tmp_path):
    path = tmp_path / "reference.safetensors"
    save_file({name: tensor(*spec) for name, spec in table.items()}, path, metadata)
    head, header = build_header([(name, dtype, shape) for name, (dtype, shape) in table.items()], metadata, path)
    written = path.read_bytes()
    assert head == written[: len(head)]
    assert header.file_bytes == len(written)
    assert header.header_bytes == len(head)
    found = read_header(path)
    assert found == header
    assert {name: (place.dtype, place.shape) for name, place in found.tensors.items()} == table


def test_types_that_files_do_not_have_are_refused():
    for dtype in ("complex128", "quint8"):
        with pytest.raises(CheckpointError, match="no type for torch"):
            build_header([("w", dtype, (2,))])
    with pytest.raises(CheckpointError, match="duplicate tensor 'w'"):
        build_header([("w", "float32", (2,)), ("w", "float32", (3,))])


def test_empty_tensors_of_any_shape_are_read(tmp_path):
    save_file({"none": torch.zeros(100_000, 0), "one": torch.ones(1)}, tmp_path / "a.safetensors")
    assert read_header(tmp_path / "a.safetensors").tensors["none"].shape == (100_000, 0)


FILES = {
    "model.safetensors": 3000,
    "optimizer/exp_avg.safetensors": 1000,
    "optimizer/optimizer.json": 17,
    "empty": 0,
    "nämen.txt": 1,
}


def make(folder: Path, files: dict[str, int] = FILES) -> Manifest:
    found = {}
    for name, size in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(name).randbytes(size))
        parts = [(start, min(700, size - start)) for start in range(0, size, 700)]
        data = path.read_bytes()
        segments = [(start, length, digest_of(data[start : start + length])) for start, length in reversed(parts)]
        found[name] = FileDigest.of(size, segments, name)
    manifest = Manifest(found, {"world_size": 2, "stage": 3})
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest


def test_a_whole_folder_passes_and_says_how_much_was_checked(tmp_path):
    manifest = make(tmp_path)
    seen: list[tuple[str, int, int]] = []
    assert verify(tmp_path, progress=lambda *call: seen.append(call)) == manifest == Manifest.read(tmp_path)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("checking", manifest.total_bytes, sum(FILES.values()))
    assert manifest.facts == {"world_size": 2, "stage": 3}
    (tmp_path / "other").write_text("files that the manifest does not list are not its business")
    verify(tmp_path)


def test_every_byte_of_the_manifest_counts(tmp_path):
    make(tmp_path)
    path = tmp_path / MANIFEST
    raw = path.read_bytes()
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        with pytest.raises(CheckpointError, match=MANIFEST):
            Manifest.read(tmp_path)
    for other in (raw + b" ", b" " + raw, raw[:-1], raw.replace(b",", b", ", 1), raw + raw, b""):
        path.write_bytes(other)
        with pytest.raises(CheckpointError, match=MANIFEST):
            Manifest.read(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is missing"):
        verify(tmp_path)


# Hostile files --------------------------------------------------------------------------------------------------------


def header(table: Any, payload: int, length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(payload)


def one(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


HEADERS: dict[str, tuple[Any, ...]] = {
    "claims more than the file": (one(), 8, 1 << 20),
    "claims the most there is": (one(), 8, (1 << 64) - 1),
    "claims over the limit": (one(), 8, 100_000_001),  # of the reference reader
    "not an object": ([one()], 8, None),
    "nested deeply": (b'{"w":' * 100_000 + b"1" + b"}" * 100_000, 0, None),
    "an integer of a million digits": (b'{"w":' + b"9" * 1_000_000 + b"}", 0, None),
    "a name twice": (b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2, None),  # noqa: E501
    "unknown type": (one(dtype="F33"), 8, None),
    "product overflows": (one(shape=[1 << 62, 4]), 8, None),
    "does not fit its range": (one(shape=[3]), 8, None),
    "offsets beyond the file": (one(data_offsets=[1 << 40, (1 << 40) + 8]), 8, None),
    "a gap first": (one(data_offsets=[4, 12]), 12, None),
    "a tail": (one(), 9, None),
    "cut short": (one(), 7, None),
    "an overlap": ({**one(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, 12, None),
    "metadata values are no text": ({"__metadata__": {"a": 1}, **one()}, 8, None),
}  # fmt: skip
"""One of each kind: headers are checked by the reference reader."""


def sign(body: dict[str, Any]) -> bytes:
    """A manifest whose own digest is right, whatever it says."""
    body = {"format": "hf_zero", "version": 1, **body}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "digest": digest_of(text)}, sort_keys=True, separators=(",", ":")).encode()


def entry(size: Any, *segments: Any) -> dict[str, Any]:
    return {"files": {"a": {"size": size, "segments": list(segments)}}}


MANIFESTS: dict[str, bytes] = {
    **{
        f"the name {name!r}": sign({"files": {name: {"size": 0, "segments": []}}})
        for name in (
            "", ".", "..", "../a", "a/../../b", "/etc/passwd", "a//b", "./a", "a/", "a\\b", "a\0b", "\ud800", "a/./b",
            "~\udcff",
        )
    },
    "a gap": sign(entry(10, [0, 4, ""], [5, 5, ""])),
    "an overlap": sign(entry(10, [0, 6, ""], [5, 5, ""])),
    "too little": sign(entry(10, [0, 9, ""])),
    "too much": sign(entry(10, [0, 11, ""])),
    "nothing covered": sign(entry(10)),
    "an empty segment": sign(entry(4, [0, 0, ""], [0, 4, ""])),
    "negative": sign(entry(0, [0, -4, ""], [-4, 4, ""])),
    "negative size": sign(entry(-1)),
    "huge": sign(entry(1 << 200, [0, 1 << 200, ""])),
    "a segment that no buffer holds": sign(entry(1 << 40, [0, 1 << 40, ""])),
    "infinite": sign(entry(float("inf"))),
    "not a number": sign(entry(float("nan"))),
    "text for a size": sign(entry("0")),
    "a fraction for a size": sign(entry(0.5)),
    "a truth for a size": sign(entry(True, [0, 1, ""])),
    "segments of two": sign(entry(1, [0, 1])),
    "segments of nothing": sign(entry(1, None)),
    "segments that are no list": sign({"files": {"a": {"size": 1, "segments": 3}}}),
    "no segments": sign({"files": {"a": {"size": 1}}}),
    "an entry that is a list": sign({"files": {"a": [1]}}),
    "files that are a list": sign({"files": ["a"]}),
    "no files": sign({}),
    "another version": sign({"version": 2, "files": {}}),
    "another format": sign({"format": "other", "files": {}}),
    "a list": b"[]",
    "no JSON": b"zero",
    "not UTF-8": b'{"format":"\xff"}',
    "nested deeply": b"[" * 400_000 + b"]" * 400_000,
    "nested not quite so deeply": b'{"digest":"","files":' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "an integer of a million digits": b'{"version":' + b"9" * 1_000_000 + b"}",
    "a key twice": sign({"files": {}}).replace(b'"version":1', b'"version":1,"version":1'),
}  # fmt: skip


def read_manifest(path: Path) -> Manifest:
    return Manifest.read(path.parent)


JSON: dict[str, tuple[bytes, str]] = {
    "many values": (b"[" + b"[]," * 5_000_000 + b"[]]", "more than the"),
    "nested deeply": (b'{"a":' + b"[" * 200_000, "nested too deeply"),
    "a key twice": (b'{"a":1,"b":2,"a":3}', "duplicate key 'a'"),
    "a long number": (b'{"a":' + b"9" * 100_000 + b"}", "digits"),
    "a list": (b"[1]", "expected a JSON object, found a list"),
}
HOSTILE: dict[str, tuple[Callable[[Path], Any], str, bytes, str, int]] = {
    **{f"header: {case}": (read_header, "a.safetensors", header(*row), "", 40) for case, row in HEADERS.items()},
    **{f"manifest: {case}": (read_manifest, MANIFEST, text, "", 60) for case, text in MANIFESTS.items()},
    **{f"json: {case}": (read_json, "a.json", text, words, 2) for case, (text, words) in JSON.items()},
}
"""How it is read, name, content, words of the error, and how many times its size may be allocated."""


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_end_in_an_error_that_names_the_file(case, tmp_path):
    read, name, content, words, times = HOSTILE[case]
    (tmp_path / name).write_bytes(content)
    with at_most(times * len(content) + (1 << 20)), pytest.raises(CheckpointError, match=rf"{name}.*{words}"):
        read(tmp_path / name)


def test_files_that_only_claim_their_size(tmp_path):
    """Without a byte on the disk, as an archive may hold them."""
    for name in ("a.json", MANIFEST):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 40)
    with (
        at_most(1 << 20),
        pytest.raises(CheckpointError, match=f"a.json has {1 << 40} bytes, more than the {MAX_JSON_BYTES}"),
    ):
        read_json(tmp_path / "a.json")
    with at_most(1 << 20), pytest.raises(CheckpointError, match=f"{MANIFEST} has"):
        verify(tmp_path)


def test_files_that_are_none(tmp_path):
    for name, content in (("empty", b""), ("short", b"1234567")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name} has {len(content)} bytes"):
            read_header(tmp_path / name)
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match=path.name):
            read_header(path)


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(CheckpointError, match=name):
            verify(tmp_path / name)


def test_a_device_is_not_opened():
    for path in ("/dev/zero", "/dev/tty", "/proc/self"):
        if os.path.exists(path):
            with pytest.raises(CheckpointError, match="expected a plain file"):
                open_regular(path)
