"""The manifest: every damage to any file of a checkpoint, the manifest itself included, is an error that names the file."""

from __future__ import annotations

import json
import random
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hf_zero import CheckpointError, verify
from hf_zero.checkpoint.manifest import MANIFEST, FileDigest, Manifest, digest_of

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
    seen: list[int] = []
    lock = threading.Lock()

    def progress(count: int) -> None:
        with lock:
            seen.append(count)

    assert verify(tmp_path, threads=3, progress=progress) == manifest == Manifest.read(tmp_path)
    assert sum(seen) == manifest.total_bytes == sum(FILES.values())
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


def sign(body: dict[str, Any]) -> bytes:
    """A manifest whose own digest is right, whatever it says."""
    body = {"format": "hf_zero", "version": 1, **body}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "digest": digest_of(text)}, sort_keys=True, separators=(",", ":")).encode()


def entry(size: Any, *segments: Any) -> dict[str, Any]:
    return {"files": {"a": {"size": size, "segments": list(segments)}}}


HOSTILE: dict[str, bytes] = {
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


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests_end_in_an_error_that_names_the_file(case, tmp_path):
    (tmp_path / MANIFEST).write_bytes(HOSTILE[case])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=MANIFEST):
        Manifest.read(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 * len(HOSTILE[case]) + (1 << 20)


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(CheckpointError, match=name):
            verify(tmp_path / name)
