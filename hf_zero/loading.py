"""Reading a checkpoint: every rank its own byte ranges, each compared with the manifest's digests as it comes in.

The folder may have been written at any world size and stage, or be a plain `from_pretrained` folder (weights only).
"""

from __future__ import annotations

import json
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .agree import together
from .comm import SoloWire
from .errors import CheckpointError
from .held import MASTER
from .manifest import (
    MANIFEST,
    SEGMENT_BYTES,
    FileDigest,
    Manifest,
    Segment,
    check_name,
    check_segment,
    check_segments,
    check_size,
    read_bounded,
    share,
)
from .precision import dtype_of
from .safetensors_io import read_fully, read_header
from .saving import OPTIMIZER_FOLDER, OPTIMIZER_INDEX, bytes_of
from .staging import recover
from .unit import Flat, Unit
from .weights import Located, Piece, Stored, WeightFormat, persistent_buffers

_MAX_JSON_BYTES = 256 << 20
_AHEAD_BYTES = 48 << 20
_LARGE_BYTES = 256 << 10


@dataclass(slots=True)
class Wanted:
    """Elements of a stored tensor, from `key_start`, that go to `place` (1-D, any type and device)."""

    stored: Stored
    key_start: int
    place: Tensor

    @property
    def offset(self) -> int:
        return self.stored.start + self.key_start * dtype_of(self.stored.dtype).itemsize

    @property
    def length(self) -> int:
        """Bytes in the file."""
        return self.place.numel() * dtype_of(self.stored.dtype).itemsize


