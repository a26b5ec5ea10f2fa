"""What of each parameter, and of its optimizer state, this rank holds: the pieces it writes and fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.layout import Overlap, Slot
from ..errors import CheckpointError
from ..runtime.flat_param import Flat
from ..runtime.state_shard import MASTER, Shard, cut
from ..runtime.unit import Unit
from ..tiers.array import OnDisk, Values


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of one parameter, from `param_start`: a 1-D view of this rank's memory, or of its disk."""

    param_start: int
    values: Values


def shares(flat: Flat, rank: int, size: int) -> Iterator[Overlap]:
    """This rank's part of the work on a span; `slice_start` counts from the beginning of the slice.

    Where every rank holds everything (plain data parallel) the span is cut for the purpose, so that all of them work.
    """
    span = flat.span
    if span.shards > 1 or size == 1:
        yield from span.overlaps(flat.rank)
        return
    numel = -(-span.used_numel // size)
    for part in replace(span, shards=size, slice_numel=numel).overlaps(rank):
        yield replace(part, slice_start=part.slice_start + rank * numel)


def held_parameters(units: Iterable[Unit], rank: int, size: int) -> dict[str, list[Held]]:
    """Parameter -> the pieces of its master that this rank writes."""
    out: dict[str, list[Held]] = {}
    for unit in units:
        for flat in unit.flats:
            for part in shares(flat, rank, size):
                for shard, at, numel in cut(flat.shards, part.slice_start, part.numel):
                    piece = _piece(part, shard, at, shard.values[at : at + numel])
                    out.setdefault(part.slot.spec.name, []).append(piece)
    return out


def held_states(
    units: Iterable[Unit], optimizer: Any, rank: int, size: int
) -> tuple[dict[str, dict[str, list[Held]]], dict[str, Values]]:
    """State -> parameter -> the pieces that this rank writes; and one tensor of each state, for its type."""
    out: dict[str, dict[str, list[Held]]] = {}
    samples: dict[str, Values] = {}
    for unit in units:
        for flat in unit.trained:
            parts = list(shares(flat, rank, size))
            for shard in flat.shards:
                for state, value in entries_of(flat, shard, optimizer).items():
                    if not is_sliced(flat, shard, state, value):
                        continue
                    samples.setdefault(state, value)
                    by_param = out.setdefault(state, {})
                    for part in parts:
                        for _, at, numel in cut([shard], part.slice_start, part.numel):
                            piece = _piece(part, shard, at, value[at : at + numel])
                            by_param.setdefault(part.slot.spec.name, []).append(piece)
            for name, entries in whole_states(flat, optimizer):
                for state, value in entries.items():
                    if is_array(value):
                        samples.setdefault(state, value.detach().reshape(-1))
                        mine = out.setdefault(state, {})
                        if rank == 0:  # all ranks have the same
                            mine[name] = [Held(0, value.detach().reshape(-1))]
    return out, samples


def whole_states(flat: Flat, optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parameter -> its state, of an optimizer over parameters of true shape.

    Raises:
        CheckpointError: a tensor that is no plain array.
    """
    for slot, entries in zip(flat.span.slots, flat.whole_entries(optimizer)):
        for state, value in entries.items():
            if isinstance(value, Tensor) and (
                type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided
            ):
                raise CheckpointError(
                    f"optimizer state {state!r} of {slot.spec.name!r} is a {type(value).__name__} ({value.layout}), which has "
                    "no place in a checkpoint: save with save_optimizer=False, and optimizer.state_dict() by yourself"
                )
        if entries:
            yield slot.spec.name, entries


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def entries_of(flat: Flat, shard: Shard, optimizer: Any) -> dict[str, Any]:
    """A shard's optimizer state, and its master where that is finer than the weights."""
    entries = shard.entries(optimizer)
    if flat.span.spec.master_dtype != flat.span.spec.dtype:
        entries[MASTER] = shard.values
    return entries


def is_sliced(flat: Flat, shard: Shard, state: str, value: Any) -> bool:
    """Whether a state has one value per element; else it is one value for the span (`step`).

    Raises:
        CheckpointError: a tensor that is neither.
    """
    if not isinstance(value, (Tensor, OnDisk)) or state == "step" or value.dim() == 0:
        return False
    if value.numel() == shard.numel:
        return True
    raise CheckpointError(
        f"optimizer state {state!r} of {flat.span.spec.name!r} has shape {tuple(value.shape)}, neither one value nor one per "
        "element: it cannot be stored by parameter"
    )


def places(units: Iterable[Unit]) -> dict[str, tuple[Flat, Slot]]:
    """Parameter's first name -> its span, and its place there."""
    return {slot.spec.name: (flat, slot) for unit in units for flat in unit.flats for slot in flat.span.slots}


def _piece(part: Overlap, shard: Shard, at: int, values: Values) -> Held:
    return Held(part.param_start + shard.start + at - part.slice_start, values)
