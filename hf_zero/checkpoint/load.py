"""Load a checkpoint: every rank reads its own byte ranges and compares them with the manifest's digests.

The folder may come from any world size and stage, or be a plain `from_pretrained` folder (weights only).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agreement import on_all_ranks
from ..comm.wire import Wire
from ..core.layout import Extent, ParamSpec
from ..core.precision import dtype_of
from ..errors import CheckpointError
from ..optimizers.step_probe import StepProbe, probe_step, refusal_of
from .files import Field, is_number, is_of_torch, read_json
from .manifest import MANIFEST, Manifest, check_segments, check_sizes, check_version, digest_of, share
from .ranges import MASTER, Fillable, OptimizerState, ParameterState, Range, RangeReader, ranges_of
from .safetensors import StoredTensor, check_same_files, sample_digest
from .save import OPTIMIZER_FOLDER, OPTIMIZER_INDEX, is_hf_zero_checkpoint
from .weights import WeightFormat, WeightLocations, checked_header, extra_states, find_weights, persistent_buffers

_SHARD = re.compile(r"-\d{5,}-of-\d{5,}$")
_MOST_STEPS = 2**53  # larger counts are not exact in float64
_MOST_DIMS = 16  # in a tensor of one element
_ADDED = {"initial_lr", "param_names", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Options that schedulers and named parameters of torch add to groups: this run may not have them yet."""


