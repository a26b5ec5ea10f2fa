"""Stored bytes of one rank, by tier and kind, for a layout and a placement. Every formula is one small function.

`peaks` adds temporary bytes.

Words: a span's slice is this rank's part of it. The copy is the slice in the compute dtype, in the parameter tier. Master,
gradient and optimizer states of the slice are in the optimizer tier. Where types and tiers are equal, the copy is the master.
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
    """The tiers of one span, equal on every rank."""

    parameters: Tier
    """Tier of the copy."""
    optimizer: tuple[tuple[Tier, int], ...]
    """Consecutive parts of the slice as (tier, elements); () for frozen spans."""

    def numel(self, tier: Tier) -> int:
        """Return how many elements of the slice have their optimizer state in `tier`."""
        return sum(numel for place, numel in self.optimizer if place is tier)


@dataclass(frozen=True, slots=True)
class Setup:
    """Inputs of the formulas besides the layout and the placements."""

    policy: StagePolicy
    world_size: int
    reduce_dtype: str = "float32"
    optimizer_tensors: int = 2
    """Tensors of optimizer state per master element: 2 for Adam."""
    backward_per_step: int = 1
    step_in_backward: bool = False
    is_cpu: bool = False
    """The device is the CPU: the gradient of a span of one parameter is sent without a copy, and copies over the link are
    complete at once.
    """
    in_files: frozenset[str] = frozenset()
    """Parameters whose values stay in the model's own files: frozen ones, with the parameter tier on disk."""
    sizes: Sizes = SIZES
    """Sizes of blocks and slabs."""
    wire: str = "none"
    """Format in which gradients are sent."""
    defers: bool = False
    """All micro-batches of a step but its last are inside `no_sync(defer=True)`."""
    kept: frozenset[int] = frozenset()
    """Indices of units that stay gathered between a forward and its backward."""

    @property
    def reduces_once(self) -> bool:
        """Gradients of a step's backwards are reduced with the last of them."""
        if self.world_size == 1 or self.backward_per_step == 1:
            return False
        return self.defers or not self.policy.reduce_each_backward

    @property
    def reduces_per_step(self) -> int:
        return self.backward_per_step if self.policy.reduce_each_backward and not self.reduces_once else 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by tier and kind.

    `stored`: between backward and step. `peak`: the highest of each kind, with temporary bytes, at different moments.
    Local gradients that are being reduced count as communication.
    """

    stored: Mapping[Tier, Mapping[str, int]]
    peak: Mapping[Tier, Mapping[str, int]]
    highest: Mapping[Tier, int]
    """By tier: all bytes at the highest moment."""
    most: Mapping[Tier, int]
    """An upper bound of it, with all states stored, which makes it linear in the placements."""

    def at_rest(self, tier: Tier) -> int:
        return sum(self.stored[tier].values())

    def at_peak(self, tier: Tier) -> int:
        """Return bytes at the highest moment."""
        return self.highest[tier]

    def at_most(self, tier: Tier) -> int:
        """Return the bound that budgets are compared with."""
        return self.most[tier]

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer state over all tiers."""
        return sum(kinds[kind] for kinds in self.stored.values() for kind in STATES)


def together(tier: Tier, span: Span, stretches: Sequence[tuple[Tier, int]]) -> Tier:
    """Return the tier of the copy: never slower than the slowest master where both have one type, and so one memory."""
    if not stretches or span.spec.compute_dtype != span.spec.master_dtype:
        return tier
    return min(tier, max((place for place, _ in stretches), key=TIERS.index), key=TIERS.index)


def shares_memory(span: Span, policy: StagePolicy) -> bool:
    """Return whether the copy is the master where both are in one tier: of one type, and not overwritten by gathers."""
    rounded = policy.keep_full and gather_codec(span) is not None
    return span.spec.compute_dtype == span.spec.master_dtype and not rounded


def stays(span: Span, placement: Placement, policy: StagePolicy) -> bool:
    """Return whether the full span is in device memory all the time."""
    return placement.parameters is Tier.DEVICE and (policy.keep_full or span.shards == 1)


def is_in_files(span: Span, placement: Placement, setup: Setup) -> bool:
    """Return whether a frozen span stays in the model's own files."""
    if placement.parameters is not Tier.DISK or span.trainable:
        return False
    return all(slot.spec.name in setup.in_files for slot in span.slots)


def parameter_bytes(span: Span, placement: Placement, setup: Setup) -> int:
    """Return bytes in the parameter tier: the copy, or the full span where it stays; on disk in full pages."""
    if is_in_files(span, placement, setup) or casts_master(span, placement, setup):
        return 0
    numel = span.numel if stays(span, placement, setup.policy) else span.slice_numel
    nbytes = numel * itemsize(span.spec.compute_dtype)
    return padded(nbytes) if placement.parameters is Tier.DISK and not _shares_array(span, placement) else nbytes


