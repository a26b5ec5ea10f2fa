"""The layout decides which rank owns which elements of each parameter. Integers only, for any number of ranks.

A **unit** is a set of parameters that move together. Its parameters are partitioned into **spans** of equal (dtype, compute
dtype, trainable, optimizer). A span is one 1-D buffer of parameters in row-major order. It is padded at the end to
`shards` equal slices of a multiple of `ALIGN_NUMEL` elements, and rank r owns slice r. Parameters of odd sizes come last: a
matrix after a scale of one element would have an unaligned address, with which kernels are slow (cuBLAS below 16 bytes) or
round differently (MKL with small matrices on AMD). Gather and reduce buffers, the optimizer's tensors, byte counts and
checkpoint ranges follow from this arithmetic.

That is the owner rule `slice`. With `whole` (`ParamSpec.step_cost`) every parameter has one owner, for optimizers that need
full matrices. Parameters of all spans are assigned to ranks, the costliest first, each to the rank with the lowest cost so
far (longest processing time first: Graham 1969, at most 4/3 of the optimum). They are ordered by owner, so slices are ragged:
not padded, possibly empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil, prod
from typing import Generic, TypeVar

S = TypeVar("S")
SpanKey = tuple[str, str, str, bool, int, bool, str]

ALIGN_NUMEL = 32
"""Slices are multiples of this many elements: 64 bytes for two-byte types, 128 for four."""


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes per element of a torch dtype, given its name, which contains its bits."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) // 8 or 1


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of a layout. Tied parameters are one spec with several names.

    Attributes:
        names: all names.
        shape: its shape.
        dtype: its own dtype, in `state_dict` and checkpoints.
        compute_dtype: the dtype in which it is gathered and used.
        master_dtype: the dtype of the owner's slice, which the optimizer updates.
        trainable: it requires a gradient.
        optimizer: number of its optimizer; -1: in none. Groups are not part of the layout: segments split a span by group.
        step_cost: 0: partitioned over the ranks. Else it has one owner, and this is the cost of the optimizer's step over it,
            in any unit, the same for all parameters.
        state_bytes: with `step_cost`: bytes of each array of its optimizer state.
        gathered_in: wire format of its values in gathers, see `ZeroConfig.wire`; `none`: the compute dtype.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    compute_dtype: str
    master_dtype: str
    trainable: bool = True
    optimizer: int = 0
    step_cost: int = 0
    state_bytes: tuple[int, ...] = ()
    gathered_in: str = "none"

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def key(self) -> SpanKey:
        """Return the span's key: parameters of one unit with equal keys are in one span."""
        return (
            self.dtype,
            self.compute_dtype,
            self.master_dtype,
            self.trainable,
            self.optimizer,
            self.step_cost > 0,
            self.gathered_in,
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter in its span, from element `offset` on."""

    spec: ParamSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True, slots=True)
class Extent(Generic[S]):
    """A range of `numel` elements, which begins at `source_start` in `source` and at `start` in another array.

    Functions that return extents document that array: a parameter, a slice, or a tensor of a file.
    """

    source: S
    source_start: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def as_slice(self) -> slice:
        return slice(self.start, self.start + self.numel)

    @property
    def source_slice(self) -> slice:
        """Return the range in `source`."""
        return slice(self.source_start, self.source_start + self.numel)

    def intersect(self, start: int, stop: int) -> Extent[S] | None:
        """Return the part between `start` and `stop`, which count as `self.start` does; None if it is empty."""
        low, high = max(self.start, start), min(self.stop, stop)
        return Extent(self.source, self.source_start + low - self.start, low, high - low) if low < high else None

    def shifted(self, by: int) -> Extent[S]:
        """Return the same elements with `start` increased by `by`."""
        return Extent(self.source, self.source_start, self.start + by, self.numel)


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """One flat buffer: its slots, and its partition into slices.

    Attributes:
        index: unique in the layout.
        slots: the parameters.
        used_numel: without the padding at the end.
        slice_numel: elements of every rank's slice. If slices are ragged, of the largest, or of one rank's (`Layout.for_rank`).
        shards: number of slices.
        cuts: offsets of ragged slices and the end; empty for equal slices.
        owned_slots: for an optimizer of full matrices: the parameters in the slice of the rank that `slice_numel` describes.
        share: the fraction of `owned_slots` that counts, see `Layout.for_average_rank`.
        is_updated: an optimizer updates the span.
        is_unsliced: its optimizer needs full matrices, so that no parameter is divided between slices or tiers.
    """

    index: int
    slots: tuple[Slot, ...]
    used_numel: int
    slice_numel: int
    shards: int
    cuts: tuple[int, ...] = ()
    owned_slots: tuple[Slot, ...] = ()
    share: float = 1.0
    trainable: bool = field(init=False, repr=False, compare=False)
    is_updated: bool = field(init=False, repr=False, compare=False)
    is_unsliced: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spec = self.slots[0].spec
        object.__setattr__(self, "is_unsliced", spec.step_cost > 0)
        object.__setattr__(self, "trainable", spec.trainable)  # stored: read for each span in every step
        object.__setattr__(self, "is_updated", spec.trainable and spec.optimizer >= 0)

    @property
    def numel(self) -> int:
        return self.cuts[-1] if self.cuts else self.slice_numel * self.shards

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's slice, and the one after its last."""
        if self.cuts:
            return self.cuts[rank], self.cuts[rank + 1]
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    @property
    def spec(self) -> ParamSpec:
        """Return one of the specs: dtypes, trainable and optimizer are equal for all."""
        return self.slots[0].spec

    def part_of(self, slot: Slot, rank: int) -> Extent[Slot] | None:
        """Return the part of a parameter that `rank` owns, if any. Starts count in the rank's slice."""
        low, high = self.bounds(rank)
        part = Extent(slot, 0, slot.offset, slot.spec.numel).intersect(low, high)
        return None if part is None else part.shifted(-low)

    def overlaps(self, rank: int) -> Iterator[Extent[Slot]]:
        """Return the parts of all parameters that `rank` owns, in order. Starts count in the rank's slice."""
        return (part for slot in self.slots if (part := self.part_of(slot, rank)) is not None)

    def owner(self, slot: Slot) -> int:
        """Return the owner of a parameter that has one owner; 0 if slices are equal."""
        if not self.cuts:
            return 0
        # A parameter without elements lies on a boundary: the first rank that ends there owns it.
        return next(rank for rank in range(self.shards) if slot.stop <= self.cuts[rank + 1])

    def owners(self, slot: Slot) -> Iterator[tuple[int, Extent[Slot]]]:
        """Yield the ranks that own elements of a parameter, in order, each with its part (see `overlaps`)."""
        if not slot.spec.numel:  # no rank owns it
            return
        ranks = range(self.shards)
        if not self.cuts:
            ranks = range(slot.offset // self.slice_numel, -(-slot.stop // self.slice_numel))
        for rank in ranks:
            part = self.part_of(slot, rank)
            if part is not None:
                yield rank, part


@dataclass(frozen=True, slots=True)
class UnitLayout:
    name: str
    spans: tuple[SpanLayout, ...]

    @property
    def numel(self) -> int:
        return sum(span.used_numel for span in self.spans)

    @property
    def gathered_bytes(self) -> int:
        return sum(span.numel * itemsize(span.spec.compute_dtype) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Visit:
    """One module's forward that uses one unit. The memory of a step follows from the order of visits.

    Attributes:
        unit: number of the unit.
        is_embedding: its inputs are indices, so its backward needs no weights and ends only with the whole backward.
        inner: visits inside this one.
    """

    unit: int
    is_embedding: bool = False
    inner: tuple[Visit, ...] = ()


@dataclass(slots=True)
class UseTimes:
    """When a forward uses one unit. The clock counts where modules begin and end; 0: never.

    Attributes:
        first: begin of its first use.
        read: begin of the first use whose backward needs the weights; an embedding's does not.
        last: end of its last use.
        is_reached: backward reaches a use of its weights.
    """

    first: int = 0
    read: int = 0
    last: int = 0
    is_reached: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """All units of one model, partitioned over `shards` owners.

    Attributes:
        units: in order.
        shards: number of owners.
        visits: a forward, as the model's structure shows it.
    """

    units: tuple[UnitLayout, ...]
    shards: int
    visits: tuple[Visit, ...] = ()

    @property
    def spans(self) -> Iterator[SpanLayout]:
        for unit in self.units:
            yield from unit.spans

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def trainable_numel(self) -> int:
        return sum(span.used_numel for span in self.spans if span.trainable)

    def uses(self) -> list[UseTimes]:
        """Return the use of each unit."""
        seen: list[tuple[Visit, int, int]] = []  # begin and end

        def walk(visits: Sequence[Visit], clock: int) -> int:
            for visit in visits:
                begin = clock
                clock = walk(visit.inner, begin + 1) + 1
                seen.append((visit, begin, clock - 1))
            return clock

        end = walk(self.visits, 1)
        trained = {at for at, unit in enumerate(self.units) if any(span.is_updated for span in unit.spans)}
        start = min((begin for visit, begin, _ in seen if visit.unit in trained), default=end)
        out = [UseTimes() for _ in self.units]
        for visit, begin, stop in seen:
            use = out[visit.unit]
            use.first = min(use.first or begin, begin)
            use.last = max(use.last, stop)
            if not visit.is_embedding:
                use.read = min(use.read or begin, begin)
                use.is_reached = use.is_reached or begin >= start
        return out

    def gathered_twice(self) -> list[int]:
        """Return the units that are gathered in forward and again in backward unless they are kept, last used first.

        The unit that ends the forward is still gathered when backward begins. An embedding's backward needs no weights.
        """
        uses = self.uses()
        end = max((use.last for use in uses), default=0)
        found = [at for at, use in enumerate(uses) if use.first and use.is_reached and use.last < end]
        return sorted(found, key=lambda at: uses[at].last, reverse=True)

    def for_rank(self, rank: int) -> Layout:
        """Return the layout with the `slice_numel` of this rank in ragged spans."""
        if not any(span.cuts for span in self.spans):
            return self

        def own(span: SpanLayout) -> SpanLayout:
            low, high = span.bounds(rank)
            return (
                replace(span, slice_numel=high - low, owned_slots=_owned(span, rank), share=1.0) if span.cuts else span
            )

        return self._map_spans(own)

    def for_average_rank(self) -> Layout:
        """Return a layout in which each ragged slice has the fraction of elements that the most loaded rank owns in total."""
        share = max(self.imbalance(), default=0.0) / self.shards

        def even(span: SpanLayout) -> SpanLayout:
            return replace(span, slice_numel=ceil(span.numel * share), owned_slots=span.slots, share=share)

        return self._map_spans(lambda span: even(span) if span.cuts else span) if share else self

    def _map_spans(self, of: Callable[[SpanLayout], SpanLayout]) -> Layout:
        units = (replace(unit, spans=tuple(map(of, unit.spans))) for unit in self.units)
        return replace(self, units=tuple(units))

    def imbalance(self) -> tuple[float, ...]:
        """Return each rank's elements of parameters with one owner, relative to the mean; empty if there are none."""
        ragged = [span for span in self.spans if span.cuts]
        total = sum(span.numel for span in ragged)
        if not total:
            return ()
        owned = (sum(high - low for low, high in (span.bounds(rank) for span in ragged)) for rank in range(self.shards))
        return tuple(numel * self.shards / total for numel in owned)

    @staticmethod
    def build(
        units: Iterable[tuple[str, Sequence[ParamSpec]]], shards: int, visits: Sequence[Visit] | None = None
    ) -> Layout:
        """Partition `(unit name, its parameters)` over `shards` owners.

        Parameters keep their order within a span, except those whose size is not a multiple of `ALIGN_NUMEL`: they come last.
        Spans are ordered by their first parameter.

        Args:
            units: the units.
            shards: number of owners.
            visits: a forward; default: every unit is used once, in this order.
        """
        out: list[UnitLayout] = []
        index = 0
        units = [(name, list(specs)) for name, specs in units]
        owner_of = _assign_owners([spec for _, specs in units for spec in specs], shards)
        for name, specs in units:
            buckets: dict[SpanKey, list[ParamSpec]] = {}
            for spec in specs:
                buckets.setdefault(spec.key, []).append(spec)
            spans = []
            for bucket in buckets.values():
                spans.append(_partition(index, bucket, shards, owner_of))
                index += 1
            out.append(UnitLayout(name, tuple(spans)))
        order = [Visit(place) for place in range(len(out))] if visits is None else visits
        return Layout(tuple(out), shards, tuple(order))


def _assign_owners(specs: Sequence[ParamSpec], shards: int) -> dict[str, int]:
    """Return the owner of each parameter that has one, by its name."""
    loads = [(0, 0, rank) for rank in range(shards)]
    owner_of = {}
    # Must be deterministic, because every rank computes the owners: the sort is stable, and ties in the heap end with the rank.
    for spec in sorted((spec for spec in specs if spec.step_cost > 0), key=lambda spec: -spec.step_cost):
        cost, numel, rank = heappop(loads)
        owner_of[spec.name] = rank
        heappush(loads, (cost + (spec.step_cost if spec.numel else 0), numel + spec.numel, rank))
    return owner_of


def _partition(index: int, specs: Sequence[ParamSpec], shards: int, owner_of: Mapping[str, int]) -> SpanLayout:
    is_whole = specs[0].step_cost > 0 and shards > 1
    specs = sorted(specs, key=lambda spec: (is_whole and owner_of[spec.name], spec.numel % ALIGN_NUMEL != 0))
    slots, offset = [], 0
    for spec in specs:
        slots.append(Slot(spec, offset))
        offset += spec.numel
    if is_whole:
        stops = {owner_of[slot.spec.name]: slot.stop for slot in slots}
        cuts = [0]
        for rank in range(shards):  # the slice of a rank that owns nothing is empty
            cuts.append(stops.get(rank, cuts[-1]))
        largest = max(high - low for low, high in pairwise(cuts))
        span = SpanLayout(index, tuple(slots), offset, largest, shards, tuple(cuts))
        rank = next(rank for rank in range(shards) if cuts[rank + 1] - cuts[rank] == largest)
        return replace(span, owned_slots=_owned(span, rank))
    # Rounded up twice: equal slices need no lengths in collectives. A slice may lie beyond the last parameter.
    per_shard = -(-offset // shards)
    slice_numel = -(-per_shard // ALIGN_NUMEL) * ALIGN_NUMEL
    return SpanLayout(
        index, tuple(slots), offset, slice_numel, shards, owned_slots=tuple(slots) if specs[0].step_cost > 0 else ()
    )


def _owned(span: SpanLayout, rank: int) -> tuple[Slot, ...]:
    return tuple(slot for slot in span.slots if span.owner(slot) == rank)
