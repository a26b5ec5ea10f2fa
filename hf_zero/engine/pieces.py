"""Gives checkpoints access to this rank's pieces of masters and of optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..checkpoint.ranges import MASTER, NamedPiece, ParameterState
from ..comm.wire import Wire
from ..core.layout import Extent, ParamSpec, Slot
from ..core.precision import dtype_of
from ..errors import CheckpointError
from ..tiers.array import Values, flat_of
from .binding import Binding
from .optimizer_state import allocate_state, arrays_of, describe, segments_of, single_value, state_signature
from .parameter import place_of
from .segments import Segment
from .span import Span
from .unit import Unit


def named_piece(piece: Extent[Slot], values: Values) -> NamedPiece:
    """Return one parameter's elements in 1-D `values`, under its name."""
    return piece.source.spec.name, Extent(values[piece.as_slice], 0, piece.source_start, piece.numel)


def parts_written(span: Span, rank: int, size: int) -> Iterator[Extent[Slot]]:
    """Yield the parts of a span that this rank writes. Starts count in the rank's slice.

    If every rank has all elements, the span is partitioned over the ranks for writing. Of several replicas the first writes.
    """
    layout = span.layout
    if layout.shards > 1 or size == 1:
        if rank < layout.shards:
            yield from layout.overlaps(span.rank)
        return
    numel = -(-layout.used_numel // size)
    for part in replace(layout, shards=size, slice_numel=numel).overlaps(rank):
        yield part.shifted(rank * numel)


class ParameterPieces:
    """The masters of a model's units, as `checkpoint.ranges.Parameters`."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._spans = [span for unit in units for span in unit.spans]
        self._places = {slot.spec.name: (span, slot) for span in self._spans for slot in span.layout.slots}

    def spec(self, name: str) -> ParamSpec:
        return self._places[name][1].spec

    def written(self, rank: int, size: int) -> Iterator[NamedPiece]:
        return self._pieces(lambda span: parts_written(span, rank, size))

    def to_fill(self) -> Iterator[NamedPiece]:
        return self._pieces(lambda span: span.layout.overlaps(span.rank))

    def _pieces(self, parts_of: Callable[[Span], Iterable[Extent[Slot]]]) -> Iterator[NamedPiece]:
        for span in self._spans:
            for part in parts_of(span):
                yield named_piece(part, span.master)

    def shares(self, name: str) -> Iterator[tuple[int, Extent[Callable[[], Tensor]]]]:
        span, slot = self._places[name]
        for rank, part in span.layout.owners(slot):
            yield rank, Extent(partial(span.values, part.start, part.numel), 0, part.source_start, part.numel)


class OptimizerPieces:
    """The state of one optimizer, as `checkpoint.ranges.OptimizerState`.

    Args:
        groups: the options of its groups, and under `params` the parameters' names.
    """

    def __init__(self, binding: Binding, wire: Wire, groups: Sequence[Mapping[str, Any]]) -> None:
        self.groups = groups
        self._binding, self.optimizer = binding, binding.optimizer
        self._refused: CheckpointError | None = None
        self._described: dict[str, ParameterState] = {}
        try:
            self._described = describe(binding, wire)
        except CheckpointError as error:  # the same on every rank; only a save raises it
            self._refused = error
        self._fresh: list[tuple[Segment, dict[str, Any]]] = []

    def parameters(self) -> Iterator[tuple[ParamSpec, bool]]:
        for span, slot in self._slots():
            yield slot.spec, span.layout.is_unsliced

    def _slots(self) -> Iterator[tuple[Span, Slot]]:
        for params in self._binding.originals:
            for param in params:
                place = place_of(param)
                if place is not None:
                    yield place.span, place.span.layout.slots[place.index]

    # To be written ----------------------------------------------------------------------------------------------------

    def described(self) -> dict[str, ParameterState]:
        """Return states by parameter in the groups' order, which does not depend on the number of ranks."""
        out: dict[str, ParameterState] = {}
        for _, slot in self._slots():
            spec, known = slot.spec, self._described.get(slot.spec.name)
            if spec.master_dtype != spec.dtype:
                known = known or ParameterState(spec.shape, {}, {})
                arrays = {**known.arrays, MASTER: (spec.master_dtype, spec.shape)}
                known = ParameterState(spec.shape, arrays, known.scalars)
            if known is not None:
                out[spec.name] = known
        return out

    def written(self, rank: int, size: int) -> dict[str, list[NamedPiece]]:
        if self._refused is not None:
            raise self._refused
        out: dict[str, list[NamedPiece]] = {state: [] for one in self.described().values() for state in one.arrays}
        for span in self._binding.spans:
            parts = list(parts_written(span, rank, size))
            spec = span.layout.spec
            for segment in segments_of(self._binding, span):
                arrays = arrays_of(self._binding, segment, self._binding.state_of(segment))
                if segment.is_matrix:
                    name = span.name_of(segment.members[0])
                    # Only the owner in the first replica writes: every rank has parameters without elements.
                    if rank == span.layout.owner(span.layout.slots[segment.members[0]]):
                        for state, value in arrays.items():
                            out[state].append((name, Extent(flat_of(value), 0, 0, value.numel())))
                    arrays = {}
                if spec.master_dtype != spec.dtype:
                    arrays[MASTER] = span.master[segment.as_slice]
                for piece in _in_segment(parts, segment):
                    for state, value in arrays.items():
                        out[state].append(named_piece(piece, value))
        return out

    # To be filled -----------------------------------------------------------------------------------------------------

    def allocate(self, saved: Mapping[str, ParameterState]) -> list[tuple[str, NamedPiece]]:
        self._fresh.clear()
        out: list[tuple[str, NamedPiece]] = []
        for span in self._binding.spans:
            parts = list(span.layout.overlaps(span.rank))
            states = [saved.get(slot.spec.name) for slot in span.layout.slots]
            marks = [state_signature(each) for each in states]
            for segment in segments_of(self._binding, span):
                for each in self._binding.divide(segment, marks.__getitem__):
                    out += self._allocate_for(each, states[each.members[0]], list(_in_segment(parts, each)))
        return out

    def _allocate_for(
        self, segment: Segment, saved: ParameterState | None, pieces: Sequence[Extent[Slot]]
    ) -> Iterator[tuple[str, NamedPiece]]:
        """Yield memory for saved states, reusing current ones that fit. All members have the same states."""
        span, kept = segment.span, self._binding.state_of(segment)
        entries: dict[str, Any] = {}
        if saved is None:
            self._fresh.append((segment, entries))
            return
        options = self._options_of(segment)
        entries.update({name: single_value(options, span, name, value) for name, value in saved.scalars.items()})
        covered = sum(piece.numel for piece in pieces) == segment.numel
        for state, (dtype, shape) in saved.arrays.items():
            if state == MASTER:  # in place: elements that are not saved keep the values from the weights
                values = span.master[segment.as_slice]
            elif segment.is_matrix:
                values = entries[state] = allocate_state(segment, state, dtype_of(dtype), shape, kept.get(state))
                yield state, (span.name_of(segment.members[0]), Extent(flat_of(values), 0, 0, values.numel()))
                continue
            else:
                values = allocate_state(segment, state, dtype_of(dtype), (segment.numel,), kept.get(state))
                entries[state] = values if covered else values.zero_()
            for piece in pieces:
                yield state, named_piece(piece, values)
        self._fresh.append((segment, entries))

    def _options_of(self, segment: Segment) -> Mapping[str, Any]:
        param = segment.span.params[segment.members[0]]
        found: Mapping[str, Any] = self.optimizer.param_groups[self._binding.group_of[param]]
        return found

    def put(self, options: Sequence[Mapping[str, Any]]) -> None:
        for segment, entries in self._fresh:
            self._binding.put_state(segment, entries)
        for group, values in zip(self.optimizer.param_groups, options):
            group.update(values)


def _in_segment(parts: Iterable[Extent[Slot]], segment: Segment) -> Iterator[Extent[Slot]]:
    """Yield the parts that a segment has. "Here" is the segment."""
    for part in parts:
        piece = part.intersect(segment.start, segment.stop)
        if piece is not None:
            yield piece.shifted(-segment.start)