class CheckpointReader:
    """Loads a checkpoint. Methods are collectives unless they say otherwise. Executes no code and reads no pickle.

    Attributes:
        folder: the checkpoint.
        manifest: its manifest; None for a plain model folder.
        verifies: whether digests are compared.
        written: the part of the run that it has begun to overwrite: `weights`, `states`, or an empty string.

    Raises:
        CheckpointError: on every rank, with the file: missing, cut short, altered, or of another model.
        RankMismatchError: ranks have different files under one name.
    """

    def __init__(self, wire: Wire, folder: str | os.PathLike[str], *, verify: bool = True) -> None:
        self._wire = wire
        self.folder = Path(folder)
        self._what = f"loading {self.folder}"
        with on_all_ranks(wire, self._what) as report:
            self.manifest = self._open()
            report.local = "" if self.manifest is None else digest_of(self.manifest.to_bytes())
        check_same_files(report.by_rank, self._what)
        self.verifies = verify
        self.written = ""
        self._reader = RangeReader(self.folder, self.manifest if verify else None)
        if verify:
            with on_all_ranks(wire, self._what):  # the ranks share the files that are not read by range
                files = {} if self.manifest is None else self.manifest.files
                rest = {name: file for name, file in files.items() if not name.endswith(".safetensors")}
                for name, segments in share(Manifest(rest), wire.rank, wire.size).items():
                    check_segments(self.folder / name, segments)

    def _open(self) -> Manifest | None:
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder. Give the folder of a checkpoint")
        if not (self.folder / MANIFEST).exists():
            if is_hf_zero_checkpoint(self.folder):
                raise CheckpointError(
                    f"{self.folder / MANIFEST} is missing, but the folder holds training state: the checkpoint is incomplete. "
                    "Load another one, or move its weights to a folder without training state"
                )
            return None
        return check_sizes(self.folder)

    def _find(self, stem: str) -> dict[str, StoredTensor]:
        return find_weights(self.folder, stem, self.manifest, verify=self.verifies).tensors

    def weights(
        self, parameters: Fillable, model: nn.Module, form: WeightFormat, *, strict: bool, folder: str = ""
    ) -> Callable[[], None]:
        """Check that the weights fit the model.

        Args:
            parameters: the model's.
            form: the names of its weights.
            strict: raise unless keys and shapes are exactly the model's.
            folder: the subfolder of a second or later model.

        Returns:
            A function that loads parameters into the masters and buffers into the model, a collective. The caller updates
            copies of the masters.
        """
        self.written = ""
        with on_all_ranks(self._wire, self._what) as report:
            stored = {
                prefix + key: place
                for stem, prefix in form.stems.items()
                for key, place in self._find(f"{folder}/{stem}" if folder else stem).items()
            }
            report.local = sample_digest(stored) if self.manifest is None and self._wire.size > 1 else ""
            located = form.locate(stored)
            if strict and (located.missing or located.unexpected or located.mismatched):
                wrong = [f"{key!r} is {found}, expected {shape}" for key, found, shape in located.mismatched[:5]]
                raise CheckpointError(
                    f"{self.folder} does not fit {type(model).__name__}: {len(located.missing)} missing "
                    f"{list(located.missing[:5])}, {len(located.unexpected)} unexpected {list(located.unexpected[:5])}, "
                    f"{len(located.mismatched)} of another shape {wrong}. Pass strict=False to load what fits"
                )
        check_same_files(report.by_rank, self._what)
        return partial(self._load_weights, parameters, model, stored, located)

    @torch.inference_mode(False)  # what it allocates is trained later
    @torch.no_grad()
    def _load_weights(
        self, parameters: Fillable, model: nn.Module, stored: Mapping[str, StoredTensor], located: WeightLocations
    ) -> None:
        self.written = "weights"
        with on_all_ranks(self._wire, self._what):
            places = {
                name: [Extent(stored[p.source], p.source_start, p.start, p.numel) for p in pieces]
                for name, pieces in located.pieces.items()
            }
            self._reader.read(ranges_of(parameters.to_fill(), places))
            buffers, extras = persistent_buffers(model), extra_states(model)
            for conversion in located.conversions:
                made = conversion.convert({key: self._reader.read_tensor(stored[key]) for key in conversion.sources})
                for param, piece in parameters.to_fill():
                    if param in made:
                        piece.source.copy_(made[param].reshape(-1)[piece.as_slice])
                for name in buffers.keys() & made.keys():
                    buffers[name].copy_(made[name])
            for name, key in located.buffers.items():
                value = self._reader.read_tensor(stored[key])
                if name in extras:
                    extras[name].set_extra_state(value)
                else:
                    buffers[name].copy_(value)
            self._reader.close()

    def tensors(self, stem: str, free_bytes: int) -> dict[str, Tensor]:
        """Read all tensors of `stem` (see `find_weights`) to CPU memory. No communication.

        Raises:
            CheckpointError: they are damaged, or claim more than `free_bytes`.
        """
        stored = self._find(stem)
        needed = sum(place.stop - place.start for place in stored.values())
        if needed > free_bytes:
            raise CheckpointError(
                f"{self.folder}/{stem}.safetensors holds {needed:,} bytes, and {free_bytes:,} are free here"
            )
        try:
            return {key: self._reader.read_tensor(place) for key, place in stored.items()}
        finally:
            self._reader.close()

    def has_optimizer(self, folder: str = OPTIMIZER_FOLDER) -> bool:
        """Return whether the checkpoint holds optimizer state; the same on every rank."""
        return self.manifest is not None and f"{folder}/{OPTIMIZER_INDEX}" in self.manifest.files

    def _index(self, folder: str) -> tuple[Path, Field]:
        """Read and check the optimizer's index.

        Raises:
            CheckpointError: with the file and the key of an impossible value.
        """
        path = self.folder / folder / OPTIMIZER_INDEX
        body = read_json(path)
        check_version(path, body, 1)
        index = Field(path, body)
        if body.get("optimizer") is not None:
            index["optimizer"].text()
        listed = {name for group in index["groups"].items() for name in group["params"].texts()}
        for name, entry in index["parameters"].entries():
            if name not in listed:
                raise CheckpointError(f"{path}: {entry.key} is the state of a parameter that is in no group")
        return path, index

    def optimizer(self, optimizer: OptimizerState, *, folder: str = OPTIMIZER_FOLDER) -> Callable[[], None]:
        """Check the optimizer's state and its groups' options. Returns a function that loads them, a collective."""
        with on_all_ranks(self._wire, self._what):
            if not self.has_optimizer(folder) or self.manifest is None:
                raise CheckpointError(
                    f"{self.folder} holds no optimizer state ({folder}/{OPTIMIZER_INDEX}): it was saved without, or not by "
                    "hf_zero. Load with load_optimizer=False to continue with a fresh optimizer"
                )
            path, index = self._index(folder)
            groups = index["groups"].items()
            if [group["params"].texts() for group in groups] != [group["params"] for group in optimizer.groups]:
                raise CheckpointError(
                    f"{path}: the optimizer groups hold other parameters than this run's. Build the same model, freeze the "
                    "same parameters, and pass optimizers in the same order"
                )
            if index.value.get("optimizer") not in (None, kind := type(optimizer.optimizer).__name__):
                raise CheckpointError(
                    f"{path} holds the state of {index.value['optimizer']}, and this run's optimizer is {kind}. "
                    "Build the run with the saved one, or begin a new one with the weights alone: engine.load(folder, "
                    "load_optimizer=False), or from_pretrained(folder) in a Trainer"
                )
            made = probe_step(optimizer.optimizer) or StepProbe({}, set())
            options = [_options(*pair, optimizer.optimizer, made.options) for pair in zip(groups, optimizer.groups)]
            # States that every parameter with state must have; unknown if the load changes options that decide them.
            changes = any(
                key in mine and bool(mine[key]) != bool(value)
                for mine, saved in zip(optimizer.groups, options)
                for key, value in saved.items()
            )
            needed = set() if changes else set(made.states)
            prefix = f"{folder}/"
            states: dict[str, dict[str, StoredTensor]] = {}
            for name in self.manifest.files:
                if name.startswith(prefix) and name.endswith(".safetensors"):
                    state = _SHARD.sub("", name.removeprefix(prefix).removesuffix(".safetensors"))
                    header = checked_header(self.folder, name, self.manifest if self.verifies else None)
                    states.setdefault(state, {}).update(header.tensors)
            entries = {name: entry for name, entry in index["parameters"].entries() if entry.value is not None}
            for_any = {
                name
                for each in entries.values()
                for name in (*each["states"].texts(), *dict(each["scalars"].entries()))
            }
            needed &= for_any  # an optimizer may drop a state that its first step created
            saved = {
                spec.name: _saved(path, spec, entries[spec.name], states, is_whole, needed)
                for spec, is_whole in optimizer.parameters()
                if spec.name in entries
            }

        @torch.inference_mode(False)  # what it allocates is trained later
        @torch.no_grad()
        def load() -> None:
            self.written = "states"
            with on_all_ranks(self._wire, self._what):
                self._reader.read(
                    Range(states[state][name], piece.start, piece.source)
                    for state, (name, piece) in optimizer.allocate(saved)
                )
            # Must follow the block, which raises on all ranks or none: options and states change only if every
            # rank has read all of them.
            optimizer.put(options)

        return load


