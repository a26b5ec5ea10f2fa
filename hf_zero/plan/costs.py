"""Bytes that one rank holds, by tier and kind, for a layout and a placement. Every formula is one small function.

Words: a span's slice is this rank's part of it. `own` is the slice in the compute dtype, at rest in the parameter tier. A
*shard* is a stretch of the slice at rest in one optimizer tier: master, gradient, optimizer states. Where both types and both
tiers are equal, `own` is the master.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..config import StagePolicy
from ..core.layout import Layout, Span, UnitLayout, Visit, itemsize
from ..tiers.tier import SIZES, Sizes, Tier, padded
from .passes import High, Manner, SpanBytes, UnitBytes, play

KINDS = ("parameters", "gradients", "optimizer", "gathered", "communication", "staging", "activations")
STATES = ("parameters", "gradients", "optimizer")
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""Fastest first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one span rests, on every rank alike."""

    parameters: Tier
    """Where `own` rests."""
    optimizer: tuple[tuple[Tier, int], ...]
    """Consecutive stretches of the slice as (tier, elements), multiples of `ALIGN_NUMEL`; () for frozen spans."""

    def numel(self, tier: Tier) -> int:
        """Elements of the slice whose optimizer state rests in `tier`."""
        return sum(numel for place, numel in self.optimizer if place is tier)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the formulas need to know beside the layout and the placements."""

    policy: StagePolicy
    world_size: int
    reduce_dtype: str = "float32"
    optimizer_tensors: int = 2
    """Tensors of optimizer state per master element: 2 for Adam."""
    backward_per_step: int = 1
    step_in_backward: bool = False
    is_cpu: bool = False
    """The device is the CPU: its wire takes fresh gradients of a span of one parameter as they are, and a copy over the link is
    over at once, so that one block serves all.
    """
    in_files: frozenset[str] = frozenset()
    """Parameters whose values are in the model's own files, where they stay as long as they are frozen and rest on disk."""
    sizes: Sizes = SIZES
    """Of the blocks and records that the engine works in."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by tier and kind.

    `rest` is what is there between backward and step; `peak` the highest of each kind, with what comes and goes. These are not
    all there at one time. Fresh gradients on their way to their owner count as communication.
    """

    rest: Mapping[Tier, Mapping[str, int]]
    peak: Mapping[Tier, Mapping[str, int]]
    highest: Mapping[Tier, int]
    """By tier: all that is there at the highest moment."""
    most: Mapping[Tier, int]
    """A bound above it: with all states at rest and complete, which makes it linear in what rests where."""

    def at_rest(self, tier: Tier) -> int:
        return sum(self.rest[tier].values())

    def at_peak(self, tier: Tier) -> int:
        """At the highest moment."""
        return self.highest[tier]

    def at_most(self, tier: Tier) -> int:
        """What budgets are compared with."""
        return self.most[tier]

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer state over all tiers."""
        return sum(kinds[kind] for kinds in self.rest.values() for kind in STATES)


def together(tier: Tier, span: Span, stretches: Sequence[tuple[Tier, int]]) -> Tier:
    """The tier of `own`: never slower than the slowest master where the two are of one type, as they are one memory then."""
    if not stretches or span.spec.compute_dtype != span.spec.master_dtype:
        return tier
    return min(tier, max((place for place, _ in stretches), key=TIERS.index), key=TIERS.index)


def stays(span: Span, placement: Placement, policy: StagePolicy) -> bool:
    """Whether the whole span is in device memory all the time."""
    return placement.parameters is Tier.DEVICE and (policy.keep_full or span.shards == 1)


def slice_bytes(span: Span) -> int:
    """`own`."""
    return span.slice_numel * itemsize(span.spec.compute_dtype)


def is_in_files(span: Span, placement: Placement, setup: Setup) -> bool:
    """Whether a frozen span stays where it is in the model's own files."""
    if placement.parameters is not Tier.DISK or span.trainable:
        return False
    return all(slot.spec.name in setup.in_files for slot in span.slots)