def casts_master(span: Span, placement: Placement, setup: Setup) -> bool:
    """Return whether masters on the device are cast into the gathered span before each gather: no tier stores a copy."""
    if stays(span, placement, setup.policy) or span.spec.compute_dtype == span.spec.master_dtype:
        return False
    masters = [tier for tier, _ in placement.optimizer] or [placement.parameters]
    return all(tier is Tier.DEVICE for tier in masters)


def _shares_array(span: Span, placement: Placement) -> bool:
    """Return whether the copy on disk is the masters' array."""
    if placement.parameters is not Tier.DISK or span.spec.compute_dtype != span.spec.master_dtype:
        return False
    return not placement.optimizer or (len(placement.optimizer) == 1 and placement.optimizer[0][0] is Tier.DISK)


def master_bytes(span: Span, placement: Placement, tier: Tier, policy: StagePolicy) -> int:
    """Return bytes of masters in `tier`, in memory, that are not the copy."""
    same = shares_memory(span, policy)
    if same and placement.parameters is tier:
        return 0
    numel = placement.numel(tier)
    if not placement.optimizer and not same and placement.parameters is tier:
        numel = span.slice_numel  # a frozen span keeps exact values besides those that it computes with
    return numel * itemsize(span.spec.master_dtype)


def disk_bytes(span: Span, numel: int, tensors: int) -> int:
    """Return bytes of master and states of `numel` elements, each an array of full pages on disk, or in a slab."""
    return (1 + tensors) * padded(numel * itemsize(span.spec.master_dtype))


def tensors_bytes(span: Span, numel: int, tier: Tier, setup: Setup) -> int:
    """Return bytes of optimizer states of `numel` elements in `tier`; on disk, in full pages.

    Full-matrix optimizers: the states of each parameter, of any shape.
    """
    if not span.is_whole:
        nbytes = numel * itemsize(span.spec.master_dtype)
        return setup.optimizer_tensors * (padded(nbytes) if tier is Tier.DISK else nbytes)
    master = itemsize(span.spec.master_dtype)
    arrays = [(nbytes, slot.spec.numel * master) for slot in span.owned_slots for nbytes in slot.spec.state_bytes]
    chosen = [nbytes for nbytes, whole in arrays if tier is not Tier.DISK or nbytes == whole] if numel else []
    return round(span.share * sum(padded(nbytes) if tier is Tier.DISK else nbytes for nbytes in chosen))


def beside_disk_bytes(span: Span, numel: int, setup: Setup) -> int:
    """Return bytes of optimizer states in host memory for `numel` masters on disk: arrays of other shapes."""
    if not span.is_whole or not numel:
        return 0
    master = itemsize(span.spec.master_dtype)
    arrays = [(nbytes, slot.spec.numel * master) for slot in span.owned_slots for nbytes in slot.spec.state_bytes]
    return round(span.share * sum(nbytes for nbytes, whole in arrays if nbytes != whole))


def optimizer_bytes(span: Span, placement: Placement, tier: Tier, setup: Setup) -> int:
    """Return bytes of optimizer states in `tier`, and of masters that are not the copy; on disk, in full pages.

    Where masters on disk are the copy, they count as parameters, and their padding counts here.
    """
    if tier is not Tier.DISK:
        states = tensors_bytes(span, placement.numel(tier), tier, setup)
        if tier is Tier.HOST:
            states += beside_disk_bytes(span, placement.numel(Tier.DISK), setup)
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
    """Return bytes per stored gradient element: the master's. `step_in_backward` with one backward per step stores none."""
    if tier is not Tier.DEVICE and setup.backward_per_step == 1 and setup.step_in_backward:
        return 0
    return itemsize(span.spec.master_dtype)


def stores_gradients(tier: Tier, setup: Setup) -> bool:
    """Return whether gradients of masters in `tier` are on disk. With `step_in_backward` they stay in host memory."""
    return tier is Tier.DISK and not setup.step_in_backward


def stored_itemsize(span: Span, placement: Placement, setup: Setup) -> int:
    """Return bytes per element of parameters on disk."""
    return itemsize(span.spec.master_dtype if is_in_files(span, placement, setup) else span.spec.compute_dtype)


def wire_dtype(span: Span, setup: Setup) -> str:
    """Return the type in which gradients are sent: those of masters that are not float32 are never narrowed."""
    return setup.reduce_dtype if span.spec.master_dtype == "float32" else span.spec.master_dtype


def state_bytes(span: Span, placement: Placement, setup: Setup) -> dict[tuple[Tier, str], int]:
    """Return stored bytes of one span, by tier and kind."""
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
