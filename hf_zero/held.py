"""What of each parameter, and of its optimizer state, this rank holds: the pieces it writes and fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .errors import CheckpointError
from .layout import Overlap, Slot
from .unit import Flat, Unit

MASTER = "master"
"""The state that a finer-than-own-type master is stored as; where the types are equal the weights are the masters."""


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of one parameter, from `param_start`: a 1-D view of this rank's memory."""

    param_start: int
    values: Tensor


def shares(flat: Flat, rank: int, size: int) -> Iterator[Overlap]:
    """This rank's part of the work on a span; `slice_start` counts from the beginning of `flat.master`.

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
            master = flat.master.detach()
            for part in shares(flat, rank, size):
                out.setdefault(part.slot.spec.name, []).append(_piece(part, master))
    return out


def held_states(
    units: Iterable[Unit], optimizer: Any, rank: int, size: int
) -> tuple[dict[str, dict[str, list[Held]]], dict[str, Tensor]]:
    """State -> parameter -> the pieces that this rank writes; and one tensor of each state, for its type."""
    out: dict[str, dict[str, list[Held]]] = {}
    samples: dict[str, Tensor] = {}
    for flat, entries in states_of(units, optimizer):
        for state, value in entries.items():
            if not is_sliced(flat, state, value):
                continue
            samples.setdefault(state, value)
            by_param = out.setdefault(state, {})
            for part in shares(flat, rank, size):
                by_param.setdefault(part.slot.spec.name, []).append(_piece(part, value))
    return out, samples


def states_of(units: Iterable[Unit], optimizer: Any) -> Iterator[tuple[Flat, dict[str, Any]]]:
    """Every trained span with its optimizer state, and its master where that is finer than the weights."""
    for unit in units:
        for flat in unit.trained:
            entries = {str(key): value for key, value in optimizer.state.get(flat.master, {}).items()}
            if flat.span.spec.master_dtype != flat.span.spec.dtype:
                entries[MASTER] = flat.master.detach()
            if entries:
                yield flat, entries


def is_sliced(flat: Flat, state: str, value: Any) -> bool:
    """Whether a state has one value per element; else it is one value for the span (`step`).

    Raises:
        CheckpointError: a tensor that is neither.
    """
    if not isinstance(value, Tensor) or state == "step" or value.dim() == 0:
        return False
    if value.numel() == flat.master.numel():
        return True
    raise CheckpointError(
        f"optimizer state {state!r} of {flat.span.spec.name!r} has shape {tuple(value.shape)}, neither one value nor one per "
        "element: it cannot be stored by parameter"
    )


def places(units: Iterable[Unit]) -> dict[str, tuple[Flat, Slot]]:
    """Parameter's first name -> its span, and its place there."""
    return {slot.spec.name: (flat, slot) for unit in units for flat in unit.flats for slot in flat.span.slots}


def _piece(part: Overlap, flat_values: Tensor) -> Held:
    return Held(part.param_start, flat_values[part.slice_start : part.slice_start + part.numel])
