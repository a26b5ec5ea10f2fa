"""Bytes that one rank holds, by tier and kind, for a layout and a placement. Every formula is one small function.

Words: a span's slice is this rank's part of it. `own` is the slice in the compute dtype, at rest in the parameter tier. A
*shard* is a stretch of the slice at rest in one optimizer tier: master, gradient, optimizer states. Where both types and both
tiers are equal, `own` is the master.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..comm.codec import gather_codec
from ..config import StagePolicy
from ..core.layout import Layout, Span, UnitLayout, Use, itemsize
from ..tiers.pool import KEPT_BUFFERS
from ..tiers.tier import SIZES, Sizes, Tier, padded

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
    wire: str = "none"
    """Format of codes in which gradients travel."""
    defers: bool = False
    """All micro-batches of a step but its last are inside `no_sync(defer=True)`."""
    kept: frozenset[int] = frozenset()
    """Units, by their place in the layout, that stay gathered between a forward and its backward."""
    parts: frozenset[int] = frozenset()
    """Units of which each rank keeps its part of what was gathered meanwhile, cut among the ranks of its node."""
    node_ranks: int = 1
    """Ranks of a node, where parameters are sharded over more than one; 1: else."""

    @property
    def reduces_once(self) -> bool:
        """Gradients of a step's backwards wait on this rank for the last of them."""
        if self.world_size == 1 or self.backward_per_step == 1:
            return False
        return self.defers or not self.policy.reduce_each_backward

    @property
    def reduces_per_step(self) -> int:
        return self.backward_per_step if self.policy.reduce_each_backward and not self.reduces_once else 1


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


def shares_memory(span: Span, policy: StagePolicy) -> bool:
    """Whether `own` is the master where both rest in one tier: of one type, and never overwritten with what is gathered."""
    rounded = policy.keep_full and gather_codec(span) is not None
    return span.spec.compute_dtype == span.spec.master_dtype and not rounded


