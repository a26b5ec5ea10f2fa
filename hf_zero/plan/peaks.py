"""Temporary bytes of a step and their peak: gathered units, gradients that are being reduced, host buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..core.layout import SpanLayout, UnitLayout, UseTimes, itemsize
from ..tiers.storage import KEPT_BUFFERS
from ..tiers.tier import Tier, padded
from .costs import (
    KINDS,
    TIERS,
    Memory,
    Placement,
    Setup,
    gradient_itemsize,
    has_one_type,
    state_bytes,
    stays,
    stored_itemsize,
    stores_gradients,
    wire_dtype,
)


@dataclass(slots=True)
class _UnitBytes:
    """Bytes that one unit adds in a pass."""

    use: UseTimes
    stays: bool
    """Gathered from its forward to its backward."""
    full: int = 0
    """Gathered, of spans that are released."""
    fresh: int = 0
    """Local gradients, without those that add up in place."""
    copying: int = 0
    """The peak of local gradients and their copies together."""
    moving: int = 0
    """Copies and means, until the next unit's reduce begins."""
    kept: int = 0
    """Stored on the device."""
    held: int = 0
    """Local gradients between backwards, where only the last one reduces."""
    tied: int = 0
    """Local gradients that autograd keeps until it has those of an embedding with the same weights."""
    reads: int = 0
    """Host buffers for spans that are read from disk."""
    cast: int = 0
    """The largest second buffer, for values that are cast."""
    down: list[int] = field(default_factory=list)
    """Gradients that need a buffer each on their way to host memory."""


@dataclass(slots=True)
class _Peaks:
    """Peaks of the temporary bytes in a step's passes.

    Attributes:
        gathered: of gathered units; `communication`, `gradients`: of local and of stored ones, each at its own moment.
        device: of the three at one moment.
    """

    gathered: int = 0
    communication: int = 0
    gradients: int = 0
    device: int = 0

    def update(self, gathered: int, communication: int, gradients: int) -> None:
        self.gathered = max(self.gathered, gathered)
        self.communication = max(self.communication, communication)
        self.gradients = max(self.gradients, gradients)
        self.device = max(self.device, gathered + communication + gradients)


def _passes(units: Sequence[_UnitBytes], setup: Setup) -> _Peaks:
    """Return the peaks over the moments in which units begin in the forward and are reduced in the backward (docs/PLAN.md).

    Args:
        units: in the order of their first uses; the backward reduces them in reverse.
    """
    peaks = _Peaks()
    adds, alone = setup.backward_per_step > 1 and not setup.reduces_once, setup.world_size == 1
    stored = sum(unit.kept for unit in units) if adds else 0
    held = sum(unit.held for unit in units)
    following = [*units[1:], None]
    wide = [unit for unit, after in zip(units, following) if unit.stays or (after and unit.use.last > after.use.first)]
    for unit, after in zip(units, following):
        now = unit.use.first
        there = sum(each.full for each in wide if each.use.first < now and (each.stays or each.use.last > now))
        peaks.update(there + unit.full + (after.full if after else 0), 0, stored + held)
    reached = sorted((unit for unit in units if unit.use.is_reached), key=lambda unit: unit.use.last)
    moving = coming = 0
    for unit in reversed(units):
        now = unit.use.first
        while reached and reached[-1].use.last >= now:
            reached.pop()
        ahead = next((each.full for each in reversed(reached) if not each.stays), 0)
        # An embedding's backward needs no weights; a tied head left its unit, and its gradient waits for the embedding's.
        own = unit.full if unit.use.is_reached and unit.use.read == now else 0
        there = own + sum(
            each.full
            for each in wide
            if each is not unit
            and each.use.is_reached
            and each.use.read <= now
            and (each.stays or each.use.last >= now)
        )
        waiting = sum(each.tied for each in wide if each.use.read > now >= each.use.first)
        if not (unit.fresh or unit.held):
            peaks.update(there + ahead, moving + waiting, stored + held)
            continue
        # The mean of the reduce before is stored when the next one begins. Not among replicas, the next unit is gathered then.
        fetches_late = moving and setup.layout.shards == setup.world_size
        peaks.update(there + (0 if fetches_late else ahead), unit.fresh + moving + waiting, stored + held)
        stored += 0 if adds else unit.kept if alone else coming
        peaks.update(there + ahead, unit.fresh + waiting, stored + held)
        held -= unit.held
        peaks.update(there + ahead - own, unit.copying + waiting, stored + held)
        moving, coming = unit.moving, unit.kept
    peaks.update(0, 0, stored + (0 if adds or alone else coming))
    return peaks


