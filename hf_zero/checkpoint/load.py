"""Reading a checkpoint: every rank its own byte ranges, each compared with the manifest's digests as it comes in.

The folder may have been written at any world size and stage, or be a plain `from_pretrained` folder (weights only).
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agree import arriving, together
from ..comm.wire import SoloWire
from ..core.precision import dtype_of
from ..errors import CheckpointError
from ..runtime.flat_param import Flat
from ..runtime.shadow_optimizer import state_names_of
from ..runtime.state_shard import MASTER, Shard, cut
from ..runtime.unit import Unit
from ..tiers.array import Values
from .folder import recover
from .manifest import (
    MANIFEST,
    FileDigest,
    Manifest,
    check_name,
    check_segments,
    check_sizes,
    check_version,
    read_bounded,
    share,
)
from .reader import Reader, Wanted
from .safetensors import read_header
from .save import OPTIMIZER_FOLDER, OPTIMIZER_INDEX
from .weights import Located, Piece, Stored, WeightFormat, persistent_buffers

_MAX_JSON_BYTES = 256 << 20
_SHARD = re.compile(r"-\d{5,}-of-\d{5,}$")


class Loading:
    """A load under way, all of it collective. Nothing is executed, no pickle is read.

    Raises:
        CheckpointError: on every rank, naming the file: missing, cut short, altered, or of another model.
    """

    def __init__(self, wire: SoloWire, folder: str | os.PathLike[str], *, verify: bool = True) -> None:
        self._wire = wire
        self.folder = Path(folder)
        self._what = f"loading {self.folder}"
        with arriving(wire, self._what):
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
        return check_sizes(self.folder)

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
        fresh: list[tuple[Shard, dict[str, Any]]] = []
        whole: list[tuple[nn.Parameter, dict[str, Any]]] = []

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
            self._check_kind(path, index, optimizer, groups)
            prefix = f"{folder}/"
            states: dict[str, dict[str, Stored]] = {}
            for name in self.manifest.files:
                if name.startswith(prefix) and name.endswith(".safetensors"):
                    state = _SHARD.sub("", name.removeprefix(prefix).removesuffix(".safetensors"))
                    file = self.manifest.files[name] if self.verifies else None
                    states.setdefault(state, {}).update(_stored(self.folder / name, file))
            wanted: list[Wanted] = []
            for unit in units:
                for flat in unit.trained:
                    saved = index["parameters"]
                    if flat.wholes:
                        found, more = _wholes_of(flat, saved, states, path, optimizer)
                        whole.extend(found)
                        wanted += more
                        saved = {name: _master_only(entry) for name, entry in saved.items()}
                    for shard in flat.shards:
                        kept = shard.entries(optimizer)
                        entries, more = _state_of(flat, shard, saved, states, path, kept)
                        fresh.append((shard, entries))
                        wanted += more
            self._reader.read(wanted)
            return index

        with torch.no_grad():
            index = together(self._wire, self._what, read, answer=False)[0]
            for shard, entries in fresh:
                entries.pop(MASTER, None)
                shard.put(optimizer, entries)
            for param, entries in whole:
                optimizer.state[param] = entries
        for group, packed in zip(optimizer.param_groups, index["groups"]):
            group.update({k: unscalar(v, group.get(k)) for k, v in packed.items() if k != "params"})

    def _check_kind(
        self, path: Path, index: dict[str, Any], optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
    ) -> None:
        """The state is one of such an optimizer; of another class it may be where all of it has a place here."""
        theirs, mine = index.get("optimizer"), type(optimizer).__name__
        if theirs == mine or theirs is None:
            return
        options = [
            (set(saved) ^ set(group)) - {"initial_lr", "param_names"} for saved, group in zip(index["groups"], groups)
        ]
        entries = index["parameters"].values()
        states = {state for entry in entries for state in (*entry["states"], *entry["scalars"])} - {MASTER}
        known = state_names_of(optimizer)
        if any(options) or known is None or (states and states != known):
            raise CheckpointError(
                f"{path} holds the state of {theirs} ({sorted(states)}, options {sorted(index['groups'][0])}), and this run's "
                f"optimizer is {mine}: its state does not fit. Build the run with {theirs}, or load with "
                "load_optimizer=False to go on with a fresh optimizer"
            )
        if self._wire.rank == 0:
            changed = {
                key: value
                for saved, group in zip(index["groups"], groups)
                for key, value in saved.items()
                if key != "params" and unscalar(value, group.get(key)) != group.get(key)
            }
            warnings.warn(
                f"{path} holds the state of {theirs}, and this run's optimizer is {mine}: it takes over {sorted(states)} and "
                f"all options, of which these were others: {changed}",
                stacklevel=2,
            )

    def _index(self, path: Path) -> dict[str, Any]:
        index = read_json(path)
        check_version(path, index, 1)
        if not isinstance(index.get("parameters"), dict):
            raise CheckpointError(f"{path} is damaged: it lists no parameters")
        out: dict[str, Any] = index
        return out


# What there is ------------------------------------------------------------------------------------------------------


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

    # The single file first, as transformers looks: an index beside it is of an older, larger save.
    if (folder / single).exists() and (listed is None or single in listed or index not in listed):
        return stored(folder / single)
    if (folder / index).exists() and (listed is None or index in listed):
        return _indexed(folder / index, stored)
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
    for part in flat.span.overlaps(flat.rank):
        for piece in located.pieces.get(part.slot.spec.name, ()):
            item = _meet(piece, part.param_start, part.numel, stored)
            if item is not None:
                source, key_start, param_start, numel = item
                at = part.slice_start + param_start - part.param_start
                for shard, start, count in cut(flat.shards, at, numel):
                    done = shard.start + start - at
                    out.append(Wanted(source, key_start + done, shard.values[start : start + count]))
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
                    for shard, start, numel in cut(flat.shards, part.slice_start, part.numel):
                        done = shard.start + start - part.slice_start
                        shard.values[start : start + numel].copy_(source[done : done + numel])


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
    shard: Shard,
    saved: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Stored]],
    path: Path,
    kept: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Wanted]]:
    """One shard's optimizer state with room for its values (those of `kept` where they fit), and what to read into them."""
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
                    out[state] = shard.values
                else:
                    out[state] = _room(flat, shard, state, dtype_of(source.dtype), kept.get(state), covered)
            for part in flat.span.overlaps(flat.rank):
                if part.slot is slot:
                    for _, start, numel in cut([shard], part.slice_start, part.numel):
                        at = part.param_start + shard.start + start - part.slice_start
                        wanted.append(Wanted(source, at, out[state][start : start + numel]))
    return out, wanted


