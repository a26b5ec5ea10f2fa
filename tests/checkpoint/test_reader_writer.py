"""Byte ranges between files and values at rest in memory or on disk: the same files, the same values, either way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_zero as zero
from hf_zero.checkpoint.folder import verify
from hf_zero.checkpoint.manifest import SEGMENT_BYTES, Manifest
from hf_zero.checkpoint.ranges import Held, Range, Reader
from hf_zero.checkpoint.save import Saving
from hf_zero.checkpoint.weights import Drawing, Entry, WeightFile, find_weights
from hf_zero.comm.wire import SoloWire
from hf_zero.core.layout import Extent, ParamSpec
from hf_zero.tiers.array import DiskArray, FileSource, OnDisk, Values
from hf_zero.tiers.disk import Disk
from hf_zero.tiers.tier import Meter

SIZES = {"large": 2 * SEGMENT_BYTES // 4 + 4321, "small": 37, "other": 1001, "empty": 0, "last": 5}
"""Elements of each parameter; in float32 the first takes more than two segments."""
NUMEL = sum(SIZES.values())
CUT = 4097
"""Where the pieces of a parameter part: within a page."""


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[OnDisk, OnDisk]]:
    """Two arrays beside each other."""
    disk = Disk(str(tmp_path / "tier"), 0, Meter())
    yield OnDisk(DiskArray(disk, NUMEL, torch.float32)), OnDisk(DiskArray(disk, NUMEL, torch.float32))
    disk.close()


@pytest.fixture
def values() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


def pieces(values: Values) -> dict[str, list[Extent[Values]]]:
    """Parameters lie end to end in `values`; each is held in two pieces."""
    out: dict[str, list[Extent[Values]]] = {}
    start = 0
    for name, numel in SIZES.items():
        cut = min(CUT, numel // 2)
        bounds = (0, cut), (cut, numel)
        out[name] = [Extent(values[start + low : start + high], 0, low, high - low) for low, high in bounds]
        start += numel
    return out


@dataclass
class AsParameters:
    """What a save asks of a run, where nothing needs to be converted."""

    pieces: dict[str, list[Extent[Values]]]

    def spec(self, name: str) -> ParamSpec:
        raise KeyError(name)

    def written(self, rank: int, size: int) -> list[Held]:
        return self.held()

    def held(self) -> list[Held]:
        return [(name, piece) for name, pieces in self.pieces.items() for piece in pieces]

    def shares(self, name: str) -> list[Any]:
        return []


def save(folder: Path, held: dict[str, list[Extent[Values]]], dtype: str) -> Saving:
    """A save of `held` that is ready to commit."""
    entries = tuple(Entry(name, dtype, (numel,), (Extent(name, 0, 0, numel),)) for name, numel in SIZES.items())
    saving = Saving(SoloWire(), folder)
    saving.weights(AsParameters(held), lambda: Drawing((WeightFile("model.safetensors", entries),)))
    return saving


def split(values: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return dict(zip(SIZES, values.to(dtype).split(list(SIZES.values()))))


def assert_saved(folder: Path, expected: dict[str, Tensor]) -> None:
    verify(folder)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("behind", [False, True])
def test_values_on_disk_are_saved_like_those_in_memory(tmp_path, on_disk, values, dtype, behind):
    at_rest = on_disk[1].copy_(values)
    saving = save(tmp_path / "out", pieces(at_rest), dtype)
    if behind:
        saving.freeze(SoloWire())
        at_rest.zero_()  # training goes on
    saving.commit()
    assert_saved(tmp_path / "out", split(values, getattr(torch, dtype)))
    save(tmp_path / "same", pieces(values), dtype).commit()
    one, two = (tmp_path / name / "model.safetensors" for name in ("out", "same"))
    assert one.read_bytes() == two.read_bytes()


def test_a_file_may_hold_values_from_memory_and_from_disk(tmp_path, on_disk, values):
    at_rest, held = pieces(on_disk[0].copy_(values)), pieces(values)
    mixed = {name: [at_rest[name][0], held[name][1]] for name in SIZES}
    save(tmp_path / "out", mixed, "float32").commit()
    assert_saved(tmp_path / "out", split(values, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("verified", [False, True])
def test_values_are_loaded_to_disk_like_into_memory(tmp_path, on_disk, values, dtype, verified):
    save(tmp_path / "out", pieces(values), str(dtype).removeprefix("torch.")).commit()
    manifest = Manifest.read(tmp_path / "out") if verified else None
    stored = find_weights(tmp_path / "out", "model", manifest).tensors
    at_rest = on_disk[1].zero_()
    on_disk[0].zero_()
    wanted = [Range(stored[name], item.start, item.source) for name in SIZES for item in pieces(at_rest)[name]]
    reader = Reader(tmp_path / "out", manifest)
    reader.read(wanted)
    assert torch.equal(at_rest.read(), values.to(dtype).float())
    assert not on_disk[0].read().any()
    assert reader.bytes_read >= NUMEL * dtype.itemsize


def test_damage_is_found_before_it_comes_to_rest(tmp_path, on_disk, values):
    save(tmp_path / "out", pieces(values), "float32").commit()
    manifest = Manifest.read(tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    stored = find_weights(tmp_path / "out", "model", manifest).tensors
    place = on_disk[1].zero_()[: SIZES["last"]]
    with pytest.raises(zero.CheckpointError, match=r"model\.safetensors is damaged"):
        Reader(tmp_path / "out", manifest).read([Range(stored["last"], 0, place)])
    assert not place.read().any()


@pytest.mark.parametrize("behind", [False, True])
def test_values_that_cannot_be_read_end_the_save(tmp_path, values, behind):
    save_file({"values": values}, tmp_path / "base.safetensors")
    offset = (tmp_path / "base.safetensors").stat().st_size - 4 * NUMEL
    at_rest = OnDisk(FileSource(tmp_path / "base.safetensors", offset, torch.float32, NUMEL, Meter()))
    save(tmp_path / "out", pieces(at_rest), "float32").commit()
    assert_saved(tmp_path / "out", split(values, torch.float32))
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with open(tmp_path / "base.safetensors", "r+b") as file:
        file.truncate(offset + 4 * NUMEL // 2)
    saving = save(tmp_path / "out", pieces(at_rest), "float32")
    with pytest.raises(zero.CheckpointError, match=r"on rank 0: TierError: .*base\.safetensors"), saving:
        saving.freeze(SoloWire()) if behind else saving.commit()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    verify(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.safetensors", "out"]
    assert not list((tmp_path / "out").glob(".*"))
