"""Bytes that a step moves on one rank, by phase and channel, and their seconds; `costs` defines the terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..comm.codec import CODECS, fits, gather_codec
from ..core.layout import Layout, SpanLayout, itemsize
from ..core.precision import dtype_of
from ..tiers.tier import Tier
from .costs import (
    Placement,
    Setup,
    casts_master,
    gradient_itemsize,
    is_cast,
    shares_memory,
    stored_itemsize,
    stores_gradients,
    tensors_bytes,
    wire_dtype,
)
from .machine import Machine

PASSES, STEP, AFTER = "passes", "step", "after"
"""Forwards and backwards; the optimizer's step; the gathers that stages 1 and 2 wait for after it."""
PHASES = (PASSES, STEP, AFTER)

PhaseTraffic = dict[tuple[str, str], float]
"""(phase, channel) -> bytes. Channels: `gather` and `reduce` (sent), `down` and `up` the link, `read` and `write` the disk, and
`device` and `host`: what the optimizer reads and writes in these memories."""


SEQUENCE = "sequence"
"""The channel of attention's all-to-all exchanges under `sp_size`."""
_SPEEDS = {
    "down": "link_down", "up": "link_up", "read": "disk_read", "write": "disk_write", "device": "device_bandwidth",
    "host": "host_bandwidth",
}  # fmt: skip
"""The field of `Machine` with the bytes per second of each channel; collectives have a `Network`."""
COLLECTIVES = ("gather", "reduce", "scalar", "agree")
LINKS = ("down", "up", "read", "write")
CHANNELS = ("gather", "reduce", *LINKS)
"""Channels whose bytes are predicted."""
WAITS = (*COLLECTIVES, *LINKS, "optimizer")
"""Channels that training waits for; `optimizer`: the thread that steps over offloaded state."""


def uses(setup: Setup) -> list[int]:
    """Return how often a step gathers or loads each unit, if it is released between its uses.

    Most units once in the forward and once in the backward. The last units of the forward and kept units are still gathered in
    the backward, and an embedding's backward needs no weights.
    """
    layout = setup.layout
    again = {*layout.gathered_twice()}.difference(setup.kept or ())
    return [setup.backward_per_step * (1 + (at in again)) if use.first else 0 for at, use in enumerate(layout.uses())]


@dataclass(frozen=True, slots=True)
class Collective:
    """`count` equal collectives of one span in a step; in each of them a rank sends `nbytes`.

    Attributes:
        kind: `gather`, `reduce`, `across`: a reduce between replicas, or `sequence`: an exchange of attention.
        ranks: ranks that take part.
        stride: distance between these ranks.
        is_all_reduce: every rank gets the full result.
    """

    kind: str
    phase: str
    count: int
    nbytes: float
    ranks: int
    stride: int = 1
    is_all_reduce: bool = False

    @property
    def channel(self) -> str:
        return "reduce" if self.kind == "across" else self.kind