def _options(
    saved: Field, group: Mapping[str, Any], optimizer: torch.optim.Optimizer, added: set[str]
) -> dict[str, Any]:
    """Return the options to set in a group; `added` are those that a step adds to it.

    Raises:
        CheckpointError: the run's group does not have an option, or cannot have its value.
    """
    kind, options = type(optimizer).__name__, {}
    for key, entry in saved.entries():
        if key == "params":
            continue
        if key not in group and key not in _ADDED:
            if key in added:
                options[key] = _scalar_from_json(entry)
                continue
            raise CheckpointError(
                f"{entry.path}: {entry.key} is an option that this run's {kind} does not have; it has "
                f"{sorted(set(group) - {'params'})}. If a scheduler adds it, build that before loading; or load with "
                "load_optimizer=False"
            )
        mine = group.get(key)
        options[key] = value = _scalar_from_json(entry, mine)
        if not isinstance(entry.value, dict):
            if is_of_torch(optimizer) or is_number(_number(mine)):
                entry.like(_number(mine))
        elif not isinstance(_number(value), bool):
            Field(entry.path, _number(value), entry.key).finite()
    reason = refusal_of(optimizer, {key: value for key, value in group.items() if key != "params"}, options)
    if reason is not None:
        raise CheckpointError(f"{saved.path}: {saved.key} is refused by {kind}: {reason}")
    return options


