"""Bytes and seconds on one rank that follow from a layout and a placement. Every formula is one small function.

Words: a span's slice is this rank's part of it. `own` is the slice in the compute dtype, at rest in the parameter tier. A
*shard* is a stretch of the slice at rest in one optimizer tier: master, gradient, optimizer states. Where both types and both
tiers are equal, `own` is the master.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import StagePolicy
from .layout import Layout, Span, UnitLayout, itemsize
from .machine import Machine
from .records import records_bytes
from .tiers import BLOCK_NUMEL, SLAB_NUMEL, Tier

SLABS = 3
"""Records in host memory at once: one is read, one updated, one written."""

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


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by tier and kind.

    `rest` is what stays from step to step, and the gradients between backward and step; `peak` has what comes and goes too.
    Fresh gradients of a unit on their way to their owner count as communication.
    """

    rest: Mapping[Tier, Mapping[str, int]]
    peak: Mapping[Tier, Mapping[str, int]]

    def at_rest(self, tier: Tier) -> int:
        return sum(self.rest[tier].values())

    def at_peak(self, tier: Tier) -> int:
        return sum(self.peak[tier].values())

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


def parameter_bytes(span: Span, placement: Placement, policy: StagePolicy) -> int:
    """In the parameter tier: `own`, or all of the span where it stays."""
    numel = span.numel if stays(span, placement, policy) else span.slice_numel
    return numel * itemsize(span.spec.compute_dtype)


def master_bytes(span: Span, placement: Placement, tier: Tier) -> int:
    """Masters in `tier` that are a memory of their own."""
    same = span.spec.compute_dtype == span.spec.master_dtype
    if same and placement.parameters is tier:
        return 0
    numel = placement.numel(tier)
    if not span.is_updated and not same and placement.parameters is tier:
        numel = span.slice_numel  # a frozen span keeps its own values beside those it computes with
    return numel * itemsize(span.spec.master_dtype)


def record_bytes(span: Span, numel: int, tensors: int) -> int:
    """Master and states of `numel` elements in records of the disk tier, padded to pages."""
    return records_bytes(numel, SLAB_NUMEL, [itemsize(span.spec.master_dtype)] * (1 + tensors))


def optimizer_bytes(span: Span, placement: Placement, tier: Tier, tensors: int) -> int:
    """Optimizer states in `tier`, and masters that are a memory of their own; on disk, in whole records."""
    if tier is not Tier.DISK:
        states = placement.numel(tier) * itemsize(span.spec.master_dtype) * tensors
        return states + master_bytes(span, placement, tier)
    records = sum(record_bytes(span, numel, tensors) for place, numel in placement.optimizer if place is tier)
    same = span.spec.compute_dtype == span.spec.master_dtype and placement.parameters is tier
    if not records:
        return master_bytes(span, placement, tier)
    return records - (placement.numel(tier) * itemsize(span.spec.master_dtype) if same else 0)


def gradient_itemsize(span: Span, tier: Tier, setup: Setup) -> int:
    """Bytes per gradient element at rest.

    Float32 (the master's type) is what sums over ranks and backwards need. Alone, with one backward per step, a gradient that
    rests below the device keeps the type it came in. Stepped in backward, it does not rest.
    """
    if tier is Tier.DEVICE:
        return itemsize(span.spec.master_dtype)
    if setup.backward_per_step == 1 and setup.step_in_backward:
        return 0
    if setup.backward_per_step == 1 and setup.world_size == 1:
        return itemsize(span.spec.compute_dtype)
    return itemsize(span.spec.master_dtype)


def gathered_bytes(layout: Layout, placements: Sequence[Placement], policy: StagePolicy) -> int:
    """Three largest units: in backward one is fetched while one is entered and the one before is not given back yet."""
    return sum(sorted((_moved_bytes(unit, placements, policy) for unit in layout.units), reverse=True)[:3])


def _moved_bytes(unit: UnitLayout, placements: Sequence[Placement], policy: StagePolicy) -> int:
    return sum(
        span.numel * itemsize(span.spec.compute_dtype)
        for span in unit.spans
        if not stays(span, placements[span.index], policy)
    )


def communication_bytes(layout: Layout, setup: Setup) -> int:
    """Gradients of the largest unit as backward leaves them; on several ranks, its bucket and its mean too."""
    reduce_size = itemsize(setup.reduce_dtype)

    def of(span: Span) -> int:
        fresh = span.used_numel * itemsize(span.spec.compute_dtype)
        if setup.world_size == 1:
            return fresh
        return fresh + span.numel * reduce_size + span.slice_numel * itemsize(span.spec.master_dtype)

    return max((sum(of(span) for span in unit.spans if span.is_updated) for unit in layout.units), default=0)


def local_gradient_bytes(layout: Layout, setup: Setup) -> int:
    """Whole gradients that add up on this rank between backwards, where the stage does not send them each time."""
    if setup.world_size == 1 or setup.policy.reduce_each_backward or setup.backward_per_step == 1:
        return 0
    return sum(span.used_numel * itemsize(span.spec.master_dtype) for span in layout.spans if span.is_updated)


