"""Where each parameter's elements live: integers only, for any number of ranks, without a process group.

A **unit** is a set of parameters that move together. Its parameters are cut into **spans** of equal (dtype, compute
dtype, trainable, optimizer group). A span is one 1-D buffer, its parameters one after another in row-major order,
padded at the end so that it divides into `shards` equal slices of a multiple of `ALIGN` elements. Rank r owns slice r.
From this arithmetic come the gather and reduce buffers, the optimizer's tensors, byte counts and checkpoint ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")

ALIGN_NUMEL = 32
"""Slices are multiples of this many elements: 64 bytes for two-byte types, 128 for four."""

ITEMSIZE = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}


def itemsize(dtype: str) -> int:
    """Bytes per element of a torch dtype given by its bare name."""
    return ITEMSIZE.get(dtype, 1)


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
    cohort: int = 0
    """Parameters of one span have gradients in the same steps, so that a parameter without one is left alone: not decayed, not
    counted in its optimizer's `step`. Those that were seen without one while others of their span had one get a number."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        numel = 1
        for extent in self.shape:
            numel *= extent
        return numel

    @property
    def key(self) -> tuple[str, str, str, bool, int, int]:
        return (self.dtype, self.compute_dtype, self.master_dtype, self.trainable, self.group, self.cohort)


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
    shards: int
    trainable: bool = field(init=False, repr=False, compare=False)
    is_updated: bool = field(init=False, repr=False, compare=False)
    """Whether an optimizer has it."""

    def __post_init__(self) -> None:
        spec = self.slots[0].spec
        object.__setattr__(self, "trainable", spec.trainable)  # asked for span by span in every step
        object.__setattr__(self, "is_updated", spec.trainable and spec.group >= 0)

    @property
    def numel(self) -> int:
        return self.slice_numel * self.shards

    @property
    def spec(self) -> ParamSpec:
        """Any of its specs: dtypes, trainable and group are equal for all."""
        return self.slots[0].spec

    def overlaps(self, rank: int) -> Iterator[Extent[Slot]]:
        """The parts of this span's parameters that `rank` owns, in order. "Here" is the rank's slice."""
        low, high = rank * self.slice_numel, (rank + 1) * self.slice_numel
        for slot in self.slots:
            part = Extent(slot, 0, slot.offset, slot.spec.numel).cut(low, high)
            if part is not None:
                yield part.moved(-low)

    def owners(self, slot: Slot) -> Iterator[tuple[int, Extent[Slot]]]:
        """The ranks that own elements of one parameter, in order, each with its part as `overlaps` has it."""
        if not slot.spec.numel:  # nobody
            return
        for rank in range(slot.offset // self.slice_numel, -(-slot.stop // self.slice_numel)):
            low = rank * self.slice_numel
            part = Extent(slot, 0, slot.offset, slot.spec.numel).cut(low, low + self.slice_numel)
            if part is not None:
                yield rank, part.moved(-low)


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

    @staticmethod
    def build(
        units: Iterable[tuple[str, Sequence[ParamSpec]]], shards: int, visits: Sequence[Visit] | None = None
    ) -> Layout:
        """Cut `(unit name, its parameters)` pairs for `shards` owners. Without `visits`, units are used in this order.

        Parameters keep the order given within their span; spans are ordered by their first parameter.
        """
        out: list[UnitLayout] = []
        index = 0
        for name, specs in units:
            buckets: dict[tuple[str, str, str, bool, int, int], list[ParamSpec]] = {}
            for spec in specs:
                buckets.setdefault(spec.key, []).append(spec)
            spans = []
            for bucket in buckets.values():
                spans.append(_cut(index, bucket, shards))
                index += 1
            out.append(UnitLayout(name, tuple(spans)))
        order = [Visit(place) for place in range(len(out))] if visits is None else visits
        return Layout(tuple(out), shards, tuple(order))


def _cut(index: int, specs: Sequence[ParamSpec], shards: int) -> Span:
    slots, offset = [], 0
    for spec in specs:
        slots.append(Slot(spec, offset))
        offset += spec.numel
    per_shard = -(-offset // shards)
    slice_numel = -(-per_shard // ALIGN_NUMEL) * ALIGN_NUMEL
    return Span(index, tuple(slots), offset, slice_numel, shards)