def _scalar_from_json(entry: Field, like: Any = None) -> Any:
    """Check and invert `scalar_to_json`. A list becomes a tuple if `like`, the run's own option, is one."""
    found = entry.value
    if isinstance(found, list):
        items = [_scalar_from_json(item) for item in entry.items()]
        return tuple(items) if isinstance(like, tuple) else items
    if not isinstance(found, dict):
        return found
    if set(found) == {"tuple"}:
        return tuple(_scalar_from_json(item) for item in entry["tuple"].items())
    number = entry["tensor"].value
    shape = entry["shape"].shape() if "shape" in found else ()
    is_empty = number is None and len(shape) <= _MOST_DIMS and 0 in shape
    is_one = isinstance(number, (bool, int, float)) and len(shape) <= _MOST_DIMS and set(shape) <= {1}
    if set(found) - {"shape"} != {"tensor", "dtype"} or not (is_one or is_empty):
        raise entry.refused("one number, as a tensor")
    values = [] if is_empty else [number]

    def tensor(_: Any) -> Tensor:
        return torch.tensor(values, dtype=dtype_of(entry["dtype"].text()), device="cpu").reshape(shape)

    return entry.read_by(tensor, "one number, as a tensor of a type that torch has")


def _number(value: Any) -> Any:
    """Return the number in a tensor of one element; any other value as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _saved(
    path: Path,
    spec: ParamSpec,
    entry: Field,
    states: Mapping[str, Mapping[str, StoredTensor]],
    is_whole: bool,
    needed: set[str],
) -> ParameterState:
    """Return a parameter's saved state.

    Args:
        path: the index.
        spec: of the parameter.
        entry: of the parameter in the index.
        states: state -> parameter -> where it is stored.
        is_whole: states may have shapes other than the parameter's.
        needed: the states that a parameter must have if it has any.

    Raises:
        CheckpointError: an impossible value, a file lacks a state, a shape differs, or a needed state is missing.
    """
    shape, names = entry["shape"].shape(), entry["states"].texts()
    scalars = {state: _scalar_from_json(value) for state, value in entry["scalars"].entries()}
    step = _number(scalars.get("step", 0))
    if not (isinstance(step, (int, float)) and 0 <= step <= _MOST_STEPS and step == int(step)):
        raise entry["scalars"]["step"].refused(f"a number of steps, from 0 to {_MOST_STEPS}")
    present = {*names, *scalars}
    lacking = set() if is_whole or not present - {MASTER} else needed - present
    if lacking:
        raise CheckpointError(f"{path}: parameters.{spec.name} lacks the state {min(lacking)!r}")
    if shape != spec.shape:
        raise CheckpointError(f"{path}: parameter {spec.name!r} has shape {shape}, expected {spec.shape}")
    arrays = {}
    for state in names:
        if state == MASTER and spec.master_dtype == spec.dtype:
            continue
        source = states.get(state, {}).get(spec.name)
        if is_whole and state != MASTER:
            if source is None:
                raise CheckpointError(f"{path.parent} lacks the state {state!r} of {spec.name!r}")
        elif source is None or source.shape != spec.shape:
            raise CheckpointError(
                f"{path.parent}/{state}.safetensors: expected {spec.name!r} of shape {spec.shape}, found "
                f"{None if source is None else source.shape}"
            )
        arrays[state] = (source.dtype, source.shape)
    return ParameterState(spec.shape, arrays, scalars)