def scratch_bytes(layout: Layout, placements: Sequence[Placement]) -> int:
    """Host: one block of float32 gradients and two of parameters on their way up, where masters are cast on the host."""
    sizes = [
        itemsize(span.spec.compute_dtype)
        for span, placement in zip(layout.spans, placements)
        if span.spec.compute_dtype != span.spec.master_dtype and placement.numel(Tier.HOST) + placement.numel(Tier.DISK)
    ]
    return BLOCK_NUMEL * (4 + 2 * max(sizes)) if sizes else 0


def ring_bytes(layout: Layout, placements: Sequence[Placement], tensors: int) -> int:
    """Host: the records under way of the disk tier."""
    largest = max(
        (
            record_bytes(span, min(numel, SLAB_NUMEL), tensors)
            for span, placement in zip(layout.spans, placements)
            for tier, numel in placement.optimizer
            if tier is Tier.DISK
        ),
        default=0,
    )
    return SLABS * largest


def fetch_bytes(layout: Layout, placements: Sequence[Placement]) -> int:
    """Host: slices of two units between disk and device, where parameters rest on disk."""
    return 2 * max(
        (
            sum(slice_bytes(span) for span in unit.spans if placements[span.index].parameters is Tier.DISK)
            for unit in layout.units
        ),
        default=0,
    )


def landing_bytes(layout: Layout, placements: Sequence[Placement], setup: Setup) -> int:
    """Host: gradients of two units that are consumed as they come."""
    if not setup.step_in_backward or setup.backward_per_step > 1:
        return 0
    return 2 * max(
        (
            sum(
                (span.slice_numel - placements[span.index].numel(Tier.DEVICE)) * itemsize(span.spec.master_dtype)
                for span in unit.spans
                if span.is_updated
            )
            for unit in layout.units
        ),
        default=0,
    )


def state_bytes(span: Span, placement: Placement, setup: Setup) -> dict[tuple[Tier, str], int]:
    """One span's parameters, gradients and optimizer state at rest, by tier and kind."""
    out = {(tier, kind): 0 for tier in TIERS for kind in STATES}
    out[placement.parameters, "parameters"] = parameter_bytes(span, placement, setup.policy)
    for tier in TIERS:
        out[tier, "optimizer"] = optimizer_bytes(span, placement, tier, setup.optimizer_tensors)
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
    rest[Tier.HOST]["staging"] = (
        scratch_bytes(layout, placements)
        + ring_bytes(layout, placements, setup.optimizer_tensors)
        + fetch_bytes(layout, placements)
        + landing_bytes(layout, placements, setup)
    )
    peak = {tier: dict(kinds) for tier, kinds in rest.items()}
    device = peak[Tier.DEVICE]
    device["gathered"] = gathered_bytes(layout, placements, setup.policy)
    device["communication"] = communication_bytes(layout, setup)
    device["gradients"] += local_gradient_bytes(layout, setup)
    device["activations"], peak[Tier.HOST]["activations"] = activations
    return Memory(rest, peak)


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


# Work: bytes per rank and step, by phase and road -------------------------------------------------------------------

PASSES, STEP, AFTER = "passes", "step", "after"
"""Forwards and backwards; the optimizer's step; the gathers that stages 1 and 2 wait for after it."""
PHASES = (PASSES, STEP, AFTER)

Work = dict[tuple[str, str], float]
"""(phase, road) -> bytes. Roads: `gather` and `reduce` as sent, `down` and `up` the link, `read` and `write` the disk, and
`device` and `host`: what the optimizer reads and writes in these memories."""

ROADS = ("gather", "reduce", "down", "up", "read", "write")


def uses(layout: Layout, setup: Setup) -> list[int]:
    """How often a step brings each unit in, where it is released between its uses.

    Once in every forward and once in every backward; the unit that ends the forward is still there when backward begins.
    """
    twice = 2 * setup.backward_per_step
    return [twice] * (len(layout.units) - 1) + [setup.backward_per_step] * min(1, len(layout.units))