class Loading:
    """A load under way, all of it collective. Nothing is executed, no pickle is read.

    Raises:
        CheckpointError: on every rank, naming the file: missing, cut short, altered, or of another model.
    """

    def __init__(self, wire: SoloWire, folder: str | os.PathLike[str], *, verify: bool = True) -> None:
        self._wire = wire
        self.folder = Path(folder)
        self._what = f"loading {self.folder}"
        together(wire, self._what, lambda: recover(self.folder) if wire.rank == 0 else None)
        self.manifest: Manifest | None = together(wire, self._what, self._open, answer=False)[0]
        self.verifies = verify
        self._reader = Reader(self.folder, self.manifest if verify else None)
        if verify:
            together(wire, self._what, self._check_small)

    @property
    def bytes_read(self) -> int:
        """By this rank, so far."""
        return self._reader.bytes_read

    def _open(self) -> Manifest | None:
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is no folder: expected a checkpoint")
        if not (self.folder / MANIFEST).exists():
            ours = (f"{OPTIMIZER_FOLDER}/{OPTIMIZER_INDEX}", "zero_state.json")
            if any((self.folder / name).exists() for name in ours):
                raise CheckpointError(
                    f"{self.folder / MANIFEST} is missing, but there is optimizer state or the like: this is a checkpoint "
                    "that is not whole. Take another one, or move the weights to a folder of their own"
                )
            return None
        manifest = Manifest.read(self.folder)
        for name, file in manifest.files.items():
            check_size(self.folder / name, file)
        return manifest

    def _check_small(self) -> None:
        """Files that are not read range by range, shared out over the ranks."""
        if self.manifest is None:
            return
        rest = {name: file for name, file in self.manifest.files.items() if not name.endswith(".safetensors")}
        for name, segments in share(Manifest(rest), self._wire.rank, self._wire.size).items():
            check_segments(self.folder / name, segments)

    def find(self, stem: str) -> dict[str, Stored]:
        """`find_weights` in this folder. Without communication."""
        return find_weights(self.folder, stem, self.manifest, verify=self.verifies)

    # Weights --------------------------------------------------------------------------------------------------------

    def weights(
        self, units: list[Unit], model: nn.Module, form: WeightFormat, *, strict: bool, folder: str = ""
    ) -> Located:
        """Parameters into the masters, buffers into the model. The caller refreshes what is made of the masters.

        Args:
            folder: inside the checkpoint, of a further model.
        """

        def plan() -> tuple[dict[str, Stored], Located]:
            stored = {
                prefix + key: place
                for stem, prefix in form.stems.items()
                for key, place in self.find(f"{folder}/{stem}" if folder else stem).items()
            }
            located = form.locate(stored)
            if strict:
                _refuse_gaps(self.folder, model, located)
            return stored, located

        stored, located = together(self._wire, self._what, plan, answer=False)[0]

        def read() -> None:
            self._reader.read(w for unit in units for flat in unit.flats for w in _wanted(flat, located, stored))
            buffers = persistent_buffers(model)
            for conversion in located.conversions:
                made = conversion.convert({key: self._reader.whole(stored[key]) for key in conversion.sources})
                _spread(units, made)
                for name in buffers.keys() & made.keys():
                    buffers[name].copy_(made[name])
            for name, key in located.buffers.items():
                buffers[name].copy_(self._reader.whole(stored[key]))
            self._reader.close()

        with torch.no_grad():
            together(self._wire, self._what, read)
        return located

    def read_whole(self, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
        """Small tensors, on CPU. Without communication."""
        try:
            return {key: self._reader.whole(place) for key, place in stored.items()}
        finally:
            self._reader.close()

    # Optimizer ------------------------------------------------------------------------------------------------------

    def has_optimizer(self, folder: str = OPTIMIZER_FOLDER) -> bool:
        """Whether the checkpoint holds optimizer state; the same on every rank."""
        return self.manifest is not None and f"{folder}/{OPTIMIZER_INDEX}" in self.manifest.files

    def optimizer(
        self,
        units: list[Unit],
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        *,
        folder: str = OPTIMIZER_FOLDER,
    ) -> None:
        """The optimizer's state and its groups' options."""
        fresh: list[tuple[Flat, dict[str, Any]]] = []

        def read() -> dict[str, Any]:
            if not self.has_optimizer(folder) or self.manifest is None:
                raise CheckpointError(
                    f"{self.folder} holds no optimizer state ({folder}/{OPTIMIZER_INDEX}): it was saved without, or is no "
                    "checkpoint of hf_zero. Load with load_optimizer=False to go on with a fresh optimizer"
                )
            path = self.folder / folder / OPTIMIZER_INDEX
            index = self._index(path)
            if [group["params"] for group in index["groups"]] != [group["params"] for group in groups]:
                raise CheckpointError(
                    f"{path}: the optimizer groups hold other parameters than this run's: it is of another model, or of one "
                    "with other parameters frozen"
                )
            prefix = f"{folder}/"
            states: dict[str, dict[str, Stored]] = {}
            for name in self.manifest.files:
                if name.startswith(prefix) and name.endswith(".safetensors"):
                    state = name.removeprefix(prefix).removesuffix(".safetensors").partition("-0")[0]
                    file = self.manifest.files[name] if self.verifies else None
                    states.setdefault(state, {}).update(_stored(self.folder / name, file))
            wanted: list[Wanted] = []
            for unit in units:
                for flat in unit.trained:
                    kept = {str(key): value for key, value in optimizer.state.get(flat.master, {}).items()}
                    entries, more = _state_of(flat, index["parameters"], states, path, kept)
                    fresh.append((flat, entries))
                    wanted += more
            self._reader.read(wanted)
            return index

        with torch.no_grad():
            index = together(self._wire, self._what, read, answer=False)[0]
            for flat, entries in fresh:
                entries.pop(MASTER, None)
                if entries:
                    optimizer.state[flat.master] = entries
                else:
                    optimizer.state.pop(flat.master, None)
        for group, packed in zip(optimizer.param_groups, index["groups"]):
            group.update({k: unscalar(v, group.get(k)) for k, v in packed.items() if k != "params"})

    def _index(self, path: Path) -> dict[str, Any]:
        index = read_json(path)
        if not isinstance(index, dict) or index.get("version") != 1 or not isinstance(index.get("parameters"), dict):
            raise CheckpointError(f"{path}: expected version 1 of an optimizer index: update hf_zero")
        return index


# Ranges -------------------------------------------------------------------------------------------------------------


class Reader:
    """Byte ranges of a folder's files, checked against its manifest where there is one. One buffer of memory or two."""

    def __init__(self, folder: Path, manifest: Manifest | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._fds: dict[Path, int] = {}
        self._cached: tuple[Path, Segment] | None = None
        self._segment: Tensor | None = None
        self._scratch: Tensor | None = None
        self.bytes_read = 0

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill every place, in file order; the disk is kept busy with what comes next while this rank checks and copies."""
        items = sorted(wanted, key=lambda item: (item.stored.file, item.offset))
        ahead = 0  # items that the kernel was told to fetch, and their bytes beyond the one at hand
        waiting_bytes = 0
        try:
            for index, item in enumerate(items):
                while ahead < len(items) and (waiting_bytes < _AHEAD_BYTES or ahead <= index):
                    waiting_bytes += items[ahead].length
                    if items[ahead].length >= _LARGE_BYTES:
                        os.posix_fadvise(
                            self._fd(items[ahead].stored.file),
                            items[ahead].offset,
                            items[ahead].length,
                            os.POSIX_FADV_WILLNEED,
                        )
                    ahead += 1
                self._fill_elements(item)
                waiting_bytes -= item.length
        finally:
            self.close()

    def whole(self, stored: Stored) -> Tensor:
        """One tensor, in its own type and shape, on CPU."""
        value = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
        self._fill_elements(Wanted(stored, 0, value.view(-1)))
        return value

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fill_elements(self, item: Wanted) -> None:
        dtype, place = dtype_of(item.stored.dtype), item.place
        if not place.numel():
            return
        if place.dtype == dtype and place.device.type == "cpu" and place.is_contiguous():
            self._fill(item.stored.file, item.offset, bytes_of(place))
            return
        if self._scratch is None:
            self._scratch = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)
        step = SEGMENT_BYTES // dtype.itemsize
        for start in range(0, place.numel(), step):
            part = place[start : start + step]
            landing = self._scratch[: part.numel() * dtype.itemsize]
            self._fill(item.stored.file, item.offset + start * dtype.itemsize, bytes_of(landing))
            part.copy_(landing.view(dtype))

    def _fill(self, path: Path, offset: int, out: memoryview) -> None:
        if self._manifest is None:
            self._pread(path, offset, out)
            return
        file = self._digest_of(path)
        stop = offset + len(out)
        index = bisect_right(file.segments, offset, key=lambda segment: segment[0]) - 1
        while index < len(file.segments) and file.segments[index][0] < stop:
            segment = file.segments[index]
            begin, end = max(offset, segment[0]), min(stop, segment[0] + segment[1])
            part = out[begin - offset : end - offset]
            if len(part) == segment[1]:
                self._pread(path, begin, part)
                check_segment(path, segment, part)
            else:
                part[:] = self._checked(path, segment)[begin - segment[0] : end - segment[0]]
            index += 1

    def _checked(self, path: Path, segment: Segment) -> memoryview:
        if self._segment is None:
            self._segment = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)
        data = bytes_of(self._segment)[: segment[1]]
        if self._cached != (path, segment):
            self._cached = None
            self._pread(path, segment[0], data)
            check_segment(path, segment, data)
            self._cached = (path, segment)
        return data

    def _pread(self, path: Path, offset: int, out: memoryview) -> None:
        read_fully(self._fd(path), out, offset, path)
        self.bytes_read += len(out)

    def _fd(self, path: Path) -> int:
        if path not in self._fds:
            try:
                self._fds[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._fds[path]

    def _digest_of(self, path: Path) -> FileDigest:
        name = path.relative_to(self._folder).as_posix()
        file = self._manifest.files.get(name) if self._manifest is not None else None
        if file is None:
            raise CheckpointError(f"{path} is not in the manifest: it is of another save")
        return file


def find_weights(folder: Path, stem: str, manifest: Manifest | None, *, verify: bool = True) -> dict[str, Stored]:
    """Key -> its bytes, for `stem.safetensors` or the files that `stem.safetensors.index.json` names.

    Args:
        stem: may begin with a folder inside `folder`.
        verify: compare the headers with their digests, where there is a manifest.

    Raises:
        CheckpointError: none there; a file that the index names is missing or lacks a tensor that it should have; a header
            is damaged.
    """
    index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
    listed = manifest.files if manifest is not None else None

    def stored(path: Path) -> dict[str, Stored]:
        name = path.relative_to(folder).as_posix()
        if listed is None or not verify:
            return _stored(path, None)
        if name not in listed:
            raise CheckpointError(f"{path} is not in the manifest: it is of another save")
        return _stored(path, listed[name])

    if (folder / index).exists() and (listed is None or (index in listed and single not in listed)):
        return _indexed(folder / index, stored)
    if (folder / single).exists():
        return stored(folder / single)
    raise CheckpointError(f"{folder} holds no weights: expected {single} or {index}")


def _indexed(index: Path, stored: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    folder, table = index.parent, read_json(index)
    where = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{index}: expected an object 'weight_map' of file names")
    out: dict[str, Stored] = {}
    for name in dict.fromkeys(where.values()):
        check_name(index, name)
        out.update(stored(folder / name))
    for key, name in where.items():
        if key not in out or out[key].file.name != name:
            raise CheckpointError(f"{folder / name} lacks the tensor {key!r}, which {index.name} says it has")
    return {key: out[key] for key in where}


def _stored(path: Path, file: FileDigest | None) -> dict[str, Stored]:
    """What a file holds. A damaged header may name other tensors: it is checked before it is believed."""
    header = read_header(path)
    if file is not None:
        check_segments(path, [segment for segment in file.segments if segment[0] < header.header_bytes])
    return {key: Stored(path, t.dtype, t.shape, t.start, t.stop) for key, t in header.tensors.items()}


def read_json(path: Path) -> Any:
    """A JSON file of bounded size.

    Raises:
        CheckpointError: missing, too large, or no JSON.
    """
    try:
        return json.loads(read_bounded(path, _MAX_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _wanted(flat: Flat, located: Located, stored: Mapping[str, Stored]) -> list[Wanted]:
    """What this rank reads of one span: its slice, or all of it where the stage shards nothing."""
    out = []
    master = flat.master.detach()
    for part in flat.span.overlaps(flat.rank):
        for piece in located.pieces.get(part.slot.spec.name, ()):
            item = _meet(piece, part.param_start, part.numel, stored)
            if item is not None:
                source, key_start, param_start, numel = item
                at = part.slice_start + param_start - part.param_start
                out.append(Wanted(source, key_start, master[at : at + numel]))
    return out


def _meet(piece: Piece, start: int, numel: int, stored: Mapping[str, Stored]) -> tuple[Stored, int, int, int] | None:
    low, high = max(piece.param_start, start), min(piece.param_start + piece.numel, start + numel)
    if low >= high:
        return None
    return stored[piece.key], piece.key_start + low - piece.param_start, low, high - low


def _spread(units: list[Unit], values: Mapping[str, Tensor]) -> None:
    """Converted whole parameters into this rank's masters."""
    for unit in units:
        for flat in unit.flats:
            for part in flat.span.overlaps(flat.rank):
                value = values.get(part.slot.spec.name)
                if value is not None:
                    source = value.reshape(-1)[part.param_start : part.param_start + part.numel]
                    flat.master.detach()[part.slice_start : part.slice_start + part.numel].copy_(source)


def _refuse_gaps(folder: Path, model: nn.Module, located: Located) -> None:
    if located.missing or located.unexpected or located.mismatched:
        wrong = [f"{key!r} is {found}, expected {shape}" for key, found, shape in located.mismatched[:5]]
        raise CheckpointError(
            f"{folder} does not fit {type(model).__name__}: {len(located.missing)} missing {list(located.missing[:5])}, "
            f"{len(located.unexpected)} unexpected {list(located.unexpected[:5])}, {len(located.mismatched)} of another shape "
            f"{wrong}. Pass strict=False to load what fits"
        )


def _state_of(
    flat: Flat,
    saved: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Stored]],
    path: Path,
    kept: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Wanted]]:
    """One span's optimizer state with room for its tensors (those of `kept` where they fit), and what to read into them."""
    out: dict[str, Any] = {}
    wanted: list[Wanted] = []
    spec = flat.span.spec
    for slot in flat.span.slots:
        entry = saved.get(slot.spec.name)
        if entry is None:
            continue
        if tuple(entry["shape"]) != slot.spec.shape:
            raise CheckpointError(
                f"{path}: parameter {slot.spec.name!r} has shape {tuple(entry['shape'])}, expected {slot.spec.shape}"
            )
        for state, value in entry["scalars"].items():
            _merge_scalar(out, state, unscalar(value, None), slot.spec.name)
        for state in entry["states"]:
            if state == MASTER and spec.master_dtype == spec.dtype:
                continue
            source = states.get(state, {}).get(slot.spec.name)
            if source is None or source.shape != slot.spec.shape:
                raise CheckpointError(
                    f"{path.parent}/{state}.safetensors: {slot.spec.name!r} of shape {slot.spec.shape} expected, found "
                    f"{None if source is None else source.shape}"
                )
            if state not in out:
                covered = all(state in saved.get(s.spec.name, {}).get("states", ()) for s in flat.span.slots)
                if state == MASTER:  # in place; what is not saved stays as it came with the weights
                    out[state] = flat.master.detach()
                else:
                    out[state] = _room(flat, dtype_of(source.dtype), kept.get(state) if covered else None)
            for part in flat.span.overlaps(flat.rank):
                if part.slot is slot:
                    place = out[state][part.slice_start : part.slice_start + part.numel]
                    wanted.append(Wanted(source, part.param_start, place))
    return out, wanted


def _room(flat: Flat, dtype: torch.dtype, kept: Any) -> Tensor:
    if isinstance(kept, Tensor) and kept.shape == (flat.master.numel(),) and kept.dtype == dtype:
        return kept.zero_() if flat.span.numel != flat.span.used_numel else kept
    return torch.zeros(flat.master.numel(), dtype=dtype, device=flat.master.device)


def _merge_scalar(out: dict[str, Any], state: str, value: Any, name: str) -> None:
    if state in out and float(out[state]) != float(value):
        warnings.warn(
            f"parameters of one span have different {state!r} in the saved optimizer state ({float(out[state])} and "
            f"{float(value)} of {name!r}); the larger is used for all",
            stacklevel=2,
        )
        value = max(out[state], value, key=float)
    out[state] = value


def unscalar(value: Any, like: Any) -> Any:
    """The inverse of `saving.scalar`; tuples by the example of `like`."""
    if isinstance(value, dict) and set(value) == {"tensor", "dtype"}:
        return torch.tensor(value["tensor"], dtype=dtype_of(value["dtype"]))
    if isinstance(value, list):
        return tuple(value) if isinstance(like, tuple) else value
    return value