def _host_bytes(units: Sequence[_UnitBytes], setup: Setup) -> tuple[int, int]:
    """Return bytes of host buffers in the passes, and of those that the pool keeps between backward and step.

    Two units are read at a time, the last one twice, and one more buffer was too small or is in use.
    Gradients use one buffer after the other, or stay in them until the step.
    """
    reads = max((a.reads + b.reads + a.cast for a, b in pairwise([*units, *units[-1:]])), default=0)
    reads += max((unit.reads for unit in units), default=0)
    buffers = [nbytes for unit in units for nbytes in unit.down]
    if setup.steps_at_once:
        sums = [sum(unit.down) for unit in units]
        landing = max((sum(sums[at : at + 3]) for at in range(len(sums))), default=0)
    else:
        landing = max((a + b for a, b in pairwise([*buffers, *buffers[-1:]])), default=0)
    singles = sorted([*buffers, *(unit.reads for unit in units)], reverse=True)
    return reads + landing, min(reads + landing, sum(singles[:KEPT_BUFFERS]))


def _unit_bytes(unit: UnitLayout, use: UseTimes, at: int, placements: Sequence[Placement], setup: Setup) -> _UnitBytes:
    """Return the bytes of one unit; `at`: its index in the layout."""
    out = _UnitBytes(use, stays=at in (setup.kept or ()))
    for span in unit.spans:
        placement, compute = placements[span.index], itemsize(span.spec.compute_dtype)
        if stays(span, placement, setup.policy):
            continue
        out.full += span.numel * compute
        if placement.parameters is Tier.DISK:
            stored = stored_itemsize(span, placement, setup)
            out.reads += span.slice_numel * stored
            # Values of another type in their file go through a second buffer.
            out.cast = max(out.cast, 0 if stored == compute else span.slice_numel * compute)
    trained = [span for span in unit.spans if span.is_updated]
    own = [span.used_numel * itemsize(span.spec.compute_dtype) for span in trained]
    left = sum(own)
    for span, nbytes in zip(trained, own):
        placement, master = placements[span.index], itemsize(span.spec.master_dtype)
        bucket = copies = _bucket_bytes(span, setup)
        if not setup.reduces_once:
            out.fresh += nbytes
        elif span.spec.compute_dtype == span.spec.master_dtype:  # they add up in place
            out.held += nbytes
        else:  # in a copy, which is copied once more where it is sent in a narrower type
            wide = span.numel * max(itemsize(wire_dtype(span, setup)), min(master, 4))
            out.fresh, out.held, copies = out.fresh + nbytes, out.held + wide, wide + (bucket if bucket < wide else 0)
        out.copying = max(out.copying, left + out.moving + copies)
        left -= nbytes
        if setup.world_size > 1:
            out.moving += (bucket or nbytes) + span.slice_numel * master
        out.copying = max(out.copying, left + out.moving)
        out.kept += span.slice_numel * master if placement.optimizer is Tier.DEVICE else 0
        if use.read > use.first:
            shared = (slot.spec.numel for slot in span.slots if len(slot.spec.names) > 1)
            out.tied += sum(shared) * itemsize(span.spec.compute_dtype)
        out.down.append(_landing_bytes(span, placement, setup))
    return out


def _bucket_bytes(span: SpanLayout, setup: Setup) -> int:
    """Return bytes of the copy of local gradients that is sent; 0 where they are sent without one."""
    if setup.is_cpu and len(span.slots) == 1 and span.spec.compute_dtype == wire_dtype(span, setup):
        return 0
    return span.numel * itemsize(wire_dtype(span, setup))


def _landing_bytes(span: SpanLayout, placement: Placement, setup: Setup) -> int:
    """Return bytes of the buffer for a gradient on its way to host memory or disk; 0 where it is stored directly.

    Where the device is the host, only gradients to which others are added have one.
    """
    tier = placement.optimizer
    if tier is None or not placement.is_offloaded:
        return 0
    dtype = span.spec.compute_dtype if setup.world_size == 1 else span.spec.master_dtype
    arriving, stored = 0 if setup.is_cpu else itemsize(dtype), gradient_itemsize(span, tier, setup)
    adds, is_on_disk = setup.backward_per_step > 1 and not setup.reduces_once, stores_gradients(tier, setup)
    if not (setup.steps_at_once or adds or is_on_disk or arriving < stored):
        return 0
    # The gradient for the disk, and the one that it is added to, which was read.
    return span.slice_numel * (arriving + (stored if adds and is_on_disk else 0))


