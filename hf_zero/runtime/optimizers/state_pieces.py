"""The pieces of an optimizer's state that checkpoints write and fill."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.ranges import MASTER, Held, ParameterState
from ...comm.wire import SoloWire
from ...core.layout import Extent, ParamSpec
from ...core.precision import dtype_name, dtype_of
from ...errors import CheckpointError
from ...tiers.array import OnDisk, Values, flat_of, is_array
from ..values.flat_param import Flat
from ..values.pieces import held_of, is_sliced, parts_written
from ..values.state_shard import Shard, extents
from .shadow_optimizer import options_added, refusal_of, states_of


class OptimizerPieces:
    """The state of an optimizer that is bound to a model, as `checkpoint.ranges.OptimizerState`.

    Args:
        flats: the spans of its groups.
        groups: as `Engine.group_options` has them.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        wire: SoloWire,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.groups = groups
        self._flats = flats
        self._wire = wire
        self._everyones: dict[str, dict[str, Any]] = {}  # by parameter that has one owner: its state, arrays as shapes
        self._optimizer = optimizer
        self._fresh: list[tuple[Shard, nn.Parameter, dict[str, Any]]] = []

    @property
    def kind(self) -> str:
        return type(self._optimizer).__name__

    def names(self) -> set[str] | None:
        states = states_of(self._optimizer)
        return None if states is None else set(states)

    def refusal(self, group: int, options: Mapping[str, Any]) -> str | None:
        return refusal_of(self._optimizer, {k: v for k, v in self.groups[group].items() if k != "params"}, options)

    def added(self) -> set[str]:
        return options_added(self._optimizer)

    def parameters(self) -> Iterator[tuple[ParamSpec, bool]]:
        for flat in self._flats:
            for slot in flat.span.slots:
                yield slot.spec, flat.wholes is not None

    # To be written --------------------------------------------------------------------------------------------------

    def written(self, rank: int, size: int) -> dict[str, list[Held]]:
        self._tell_others()
        out: dict[str, list[Held]] = {
            state: [] for entries in self._everyones.values() for state, value in entries.items() if is_array(value)
        }
        for flat in self._flats:
            parts = list(parts_written(flat, rank, size))
            for shard in flat.shards:
                for state, value in self._sliced(flat, shard).items():
                    held = out.setdefault(state, [])
                    held += (held_of(piece, value) for _, piece in extents(parts, [shard]))
            for spec, entries in self._whole_states(flat):
                for state, value in entries.items():
                    if is_array(value):
                        held = out.setdefault(state, [])
                        # Of replicas the first writes; where nothing is cut all ranks have the same.
                        if rank < (flat.span.shards if flat.span.cuts else 1):
                            held.append((spec.name, Extent(flat_of(value), 0, 0, value.numel())))
        return out

    def described(self) -> dict[str, ParameterState]:
        out: dict[str, ParameterState] = {}
        for flat in self._flats:
            shard = flat.shards[0]  # all of them have made the same steps
            entries, sliced = self._entries(flat, shard), self._sliced(flat, shard)
            dtypes = {state: dtype_name(value.dtype) for state, value in sliced.items()}
            scalars = {key: value for key, value in entries.items() if key not in sliced}
            for slot in flat.span.slots if entries else ():
                arrays = {state: (dtype, slot.spec.shape) for state, dtype in dtypes.items()}
                out[slot.spec.name] = ParameterState(slot.spec.shape, arrays, scalars)
            for spec, whole in self._known_states(flat):
                arrays = {state: (dtype, spec.shape) for state, dtype in dtypes.items()}
                for state, value in whole.items():
                    if is_array(value):
                        arrays[state] = (dtype_name(value.dtype), tuple(value.shape))
                scalars = {key: value for key, value in whole.items() if not is_array(value)}
                out[spec.name] = ParameterState(spec.shape, arrays, scalars)
        return out

    def _tell_others(self) -> None:
        """What the owner of a parameter has, all ranks write down and name alike. A collective where there are owners."""
        if not any(flat.wholes is not None and flat.span.cuts for flat in self._flats):
            return
        mine = {
            flat.span.slots[index].spec.name: {
                state: torch.empty(value.shape, dtype=value.dtype, device="meta") if is_array(value) else value
                for state, value in entries.items()
            }
            for flat in self._flats
            for index, entries in flat.whole_entries(self._optimizer).items()
            if entries and flat.span.cuts
        }
        self._everyones = {name: entries for rank in self._wire.exchange(mine) for name, entries in rank.items()}

    def _known_states(self, flat: Flat) -> Iterator[tuple[ParamSpec, dict[str, Any]]]:
        """As `_whole_states`, those that other ranks own too; arrays of these by type and shape only."""
        if flat.wholes is None or not flat.span.cuts:
            yield from self._whole_states(flat)
            return
        for slot in flat.span.slots:
            if slot.spec.name in self._everyones:
                yield slot.spec, self._everyones[slot.spec.name]

    def _entries(self, flat: Flat, shard: Shard) -> dict[str, Any]:
        """A shard's optimizer state, and its master where that is finer than the weights."""
        entries = shard.entries(self._optimizer)
        if flat.span.spec.master_dtype != flat.span.spec.dtype:
            entries[MASTER] = shard.values
        return entries

    def _sliced(self, flat: Flat, shard: Shard) -> dict[str, Values]:
        entries = self._entries(flat, shard)
        return {state: value for state, value in entries.items() if is_sliced(flat, shard, state, value)}

    def _whole_states(self, flat: Flat) -> Iterator[tuple[ParamSpec, dict[str, Any]]]:
        """Parameter -> its state, of an optimizer over parameters of true shape.

        Raises:
            CheckpointError: a tensor that is no plain array.
        """
        for index, entries in flat.whole_entries(self._optimizer).items():
            slot = flat.span.slots[index]
            for state, value in entries.items():
                if isinstance(value, Tensor) and (
                    type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided
                ):
                    raise CheckpointError(
                        f"optimizer state {state!r} of {slot.spec.name!r} is a {type(value).__name__} ({value.layout}), "
                        "which has no place in a checkpoint: save with save_optimizer=False, and optimizer.state_dict() by "
                        "yourself"
                    )
            if entries:
                yield slot.spec, entries

    # To be filled ---------------------------------------------------------------------------------------------------

    def room(self, saved: Mapping[str, ParameterState]) -> list[tuple[str, Held]]:
        self._fresh.clear()
        out: list[tuple[str, Held]] = []
        for flat in self._flats:
            here = {slot.spec.name: saved[slot.spec.name] for slot in flat.span.slots if slot.spec.name in saved}
            if flat.wholes is not None:
                out += self._room_of_wholes(flat, here)
                here = {name: _only_master(state) for name, state in here.items()}
            for shard in flat.shards:
                out += self._room_of_shard(flat, shard, here)
        return out

    def put(self, options: Sequence[Mapping[str, Any]]) -> None:
        for shard, param, entries in self._fresh:
            shard.put(self._optimizer, param, entries)
        for group, values in zip(self._optimizer.param_groups, options):
            group.update(values)

    def _room_of_shard(
        self, flat: Flat, shard: Shard, saved: Mapping[str, ParameterState]
    ) -> Iterator[tuple[str, Held]]:
        """Values go to where those of now rest, where they fit."""
        entries: dict[str, Any] = {}
        kept = shard.entries(self._optimizer)
        for name, one in saved.items():
            for state, value in one.scalars.items():
                # A copy: what an optimizer counts in place must not be counted once for every shard.
                merge_scalar(entries, state, value.clone() if isinstance(value, Tensor) else value, name)
            for state, (dtype, _) in one.arrays.items():
                if state in entries:
                    continue
                if state == MASTER:  # in place; what is not saved stays as it came with the weights
                    entries[state] = shard.values
                else:
                    covered = len(saved) == len(flat.span.slots) and all(state in s.arrays for s in saved.values())
                    entries[state] = _room(flat, shard, state, dtype_of(dtype), kept.get(state), covered)
        for _, piece in extents(flat.span.overlaps(flat.rank), [shard]):
            name = piece.source.spec.name
            for state in saved[name].arrays if name in saved else ():
                yield state, held_of(piece, entries[state])
        entries.pop(MASTER, None)
        self._fresh.append((shard, shard.master, entries))

    def _room_of_wholes(self, flat: Flat, saved: Mapping[str, ParameterState]) -> Iterator[tuple[str, Held]]:
        """Parameters of true shape: each array of the shape it was saved with."""
        shard = flat.shards[0]
        for index, whole in (flat.wholes or {}).items():
            slot = flat.span.slots[index]
            one = saved.get(slot.spec.name)
            if one is None:
                continue
            entries = dict(one.scalars)
            for state, (dtype, shape) in one.arrays.items():
                if state != MASTER:
                    entries[state] = values = shard.new_state(whole, state, dtype_of(dtype), shape)
                    yield state, (slot.spec.name, Extent(flat_of(values), 0, 0, values.numel()))
            self._fresh.append((shard, whole, entries))


