"""Bytes that rest on one rank, by tier and kind, for a layout and a placement. Every formula is one small function.

What comes and goes in a step, and all of it together, is `peaks`.

Words: a span's slice is this rank's part of it. `own` is the slice in the compute dtype, at rest in the parameter tier. A
*shard* is a stretch of the slice at rest in one optimizer tier: master, gradient, optimizer states. Where both types and both
tiers are equal, `own` is the master.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comm.codec import gather_codec
from ..config import StagePolicy
from ..core.layout import Span, itemsize
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
    if is_in_files(span, placement, setup) or _casts_master(span, placement, setup):
        return 0
    numel = span.numel if stays(span, placement, setup.policy) else span.slice_numel
    nbytes = numel * itemsize(span.spec.compute_dtype)
    return padded(nbytes) if placement.parameters is Tier.DISK and not _shares_array(span, placement) else nbytes


def _casts_master(span: Span, placement: Placement, setup: Setup) -> bool:
    """Whether masters on the device are cast into the gathered span before each gather: no slice in the compute dtype rests."""
    if stays(span, placement, setup.policy) or span.spec.compute_dtype == span.spec.master_dtype:
        return False
    return placement.parameters is Tier.DEVICE and all(tier is Tier.DEVICE for tier, _ in placement.optimizer)


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
    """Bytes per stored gradient element: the master's. With `step_in_backward` and one backward per step none is stored."""
    if tier is not Tier.DEVICE and setup.backward_per_step == 1 and setup.step_in_backward:
        return 0
    return itemsize(span.spec.master_dtype)


def stores_gradients(tier: Tier, setup: Setup) -> bool:
    """Whether gradients of what rests in `tier` are on disk. Stepped in backward, they stay in host memory until then."""
    return tier is Tier.DISK and not setup.step_in_backward


def stored_itemsize(span: Span, placement: Placement, setup: Setup) -> int:
    """Of parameters on disk."""
    return itemsize(span.spec.master_dtype if is_in_files(span, placement, setup) else span.spec.compute_dtype)


def wire_dtype(span: Span, setup: Setup) -> str:
    """Of gradients on the wire: masters that are no float32 are never narrowed."""
    return setup.reduce_dtype if span.spec.master_dtype == "float32" else span.spec.master_dtype


def state_bytes(span: Span, placement: Placement, setup: Setup) -> dict[tuple[Tier, str], int]:
    """One span's parameters, gradients and optimizer state at rest, by tier and kind."""
    out = {(tier, kind): 0 for tier in TIERS for kind in STATES}
    out[placement.parameters, "parameters"] = parameter_bytes(span, placement, setup)
    for tier in TIERS:
        out[tier, "optimizer"] = optimizer_bytes(span, placement, tier, setup)
    for tier, numel in placement.optimizer:
        nbytes = numel * gradient_itemsize(span, tier, setup)
        if stores_gradients(tier, setup):
            out[tier, "gradients"] += padded(nbytes)
        else:
            out[Tier.DEVICE if tier is Tier.DEVICE else Tier.HOST, "gradients"] += nbytes
    return out