def block_bytes(placements: Sequence[Placement], setup: Setup) -> int:
    """Return host bytes of blocks that are cast on their way to the device, and of slabs and full matrices of the disk tier."""
    sizes = setup.sizes
    lanes = blocks = records = largest = 0
    for span, placement in zip(setup.layout.spans, placements):
        if placement.optimizer is Tier.DISK:
            count, nbytes = _records(span, setup)
            records, largest = records + count, max(largest, nbytes)
        if placement.is_offloaded and placement.parameters is Tier.DEVICE and not has_one_type(span):
            blocks += -(-span.slice_numel // sizes.block_numel)
            lanes = max(lanes, sizes.block_numel * itemsize(span.spec.compute_dtype))
    return min(0 if setup.is_cpu else sizes.lanes, blocks) * lanes + min(sizes.slabs, records) * largest


def _records(span: SpanLayout, setup: Setup) -> tuple[int, int]:
    """Return how many slabs or full matrices of a span the disk tier updates one by one, and the bytes of the largest."""
    master = itemsize(span.spec.master_dtype)
    gradient = gradient_itemsize(span, Tier.DISK, setup) if stores_gradients(Tier.DISK, setup) else 0
    if span.is_unsliced:
        found = [(slot.spec.numel, slot.spec.state_bytes) for slot in span.owned_slots if span.slice_numel]
    else:
        slab = min(span.slice_numel, setup.sizes.slab_numel)
        found = [(slab, (slab * master,) * setup.optimizer_tensors)]
    count = len(found) if span.is_unsliced else -(-span.slice_numel // setup.sizes.slab_numel)
    sizes = (sum(map(padded, (numel * master, numel * gradient, *states))) for numel, states in found)
    return count, max(sizes, default=0)


def matrix_bytes(placements: Sequence[Placement], setup: Setup) -> int:
    """Return device bytes of the step over an offloaded full matrix: master, gradient and states of the largest one."""
    sizes = (
        2 * slot.spec.numel * itemsize(span.spec.master_dtype) + sum(slot.spec.state_bytes)
        for span, placement in zip(setup.layout.spans, placements)
        if span.is_unsliced and span.slice_numel and placement.is_offloaded and not setup.is_cpu
        for slot in span.owned_slots
    )
    return max(sizes, default=0)


def memory_of(placements: Sequence[Placement], setup: Setup, activations: tuple[int, int, int]) -> Memory:
    """Return bytes per rank for `placements`, one per span by index; `activations` by tier."""
    stored = {tier: dict.fromkeys(KINDS, 0) for tier in TIERS}
    for span, placement in zip(setup.layout.spans, placements):
        for (tier, kind), value in state_bytes(span, placement, setup).items():
            stored[tier][kind] += value
    layout, uses = setup.layout, setup.layout.uses()
    order = sorted((at for at, use in enumerate(uses) if use.first), key=lambda at: uses[at].first)
    units = [_unit_bytes(layout.units[at], uses[at], at, placements, setup) for at in order]
    passes, (scratch, resting_scratch) = _passes(units, setup), _host_bytes(units, setup)
    blocks = block_bytes(placements, setup)
    on_device = matrix_bytes(placements, setup)
    stored[Tier.HOST]["staging"] = blocks + resting_scratch
    peak = {tier: dict(kinds) for tier, kinds in stored.items()}
    device, host = peak[Tier.DEVICE], peak[Tier.HOST]
    device |= {"gathered": passes.gathered, "communication": passes.communication, "gradients": passes.gradients}
    host["staging"] = blocks + scratch
    device["staging"] = on_device
    for tier, nbytes in zip(TIERS, activations):
        peak[tier]["activations"] = nbytes
    highest = {tier: sum(kinds.values()) for tier, kinds in peak.items()}
    alone = passes.device + device["activations"], on_device  # between passes, or as they begin
    highest[Tier.DEVICE] = device["parameters"] + device["optimizer"] + max(alone)
    return Memory(stored, peak, highest)
