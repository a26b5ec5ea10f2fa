"""Stored bytes of one rank, by tier and kind, for a layout and a placement. Every formula is one small function.

`peaks` adds temporary bytes.

Terms: a span's slice is this rank's part of it. The copy is the slice in the compute dtype, in the parameter tier. Master,
gradient and optimizer states of the slice are in the optimizer tier. Where types and tiers are equal, the copy is the master.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..comm.codec import gather_codec
from ..config import StagePolicy, ZeroConfig
from ..core.layout import Layout, SpanLayout, itemsize
from ..core.precision import Precision, dtype_name
from ..tiers.tier import SIZES, Sizes, Tier, padded
from .machine import Machine

KINDS = ("parameters", "gradients", "optimizer", "gathered", "communication", "staging", "activations")
STATES = ("parameters", "gradients", "optimizer")
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""Fastest first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The tiers of one span, equal on every rank."""

    parameters: Tier
    """Tier of the copy."""
    optimizer: Tier | None = None
    """Tier of master, gradient and optimizer states; None: frozen."""

    @staticmethod
    def of(span: SpanLayout, parameters: Tier, optimizer: Tier) -> Placement:
        """Place a span. A copy of the master's dtype is placed in the faster tier; in one tier, both share memory."""
        if not span.is_updated:
            return Placement(parameters)
        if has_one_type(span):
            parameters = min(parameters, optimizer, key=TIERS.index)
        return Placement(parameters, optimizer)

    @property
    def master_tier(self) -> Tier:
        """The tier of the master."""
        return self.optimizer or self.parameters

    @property
    def is_offloaded(self) -> bool:
        """Return whether an optimizer updates the span outside device memory."""
        return self.optimizer not in (None, Tier.DEVICE)


def has_one_type(span: SpanLayout) -> bool:
    return span.spec.compute_dtype == span.spec.master_dtype


@dataclass(frozen=True)
class Setup:
    """The inputs of the formulas besides the placements.

    Args:
        layout: partitioned for `world_size` owners (one at stage 0).
        machine: one rank's share.
        optimizer_tensors: tensors of optimizer state per master element; 2 for Adam.
        backward_per_step: micro-batches of a step.
        in_files: parameters whose values stay in the model's own files: frozen ones, with the parameter tier on disk.
        sizes: sizes of blocks and slabs of offloaded state.
        defers: all micro-batches of a step but its last are inside `no_sync(defer=True)`.
        kept: indices of units that stay gathered between a forward and its backward; None: not decided.

    Raises:
        ConfigError: an offload that the stage does not allow, or groups of ranks that do not divide `world_size`.
    """

    layout: Layout
    machine: Machine
    config: ZeroConfig
    world_size: int
    precision: Precision
    optimizer_tensors: int = 2
    backward_per_step: int = 1
    in_files: frozenset[str] = frozenset()
    sizes: Sizes = SIZES
    defers: bool = False
    kept: frozenset[int] | None = None

    def __post_init__(self) -> None:
        self.config.check_world_size(self.world_size)

    @cached_property
    def policy(self) -> StagePolicy:
        return self.config.policy_for(self.world_size)

    @property
    def is_cpu(self) -> bool:
        """The device is the CPU: the gradient of a span of one parameter is sent without a copy, and copies over the link are
        complete at once.
        """
        return self.machine.shares_memory

    @property
    def steps_at_once(self) -> bool:
        """Return whether offloaded masters are updated as their gradients arrive, which are not stored."""
        return self.config.step_in_backward and self.backward_per_step == 1

    @property
    def reduces_once(self) -> bool:
        """Return whether gradients of a step's backwards are reduced with the last of them."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, by names of tiers: the `stored` and `peak` tables, and their `stored_bytes` and `peak_bytes`."""
        return {
            "stored": {tier.value: dict(kinds) for tier, kinds in self.stored.items()},
            "peak": {tier.value: dict(kinds) for tier, kinds in self.peak.items()},
            "stored_bytes": {tier.value: self.stored_bytes(tier) for tier in TIERS},
            "peak_bytes": {tier.value: self.at_peak(tier) for tier in TIERS},
        }

    def stored_bytes(self, tier: Tier) -> int:
        return sum(self.stored[tier].values())

    def at_peak(self, tier: Tier) -> int:
        """Return bytes at the highest moment, which budgets are compared with."""
        return self.highest[tier]

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer state over all tiers."""
        return sum(kinds[kind] for kinds in self.stored.values() for kind in STATES)


def stays(span: SpanLayout, placement: Placement, policy: StagePolicy) -> bool:
    """Return whether the full span is always in device memory."""
    return placement.parameters is Tier.DEVICE and (policy.keep_full or span.shards == 1)


def is_cast(span: SpanLayout, policy: StagePolicy) -> bool:
    """Return whether the copy has other values than the master: of another type, or overwritten by coded gathers."""
    return not has_one_type(span) or (policy.keep_full and gather_codec(span) is not None)


def shares_memory(span: SpanLayout, placement: Placement, policy: StagePolicy) -> bool:
    """Return whether the copy is the master."""
    return placement.parameters is placement.master_tier and not is_cast(span, policy)


def is_in_files(span: SpanLayout, placement: Placement, setup: Setup) -> bool:
    """Return whether a frozen span stays in the model's own files."""
    if placement.parameters is not Tier.DISK or span.trainable:
        return False
    return all(slot.spec.name in setup.in_files for slot in span.slots)


