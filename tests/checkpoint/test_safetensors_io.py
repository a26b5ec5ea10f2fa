"""Headers of safetensors files: ours equal the reference writer's to the byte, and hostile ones end in a CheckpointError."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_zero import CheckpointError
from hf_zero.checkpoint.safetensors import (
    MAX_HEADER_BYTES,
    build_header,
    read_header,
)
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


def write(path: Path, header: Any, payload: int, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(payload))
    return path


def one(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


HOSTILE: dict[str, tuple[Any, int, int | None]] = {
    "claims more than the file": (one(), 8, 1 << 20),
    "claims 2^63": (one(), 8, 1 << 63),
    "claims the most there is": (one(), 8, (1 << 64) - 1),
    "claims over the limit": (one(), 8, MAX_HEADER_BYTES + 1),
    "claims nothing": (one(), 8, 0),
    "not an object": ([one()], 8, None),
    "no JSON": (b"{" * 64, 8, None),
    "not UTF-8": (b'{"\xff\xfe":1}', 8, None),
    "UTF-16": (json.dumps(one()).encode("utf-16"), 8, None),
    "nested deeply": (b'{"w":' * 100_000 + b"1" + b"}" * 100_000, 0, None),
    "a list nested deeply": (b'{"w":' + b"[" * 500_000 + b"]" * 500_000 + b"}", 0, None),
    "an integer of a million digits": (b'{"w":' + b"9" * 1_000_000 + b"}", 0, None),
    "a name twice": (b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2, None),  # noqa: E501
    "a field twice": (b'{"w":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', 1, None),
    "unknown type": (one(dtype="F33"), 8, None),
    "type is no text": (one(dtype=["F32"]), 8, None),
    "an entry that is no object": ({"w": 1}, 8, None),
    "an entry that is null": ({"w": None}, 8, None),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, None),
    "negative extent": (one(shape=[-2]), 8, None),
    "negative extents whose product fits": (one(shape=[-1, -2]), 8, None),
    "fractional extent": (one(shape=[2.0]), 8, None),
    "boolean extent": (one(shape=[True, 2]), 8, None),
    "product overflows": (one(shape=[1 << 62, 4]), 8, None),
    "many extents": (one(shape=[1 << 40] * 100_000), 8, None),
    "extent beyond 64 bits": (one(shape=[1 << 70]), 8, None),
    "does not fit its range": (one(shape=[3]), 8, None),
    "three offsets": (one(data_offsets=[0, 8, 8]), 8, None),
    "offsets backwards": (one(data_offsets=[8, 0]), 8, None),
    "negative offsets": (one(data_offsets=[-8, 0]), 8, None),
    "offsets beyond the file": (one(data_offsets=[1 << 40, (1 << 40) + 8]), 8, None),
    "infinite offset": (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}', 8, None),
    "a gap first": (one(data_offsets=[4, 12]), 12, None),
    "a tail": (one(), 9, None),
    "cut short": (one(), 7, None),
    "an overlap": ({**one(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, 12, None),
    "a gap": ({**one(), "v": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, 16, None),
    "metadata is no object": ({"__metadata__": ["x"], **one()}, 8, None),
    "metadata values are no text": ({"__metadata__": {"a": 1}, **one()}, 8, None),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_end_in_an_error_that_names_the_file(case, tmp_path):
    path = write(tmp_path / "hostile.safetensors", *HOSTILE[case])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"hostile\.safetensors"):
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * path.stat().st_size + (1 << 20)


def test_files_that_are_none(tmp_path):
    for name, content in (("empty", b""), ("short", b"1234567")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name} has {len(content)} bytes"):
            read_header(tmp_path / name)
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match=path.name):
            read_header(path)


def test_empty_tensors_of_any_shape_are_read(tmp_path):
    save_file({"none": torch.zeros(100_000, 0), "one": torch.ones(1)}, tmp_path / "a.safetensors")
    assert read_header(tmp_path / "a.safetensors").tensors["none"].shape == (100_000, 0)


@QUICK
@given(table=TABLES.filter(bool), data=st.data())
def test_any_damage_to_a_header_is_an_error_or_describes_the_file_exactly(table, data, tmp_path):
    path = tmp_path / "x.safetensors"
    head, header = build_header([(name, *spec) for name, spec in table.items()])
    raw = bytearray(head + bytes(header.file_bytes - len(head)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.sampled_from([len(raw), len(raw) - 1, len(head)])) :]
    path.write_bytes(raw)
    try:
        found = read_header(path)
    except CheckpointError:
        return
    at = found.header_bytes
    for place in found.tensors.values():
        numel = 1
        for extent in place.shape:
            numel *= extent
        assert (place.start, place.stop - place.start) == (at, numel * itemsize(place.dtype))
        at = place.stop
    assert at == found.file_bytes == len(raw)