def parameter_bytes(span: Span, placement: Placement, setup: Setup) -> int:
    """In the parameter tier: `own`, or all of the span where it stays; on disk whole pages, where not the master's array."""
    if is_in_files(span, placement, setup):
        return 0
    numel = span.numel if stays(span, placement, setup.policy) else span.slice_numel
    nbytes = numel * itemsize(span.spec.compute_dtype)
    return padded(nbytes) if placement.parameters is Tier.DISK and not _shares_array(span, placement) else nbytes


def _shares_array(span: Span, placement: Placement) -> bool:
    """On disk: `own` is the masters' array."""
    if placement.parameters is not Tier.DISK or span.spec.compute_dtype != span.spec.master_dtype:
        return False
    return not placement.optimizer or (len(placement.optimizer) == 1 and placement.optimizer[0][0] is Tier.DISK)


def master_bytes(span: Span, placement: Placement, tier: Tier) -> int:
    """Masters in `tier`, in memory, that are a memory of their own."""
    same = span.spec.compute_dtype == span.spec.master_dtype
    if same and placement.parameters is tier:
        return 0
    numel = placement.numel(tier)
    if not placement.optimizer and not same and placement.parameters is tier:
        numel = span.slice_numel  # a frozen span keeps its own values beside those it computes with
    return numel * itemsize(span.spec.master_dtype)


def disk_bytes(span: Span, numel: int, tensors: int) -> int:
    """Master and states of `numel` elements, each an array of whole pages on disk, or in a slab."""
    return (1 + tensors) * padded(numel * itemsize(span.spec.master_dtype))


def optimizer_bytes(span: Span, placement: Placement, tier: Tier, setup: Setup) -> int:
    """Optimizer states in `tier`, and masters that are a memory of their own; on disk, in whole pages.

    Where the masters on disk are the parameters themselves, these count as parameters, and all padding here.
    """
    tensors = setup.optimizer_tensors
    if tier is not Tier.DISK:
        states = placement.numel(tier) * itemsize(span.spec.master_dtype) * tensors
        return states + master_bytes(span, placement, tier)
    if is_in_files(span, placement, setup):
        return 0
    arrays = sum(disk_bytes(span, numel, tensors) for place, numel in placement.optimizer if place is tier)
    if not placement.optimizer and placement.parameters is tier:
        arrays = disk_bytes(span, span.slice_numel, 0)
    return arrays - (slice_bytes(span) if _shares_array(span, placement) else 0)


def gradient_itemsize(span: Span, tier: Tier, setup: Setup) -> int:
    """Bytes per gradient element at rest.

    Float32 (the master's type) is what sums over ranks and backwards need. Alone, with one backward per step, a gradient that
    rests below the device keeps the type it came in, but for float16, which loss scalers unscale. Stepped in backward, it does
    not rest.
    """
    if tier is Tier.DEVICE:
        return itemsize(span.spec.master_dtype)
    if setup.backward_per_step == 1 and setup.step_in_backward:
        return 0
    if setup.backward_per_step == 1 and setup.world_size == 1 and span.spec.compute_dtype != "float16":
        return itemsize(span.spec.compute_dtype)
    return itemsize(span.spec.master_dtype)


def of_passes(layout: Layout, placements: Sequence[Placement], setup: Setup) -> High:
    """What comes and goes: gathered units, gradients on their way, buffers of the host."""
    copies = tied_copies(layout)
    tied = [nbytes * copies for nbytes in tied_bytes(layout)]
    units = [_unit_bytes(unit, tied_, placements, setup) for unit, tied_ in zip(layout.units, tied)]
    return play(layout.visits, units, _manner(layout, placements, setup))


def _manner(layout: Layout, placements: Sequence[Placement], setup: Setup) -> Manner:
    return Manner(
        frees=not setup.policy.keep_full,
        defers=setup.world_size > 1 and not setup.policy.reduce_each_backward,
        alone=setup.world_size == 1,
        consumes=setup.step_in_backward and setup.backward_per_step == 1,
        backwards=setup.backward_per_step,
    )