def work_of(span: Span, placement: Placement, setup: Setup, used: int) -> Work:
    """One span's part in a step. `used` is its unit's entry of `uses`.

    Gathers and reduces: Rajbhandari et al. (arXiv 1910.02054), section 7: 2 per parameter for stages 1 and 2, 3 for stage 3. A
    ring all-reduce (stage 0) sends 2 (N-1)/N of the buffer. The rest is counted from what moves where.
    """
    others = setup.world_size - 1
    compute, master = itemsize(span.spec.compute_dtype), itemsize(span.spec.master_dtype)
    own, shards = placement.parameters, placement.optimizer
    same = span.spec.compute_dtype == span.spec.master_dtype
    work: Work = {}

    def add(phase: str, road: str, numel: float, size: float) -> None:
        if numel and size:
            work[phase, road] = work.get((phase, road), 0) + numel * size

    slice_numel = span.slice_numel
    if span.shards > 1 and not setup.policy.keep_full:
        add(PASSES, "gather", used * others * slice_numel, compute)
    elif span.shards > 1 and span.is_updated:
        add(AFTER, "gather", others * slice_numel, compute)
    if own is not Tier.DEVICE:
        add(PASSES, "up", used * slice_numel, compute)
    if own is Tier.DISK:
        add(PASSES, "read", used * slice_numel, compute)
    if not span.is_updated:
        return work

    sends = setup.backward_per_step if setup.policy.reduce_each_backward else 1
    reduced = itemsize(setup.reduce_dtype) if span.spec.master_dtype == "float32" else master
    if span.shards > 1:
        add(PASSES, "reduce", sends * others * slice_numel, reduced)
    elif others:
        add(PASSES, "reduce", 2 * others / setup.world_size * span.numel, reduced)
    arrivals = setup.backward_per_step if setup.world_size == 1 else sends
    fresh = compute if setup.world_size == 1 else master
    for tier, numel in shards:
        touched = 2 * (1 + setup.optimizer_tensors) * master + (0 if same else compute)
        if tier is Tier.DEVICE:
            add(STEP, "device", numel, touched + master)
            if own is not Tier.DEVICE:
                add(STEP, "down", numel, compute)
            if own is Tier.DISK:
                add(STEP, "write", numel, compute)
            continue
        add(PASSES, "down", arrivals * numel, fresh)
        add(STEP, "host", numel, touched + (gradient_itemsize(span, tier, setup) or fresh))
        if own is Tier.DEVICE:
            add(STEP, "up", numel, compute)
        if tier is Tier.DISK:
            records = record_bytes(span, numel, setup.optimizer_tensors)
            add(STEP, "read", 1, records)
            add(STEP, "write", 1, records)
        if own is Tier.DISK and not (same and tier is own):
            add(STEP, "write", numel, compute)
    return work


def work_in_total(layout: Layout, placements: Sequence[Placement], setup: Setup) -> Work:
    """The sum over all spans."""
    total: Work = {}
    for unit, used in zip(layout.units, uses(layout, setup)):
        for span in unit.spans:
            for key, value in work_of(span, placements[span.index], setup, used).items():
                total[key] = total.get(key, 0) + value
    return total


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per rank and step by road."""

    gather: int = 0
    reduce: int = 0
    down: int = 0
    up: int = 0
    read: int = 0
    write: int = 0

    @staticmethod
    def of(work: Work) -> Traffic:
        return Traffic(**{road: round(sum(work.get((phase, road), 0) for phase in PHASES)) for road in ROADS})


# Time ---------------------------------------------------------------------------------------------------------------


def speed(machine: Machine, road: str) -> float | None:
    """Bytes per second on a road; None: not known."""
    return {
        "gather": machine.collective,
        "reduce": machine.collective,
        "down": machine.link_down,
        "up": machine.link_up,
        "read": machine.disk_read,
        "write": machine.disk_write,
        "device": machine.device_bandwidth,
        "host": machine.host_bandwidth,
    }[road]


def resource(road: str, machine: Machine) -> str:
    """What a road occupies: roads of one resource take turns, others go on at the same time.

    On a CPU everything but the disk is the processor's work. The optimizer works on the device, then on the host.
    """
    if road in ("read", "write"):
        return road
    if machine.shares_memory:
        return "processor"
    return {"gather": "collective", "reduce": "collective", "device": "optimizer", "host": "optimizer"}.get(road, road)


def phase_of(phase: str, setup: Setup) -> str:
    """Stepping in backward makes one phase of two."""
    return PASSES if phase == STEP and setup.step_in_backward else phase


def compute_flops(layout: Layout, tokens: int, checkpointing: bool) -> float:
    """Of one step on `tokens` tokens: 2 per parameter and token forward, 2 for the inputs' gradients, 2 for the parameters' own
    where they are trained, 2 for the recomputation under activation checkpointing.

    Kaplan et al. 2020 (arXiv 2001.08361), section 2.1; attention scores are left out.
    """
    passes = 6 if checkpointing else 4
    return tokens * (passes * layout.numel + 2.0 * layout.trainable_numel)


def seconds(work: Work, machine: Machine, compute_s: float | None) -> dict[tuple[str, str], float | None]:
    """Every part of the step by itself; None where no speed is known. `compute_s`: of all passes."""
    parts: dict[tuple[str, str], float | None] = {(PASSES, "compute"): compute_s} if compute_s != 0 else {}
    for (phase, road), value in work.items():
        rate = speed(machine, road)
        parts[phase, road] = None if rate is None else value / rate
    return parts


def step_seconds(parts: Mapping[tuple[str, str], float | None], machine: Machine, setup: Setup) -> float | None:
    """Phases one after another; in each, the busiest resource. None where a part is not known.

    A bound from below for perfect overlap within a phase, as in Ren et al., "ZeRO-Offload" (arXiv 2101.06840), section 4.
    """
    busy: dict[tuple[str, str], float] = {}
    for (phase, road), value in parts.items():
        if value is None:
            return None
        key = phase_of(phase, setup), resource(road, machine)
        busy[key] = busy.get(key, 0) + value
    longest: dict[str, float] = {}
    for (phase, _), value in busy.items():
        longest[phase] = max(longest.get(phase, 0), value)
    return sum(longest.values())