def collectives_of(span: SpanLayout, setup: Setup, used: int) -> Iterator[Collective]:
    """Yield one span's collectives in a step. `used` is its unit's entry of `uses`.

    Gathers and reduces: Rajbhandari et al. (arXiv 1910.02054), section 7: 2 per parameter for stages 1 and 2, 3 for stage 3. A
    ring all-reduce (stage 0) sends 2 (N-1)/N of the buffer.
    """
    shards, numel = span.shards, span.slice_numel
    if shards > 1:
        codec = gather_codec(span)
        gathered = numel * itemsize(span.spec.compute_dtype) if codec is None else codec.nbytes(numel)
        if not setup.policy.keep_full:
            yield Collective("gather", PASSES, used, (shards - 1) * gathered, shards)
        elif span.is_updated:
            yield Collective("gather", AFTER, 1, (shards - 1) * gathered, shards)
    if not span.is_updated:
        return
    sends, size = setup.reduces_per_step, itemsize(wire_dtype(span, setup))
    if shards > 1:  # slices of any length are not coded
        sent = (span.numel - numel) * size if span.cuts else (shards - 1) * _sent_bytes(numel, span, setup)
        yield Collective("reduce", PASSES, sends, sent, shards)
    replicas = setup.world_size // shards
    if replicas == 1:
        return
    kind, stride = ("across", shards) if setup.policy.shard else ("reduce", 1)
    part = -(-numel // replicas)
    if shards == 1 and not (setup.policy.shard and _is_coded(part, span, setup)):
        nbytes = 2 * (replicas - 1) / replicas * span.numel * size
        yield Collective(kind, PASSES, sends, nbytes, replicas, stride, is_all_reduce=True)
    else:  # a reduce-scatter and a gather
        yield Collective(kind, PASSES, 2 * sends, (replicas - 1) * _sent_bytes(part, span, setup), replicas, stride)


def span_traffic(span: SpanLayout, placement: Placement, setup: Setup, used: int) -> PhaseTraffic:
    """Return the bytes that one span moves on this rank in a step. `used` is its unit's entry of `uses`."""
    numel = span.slice_numel
    copy, masters = numel * itemsize(span.spec.compute_dtype), numel * itemsize(span.spec.master_dtype)
    own = Tier.DEVICE if casts_master(span, placement, setup) else placement.parameters
    has_link = not setup.is_cpu  # on a CPU device, host memory is where values are used
    traffic: PhaseTraffic = {}

    def add(phase: str, channel: str, nbytes: float) -> None:
        if nbytes:
            traffic[phase, channel] = traffic.get((phase, channel), 0) + nbytes

    if own is Tier.HOST or (own is Tier.DISK and has_link):
        add(PASSES, "up", used * copy)
    if own is Tier.DISK:
        add(PASSES, "read", used * numel * stored_itemsize(span, placement, setup))
    tier = placement.optimizer
    if tier is None:
        return traffic
    states, _ = tensors_bytes(span, Tier.HOST, setup)
    touched = 2 * (masters + states) + (copy if is_cast(span, setup.policy) else 0)
    if tier is Tier.DEVICE:
        add(STEP, "device", touched + masters)
        if own is not Tier.DEVICE:
            add(STEP, "down", copy)
        if own is Tier.DISK:
            add(STEP, "write", copy)
        return traffic
    arriving = copy if setup.world_size == 1 else masters
    arrivals = setup.backward_per_step if setup.world_size == 1 else setup.reduces_per_step
    gradient = numel * gradient_itemsize(span, tier, setup) or arriving
    if has_link:
        add(PASSES, "down", arrivals * arriving)
    if span.is_unsliced and has_link:  # the step runs on the device, on temporary copies
        add(STEP, "up", masters + states + gradient)
        add(STEP, "device", touched + masters)
        add(STEP, "down", masters + states)
    else:
        add(STEP, "host", touched + gradient)
    if own is Tier.DEVICE and has_link:
        add(STEP, "up", copy)
    if tier is Tier.DISK:
        add(STEP, "read", masters + states)
        add(STEP, "write", masters + states)
    if stores_gradients(tier, setup):
        add(PASSES, "write", arrivals * gradient)
        add(PASSES, "read", (arrivals - 1) * gradient)
        add(STEP, "read", gradient)
    if own is Tier.DISK and not shares_memory(span, placement, setup.policy):
        add(STEP, "write", copy)
    return traffic


def _sent_bytes(numel: int, span: SpanLayout, setup: Setup) -> int:
    """Return the bytes sent for `numel` elements of a gradient, one part."""
    coded = _is_coded(numel, span, setup)
    return CODECS[setup.config.wire].nbytes(numel) if coded else numel * itemsize(wire_dtype(span, setup))


def _is_coded(numel: int, span: SpanLayout, setup: Setup) -> bool:
    return fits(CODECS.get(setup.config.wire), numel, dtype_of(wire_dtype(span, setup)))


def total_traffic(
    placements: Sequence[Placement], setup: Setup, more: Iterable[Collective]
) -> tuple[list[Collective], PhaseTraffic]:
    """Return the collectives of all spans and `more`, and the bytes of these and of all spans."""
    spans = [(span, used) for unit, used in zip(setup.layout.units, uses(setup)) for span in unit.spans]
    collectives = [each for span, used in spans for each in collectives_of(span, setup, used)]
    collectives += more
    total: PhaseTraffic = {}
    for each in collectives:
        key = each.phase, each.channel
        total[key] = total.get(key, 0) + each.count * each.nbytes
    for span, used in spans:
        for key, value in span_traffic(span, placements[span.index], setup, used).items():
            total[key] = total.get(key, 0) + value
    return collectives, total


def bytes_by_channel(traffic: PhaseTraffic, collectives: Iterable[Collective]) -> dict[str, int]:
    """Return the bytes per rank and step by channel, and `across`: the part of `reduce` that goes to other replicas."""
    moved = {
        channel: round(sum(traffic.get((phase, channel), 0) for phase in PHASES)) for channel in (*CHANNELS, SEQUENCE)
    }
    return {**moved, "across": round(sum(each.count * each.nbytes for each in collectives if each.kind == "across"))}


def resource(channel: str, machine: Machine) -> str:
    """Return the resource of a channel (or of `compute`): one resource is shared in turns, different ones overlap.

    On a CPU the processor does everything but disk transfers.
    """
    if machine.shares_memory and channel not in ("read", "write"):
        return "processor"
    if channel in ("gather", "reduce", SEQUENCE):
        return "collective"
    return "optimizer" if channel in ("device", "host") else channel


def compute_flops(layout: Layout, tokens: int, checkpointing: bool) -> float:
    """Return the operations of one step. Per parameter and token: 2 in the forward, 2 for the inputs' gradients, 2 for the
    gradients of trained parameters, 2 for recomputation.

    Kaplan et al. 2020 (arXiv 2001.08361), section 2.1; attention scores are left out.
    """
    passes = 6 if checkpointing else 4
    return tokens * (passes * layout.numel + 2.0 * layout.trainable_numel)


def seconds(
    traffic: PhaseTraffic, machine: Machine, compute_s: float | None, sent_s: Mapping[tuple[str, str], float]
) -> dict[tuple[str, str], float | None]:
    """Return the seconds of each part of a step by itself; None if its speed is not known.

    Args:
        compute_s: of all passes.
        sent_s: of collectives, from `Network.seconds`; empty if their speed is not known.
    """
    parts: dict[tuple[str, str], float | None] = {(PASSES, "compute"): compute_s} if compute_s != 0 else {}
    for (phase, channel), value in traffic.items():
        rate = getattr(machine, _SPEEDS[channel]) if channel in _SPEEDS else None
        parts[phase, channel] = sent_s.get((phase, channel), None if rate is None else value / rate)
    return parts


def step_seconds(parts: Mapping[tuple[str, str], float | None], setup: Setup) -> float | None:
    """Return the sum over phases of the busiest resource's seconds; None if a part is not known.

    This is a lower bound, with perfect overlap within a phase, as in Ren et al., "ZeRO-Offload" (arXiv 2101.06840), section 4.
    """
    busy: dict[tuple[str, str], float] = {}
    for (phase, channel), value in parts.items():
        if value is None:
            return None
        merged = PASSES if phase == STEP and setup.config.step_in_backward else phase
        key = merged, resource(channel, setup.machine)
        busy[key] = busy.get(key, 0) + value
    longest: dict[str, float] = {}
    for (phase, _), value in busy.items():
        longest[phase] = max(longest.get(phase, 0), value)
    return sum(longest.values())
