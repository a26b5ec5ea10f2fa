"""Where each parameter's elements live: integers only, for any number of ranks, without a process group.

A **unit** is a set of parameters that move together. Its parameters are cut into **spans** of equal (dtype, compute
dtype, trainable, optimizer group). A span is one 1-D buffer, its parameters one after another in row-major order,
padded at the end so that it divides into `shards` equal slices of a multiple of `ALIGN_NUMEL` elements. Rank r owns slice r.
Odd sizes come last: a scale of one element before a matrix would put the matrix at an address that kernels are slow with
(cuBLAS below 16 bytes), or round differently at (MKL with small matrices on AMD).
From this arithmetic come the gather and reduce buffers, the optimizer's tensors, byte counts and checkpoint ranges.

That is the owner rule `slice`. With `whole` (`ParamSpec.step_cost`) every parameter of a span has one owner, for optimizers
whose rule needs its true shape: slots are dealt to the ranks over all spans of the layout, the costliest first, each to the
rank that has least to do so far (longest processing time first: Graham 1969, at most 4/3 of the best), and lie in the order of
their owners. Slices are ragged then, not padded, maybe empty.
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
SpanKey = tuple[str, str, str, bool, int, int, int, bool, str]

ALIGN_NUMEL = 32
"""Slices are multiples of this many elements: 64 bytes for two-byte types, 128 for four."""


@cache
def itemsize(dtype: str) -> int:
    """Bytes per element of a torch dtype given by its bare name, which says its bits."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) // 8 or 1


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the layout sees it. Tied parameters are one spec with several names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    """The parameter's own type: what `state_dict` and checkpoints hold."""
    compute_dtype: str
    """The type it is gathered and used in."""
    master_dtype: str
    """The type of the owner's slice, which the optimizer updates."""
    trainable: bool = True
    group: int = 0
    """Index of its optimizer group; -1 when no optimizer has it."""
    optimizer: int = 0
    """Which of the model's optimizers that is a group of."""
    cohort: int = 0
    """Parameters of one span have gradients in the same steps, so that a parameter without one is left alone: not decayed, not
    counted in its optimizer's `step`. Those that were seen without one while others of their span had one get a number."""
    step_cost: int = 0
    """0: the ranks share its elements out. Else it has one owner, and this is what the optimizer's step over it costs there, in
    any unit, the same for all parameters."""
    state_bytes: tuple[int, ...] = ()
    """With `step_cost`: bytes of each array of the state that its optimizer makes of it."""
    gathered_in: str = "none"
    """Format of codes in which its values travel where they are gathered, see `ZeroConfig.wire`; none: as they are."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def key(self) -> SpanKey:
        """Parameters of one unit with equal keys are one span."""
        return (
            self.dtype,
            self.compute_dtype,
            self.master_dtype,
            self.trainable,
            self.optimizer,
            self.group,
            self.cohort,
            self.step_cost > 0,
            self.gathered_in,
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in its span."""

    spec: ParamSpec
    offset: int  # elements from the start of the span

    @property
    def stop(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True, slots=True)
class Extent(Generic[S]):
    """These elements are those elements: `numel` from `start` on here are the ones of `source` from `source_start` on.

    What "here" counts in (a parameter, a slice, a tensor of a file) is said by whoever hands one out.
    """

    source: S
    source_start: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def here(self) -> slice:
        return slice(self.start, self.start + self.numel)

    @property
    def there(self) -> slice:
        """The same elements, in `source`."""
        return slice(self.source_start, self.source_start + self.numel)

    def cut(self, start: int, stop: int) -> Extent[S] | None:
        """The part of it from `start` to `stop`, both counted here; None where there is none."""
        low, high = max(self.start, start), min(self.stop, stop)
        return Extent(self.source, self.source_start + low - self.start, low, high - low) if low < high else None

    def moved(self, by: int) -> Extent[S]:
        """The same elements where "here" begins `by` elements earlier."""
        return Extent(self.source, self.source_start, self.start + by, self.numel)