def part_numel(span: Span, node_ranks: int) -> int:
    """Elements of a gathered span that each rank of a node keeps; the last ones may keep fewer."""
    return -(-span.numel // node_ranks)


def stays(span: Span, placement: Placement, policy: StagePolicy) -> bool:
    """Whether the whole span is in device memory all the time."""
    return placement.parameters is Tier.DEVICE and (policy.keep_full or span.shards == 1)


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


def master_bytes(span: Span, placement: Placement, tier: Tier, policy: StagePolicy) -> int:
    """Masters in `tier`, in memory, that are a memory of their own."""
    same = shares_memory(span, policy)
    if same and placement.parameters is tier:
        return 0
    numel = placement.numel(tier)
    if not placement.optimizer and not same and placement.parameters is tier:
        numel = span.slice_numel  # a frozen span keeps its own values beside those it computes with
    return numel * itemsize(span.spec.master_dtype)


def disk_bytes(span: Span, numel: int, tensors: int) -> int:
    """Master and states of `numel` elements, each an array of whole pages on disk, or in a slab."""
    return (1 + tensors) * padded(numel * itemsize(span.spec.master_dtype))


def tensors_bytes(span: Span, numel: int, tier: Tier, setup: Setup) -> int:
    """Optimizer states of `numel` elements that rest in `tier`; on disk, in whole pages.

    Of parameters that the optimizer steps over whole: what it makes of each, of whatever shape.
    """
    if not span.is_whole:
        nbytes = numel * itemsize(span.spec.master_dtype)
        return setup.optimizer_tensors * (padded(nbytes) if tier is Tier.DISK else nbytes)
    arrays = [nbytes for slot in span.wholes for nbytes in slot.spec.state_bytes] if numel else []
    return round(span.share * sum(padded(nbytes) if tier is Tier.DISK else nbytes for nbytes in arrays))


def optimizer_bytes(span: Span, placement: Placement, tier: Tier, setup: Setup) -> int:
    """Optimizer states in `tier`, and masters that are a memory of their own; on disk, in whole pages.

    Where the masters on disk are the parameters themselves, these count as parameters, and all padding here.
    """
    if tier is not Tier.DISK:
        states = tensors_bytes(span, placement.numel(tier), tier, setup)
        return states + master_bytes(span, placement, tier, setup.policy)
    if is_in_files(span, placement, setup):
        return 0
    arrays = sum(
        disk_bytes(span, numel, 0) + tensors_bytes(span, numel, tier, setup)
        for place, numel in placement.optimizer
        if place is tier
    )
    if not placement.optimizer and placement.parameters is tier:
        arrays = disk_bytes(span, span.slice_numel, 0)
    return arrays - (span.slice_numel * itemsize(span.spec.compute_dtype) if _shares_array(span, placement) else 0)


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


# What comes and goes ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _UnitBytes:
    """What one unit brings in and makes in a pass."""

    use: Use
    stays: bool
    """Gathered from its forward to its backward."""
    full: int = 0
    """Gathered, of spans that come and go."""
    fresh: int = 0
    """Gradients as backward leaves them, beside those that add up in place."""
    early: int = 0
    """The most of them that is there in the middle of its backward."""
    copying: int = 0
    """The most that is there, of these and of their copies, while they are copied."""
    moving: int = 0
    """Copies and means, until the next unit's reduce begins."""
    kept: int = 0
    """At rest on the device."""
    held: int = 0
    """Local gradients between backwards, where they are sent with the last one only."""
    tied: int = 0
    """Fresh gradients that autograd keeps until it has those of an embedding with the same weights."""
    reads: int = 0
    """Host buffers that spans on disk are read to."""
    cast: int = 0
    """The largest second one, of values that are cast."""
    down: list[int] = field(default_factory=list)
    """Gradients that go down to host memory through a buffer each."""
    part: int = 0
    """Kept of `full` on each rank of a node between forward and backward; 0: nothing."""


@dataclass(slots=True)
class Passing:
    """The highest of what comes and goes in a step's passes; `scratch` is host memory."""

    gathered: int = 0
    communication: int = 0
    gradients: int = 0
    moment: int = 0
    """Gathered and communication at one moment."""
    device: int = 0
    """All three at one moment."""
    scratch: int = 0
    resting_scratch: int = 0
    """What the pool keeps of it between backward and step."""


def passing_bytes(layout: Layout, placements: Sequence[Placement], setup: Setup) -> Passing:
    """What comes and goes: gathered units, gradients on their way, landing buffers of the host.

    A unit is gathered from its first use to its last, and with it the one that comes next. In backward its fresh gradients are
    there beside buckets and means of the unit before it (docs/PLAN.md).
    """
    uses = layout.uses()
    order = sorted((at for at, use in enumerate(uses) if use.first), key=lambda at: uses[at].first)
    units = [_unit_bytes(layout.units[at], uses[at], at, placements, setup) for at in order]
    out = Passing()
    _look_at_forward(out, units)
    _look_at_backward(out, units[::-1], setup)
    _look_at_host(out, units, setup)
    return out


def _look_at_forward(out: Passing, units: Sequence[_UnitBytes]) -> None:
    """Units in the order of their first uses; `stays`: until their backward."""
    events = [(unit.use.first, True, place) for place, unit in enumerate(units)]
    events += [(unit.use.last, False, place) for place, unit in enumerate(units)]
    there = 0
    for _, begins, place in sorted(events):
        unit = units[place]
        following = units[place + 1] if place + 1 < len(units) else None
        if begins:
            there += unit.full
        else:
            there += unit.part  # copied while all of it is there, and the next one has been fetched
            if unit.part and following is not None and following.use.first > unit.use.last:
                out.gathered = max(out.gathered, there + following.full)
            there -= 0 if unit.stays else unit.full
        ahead = following.full if begins and following is not None else 0
        out.gathered = max(out.gathered, there + ahead)
    out.moment = out.gathered


def _look_at_backward(out: Passing, units: Sequence[_UnitBytes], setup: Setup) -> None:
    """Units in the order of their reduces: those used first last."""
    alone = setup.world_size == 1
    walk = sorted((at for at, unit in enumerate(units) if unit.use.is_reached), key=lambda at: -units[at].use.last)
    enter, gradients, leave = 0, 1, 2
    events = [(-units[place].use.last, enter, place) for place in walk]
    events += [(-units[place].use.read, leave, place) for place in walk]
    events += [(-unit.use.first, gradients, place) for place, unit in enumerate(units) if unit.fresh or unit.held]
    next_of = {
        at: next((later for later in walk[n + 1 :] if not units[later].stays), None) for n, at in enumerate(walk)
    }
    there, ahead = sum(unit.full for unit in units if unit.stays) + sum(unit.part for unit in units), 0
    parted: set[int | None] = set()
    put_off: int | None = None  # the unit that is fetched when the reduce under way is over
    waiting = moving = coming = 0
    adds = setup.backward_per_step > 1 and not setup.reduces_once
    kept = sum(unit.kept for unit in units) if adds else 0
    held = sum(unit.held for unit in units)

    def look(passing: int, gone: int = 0) -> None:
        gathered = there + ahead - gone
        out.gathered = max(out.gathered, gathered)
        out.communication = max(out.communication, passing)
        out.gradients = max(out.gradients, kept + held)
        out.moment = max(out.moment, gathered + passing)
        out.device = max(out.device, gathered + passing + kept + held)

    def join(*arrived: int | None) -> None:
        """These are there: their parts have gone into place."""
        nonlocal there
        done = set(arrived) - parted
        parted.update(done)
        there -= sum(units[each].part for each in done if each is not None)

    def fetch() -> None:
        nonlocal ahead, kept, moving, coming, put_off
        if put_off is not None:
            kept, moving, coming = kept + (0 if adds else coming), 0, 0
            ahead = units[put_off].full
            look(waiting)
            join(put_off)
            put_off = None

    look(0)
    out.device = max(out.device, out.gathered + kept + held)
    for _, what, place in sorted(events):
        unit, use = units[place], units[place].use
        if what == enter:
            fetch()
            there += 0 if unit.stays else unit.full
            following, ahead = next_of[place], 0
            if following is not None and moving and units[following].full and (unit.fresh or unit.held):
                put_off = following
                look(moving + waiting)
                join(place)
            else:
                ahead = 0 if following is None else units[following].full
                look(moving + waiting)
                join(place, following)
        elif what == leave:
            there -= unit.full
            waiting += unit.tied
        else:
            if put_off is not None:
                look(unit.early + moving + waiting)
                fetch()
            look(unit.fresh + moving + waiting)
            kept += 0 if adds else (unit.kept if alone else coming)
            held -= unit.held
            look(unit.copying + waiting, unit.full if use.is_reached and use.read == use.first else 0)
            moving, coming = unit.moving, unit.kept
            waiting -= unit.tied if use.is_reached and use.read > use.first else 0
    kept += 0 if adds or alone else coming
    look(0)


def _look_at_host(out: Passing, units: Sequence[_UnitBytes], setup: Setup) -> None:
    """Two units are read at a time, the last one twice, and one buffer is still there that was too small, or has not been given
    back. Gradients land in one buffer after the other, or stay in them until they are stepped.
    """
    reads = max((a.reads + b.reads + a.cast for a, b in pairwise([*units, *units[-1:]])), default=0)
    reads += max((unit.reads for unit in units), default=0)
    buffers = [nbytes for unit in units for nbytes in unit.down]
    if setup.step_in_backward and setup.backward_per_step == 1:
        sums = [sum(unit.down) for unit in units]
        landing = max((sum(sums[at : at + 3]) for at in range(len(sums))), default=0)
    else:
        landing = max((a + b for a, b in pairwise([*buffers, *buffers[-1:]])), default=0)
    out.scratch = reads + landing
    singles = sorted([*buffers, *(unit.reads for unit in units)], reverse=True)
    out.resting_scratch = min(out.scratch, sum(singles[:KEPT_BUFFERS]))


def _unit_bytes(unit: UnitLayout, use: Use, at: int, placements: Sequence[Placement], setup: Setup) -> _UnitBytes:
    """`at`: its place in the layout."""
    out = _UnitBytes(use, stays=at in setup.kept)
    for span in unit.spans:
        placement, compute = placements[span.index], itemsize(span.spec.compute_dtype)
        if stays(span, placement, setup.policy):
            continue
        out.full += span.numel * compute
        out.part += part_numel(span, setup.node_ranks) * compute if at in setup.parts else 0
        if placement.parameters is Tier.DISK:
            stored = stored_itemsize(span, placement, setup)
            out.reads += span.slice_numel * stored
            # What has another type in its file than where it is used goes through a second buffer.
            out.cast = max(out.cast, 0 if stored == compute else span.slice_numel * compute)
    trained = [span for span in unit.spans if span.is_updated]
    own = [span.used_numel * itemsize(span.spec.compute_dtype) for span in trained]
    left = sum(own)
    largest = max(
        (slot.spec.numel * itemsize(span.spec.compute_dtype) for span in trained for slot in span.slots), default=0
    )
    for span, nbytes in zip(trained, own):
        placement, master = placements[span.index], itemsize(span.spec.master_dtype)
        bucket = copies = _bucket_bytes(span, placement, setup)
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
        out.kept += placement.numel(Tier.DEVICE) * master
        if use.read > use.first:
            shared = (slot.spec.numel for slot in span.slots if len(slot.spec.names) > 1)
            out.tied += sum(shared) * itemsize(span.spec.compute_dtype)
        out.down += _landing_bytes(span, placement, setup)
    out.early = min(out.fresh, out.fresh // 2 + largest)
    return out


def _bucket_bytes(span: Span, placement: Placement, setup: Setup) -> int:
    """The copy of fresh gradients that is sent; 0 where they are sent as they are, or are copied to where they rest."""
    compute = itemsize(span.spec.compute_dtype)
    if setup.world_size == 1:
        return 0 if placement.numel(Tier.DEVICE) == span.slice_numel else span.numel * compute
    if setup.is_cpu and len(span.slots) == 1 and span.spec.compute_dtype == wire_dtype(span, setup):
        return 0
    return span.numel * itemsize(wire_dtype(span, setup))


def _landing_bytes(span: Span, placement: Placement, setup: Setup) -> list[int]:
    """Buffers for gradients on their way to host memory, by shard below the device; none where they land where they rest."""
    arriving = itemsize(span.spec.compute_dtype if setup.world_size == 1 else span.spec.master_dtype)
    below = [(tier, numel) for tier, numel in placement.optimizer if tier is not Tier.DEVICE]
    steps_at_once = setup.step_in_backward and setup.backward_per_step == 1
    adds = setup.backward_per_step > 1 and not setup.reduces_once
    return [
        numel * arriving
        for tier, numel in below
        if steps_at_once or adds or arriving < gradient_itemsize(span, tier, setup)
    ]


def stored_itemsize(span: Span, placement: Placement, setup: Setup) -> int:
    """Of parameters on disk."""
    return itemsize(span.spec.master_dtype if is_in_files(span, placement, setup) else span.spec.compute_dtype)


def wire_dtype(span: Span, setup: Setup) -> str:
    """Of gradients on the wire: masters that are no float32 are never narrowed."""
    return setup.reduce_dtype if span.spec.master_dtype == "float32" else span.spec.master_dtype


def block_bytes(layout: Layout, placements: Sequence[Placement], setup: Setup) -> int:
    """Host: a block for gradients that rest in another type than their masters', two for parameters that are cast on their way
    up to the device, and the slabs under way of the disk tier.
    """
    sizes = setup.sizes
    block = lanes = blocks = slabs = largest = 0
    for span, placement in zip(layout.spans, placements):
        for tier, numel in placement.optimizer:
            if tier is Tier.DISK and not span.is_whole:
                slabs += -(-numel // sizes.slab_numel)
                largest = max(largest, disk_bytes(span, min(numel, sizes.slab_numel), setup.optimizer_tensors))
        compute, master = itemsize(span.spec.compute_dtype), itemsize(span.spec.master_dtype)
        below = [numel for tier, numel in placement.optimizer if tier is not Tier.DEVICE]
        if span.spec.compute_dtype == span.spec.master_dtype or not below:
            continue
        if (gradient_itemsize(span, Tier.HOST, setup) or (compute if setup.world_size == 1 else master)) != master:
            block = max(block, sizes.block_numel * master)
        if placement.parameters is Tier.DEVICE:
            blocks += sum(-(-numel // sizes.block_numel) for numel in below)
            lanes = max(lanes, sizes.block_numel * compute)
    return block + min(1 if setup.is_cpu else sizes.lanes, blocks) * lanes + min(sizes.slabs, slabs) * largest


def whole_buffers(layout: Layout, placements: Sequence[Placement], setup: Setup) -> tuple[int, int, int]:
    """What parameters that are stepped over whole, and do not rest on the device, pass through.

    Returns:
        On the host: one is read, one updated, one written. There, too, in the pool's scratch memory: a gradient that is cast.
        On the device, where the step is made there: master, gradient and state of one.
    """
    reads, cast, device = [], 0, 0
    for span, placement in zip(layout.spans, placements):
        master = itemsize(span.spec.master_dtype)
        below = [tier for tier, numel in placement.optimizer if numel and tier is not Tier.DEVICE]
        for tier in below if span.is_whole else ():
            is_narrow = gradient_itemsize(span, Tier.HOST, setup) not in (0, master)
            for slot in span.wholes:
                nbytes, states = slot.spec.numel * master, slot.spec.state_bytes
                if tier is Tier.DISK:
                    reads.append(padded(nbytes) + sum(padded(each) for each in states))
                cast = max(cast, nbytes) if is_narrow and setup.is_cpu else cast
                device = device if setup.is_cpu else max(device, 2 * nbytes + sum(states))
    return min(3, len(reads)) * max(reads, default=0), cast, device


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
    high = passing_bytes(layout, placements, setup)
    blocks = block_bytes(layout, placements, setup)
    whole, cast, on_device = whole_buffers(layout, placements, setup)
    rest[Tier.HOST]["staging"] = blocks + whole + max(high.resting_scratch, cast)
    peak = {tier: dict(kinds) for tier, kinds in rest.items()}
    device, host = peak[Tier.DEVICE], peak[Tier.HOST]
    device |= {"gathered": high.gathered, "communication": high.communication, "gradients": high.gradients}
    host["staging"] = blocks + whole + high.scratch + cast
    device["staging"] = on_device
    device["activations"], host["activations"] = activations
    most = {tier: sum(kinds.values()) for tier, kinds in peak.items()}
    highest = dict(most)
    most[Tier.DEVICE] += high.moment - high.gathered - high.communication
    alone = high.device + device["activations"], on_device  # between passes, or as they begin
    highest[Tier.DEVICE] = device["parameters"] + device["optimizer"] + max(alone)
    return Memory(rest, peak, highest, most)