def casts_master(span: SpanLayout, placement: Placement, setup: Setup) -> bool:
    """Return whether masters on the device are cast into the gathered span before each gather: no tier stores a copy."""
    if stays(span, placement, setup.policy) or has_one_type(span):
        return False
    return placement.master_tier is Tier.DEVICE


def parameter_bytes(span: SpanLayout, placement: Placement, setup: Setup) -> int:
    """Return bytes in the parameter tier: the copy, or the full span where it stays; on disk in full pages."""
    if is_in_files(span, placement, setup) or casts_master(span, placement, setup):
        return 0
    numel = span.numel if stays(span, placement, setup.policy) else span.slice_numel
    nbytes = numel * itemsize(span.spec.compute_dtype)
    return padded(nbytes) if placement.parameters is Tier.DISK else nbytes


def master_bytes(span: SpanLayout, placement: Placement, setup: Setup) -> int:
    """Return bytes of masters that are not the copy, which counts as parameters; on disk in full pages.

    A frozen span stores exact values in addition to its compute copy.
    """
    if is_in_files(span, placement, setup) or shares_memory(span, placement, setup.policy):
        return 0
    nbytes = span.slice_numel * itemsize(span.spec.master_dtype)
    return padded(nbytes) if placement.master_tier is Tier.DISK else nbytes


def tensors_bytes(span: SpanLayout, tier: Tier, setup: Setup) -> tuple[int, int]:
    """Return bytes of optimizer states in `tier`, on disk in full pages, and of those that stay in host memory.

    Full-matrix optimizers: the states of each parameter, of any shape. Those that are not of the parameter's shape are never
    on disk.
    """
    is_on_disk, master = tier is Tier.DISK, itemsize(span.spec.master_dtype)
    if not span.is_unsliced:
        nbytes = span.slice_numel * master
        return setup.optimizer_tensors * (padded(nbytes) if is_on_disk else nbytes), 0
    arrays = [(nbytes, slot.spec.numel * master) for slot in span.owned_slots for nbytes in slot.spec.state_bytes]
    arrays = arrays if span.slice_numel else []
    if not is_on_disk:
        return round(span.share * sum(nbytes for nbytes, _ in arrays)), 0
    beside = sum(nbytes for nbytes, whole in arrays if nbytes != whole)
    return round(span.share * sum(padded(n) for n, whole in arrays if n == whole)), round(span.share * beside)


def gradient_itemsize(span: SpanLayout, tier: Tier, setup: Setup) -> int:
    """Return bytes per stored gradient element: the master's. `step_in_backward` with one backward per step stores none."""
    return 0 if tier is not Tier.DEVICE and setup.steps_at_once else itemsize(span.spec.master_dtype)


def stores_gradients(tier: Tier, setup: Setup) -> bool:
    """Return whether gradients of masters in `tier` are on disk. With `step_in_backward` they stay in host memory."""
    return tier is Tier.DISK and not setup.config.step_in_backward


def stored_itemsize(span: SpanLayout, placement: Placement, setup: Setup) -> int:
    """Return bytes per element of parameters on disk."""
    return itemsize(span.spec.master_dtype if is_in_files(span, placement, setup) else span.spec.compute_dtype)


def wire_dtype(span: SpanLayout, setup: Setup) -> str:
    """Return the type in which gradients are sent: those of masters that are not float32 are never narrowed."""
    return dtype_name(setup.precision.reduce_dtype) if span.spec.master_dtype == "float32" else span.spec.master_dtype


def state_bytes(span: SpanLayout, placement: Placement, setup: Setup) -> dict[tuple[Tier, str], int]:
    """Return stored bytes of one span, by tier and kind."""
    out = {(tier, kind): 0 for tier in TIERS for kind in STATES}
    out[placement.parameters, "parameters"] = parameter_bytes(span, placement, setup)
    out[placement.master_tier, "optimizer"] = master_bytes(span, placement, setup)
    if (tier := placement.optimizer) is not None:
        states, beside = tensors_bytes(span, tier, setup)
        out[tier, "optimizer"] += states
        out[Tier.HOST, "optimizer"] += beside
        nbytes = span.slice_numel * gradient_itemsize(span, tier, setup)
        if stores_gradients(tier, setup):
            out[tier, "gradients"] = padded(nbytes)
        else:
            out[Tier.DEVICE if tier is Tier.DEVICE else Tier.HOST, "gradients"] = nbytes
    return out