def _only_master(state: ParameterState) -> ParameterState:
    return replace(state, arrays={name: array for name, array in state.arrays.items() if name == MASTER}, scalars={})


def _room(flat: Flat, shard: Shard, state: str, dtype: torch.dtype, kept: Any, covered: bool) -> Values:
    """Where a state's values rest; zeros, unless all of them are about to be read."""
    whole = covered and flat.span.numel == flat.span.used_numel
    fits = isinstance(kept, (Tensor, OnDisk)) and kept.shape == (shard.numel,) and kept.dtype == dtype
    room: Values = kept if fits else shard.new_state(shard.master, state, dtype, (shard.numel,))
    return room if whole else room.zero_()


def merge_scalar(out: dict[str, Any], state: str, value: Any, name: str) -> None:
    if state in out and _is_number(value) and _is_number(out[state]) and float(out[state]) != float(value):
        warnings.warn(
            f"parameters of one span have different {state!r} in the saved optimizer state ({float(out[state])} and "
            f"{float(value)} of {name!r}); the larger is used for all",
            stacklevel=2,
        )
        value = max(out[state], value, key=float)
    elif state in out and not _is_number(value) and repr(out[state]) != repr(value):
        warnings.warn(
            f"parameters of one span have different {state!r} in the saved optimizer state ({out[state]!r} and {value!r} of "
            f"{name!r}); the first is used for all",
            stacklevel=2,
        )
        return
    out[state] = value


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (bool, int, float))
