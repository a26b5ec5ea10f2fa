"""The pieces of parameters that checkpoints write and fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ...checkpoint.ranges import Held
from ...core.layout import Extent, ParamSpec, Slot
from ...errors import CheckpointError
from ...tiers.array import OnDisk, Values
from .flat_param import Flat
from .state_shard import Shard, extents, is_elementwise
from .unit import Unit


def held_of(piece: Extent[Slot], values: Values) -> Held:
    """What a shard's values have of one parameter."""
    return piece.source.spec.name, Extent(values[piece.here], 0, piece.source_start, piece.numel)


class ParameterPieces:
    """The masters of a model's units, as `checkpoint.ranges.Parameters`."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._places = {
            slot.spec.name: (flat, slot) for unit in units for flat in unit.flats for slot in flat.span.slots
        }

    def spec(self, name: str) -> ParamSpec:
        return self._places[name][1].spec

    def written(self, rank: int, size: int) -> Iterator[Held]:
        return self._pieces(lambda flat: parts_written(flat, rank, size))

    def held(self) -> Iterator[Held]:
        return self._pieces(lambda flat: flat.span.overlaps(flat.rank))

    def _pieces(self, parts_of: Callable[[Flat], Iterable[Extent[Slot]]]) -> Iterator[Held]:
        for unit in self._units:
            for flat in unit.flats:
                for shard, piece in extents(parts_of(flat), flat.shards):
                    yield held_of(piece, shard.values)

    def shares(self, name: str) -> Iterator[tuple[int, Extent[Callable[[], Tensor]]]]:
        flat, slot = self._places[name]
        for rank, part in flat.span.owners(slot):
            yield rank, Extent(partial(flat.values, part.start, part.numel), 0, part.source_start, part.numel)


def is_sliced(flat: Flat, shard: Shard, state: str, value: Any) -> bool:
    """Whether a state has one value per element; else it is one value for the span (`step`).

    Raises:
        CheckpointError: a tensor that is neither.
    """
    if not isinstance(value, (Tensor, OnDisk)) or state == "step":
        return False
    if is_elementwise(state, value, shard.numel):
        return True
    if value.numel() <= 1:  # of any shape; a slice has more elements than one
        return False
    raise CheckpointError(
        f"optimizer state {state!r} of {flat.span.spec.name!r} has shape {tuple(value.shape)}, neither one value nor one per "
        "element: it cannot be stored by parameter"
    )


def parts_written(flat: Flat, rank: int, size: int) -> Iterator[Extent[Slot]]:
    """This rank's part of the work on a span. "Here" is the slice that the rank has.

    Where every rank holds everything (plain data parallel) the span is cut for the purpose, so that all of them work. Of
    several replicas of a cut span the first writes, whose ranks come first.
    """
    span = flat.span
    if span.shards > 1 or size == 1:
        if rank < span.shards:
            yield from span.overlaps(flat.rank)
        return
    numel = -(-span.used_numel // size)
    for part in replace(span, shards=size, slice_numel=numel).overlaps(rank):
        yield part.moved(rank * numel)
