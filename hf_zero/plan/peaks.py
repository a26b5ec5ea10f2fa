"""Temporary bytes of a step, and their highest moment: gathered units, gradients that are reduced, buffers of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..core.layout import SpanLayout, UnitLayout, UseTimes, itemsize
from ..tiers.pool import KEPT_BUFFERS
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
    """The most of these and of their copies together."""
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


class _Passes:
    """Walks through the passes of a step, and keeps their highest temporary bytes.

    A unit is gathered from its first use to its last, and the next one with it. In the backward its local gradients exist
    together with the buffer and the mean of the unit before it (docs/PLAN.md).

    Attributes:
        gathered: the most of gathered units; `communication`, `gradients`: of local and of stored ones.
        device: the most of the three at one moment.
        there: gathered bytes of units in use or kept; `ahead`: of the prefetched unit.
        deferred: the unit that is gathered after the running reduce. Not among replicas (`fetches_late`).
        moving: buffer and mean of that reduce; `coming`: the gradients that are stored with it.
        waiting: gradients that autograd keeps until it has others of the same parameter.
        kept: stored gradients; `held`: local ones of earlier backwards.
    """

    def __init__(self, units: Sequence[_UnitBytes], setup: Setup) -> None:
        """`units`: in the order of their first uses."""
        self.gathered = self.communication = self.gradients = self.device = 0
        self.fetches_late = setup.layout.shards == setup.world_size
        self.alone, self.adds = setup.world_size == 1, setup.backward_per_step > 1 and not setup.reduces_once
        self.forward(units)
        self.backward(units[::-1])

    def forward(self, units: Sequence[_UnitBytes]) -> None:
        """Count gathered bytes; units that stay are not released."""
        events = [(unit.use.first, True, place) for place, unit in enumerate(units)]
        events += [(unit.use.last, False, place) for place, unit in enumerate(units)]
        there = 0
        for _, begins, place in sorted(events):
            unit = units[place]
            following = units[place + 1] if place + 1 < len(units) else None
            if begins:
                there += unit.full
            else:
                there -= 0 if unit.stays else unit.full
            ahead = following.full if begins and following is not None else 0
            self.gathered = max(self.gathered, there + ahead)

    def backward(self, units: Sequence[_UnitBytes]) -> None:
        """Count bytes over the units in the order of their reduces: those used first come last."""
        self.units = units
        self.there, self.ahead = sum(unit.full for unit in units if unit.stays), 0
        self.waiting = self.moving = self.coming = 0
        self.kept = sum(unit.kept for unit in units) if self.adds else 0
        self.held = sum(unit.held for unit in units)
        self.deferred: int | None = None
        walk = sorted((at for at, unit in enumerate(units) if unit.use.is_reached), key=lambda at: -units[at].use.last)
        self.next_of = {
            at: next((later for later in walk[n + 1 :] if not units[later].stays), None) for n, at in enumerate(walk)
        }
        # At one moment units enter first, then gradients are reduced, then units leave.
        events = [(-units[at].use.last, 0, self.enter, at) for at in walk]
        events += [(-unit.use.first, 1, self.reduce, at) for at, unit in enumerate(units) if unit.fresh or unit.held]
        events += [(-units[at].use.read, 2, self.leave, at) for at in walk]
        self.update_peaks(0)
        self.device = max(self.device, self.gathered + self.kept + self.held)
        for _, _, what, at in sorted(events, key=lambda event: (event[0], event[1], event[3])):
            what(at)
        self.kept += 0 if self.adds or self.alone else self.coming
        self.update_peaks(0)

    def update_peaks(self, passing: int, gone: int = 0) -> None:
        gathered, gradients = self.there + self.ahead - gone, self.kept + self.held
        self.gathered = max(self.gathered, gathered)
        self.communication = max(self.communication, passing)
        self.gradients = max(self.gradients, gradients)
        self.device = max(self.device, gathered + passing + gradients)

    def enter(self, at: int) -> None:
        self.fetch()
        unit, following = self.units[at], self.next_of[at]
        self.there += 0 if unit.stays else unit.full
        self.ahead = 0 if following is None else self.units[following].full
        if self.fetches_late and self.ahead and self.moving and (unit.fresh or unit.held):
            self.deferred, self.ahead = following, 0
        self.update_peaks(self.moving + self.waiting)

    def fetch(self) -> None:
        if self.deferred is not None:
            self.end_reduce()
            self.ahead = self.units[self.deferred].full
            self.update_peaks(self.waiting)
            self.deferred = None

    def end_reduce(self) -> None:
        self.kept += 0 if self.adds else self.coming
        self.moving = self.coming = 0

    def reduce(self, at: int) -> None:
        unit, use = self.units[at], self.units[at].use
        if self.deferred is not None:  # all local gradients may exist before a hook runs
            self.update_peaks(unit.fresh + self.moving + self.waiting)
            self.fetch()
        self.update_peaks(unit.fresh + self.moving + self.waiting)
        self.end_reduce()
        self.kept += unit.kept if self.alone and not self.adds else 0
        self.held -= unit.held
        self.update_peaks(unit.copying + self.waiting, unit.full if use.is_reached and use.read == use.first else 0)
        self.moving, self.coming = unit.moving, 0 if self.alone else unit.kept
        self.waiting -= unit.tied if use.is_reached and use.read > use.first else 0

    def leave(self, at: int) -> None:
        self.there -= self.units[at].full
        self.waiting += self.units[at].tied


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
    if span.is_whole:
        found = [(slot.spec.numel, slot.spec.state_bytes) for slot in span.owned_slots if span.slice_numel]
    else:
        slab = min(span.slice_numel, setup.sizes.slab_numel)
        found = [(slab, (slab * master,) * setup.optimizer_tensors)]
    count = len(found) if span.is_whole else -(-span.slice_numel // setup.sizes.slab_numel)
    sizes = (sum(map(padded, (numel * master, numel * gradient, *states))) for numel, states in found)
    return count, max(sizes, default=0)


def matrix_bytes(placements: Sequence[Placement], setup: Setup) -> int:
    """Return device bytes of the step over an offloaded full matrix: master, gradient and states of the largest one."""
    sizes = (
        2 * slot.spec.numel * itemsize(span.spec.master_dtype) + sum(slot.spec.state_bytes)
        for span, placement in zip(setup.layout.spans, placements)
        if span.is_whole and span.slice_numel and placement.is_offloaded and not setup.is_cpu
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
    passes, (scratch, resting_scratch) = _Passes(units, setup), _host_bytes(units, setup)
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
