"""Weights at rest: which elements of which parameter every tensor of a safetensors file is made of, and back.

A flat slice of a row-major tensor is a contiguous byte range of its file, so integers are all there is to know: each
rank writes and reads its own ranges, whatever their number. A `WeightFormat` knows the names: the generic one here those
of `state_dict()`, the one for transformers models (integrations) those of `save_pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from ..config import parse_bytes
from ..errors import CheckpointError
from .safetensors import itemsize


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one parameter, row-major."""

    param: str  # the parameter's first name in the layout
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `runs` one after another, or a value (a buffer, a converted tensor) that rank 0 holds."""

    key: str
    dtype: str  # a torch dtype's bare name
    shape: tuple[int, ...]
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file, its tensors in any order: the header's order follows from their types and names."""

    name: str  # relative to the folder
    entries: tuple[Entry, ...]
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors that are computed from whole other tensors, not placed: `convert` maps the sources' values to them."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a save writes."""

    files: tuple[WeightFile, ...]
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """key -> CPU value of every entry without runs that no conversion makes: buffers."""
    conversions: tuple[Conversion, ...] = ()
    """From parameters (sources: first names in the layout) to keys, in the order to be done; one at a time is held."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor found in a folder: its file, type, shape and absolute byte range."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """`numel` elements from element `key_start` of a stored tensor are those from `param_start` of a parameter."""

    key: str
    key_start: int
    param_start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Located:
    """Where a load finds the parameters of a model; the same on every rank."""

    pieces: Mapping[str, Sequence[Piece]]
    """parameter (first name in the layout) -> its pieces by `param_start`, without gaps."""
    buffers: Mapping[str, str] = field(default_factory=dict)
    """buffer name -> key."""
    conversions: tuple[Conversion, ...] = ()
    """From keys to parameters; one at a time is held."""
    missing: tuple[str, ...] = ()
    """parameters and persistent buffers that the folder does not have."""
    unexpected: tuple[str, ...] = ()
    """keys that belong to nothing in the model."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """(key, stored shape, model's shape)."""


class WeightFormat(Protocol):
    """What one model's weights are called at rest."""

    @property
    def stems(self) -> Mapping[str, str]:
        """Where a load looks: the stems of the files -> by what a load prefixes the keys found there, to tell them apart."""
        ...

    def draw(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Drawing:
        """On rank 0 alone, without communication: what to write. May write small files (config, index) into `folder`.

        Args:
            state: as `model.state_dict()`, parameters as meta tensors of their own type and full shape (tied ones the
                same object), buffers as CPU values.
        """
        ...

    def locate(self, stored: Mapping[str, Stored]) -> Located:
        """Without communication, the same answer on every rank: where the tensors of a folder belong."""
        ...


FORMATS: list[Callable[[nn.Module], WeightFormat | None]] = []
"""Who may know a format for a model, asked in order before the generic one; filled by integrations when imported."""


def format_of(model: nn.Module) -> WeightFormat:
    """What `model`'s weights are called at rest: by the first that knows it, else the names of `state_dict()`."""
    for maker in FORMATS:
        found = maker(model)
        if found is not None:
            return found
    return StateDictFormat(model)


class StateDictFormat:
    """The names of `state_dict()`, in `model.safetensors`; tied parameters under their first name only."""

    def __init__(self, model: nn.Module, stem: str = "model") -> None:
        self._stem = stem
        self.stems = {stem: ""}
        self._names = names_of(model)
        self._shapes = {key: tuple(param.shape) for key, param in model.named_parameters(remove_duplicate=False)}
        buffers = persistent_buffers(model)
        self._buffers = {key: tuple(buffer.shape) for key, buffer in buffers.items()}
        first: dict[int, str] = {}
        self._first_of = {key: first.setdefault(id(buffer), key) for key, buffer in buffers.items()}

    def draw(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Drawing:
        entries, values, done = [], {}, set()
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"state_dict() has a {type(value).__name__} under {key!r}: only tensors can be saved"
                )
            first = self._names.get(key)
            if first in done:
                continue
            runs: tuple[Run, ...] = ()
            if first is None:
                values[key] = value
            else:
                done.add(first)
                runs = (Run(first, 0, value.numel()),)
            entries.append(Entry(key, str(value.dtype).removeprefix("torch."), tuple(value.shape), runs))
        files = split_files(self._stem, entries, max_shard_size)
        if len(files) > 1:
            (folder / f"{self._stem}.safetensors.index.json").write_text(index_of(files))
        return Drawing(tuple(files), values)

    def locate(self, stored: Mapping[str, Stored]) -> Located:
        pieces: dict[str, tuple[Piece, ...]] = {}
        buffers: dict[str, str] = {}
        mismatched, unexpected = [], []
        for key, found in stored.items():
            shape = self._shapes.get(key, self._buffers.get(key))
            if shape is None:
                unexpected.append(key)
            elif shape != found.shape:
                mismatched.append((key, found.shape, shape))
            elif key in self._buffers:
                buffers[key] = key
            else:
                numel = 1
                for extent in shape:
                    numel *= extent
                pieces[self._names[key]] = (Piece(key, 0, 0, numel),)
        wrong = {self._names.get(key, self._first_of.get(key, key)) for key, _, _ in mismatched}
        # What has several names is there if one of them is.
        wanted = dict.fromkeys([*self._names.values(), *self._first_of.values()])
        there = {*pieces, *wrong, *(self._first_of[name] for name in buffers)}
        missing = tuple(name for name in wanted if name not in there)
        return Located(pieces, buffers, missing=missing, unexpected=tuple(unexpected), mismatched=tuple(mismatched))


def names_of(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the parameter's first name."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(param, name) for name, param in model.named_parameters(remove_duplicate=False)}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `state_dict()` has, under all names that it has for them."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def split_files(stem: str, entries: Iterable[Entry], max_shard_size: int | str) -> list[WeightFile]:
    """`stem.safetensors`, or `stem-00001-of-0000N.safetensors`, …: filled in order, each at most `max_shard_size` bytes
    (one larger tensor has a file of its own)."""
    limit = parse_bytes(max_shard_size)
    parts: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        numel = 1
        for extent in entry.shape:
            numel *= extent
        size = numel * itemsize(entry.dtype)
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(entry)
        filled += size
    if len(parts) == 1:
        return [WeightFile(f"{stem}.safetensors", tuple(parts[0]))]
    return [
        WeightFile(f"{stem}-{index:05d}-of-{len(parts):05d}.safetensors", tuple(part))
        for index, part in enumerate(parts, 1)
    ]


def index_of(files: Iterable[WeightFile]) -> str:
    """The text of `….safetensors.index.json`."""
    total = numel = 0
    where: dict[str, str] = {}
    for file in files:
        for entry in file.entries:
            where[entry.key] = file.name
            count = 1
            for extent in entry.shape:
                count *= extent
            numel += count
            total += count * itemsize(entry.dtype)
    body = {"metadata": {"total_parameters": numel, "total_size": total}, "weight_map": where}
    return json.dumps(body, indent=2, sort_keys=True) + "\n"
