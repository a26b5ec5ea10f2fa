"""Weights of a model folder written anew, in another type or split into other files, a few MiB at a time.

No model is built and no tensor is ever whole in memory. A file that would come out as it is gets copied as bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError
from .safetensors import Header, TensorRange, build_header, itemsize, read_fully, read_header, write_fully

CHUNK_BYTES = 4 << 20  # what is read and what it becomes, together; temporaries take about as much again
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_NOT_OURS = re.compile(r"\..*|checkpoint-\d+").fullmatch  # hidden, or a checkpoint of its own
_DIGITS = re.compile(r"(\d+)")

Split = Callable[[dict[str, int], int, str], dict[str, list[str]]]
"""(key -> bytes, most bytes per file, pattern of names with `{suffix}`) -> file name -> its keys."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Weights that are loaded together: one file, or several and the index that names them."""

    stem: str
    """Relative to the folder: `model`, `adapter_model`, `other/adapter_model`."""
    files: dict[str, Header]
    """Name relative to the folder -> header, in order."""
    index: str | None = None
    total_parameters: int | None = None
    """As the index says; it counts parameters, without buffers."""

    @property
    def names(self) -> list[str]:
        return [*self.files, *([self.index] if self.index else [])]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from, and the type it is to have."""

    file: str
    place: TensorRange
    dtype: str

    @property
    def out_bytes(self) -> int:
        return (self.place.stop - self.place.start) // itemsize(self.place.dtype) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Output:
    """One file to be written."""

    name: str
    sources: dict[str, Source]
    metadata: dict[str, str]
    copied: str | None = None
    """The file to copy byte for byte, where nothing changes."""

    @property
    def payload_bytes(self) -> int:
        return sum(source.out_bytes for source in self.sources.values())


# What is there ------------------------------------------------------------------------------------------------------


def find_weights(folder: Path) -> list[WeightSet]:
    """The weights of a model folder, headers checked, and that the index and the files hold the same.

    Raises:
        CheckpointError: none are there, a file is missing or damaged, or index and files disagree.
    """
    found: list[WeightSet] = []
    if (folder / "model.safetensors").is_file():  # which readers prefer to an index beside it
        found.append(WeightSet("model", {"model.safetensors": read_header(folder / "model.safetensors")}))
    elif (folder / "model.safetensors.index.json").is_file():
        found.append(_indexed(folder, "model"))
    for path in (
        folder,
        *(child for child in sorted(folder.iterdir()) if child.is_dir() and _NOT_OURS(child.name) is None),
    ):
        if (path / "adapter_config.json").is_file() and (path / "adapter_model.safetensors").is_file():
            stem = (path / "adapter_model").relative_to(folder).as_posix()
            name = f"{stem}.safetensors"
            found.append(WeightSet(stem, {name: read_header(folder / name)}))
    if not found:
        raise CheckpointError(
            f"{folder} has no weights: expected model.safetensors, model.safetensors.index.json or adapter_model.safetensors"
            + _hint(folder)
        )
    return found


def _hint(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*.bin") if "model" in path.name)
    if pickled:
        return f"; {pickled[0]} is a pickle: load it with transformers and save it again"
    inner = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    return f"; take one of its checkpoints: {', '.join(inner)}" if inner else ""


def _indexed(folder: Path, stem: str) -> WeightSet:
    name = f"{stem}.safetensors.index.json"
    index = read_json(folder / name)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{folder / name}: expected a weight_map from tensor to file")
    files: dict[str, Header] = {}
    for file in sorted(set(where.values())):
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{folder / name}: {file!r} is no safetensors file of this folder")
        files[file] = read_header(folder / file)
    held = [(key, file) for file, header in files.items() for key in header.tensors]
    for key, file in held:
        if where.get(key) != file:
            raise CheckpointError(f"{folder / file} holds {key!r}, which {name} places in {where.get(key)!r}")
    for key in sorted(set(where) - {key for key, _ in held})[:1]:
        raise CheckpointError(f"{folder / where[key]} lacks {key!r}, which {name} places there")
    metadata = index.get("metadata")
    total = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    return WeightSet(stem, files, name, total if type(total) is int else None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: missing or malformed, with the file's name.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


# What is to be ------------------------------------------------------------------------------------------------------


def plan(weights: WeightSet, dtype: str | None, limit: int, split: Split) -> list[Output]:
    """The files to write. Those that are there stay as they are where neither types nor `limit` ask for others.

    Raises:
        ConfigError: weights that are quantised, and so cannot be cast.
    """
    by_file = {
        file: {key: Source(file, place, _cast(file, key, place.dtype, dtype)) for key, place in header.tensors.items()}
        for file, header in weights.files.items()
    }
    metadata = {k: v for header in weights.files.values() for k, v in header.metadata.items()} or {"format": "pt"}
    names = [f"{weights.stem}.safetensors"]
    if len(by_file) > 1:
        names = [f"{weights.stem}-{i:05d}-of-{len(by_file):05d}.safetensors" for i in range(1, len(by_file) + 1)]
    kept = list(by_file) == names and _is_kept(list(by_file.values()), limit)
    if not kept and not weights.stem.endswith("adapter_model"):  # an adapter has no index: it is one file always
        return _split_anew(weights, by_file, metadata, limit, split)
    outputs = []
    for file, sources in by_file.items():
        same = all(source.dtype == source.place.dtype for source in sources.values())
        outputs.append(Output(file, sources, weights.files[file].metadata, file if same else None))
    return outputs


def _cast(file: str, key: str, dtype: str, wanted: str | None) -> str:
    if wanted is None or dtype == wanted:
        return dtype
    if dtype.startswith("float8"):
        raise ConfigError(f"{file}: {key!r} is quantised ({dtype}); casting it to {wanted} would drop its scales")
    return wanted if dtype in _FLOATS else dtype


def _is_kept(files: list[dict[str, Source]], limit: int) -> bool:
    """Whether filling files in order up to `limit` could have come out like this."""
    totals = [sum(source.out_bytes for source in file.values()) for file in files]
    largest = [max((source.out_bytes for source in file.values()), default=0) for file in files]
    fits = all(total <= limit or len(file) == 1 for total, file in zip(totals, files))
    return fits and all(total + after > limit for total, after in zip(totals, largest[1:]))


def _split_anew(
    weights: WeightSet, by_file: dict[str, dict[str, Source]], metadata: dict[str, str], limit: int, split: Split
) -> list[Output]:
    # Headers are sorted by type and name; the model's order is not known. Layer 2 before layer 10 is near to it.
    ordered = {key: s for sources in by_file.values() for key, s in sorted(sources.items(), key=_natural)}
    names = split(
        {key: source.out_bytes for key, source in ordered.items()}, limit, weights.stem + "{suffix}.safetensors"
    )
    return [Output(name, {key: ordered[key] for key in keys}, metadata) for name, keys in names.items()]


def _natural(item: tuple[str, Source]) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(item[0]))]


def index_text(weights: WeightSet, outputs: list[Output]) -> str:
    """The index of several files, as `save_pretrained` writes it."""
    sizes = [source for output in outputs for source in output.sources.values()]
    numel = sum((s.place.stop - s.place.start) // itemsize(s.place.dtype) for s in sizes)
    total = numel if weights.total_parameters is None else weights.total_parameters
    body = {
        "metadata": {"total_parameters": total, "total_size": sum(output.payload_bytes for output in outputs)},
        "weight_map": {key: output.name for output in outputs for key in output.sources},
    }
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


# Writing ------------------------------------------------------------------------------------------------------------


def write(folder: Path, output: Output, target: Path, done: Callable[[int], None]) -> None:
    """Write one file to `target`, `done(bytes)` as they come.

    Raises:
        CheckpointError: a file cannot be read or written (disk full).
        ConfigError: a value is too large for the type.
    """
    try:
        if output.copied is not None:
            shutil.copyfile(folder / output.copied, target)
            done(output.payload_bytes)
            return
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    opened: dict[str, int] = {}
    try:
        entries = [(key, source.dtype, source.place.shape) for key, source in output.sources.items()]
        text, header = build_header(entries, output.metadata)
        write_fully(fd, memoryview(text), 0, target)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for key, place in header.tensors.items():
            source = output.sources[key]
            if source.file not in opened:
                opened[source.file] = os.open(folder / source.file, os.O_RDONLY)
            at = place.start
            for data in _chunks(opened[source.file], folder / source.file, key, source, buffer):
                write_fully(fd, data, at, target)
                at += len(data)
                done(len(data))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        for descriptor in (fd, *opened.values()):
            os.close(descriptor)


def _chunks(fd: int, path: Path, key: str, source: Source, buffer: memoryview) -> Iterator[memoryview]:
    """A tensor's bytes in the type it is to have."""
    place = source.place
    size, out_size = itemsize(place.dtype), itemsize(source.dtype)
    stride = len(buffer) // (size + out_size) * size
    for start in range(place.start, place.stop, stride):
        part = buffer[: min(stride, place.stop - start)]
        read_fully(fd, part, start, path)
        if place.dtype == source.dtype:
            yield part
            continue
        values = torch.frombuffer(part, dtype=getattr(torch, place.dtype))
        cast = values.to(getattr(torch, source.dtype))
        low, high = cast.aminmax()  # not finite where any is not; isinf is slow
        if not (low.isfinite() and high.isfinite()) and not torch.equal(cast.isinf(), values.isinf()):
            largest = values[values.isfinite()].abs().max().item()
            raise ConfigError(
                f"{path}: {key!r} has values up to {largest:.4g}, which {source.dtype} cannot hold: take bfloat16 or float32"
            )
        yield cast.view(torch.uint8).numpy().data