@dataclass(frozen=True, slots=True)
class Span:
    """One flat buffer: the slots, and how it is cut."""

    index: int  # unique over the whole layout
    slots: tuple[Slot, ...]
    used_numel: int  # without the padding at the end
    slice_numel: int
    """Elements of every rank's slice; where slices are ragged, of the largest, or of one rank's (`Layout.seen_from`)."""
    shards: int
    cuts: tuple[int, ...] = ()
    """Where ragged slices begin, and the end; empty where all slices are equal."""
    wholes: tuple[Slot, ...] = ()
    """Of an optimizer that steps over parameters whole: those in one rank's slice, the rank of `slice_numel`."""
    share: float = 1.0
    """How much of `wholes` counts, see `Layout.evened`."""
    trainable: bool = field(init=False, repr=False, compare=False)
    is_updated: bool = field(init=False, repr=False, compare=False)
    """Whether an optimizer has it."""
    optimizer: int = field(init=False, repr=False, compare=False)
    """Which of the model's."""
    is_whole: bool = field(init=False, repr=False, compare=False)
    """Whether that one steps over parameters whole: no slice, and no tier, has a part of one."""

    def __post_init__(self) -> None:
        spec = self.slots[0].spec
        object.__setattr__(self, "is_whole", spec.step_cost > 0)
        object.__setattr__(self, "trainable", spec.trainable)  # asked for span by span in every step
        object.__setattr__(self, "is_updated", spec.trainable and spec.group >= 0)
        object.__setattr__(self, "optimizer", spec.optimizer)

    @property
    def numel(self) -> int:
        return self.cuts[-1] if self.cuts else self.slice_numel * self.shards

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of a rank's slice, and the one after its last."""
        if self.cuts:
            return self.cuts[rank], self.cuts[rank + 1]
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    @property
    def spec(self) -> ParamSpec:
        """Any of its specs: dtypes, trainable and group are equal for all."""
        return self.slots[0].spec

    def part_of(self, slot: Slot, rank: int) -> Extent[Slot] | None:
        """The part of one parameter that `rank` owns, if any. "Here" is the rank's slice."""
        low, high = self.bounds(rank)
        part = Extent(slot, 0, slot.offset, slot.spec.numel).cut(low, high)
        return None if part is None else part.moved(-low)

    def overlaps(self, rank: int) -> Iterator[Extent[Slot]]:
        """The parts of this span's parameters that `rank` owns, in order. "Here" is the rank's slice."""
        return (part for slot in self.slots if (part := self.part_of(slot, rank)) is not None)

    def owner(self, slot: Slot) -> int:
        """The rank that has all of a parameter, where each has one owner; 0 where every rank has all."""
        if not self.cuts:
            return 0
        # A parameter without elements lies at a boundary, on nobody's side: the first rank that ends there has it.
        return next(rank for rank in range(self.shards) if slot.stop <= self.cuts[rank + 1])

    def owners(self, slot: Slot) -> Iterator[tuple[int, Extent[Slot]]]:
        """The ranks that own elements of one parameter, in order, each with its part as `overlaps` has it."""
        if not slot.spec.numel:  # nobody
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
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        return sum(span.used_numel for span in self.spans)

    @property
    def gathered_bytes(self) -> int:
        return sum(span.numel * itemsize(span.spec.compute_dtype) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Visit:
    """One module's forward that uses one unit, in its place in a pass. What memory a step takes follows from these."""

    unit: int
    is_embedding: bool = False
    """Its inputs are indices: its backward needs no weights, and nothing tells when it is over but the end of backward."""
    inner: tuple[Visit, ...] = ()
    """Visits that happen inside this one."""


@dataclass(slots=True)
class Use:
    """When a pass forward uses one unit, on a clock that counts where modules begin and end. 0: not at all."""

    first: int = 0
    """Its first use begins."""
    read: int = 0
    """Its first use whose backward needs the weights begins: an embedding's does not."""
    last: int = 0
    """Its last use ends."""
    is_reached: bool = False
    """Backward comes to a use of its weights."""


@dataclass(frozen=True, slots=True)
class Layout:
    """All units of one model, cut for `shards` owners."""

    units: tuple[UnitLayout, ...]
    shards: int
    visits: tuple[Visit, ...] = ()
    """A pass forward, as far as the model's structure shows it; without one every unit is used once, one after another."""

    @property
    def spans(self) -> Iterator[Span]:
        for unit in self.units:
            yield from unit.spans

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def trainable_numel(self) -> int:
        return sum(span.used_numel for span in self.spans if span.trainable)

    def uses(self) -> list[Use]:
        """By unit."""
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
        out = [Use() for _ in self.units]
        for visit, begin, stop in seen:
            use = out[visit.unit]
            use.first = min(use.first or begin, begin)
            use.last = max(use.last, stop)
            if not visit.is_embedding:
                use.read = min(use.read or begin, begin)
                use.is_reached = use.is_reached or begin >= start
        return out

    def brought_in_twice(self) -> list[int]:
        """Units that a pass gathers for its forward and again for its backward, if nothing keeps them: what ends the forward is
        still there when backward begins, and an embedding's backward needs no weights. Those used last first.
        """
        uses = self.uses()
        end = max((use.last for use in uses), default=0)
        found = [at for at, use in enumerate(uses) if use.first and use.is_reached and use.last < end]
        return sorted(found, key=lambda at: uses[at].last, reverse=True)

    def seen_from(self, rank: int) -> Layout:
        """The same, where `slice_numel` of ragged slices is this rank's."""
        if not any(span.cuts for span in self.spans):
            return self

        def own(span: Span) -> Span:
            low, high = span.bounds(rank)
            return replace(span, slice_numel=high - low, wholes=_owned(span, rank), share=1.0) if span.cuts else span

        return self._each(own)

    def evened(self) -> Layout:
        """The same from every rank: of ragged slices a rank has as much as the one that owns most, in equal parts of each."""
        share = max(self.imbalance(), default=0.0) / self.shards

        def even(span: Span) -> Span:
            return replace(span, slice_numel=ceil(span.numel * share), wholes=span.slots, share=share)

        return self._each(lambda span: even(span) if span.cuts else span) if share else self

    def _each(self, of: Callable[[Span], Span]) -> Layout:
        units = (replace(unit, spans=tuple(map(of, unit.spans))) for unit in self.units)
        return replace(self, units=tuple(units))

    def imbalance(self) -> tuple[float, ...]:
        """By rank, the elements of parameters with one owner that it owns, over the mean of all ranks; empty without any."""
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
        """Cut `(unit name, its parameters)` pairs for `shards` owners. Without `visits`, units are used in this order.

        Parameters keep the order given within their span, but for those whose elements are no multiple of `ALIGN_NUMEL`, which
        come last; spans are ordered by their first parameter.
        """
        out: list[UnitLayout] = []
        index = 0
        units = [(name, list(specs)) for name, specs in units]
        owner_of = _dealt([spec for _, specs in units for spec in specs], shards)
        for name, specs in units:
            buckets: dict[SpanKey, list[ParamSpec]] = {}
            for spec in specs:
                buckets.setdefault(spec.key, []).append(spec)
            spans = []
            for bucket in buckets.values():
                spans.append(_cut(index, bucket, shards, owner_of))
                index += 1
            out.append(UnitLayout(name, tuple(spans)))
        order = [Visit(place) for place in range(len(out))] if visits is None else visits
        return Layout(tuple(out), shards, tuple(order))


def _dealt(specs: Sequence[ParamSpec], shards: int) -> dict[str, int]:
    """By name, the owner of each parameter that has one."""
    loads = [(0, 0, rank) for rank in range(shards)]
    owner_of = {}
    # A stable sort, and a heap whose ties end with the rank: every rank computes this by itself, and must get the same owners.
    for spec in sorted((spec for spec in specs if spec.step_cost > 0), key=lambda spec: -spec.step_cost):
        cost, numel, rank = heappop(loads)
        owner_of[spec.name] = rank
        heappush(loads, (cost + (spec.step_cost if spec.numel else 0), numel + spec.numel, rank))
    return owner_of


def _cut(index: int, specs: Sequence[ParamSpec], shards: int, owner_of: Mapping[str, int]) -> Span:
    is_whole = specs[0].step_cost > 0 and shards > 1
    specs = sorted(specs, key=lambda spec: (is_whole and owner_of[spec.name], spec.numel % ALIGN_NUMEL != 0))
    slots, offset = [], 0
    for spec in specs:
        slots.append(Slot(spec, offset))
        offset += spec.numel
    if is_whole:
        stops = {owner_of[slot.spec.name]: slot.stop for slot in slots}
        cuts = [0]
        for rank in range(shards):  # who owns nothing here ends where the one before does
            cuts.append(stops.get(rank, cuts[-1]))
        largest = max(high - low for low, high in pairwise(cuts))
        span = Span(index, tuple(slots), offset, largest, shards, tuple(cuts))
        rank = next(rank for rank in range(shards) if cuts[rank + 1] - cuts[rank] == largest)
        return replace(span, wholes=_owned(span, rank))
    # Rounded up twice: slices are equal, so that a collective needs no lengths, and may lie beyond the last parameter.
    per_shard = -(-offset // shards)
    slice_numel = -(-per_shard // ALIGN_NUMEL) * ALIGN_NUMEL
    return Span(index, tuple(slots), offset, slice_numel, shards, wholes=tuple(slots) if specs[0].step_cost > 0 else ())


def _owned(span: Span, rank: int) -> tuple[Slot, ...]:
    return tuple(slot for slot in span.slots if span.owner(slot) == rank)
