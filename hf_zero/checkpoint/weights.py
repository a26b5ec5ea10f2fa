"""Map the tensors of a model to the keys and files that store them.

A slice of a row-major tensor is a contiguous byte range of its file, so each rank reads and writes its
own ranges, for any number of ranks. A `WeightFormat` knows the names: the generic one uses those of
`state_dict()`, the one for transformers models (`huggingface`) those of `save_pretrained`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from torch import Tensor, nn

from ..config import parse_bytes
from ..core.layout import Extent, itemsize
from ..core.lazy_import import LazyFunction
from ..core.precision import dtype_name
from ..errors import CheckpointError
from .files import inside, read_json
from .manifest import Manifest, check_name, check_segments
from .safetensors import Header, StoredTensor, read_header

EXTRA_STATE = "_extra_state"
"""Last part of the key of a module's extra state."""
_HUB_FORMAT = LazyFunction("transformers.modeling_utils", "huggingface.weights", "hub_format")


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """Tensors that `convert` computes from the complete values of the sources."""

    sources: tuple[str, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: elements of parameters, or `value`.

    Attributes:
        key: its name in the file.
        dtype: a torch dtype's name, such as `float32`.
        shape: in the file.
        runs: elements of parameters, by their first names, in order. `start` counts in the tensor.
        value: a buffer's CPU value, or the conversion that computes `key`; rank 0 writes it.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[Extent[str], ...] = ()
    value: Tensor | Conversion | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the size in the file."""
        return self.numel * itemsize(self.dtype)


Files = Mapping[str, Sequence[Entry]]
"""Names of safetensors files, relative to the folder -> their tensors. Headers order them by dtype and name."""


@dataclass(frozen=True, slots=True)
class WeightLocations:
    """The places where a load finds the parameters of a model; the same on every rank.

    Attributes:
        pieces: parameter (first name) -> pieces of stored tensors by key, in order, without gaps. `start`
            counts in the parameter.
        buffers: name of a buffer, or of a module's extra state -> key.
        conversions: from keys to parameters; a load holds one at a time in memory.
        missing: parameters and persistent buffers that the folder lacks.
        unexpected: keys without a counterpart in the model.
        mismatched: (key, stored shape, model's shape).
    """

    pieces: Mapping[str, Sequence[Extent[str]]]
    buffers: Mapping[str, str] = field(default_factory=dict)
    conversions: tuple[Conversion, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()


class WeightFormat(Protocol):
    """The names of a model's stored weights."""

    @property
    def stems(self) -> Mapping[str, str]:
        """Return the stems of the files that a load reads -> the prefix of their keys, which keeps them apart."""
        ...

    def write_metadata(self, state: dict[str, Tensor], folder: Path) -> None:
        """Write all files but the weights (config, model card). Runs on rank 0, without communication.

        Args:
            state: see `plan_files`.
            folder: for the files.
        """
        ...

    def plan_files(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Files:
        """Return the files to write, and write their index. Runs on rank 0, without communication.

        Args:
            state: as `model.state_dict()`, with parameters as meta tensors of their dtype and full shape (tied ones the
                same object) and buffers as CPU values.
            folder: for the index.
            max_shard_size: most bytes per file.
        """
        ...

    def locate(self, stored: Mapping[str, StoredTensor]) -> WeightLocations:
        """Return where the tensors of a folder belong; the same on every rank, without communication."""
        ...


def format_of(model: nn.Module) -> WeightFormat:
    """Return the format of a model's weights: that of its `save_pretrained`, else that of `state_dict()`."""
    hub_format = _HUB_FORMAT.if_loaded()
    found: WeightFormat | None = None if hub_format is None else hub_format(model)
    return found or StateDictFormat(model)


class StateDictFormat:
    """Names of `state_dict()`, in `model.safetensors`; tied parameters under their first name only."""

    def __init__(self, model: nn.Module) -> None:
        self.stems = {"model": ""}
        self._model = model

    def write_metadata(self, state: dict[str, Tensor], folder: Path) -> None:
        """Write nothing; see `WeightFormat`."""

    def plan_files(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Files:
        """Return the files to write; see `WeightFormat`."""
        entries, done = [], set()
        names = names_of(self._model)
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"state_dict() has a {type(value).__name__} under {key!r}, and only tensors can be saved. Return a tensor "
                    "from get_extra_state()"
                )
            first = names.get(key)
            if first in done:
                continue
            dtype, shape = dtype_name(value.dtype), tuple(value.shape)
            if first is None:
                entries.append(Entry(key, dtype, shape, value=value))
            else:
                done.add(first)
                entries.append(Entry(key, dtype, shape, (Extent(first, 0, 0, value.numel()),)))
        return write_index(self._model, entries, max_shard_size, folder)

    def locate(self, stored: Mapping[str, StoredTensor]) -> WeightLocations:
        """Return where stored tensors belong; see `WeightFormat`."""
        names = (*names_of(self._model), *persistent_buffers(self._model), *extra_states(self._model))
        return locate_by_name(self._model, dict(zip(names, names)), stored)


def locate_by_name(
    model: nn.Module, known: Mapping[str, str], stored: Mapping[str, StoredTensor], optional: Collection[str] = ()
) -> WeightLocations:
    """Locate tensors that are stored exactly as parameters and buffers.

    Args:
        model: the model.
        known: key -> any name of the parameter or buffer.
        stored: key -> the tensor in a file.
        optional: keys that may be missing.
    """
    names, buffers, extras = names_of(model), persistent_buffers(model), extra_states(model)
    first: dict[int, str] = {}
    first_of = {**names, **{name: first.setdefault(id(buffer), name) for name, buffer in buffers.items()}}
    first_of |= {name: name for name in extras}
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    pieces: dict[str, tuple[Extent[str], ...]] = {}
    found_buffers: dict[str, str] = {}
    mismatched, unexpected = [], []
    for key, found in stored.items():
        name = known.get(key)
        if name is None:
            unexpected.append(key)
        elif name in extras:
            found_buffers[name] = key
        elif shapes[name] != found.shape:
            mismatched.append((key, found.shape, shapes[name]))
        elif name in buffers:
            found_buffers[name] = key
        else:
            pieces[names[name]] = (Extent(key, 0, 0, math.prod(found.shape)),)
    # A tied parameter is found if one of its names is.
    wanted = dict.fromkeys(first_of[name] for key, name in known.items() if key not in optional)
    present = {first_of[name] for key, name in known.items() if key in stored}
    missing = tuple(name for name in wanted if name not in present)
    return WeightLocations(
        pieces, found_buffers, missing=missing, unexpected=tuple(unexpected), mismatched=tuple(mismatched)
    )


def names_of(model: nn.Module) -> dict[str, str]:
    """Return every name of every parameter -> the parameter's first name."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(param, name) for name, param in model.named_parameters(remove_duplicate=False)}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of `state_dict()`, under all their names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with `get_extra_state`, by the key of that state in `state_dict()`."""
    return {
        f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE: module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def split_files(
    stem: str, entries: Iterable[Entry], max_shard_size: int | str, storages: Mapping[str, Any] | None = None
) -> Files:
    """Split tensors over files of at most `max_shard_size` bytes by the rule of `save_pretrained`.

    Args:
        stem: beginning of the file names.
        entries: in the order in which files are filled.
        max_shard_size: a larger tensor has a file of its own.
        storages: key -> the tensor's storage; tensors that share one are in one file.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_key: dict[str, Any] = {entry.key: entry for entry in entries}
    split = split_state_dict_into_shards_factory(
        by_key,
        get_storage_size=lambda entry: storages[entry.key].nbytes() if storages else entry.size_bytes,
        get_storage_id=(lambda entry: storages[entry.key]._cdata) if storages else (lambda entry: None),
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=parse_bytes(max_shard_size),
    )
    names = split.filename_to_tensors or {f"{stem}.safetensors": []}
    return {name: [by_key[key] for key in keys] for name, keys in names.items()}


def write_index(
    model: nn.Module,
    entries: Sequence[Entry],
    max_shard_size: int | str,
    folder: Path,
    storages: Mapping[str, Any] | None = None,
) -> Files:
    """Split a model's tensors over files, see `split_files`; write the index of several files to `folder`."""
    files = split_files("model", entries, max_shard_size, storages)
    if len(files) > 1:
        total_size = sum(entry.size_bytes for entry in entries)
        body = {
            "metadata": {"total_parameters": sum(p.numel() for p in model.parameters()), "total_size": total_size},
            "weight_map": {entry.key: name for name, tensors in files.items() for entry in tensors},
        }
        (folder / "model.safetensors.index.json").write_text(index_text(body))
    return files


def index_text(body: Mapping[str, Any]) -> str:
    """Return the text of `….safetensors.index.json`, as `save_pretrained` writes it."""
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Weights that are loaded together: one file, or several and their index.

    Attributes:
        files: name relative to the folder -> header.
        index: name of the index; None for one file.
        where: key -> file, relative to the folder, from the index. Files may hold more tensors.
    """

    files: dict[str, Header]
    index: str | None = None
    where: dict[str, str] | None = None

    @property
    def names(self) -> list[str]:
        """Return the names of all files."""
        return [*self.files, *([self.index] if self.index else [])]

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors by key."""
        found = {key: stored for header in self.files.values() for key, stored in header.tensors.items()}
        return found if self.where is None else {key: self.files[name].tensors[key] for key, name in self.where.items()}


def find_weights(folder: Path, stem: str, manifest: Manifest | None = None, *, verify: bool = True) -> WeightSet:
    """Return the weights in `stem.safetensors`, or in the files of `stem.safetensors.index.json`.

    Args:
        folder: the checkpoint or model folder.
        stem: may begin with a folder inside `folder`.
        manifest: of the checkpoint.
        verify: compare the headers with their digests, if there is a manifest.

    Raises:
        CheckpointError: there are none; a file of the index is missing or lacks a tensor; a header is damaged.
    """
    index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
    listed = manifest.files if manifest is not None else None
    # Like transformers, prefer the single file: an index next to it belongs to an older, larger save.
    if (folder / single).exists() and (listed is None or single in listed or index not in listed):
        return WeightSet({single: checked_header(folder, single, manifest if verify else None)})
    if not (folder / index).exists() or (listed is not None and index not in listed):
        raise CheckpointError(f"{folder} holds no weights: expected {single} or {index}")
    table = read_json(inside(folder, index))
    where = table.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{folder / index}: expected an object 'weight_map' of file names")
    below = PurePosixPath(stem).parent
    files: dict[str, Header] = {}
    for name in sorted(set(where.values())):
        check_name(folder / index, name)
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / index}: {name!r} is not a safetensors file")
        path = (below / name).as_posix()
        files[path] = checked_header(folder, path, manifest if verify else None)
    where = {key: (below / name).as_posix() for key, name in where.items()}
    for key, path in where.items():
        if key not in files[path].tensors:
            raise CheckpointError(f"{folder / path} lacks the tensor {key!r}, which {index} places in it")
    return WeightSet(files, index, where)


def checked_header(folder: Path, name: str, manifest: Manifest | None) -> Header:
    """Read a header and compare it with its digests: a damaged one may name other tensors.

    Raises:
        CheckpointError: it is damaged or outside the folder, or the manifest does not list the file.
    """
    header = read_header(inside(folder, name))
    if manifest is not None:
        if name not in manifest.files:
            raise CheckpointError(f"{folder / name} is not in the manifest: it belongs to another save")
        segments = manifest.files[name].segments
        check_segments(folder / name, [segment for segment in segments if segment[0] < header.header_bytes])
    return header