def _unit_bytes(unit: UnitLayout, tied: int, placements: Sequence[Placement], setup: Setup) -> UnitBytes:
    moved = [span for span in unit.spans if not stays(span, placements[span.index], setup.policy)]
    trained = [span for span in unit.spans if span.is_updated]
    return UnitBytes(
        full=sum(span.numel * itemsize(span.spec.compute_dtype) for span in moved),
        reads=tuple(
            _read_bytes(span, placements[span.index], setup)
            for span in moved
            if placements[span.index].parameters is Tier.DISK
        ),
        spans=tuple(_span_bytes(span, placements[span.index], setup) for span in trained),
        tied=tied,
        is_trained=bool(trained),
    )


def tied_bytes(layout: Layout) -> list[int]:
    """By unit: fresh gradients of parameters that an embedding has and another module, too."""
    kinds: list[set[bool]] = [set() for _ in layout.units]
    for visit in every(layout.visits):
        kinds[visit.unit].add(visit.is_embedding)
    return [
        sum(
            slot.spec.numel * itemsize(slot.spec.compute_dtype)
            for span in unit.spans
            if span.is_updated
            for slot in span.slots
            if len(slot.spec.names) > 1
        )
        if len(of) > 1
        else 0
        for unit, of in zip(layout.units, kinds)
    ]


def tied_copies(layout: Layout) -> int:
    """Of such a gradient, beside the one that stays, when it is added up: the other one, and their sum. Under autocast the one
    that waits has come through a cast, and is added to in place.
    """
    return 1 if any(span.spec.compute_dtype != span.spec.dtype for span in layout.spans) else 2


def every(visits: Sequence[Visit]) -> Iterator[Visit]:
    """Inner ones, too."""
    for visit in visits:
        yield visit
        yield from every(visit.inner)


def _read_bytes(span: Span, placement: Placement, setup: Setup) -> tuple[int, ...]:
    """The host buffer of one read, and a second one for what has another type in its file than where it is used."""
    stored = stored_itemsize(span, placement, setup)
    compute = itemsize(span.spec.compute_dtype)
    return (
        (span.slice_numel * stored,) if stored == compute else (span.slice_numel * stored, span.slice_numel * compute)
    )


def stored_itemsize(span: Span, placement: Placement, setup: Setup) -> int:
    """Of parameters on disk."""
    return itemsize(span.spec.master_dtype if is_in_files(span, placement, setup) else span.spec.compute_dtype)


def _span_bytes(span: Span, placement: Placement, setup: Setup) -> SpanBytes:
    compute, master = itemsize(span.spec.compute_dtype), itemsize(span.spec.master_dtype)
    reduced = itemsize(wire_dtype(span, setup))
    is_kept = len(placement.optimizer) == 1 and placement.optimizer[0][0] is Tier.DEVICE
    below = [numel for tier, numel in placement.optimizer if tier is not Tier.DEVICE]
    alone = setup.world_size == 1
    defers = not alone and not setup.policy.reduce_each_backward and setup.backward_per_step > 1
    holds = defers and span.spec.compute_dtype != span.spec.master_dtype
    is_sent_whole = setup.is_cpu and len(span.slots) == 1 and span.spec.compute_dtype == wire_dtype(span, setup)
    arriving = compute if alone else master
    rests = gradient_itemsize(span, Tier.HOST, setup)
    bucket = span.numel * (compute if alone else reduced)
    return SpanBytes(
        fresh=span.used_numel * compute,
        bucket=0 if (is_kept if alone else is_sent_whole) else bucket,
        mean=0 if alone else span.slice_numel * master,
        kept=placement.numel(Tier.DEVICE) * master,
        is_kept=is_kept,
        held=span.numel * max(reduced, min(master, 4)) if holds else 0,
        sent=span.numel * reduced if holds else 0,
        down=tuple(numel * arriving for numel in below),
        lands=arriving < rests,
    )


def wire_dtype(span: Span, setup: Setup) -> str:
    """Of gradients on the wire: masters that are no float32 are never narrowed."""
    return setup.reduce_dtype if span.spec.master_dtype == "float32" else span.spec.master_dtype