def _master_only(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "states": [state for state in entry["states"] if state == MASTER], "scalars": {}}


def _wholes_of(
    flat: Flat,
    saved: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Stored]],
    path: Path,
    optimizer: torch.optim.Optimizer,
) -> tuple[list[tuple[nn.Parameter, dict[str, Any]]], list[Wanted]]:
    """The state of parameters of true shape, each of the shape it was saved with, and what to read into it."""
    out: list[tuple[nn.Parameter, dict[str, Any]]] = []
    wanted: list[Wanted] = []
    group = optimizer.param_groups[flat.span.spec.group]
    home = flat.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    for slot, whole in zip(flat.span.slots, flat.wholes):
        entry = saved.get(slot.spec.name)
        if entry is None:
            continue
        if tuple(entry["shape"]) != slot.spec.shape:
            raise CheckpointError(
                f"{path}: parameter {slot.spec.name!r} has shape {tuple(entry['shape'])}, expected {slot.spec.shape}"
            )
        entries = {state: unscalar(value, None) for state, value in entry["scalars"].items()}
        for state, value in entries.items():
            if isinstance(value, Tensor):
                entries[state] = value.to(home if state == "step" else flat.device)
        for state in entry["states"]:
            if state == MASTER:
                continue
            source = states.get(state, {}).get(slot.spec.name)
            if source is None:
                raise CheckpointError(f"{path.parent} lacks the state {state!r} of {slot.spec.name!r}")
            entries[state] = torch.empty(source.shape, dtype=dtype_of(source.dtype), device=flat.device)
            wanted.append(Wanted(source, 0, entries[state].view(-1)))
        out.append((whole, entries))
    return out, wanted


def _room(flat: Flat, shard: Shard, state: str, dtype: torch.dtype, kept: Any, covered: bool) -> Values:
    """Where a state's values rest; zeros, unless all of them are about to be read."""
    whole = covered and flat.span.numel == flat.span.used_numel
    room: Values | None = shard.room(state)
    if room is None and isinstance(kept, Tensor) and kept.shape == (shard.numel,) and kept.dtype == dtype:
        room = kept
    if room is None:
        return torch.zeros(shard.numel, dtype=dtype, device=shard.master.device)
    return room if whole else room.zero_()


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
