"""`check_checkpoint`: what holds for every checkpoint, whichever ranks, stage and tiers wrote it.

It runs on every rank of any number of ranks at once: rank 0 damages files, all ranks must notice.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_zero as zero

MANIFEST = "zero_manifest.json"


@dataclass(frozen=True)
class Expected:
    """What a checkpoint was made of.

    Attributes:
        weights: parameters and persistent buffers by name; of tied ones the first name alone.
        state: optimizer state by parameter, then by name.
        options: of each group.
        limit_bytes: the largest file that was asked for.
    """

    weights: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Any]]
    options: list[dict[str, Any]]
    limit_bytes: int


class Job(Protocol):
    """A training run that the checkpoint is loaded into; all methods are collectives."""

    rank: int

    def load(self, folder: Path) -> None: ...

    def save(self, folder: Path) -> None:
        """With the same file limit as the checkpoint was."""

    def found(self) -> Expected | None:
        """What is in the run now; on rank 0."""

    def barrier(self) -> None: ...


def check_checkpoint(folder: Path, expected: Expected, job: Job, damages: int | None = None) -> None:
    """Raise AssertionError where the checkpoint, or its reader, breaks a promise.

    Args:
        damages: how many, chosen at random; None: every kind of damage to every file.
    """
    if job.rank == 0:
        plain_files(folder, expected)
    job.barrier()
    job.load(folder)
    same_run(job.found(), expected, "after a load")
    again = folder.with_name(folder.name + "-again")
    job.save(again)
    job.barrier()
    if job.rank == 0:
        same_bytes(folder, again)
        shutil.rmtree(again)
    job.barrier()
    damage_is_named(folder, job, damages)
    job.load(folder)
    same_run(job.found(), expected, "after loads of damaged folders")


def plain_files(folder: Path, expected: Expected) -> None:
    """Safetensors alone reads every value; the index, the limit and the reference writer's bytes are kept."""
    manifest = zero.verify(folder)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {*manifest.files, MANIFEST}
    assert {name: (folder / name).stat().st_size for name in manifest.files} == {
        name: file.size for name, file in manifest.files.items()
    }
    one = folder / "model.safetensors"
    if one.exists():
        reference = folder.with_name(folder.name + "-reference")
        save_file(dict(expected.weights), reference, {"format": "pt"})
        assert one.read_bytes() == reference.read_bytes(), "not the bytes that safetensors writes"
        reference.unlink()
        found = load_file(one)
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        parts = {name: load_file(folder / name) for name in sorted({*index["weight_map"].values()})}
        found = {key: parts[name][key] for key, name in index["weight_map"].items()}
        assert sum(map(len, parts.values())) == len(found)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.weights.values())
        for name, tensors in parts.items():
            size = sum(value.nbytes for value in tensors.values())
            assert size <= expected.limit_bytes or len(tensors) == 1, f"{name} has {size} bytes"
    same(found, expected.weights, "weights")
    states: dict[str, dict[str, Tensor]] = {}
    for name, entries in expected.state.items():
        for key, value in entries.items():
            if key != "step" and isinstance(value, Tensor):
                states.setdefault(key, {})[name] = value
    for key, values in states.items():
        stored: dict[str, Tensor] = {}
        for path in folder.glob(f"optimizer*/{key}[.-]*safetensors"):
            stored.update(load_file(path))
        same(stored, values, key)


def same_bytes(folder: Path, again: Path) -> None:
    """Weights and optimizer state have the same bytes, whoever wrote them. (`zero_state.*` holds each rank's own.)"""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    for name in names:
        if not name.name.startswith("zero_"):
            assert (folder / name).read_bytes() == (again / name).read_bytes(), f"{name} of a save after a load"
    assert {path.relative_to(again) for path in again.rglob("*") if path.is_file()} == {*names}


def same_run(found: Expected | None, expected: Expected, when: str) -> None:
    if found is not None:
        same(found.weights, expected.weights, f"weights {when}")
        same(found.state, expected.state, f"optimizer state {when}")
        assert found.options == expected.options, f"options of the optimizer's groups {when}"


def same(ours: Any, theirs: Any, where: str) -> None:
    """Equal to the bit, types, order of sequences and nesting too."""
    if isinstance(theirs, Mapping):
        assert set(ours) == set(theirs), where
        for key in theirs:
            same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert ours.equal(theirs), where
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs), where
        assert len(ours) == len(theirs), where
        for number, pair in enumerate(zip(ours, theirs)):
            same(*pair, f"{where}.{number}")
    else:
        assert type(ours) is type(theirs), where
        assert ours == theirs, where


# Damage ---------------------------------------------------------------------------------------------------------------

Change = Callable[[bytes, random.Random], bytes | None]
"""What a file's content becomes; None: the file is deleted."""


def flipped(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :]


def shifted(raw: bytes, chance: random.Random) -> bytes:
    """A byte range off by one."""
    at = chance.randrange(len(raw) - 1)
    return raw[:at] + raw[at + 1 :] + b"\0"


CHANGES: dict[str, Change] = {
    "deleted": lambda raw, _: None,
    "a byte short": lambda raw, _: raw[:-1],
    "a byte long": lambda raw, _: raw + b"\0",
    "empty": lambda raw, _: b"",
    "half": lambda raw, _: raw[: len(raw) // 2],
    "a bit": flipped,
    "another bit": flipped,
    "first byte": lambda raw, _: bytes([raw[0] ^ 1]) + raw[1:],
    "last byte": lambda raw, _: raw[:-1] + bytes([raw[-1] ^ 128]),
    "shifted": shifted,
    "halves swapped": lambda raw, _: raw[len(raw) // 2 :] + raw[: len(raw) // 2],
    "doubled": lambda raw, _: raw + raw,
}


def damage_is_named(folder: Path, job: Job, damages: int | None) -> None:
    """Every damage is a CheckpointError that names the file, on every rank, from `zero.verify` as from a load."""
    chance = random.Random(folder.name)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    rows: list[tuple[str, str]] = [(name, kind) for name in names for kind in CHANGES]
    sizes = {name: (folder / name).stat().st_size for name in names}
    contents = {name: (folder / name).read_bytes() for name in names}
    # Of files of one size, in each other's place, nothing but the content tells.
    rows += [(one, other) for one in names for other in names if one < other and sizes[one] == sizes[other]]
    rows += [(names[0], names[-1])]
    rows = [row for row in rows if row[1] in CHANGES or contents[row[0]] != contents[row[1]]]
    if damages is not None:
        rows = chance.sample(rows, min(damages, len(rows)))
    for name, kind in rows:
        touched = [name, kind] if kind in names else [name]
        job.barrier()  # all have read it
        if job.rank == 0:
            if kind in names:
                (folder / name).write_bytes(contents[kind])
                (folder / kind).write_bytes(contents[name])
            elif (changed := CHANGES[kind](contents[name], chance)) is None:
                (folder / name).unlink()
            elif changed == contents[name]:
                (folder / name).write_bytes(contents[name] + b" ")
            else:
                (folder / name).write_bytes(changed)
        job.barrier()
        for act in (job.load, zero.verify):
            with pytest.raises(zero.CheckpointError) as refused:
                act(folder)
            assert any(Path(each).name in str(refused.value) for each in touched), (name, kind, str(refused.value))
            assert str(folder) in str(refused.value)
        job.barrier()
        if job.rank == 0:
            for each in touched:
                (folder / each).write_bytes(contents[each])
    job.barrier()