def scratch_bytes(layout: Layout, placements: Sequence[Placement], setup: Setup) -> int:
    """Host: a block for gradients that rest in another type than their masters', and two for parameters that are cast on their
    way up to the device.
    """
    sizes = setup.sizes
    block = lanes = blocks = 0
    for span, placement in zip(layout.spans, placements):
        compute, master = itemsize(span.spec.compute_dtype), itemsize(span.spec.master_dtype)
        below = [numel for tier, numel in placement.optimizer if tier is not Tier.DEVICE]
        if span.spec.compute_dtype == span.spec.master_dtype or not below:
            continue
        if (gradient_itemsize(span, Tier.HOST, setup) or (compute if setup.world_size == 1 else master)) != master:
            block = max(block, sizes.block_numel * master)
        if placement.parameters is Tier.DEVICE:
            blocks += sum(-(-numel // sizes.block_numel) for numel in below)
            lanes = max(lanes, sizes.block_numel * compute)
    return block + min(1 if setup.is_cpu else sizes.lanes, blocks) * lanes


def ring_bytes(layout: Layout, placements: Sequence[Placement], setup: Setup) -> int:
    """Host: the slabs under way of the disk tier."""
    sizes = setup.sizes
    count = largest = 0
    for span, placement in zip(layout.spans, placements):
        for tier, numel in placement.optimizer:
            if tier is Tier.DISK:
                count += -(-numel // sizes.slab_numel)
                slab = disk_bytes(span, min(numel, sizes.slab_numel), setup.optimizer_tensors)
                largest = max(largest, slab)
    return min(sizes.slabs, count) * largest


def state_bytes(span: Span, placement: Placement, setup: Setup) -> dict[tuple[Tier, str], int]:
    """One span's parameters, gradients and optimizer state at rest, by tier and kind."""
    out = {(tier, kind): 0 for tier in TIERS for kind in STATES}
    out[placement.parameters, "parameters"] = parameter_bytes(span, placement, setup)
    for tier in TIERS:
        out[tier, "optimizer"] = optimizer_bytes(span, placement, tier, setup)
    for tier, numel in placement.optimizer:
        home = Tier.DEVICE if tier is Tier.DEVICE else Tier.HOST
        out[home, "gradients"] += numel * gradient_itemsize(span, tier, setup)
    return out


def memory_of(
    layout: Layout, placements: Sequence[Placement], setup: Setup, activations: tuple[int, int] = (0, 0)
) -> Memory:
    """Bytes per rank for `placements`, one per span by index; `activations` in bytes on the device and on the host."""
    rest = {tier: dict.fromkeys(KINDS, 0) for tier in TIERS}
    for span, placement in zip(layout.spans, placements):
        for (tier, kind), value in state_bytes(span, placement, setup).items():
            rest[tier][kind] += value
    high = of_passes(layout, placements, setup)
    blocks = scratch_bytes(layout, placements, setup) + ring_bytes(layout, placements, setup)
    rest[Tier.HOST]["staging"] = blocks + high.resting_scratch
    peak = {tier: dict(kinds) for tier, kinds in rest.items()}
    device, host = peak[Tier.DEVICE], peak[Tier.HOST]
    device |= {"gathered": high.gathered, "communication": high.communication, "gradients": high.gradients}
    host["staging"] = max(high.scratch, blocks + high.later_scratch)
    device["activations"], host["activations"] = activations
    most = {tier: sum(kinds.values()) for tier, kinds in peak.items()}
    most[Tier.HOST] += blocks + high.later_scratch - host["staging"]
    highest = dict(most)
    most[Tier.DEVICE] += high.passing - high.gathered - high.communication
    highest[Tier.DEVICE] = device["parameters"] + device["optimizer"] + high.device + device["activations"]
    return Memory(rest, peak, highest, most)


def paper_states_bytes(parameters: int, policy: StagePolicy, ranks: int, optimizer_bytes: int = 12) -> float:
    """Bytes of model states per rank as Rajbhandari et al. (arXiv 1910.02054, figure 1) count them, to compare with them.

    fp16 parameters and gradients, 2 bytes each, and `optimizer_bytes` (K = 12: fp32 master, momentum, variance). This library's
    own figures differ: gradients rest at their owner alone, in float32, at stages 1, 2 and 3.
    """
    return parameters * (
        2 / (1 if policy.keep_full else ranks)
        + 2 / (ranks if policy.reduce_each_backward else 1)
        + optimizer_bytes / (ranks if policy.shard else 1)
    )
