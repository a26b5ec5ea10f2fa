"""Reading a checkpoint: every rank its own byte ranges, each compared with the manifest's digests as it comes in.

The folder may have been written at any world size and stage, or be a plain `from_pretrained` folder (weights only).
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agree import together
from ..comm.wire import SoloWire
from ..core.layout import ParamSpec
from ..core.precision import dtype_of
from ..errors import CheckpointError
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
from .pieces import MASTER, OptimizerState, Parameters, ParameterState
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
        with wire.watch.doing(self._what):
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
        self, parameters: Parameters, model: nn.Module, form: WeightFormat, *, strict: bool, folder: str = ""
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
            self._reader.read(_wanted(parameters, located, stored))
            buffers = persistent_buffers(model)
            for conversion in located.conversions:
                made = conversion.convert({key: self._reader.whole(stored[key]) for key in conversion.sources})
                for param, piece in parameters.held():
                    if param in made:
                        start, numel = piece.param_start, piece.values.numel()
                        piece.values.copy_(made[param].reshape(-1)[start : start + numel])
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

    def optimizer(self, optimizer: OptimizerState, *, folder: str = OPTIMIZER_FOLDER) -> None:
        """The optimizer's state and its groups' options."""

        def read() -> dict[str, Any]:
            if not self.has_optimizer(folder) or self.manifest is None:
                raise CheckpointError(
                    f"{self.folder} holds no optimizer state ({folder}/{OPTIMIZER_INDEX}): it was saved without, or is no "
                    "checkpoint of hf_zero. Load with load_optimizer=False to go on with a fresh optimizer"
                )
            path = self.folder / folder / OPTIMIZER_INDEX
            index = self._index(path)
            if [group["params"] for group in index["groups"]] != [group["params"] for group in optimizer.groups]:
                raise CheckpointError(
                    f"{path}: the optimizer groups hold other parameters than this run's: it is of another model, or of one "
                    "with other parameters frozen"
                )
            self._check_kind(path, index, optimizer)
            prefix = f"{folder}/"
            states: dict[str, dict[str, Stored]] = {}
            for name in self.manifest.files:
                if name.startswith(prefix) and name.endswith(".safetensors"):
                    state = _SHARD.sub("", name.removeprefix(prefix).removesuffix(".safetensors"))
                    file = self.manifest.files[name] if self.verifies else None
                    states.setdefault(state, {}).update(_stored(self.folder / name, file))
            entries = index["parameters"]
            saved = {
                spec.name: _saved(path, spec, entries[spec.name], states, is_whole)
                for spec, is_whole in optimizer.parameters()
                if entries.get(spec.name) is not None
            }
            room = optimizer.room(saved)
            self._reader.read(
                Wanted(states[state][name], piece.param_start, piece.values) for name, state, piece in room
            )
            return index

        with torch.no_grad():
            index = together(self._wire, self._what, read, answer=False)[0]
            optimizer.put(
                [
                    {key: unscalar(value, group.get(key)) for key, value in packed.items() if key != "params"}
                    for group, packed in zip(optimizer.groups, index["groups"])
                ]
            )

    def _check_kind(self, path: Path, index: dict[str, Any], optimizer: OptimizerState) -> None:
        """The state is one of such an optimizer; of another class it may be where all of it has a place here."""
        theirs, mine, groups = index.get("optimizer"), optimizer.kind, optimizer.groups
        if theirs == mine or theirs is None:
            return
        options = [
            (set(saved) ^ set(group)) - {"initial_lr", "param_names"} for saved, group in zip(index["groups"], groups)
        ]
        entries = index["parameters"].values()
        states = {state for entry in entries for state in (*entry["states"], *entry["scalars"])} - {MASTER}
        known = optimizer.names()
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


def _wanted(parameters: Parameters, located: Located, stored: Mapping[str, Stored]) -> Iterator[Wanted]:
    """What this rank reads of the weights: its pieces, wherever the folder has their elements."""
    for name, held in parameters.held():
        for piece in located.pieces.get(name, ()):
            item = _meet(piece, held.param_start, held.values.numel(), stored)
            if item is not None:
                source, key_start, param_start, numel = item
                at = param_start - held.param_start
                yield Wanted(source, key_start, held.values[at : at + numel])


def _meet(piece: Piece, start: int, numel: int, stored: Mapping[str, Stored]) -> tuple[Stored, int, int, int] | None:
    low, high = max(piece.param_start, start), min(piece.param_start + piece.numel, start + numel)
    if low >= high:
        return None
    return stored[piece.key], piece.key_start + low - piece.param_start, low, high - low


def _refuse_gaps(folder: Path, model: nn.Module, located: Located) -> None:
    if located.missing or located.unexpected or located.mismatched:
        wrong = [f"{key!r} is {found}, expected {shape}" for key, found, shape in located.mismatched[:5]]
        raise CheckpointError(
            f"{folder} does not fit {type(model).__name__}: {len(located.missing)} missing {list(located.missing[:5])}, "
            f"{len(located.unexpected)} unexpected {list(located.unexpected[:5])}, {len(located.mismatched)} of another shape "
            f"{wrong}. Pass strict=False to load what fits"
        )


def _saved(
    path: Path, spec: ParamSpec, entry: Mapping[str, Any], states: Mapping[str, Mapping[str, Stored]], is_whole: bool
) -> ParameterState:
    """What the checkpoint has of one parameter's state and is wanted here.

    Raises:
        CheckpointError: a file lacks it, or its shape is not that of the parameter (`is_whole`: it may have its own).
    """
    if tuple(entry["shape"]) != spec.shape:
        raise CheckpointError(
            f"{path}: parameter {spec.name!r} has shape {tuple(entry['shape'])}, expected {spec.shape}"
        )
    arrays = {}
    for state in entry["states"]:
        if state == MASTER and spec.master_dtype == spec.dtype:
            continue
        source = states.get(state, {}).get(spec.name)
        if is_whole and state != MASTER:
            if source is None:
                raise CheckpointError(f"{path.parent} lacks the state {state!r} of {spec.name!r}")
        elif source is None or source.shape != spec.shape:
            raise CheckpointError(
                f"{path.parent}/{state}.safetensors: {spec.name!r} of shape {spec.shape} expected, found "
                f"{None if source is None else source.shape}"
            )
        arrays[state] = (source.dtype, source.shape)
    return ParameterState(
        spec.shape, arrays, {state: unscalar(value, None) for state, value in entry["scalars"].items()}
    )


def unscalar(value: Any, like: Any) -> Any:
    """The inverse of `saving.scalar`; tuples by the example of `like`."""
    if isinstance(value, dict) and set(value) == {"tensor", "dtype"}:
        return torch.tensor(value["tensor"], dtype=dtype_of(value["dtype"]))
    if isinstance(value, list):
        return tuple(value) if isinstance(like, tuple) else value
    return value
