"""The inputs of a plan, and the placement of `auto`: a greedy fill of the fastest memory with whole units.

A unit's parameters are in one tier, and so is its optimizer state. Everything starts in the slowest tier. Then units move up in
the order in which a forward uses them: first to the device, then from disk to host memory. The predicted time of a step decides
whether optimizer state or parameters move first.

The placement depends only on the inputs, which are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from ..config import ZeroConfig
from ..core.layout import Layout, UnitLayout, itemsize
from ..core.precision import Precision, dtype_name
from ..errors import ConfigError
from ..tiers.tier import SIZES, Sizes, Tier
from .costs import STATES, TIERS, Memory, Placement, Setup, is_in_files, state_bytes, together
from .machine import Machine
from .network import Network
from .outline import Batch, activation_bytes, activation_work, exchanges
from .peaks import memory_of
from .work import compute_flops, seconds, step_seconds, work_in_total

TIERS_OF = {"none": (Tier.DEVICE,), "cpu": (Tier.HOST,), "disk": (Tier.DISK,), "auto": TIERS}
NOMINAL = {
    "device_bandwidth": 1e12,
    "host_bandwidth": 2e10,
    "link_down": 1.2e10,
    "link_up": 1.2e10,
    "disk_read": 2.5e9,
    "disk_write": 2.5e9,
    "collective": 1e10,
}
"""Speeds that order the choices if none are known."""
TIE = 1e-3
"""Weight of the sum of all parts, added to the time: of equally fast placements the one with less traffic wins."""
ATTEMPTS = 4
"""Attempts to leave enough memory free for ranks that own more than the mean."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes per rank by tier; None: no limit. `together` limits device and host memory as one."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    together: int | None = None

    def rows(self) -> Iterator[tuple[str, tuple[Tier, ...], int]]:
        """Yield the given limits: name, tiers, bytes."""
        for name, tiers in (
            ("device", (Tier.DEVICE,)),
            ("host", (Tier.HOST,)),
            ("disk", (Tier.DISK,)),
            ("together", (Tier.DEVICE, Tier.HOST)),
        ):
            limit = getattr(self, name)
            if limit is not None:
                yield name, tiers, limit

    def excess(self, memory: Memory) -> dict[str, int]:
        """Return the bytes by which `memory` may exceed each limit."""
        over = {name: sum(memory.at_most(tier) for tier in tiers) - limit for name, tiers, limit in self.rows()}
        return {name: value for name, value in over.items() if value > 0}


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan.

    Args:
        layout: partitioned for `world_size` owners (one at stage 0).
        machine: one rank's share.
        optimizer_tensors: tensors of state per master; 2 for Adam.
        batch: for activations and computing time; None: both are left out.
        backward_per_step: micro-batches of a step.
        in_files: names of parameters that may stay in the model's own files.
        sizes: sizes of blocks and slabs of offloaded state.
        network: the links between ranks; None: those of the machine.

    Raises:
        ConfigError: an offload that the stage does not allow, a layout for another number of ranks, a number below its least.
    """

    layout: Layout
    machine: Machine
    config: ZeroConfig
    world_size: int
    precision: Precision
    optimizer_tensors: int = 2
    batch: Batch | None = None
    backward_per_step: int = 1
    in_files: frozenset[str] = frozenset()
    sizes: Sizes = SIZES
    network: Network | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("world_size", 1),
            ("backward_per_step", 1),
            ("optimizer_tensors", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, found {getattr(self, name)}")
        self.config.check_world_size(self.world_size)
        owners = self.config.shards(self.world_size)
        if self.layout.shards != owners:
            raise ConfigError(
                f"stage {self.config.stage} on {self.world_size} ranks needs a layout of {owners} shards, found one of "
                f"{self.layout.shards}"
            )

    @cached_property
    def setup(self) -> Setup:
        """The inputs of the formulas of `costs`."""
        return Setup(
            self.config.policy_for(self.world_size),
            self.world_size,
            dtype_name(self.precision.reduce_dtype),
            self.optimizer_tensors,
            self.backward_per_step,
            self.config.step_in_backward,
            self.machine.shares_memory,
            self.in_files,
            self.sizes,
            self.config.wire,
        )

    @property
    def budgets(self) -> Budgets:
        """The memory limits of the settings, else of the machine."""
        device, host = (
            None if limit is None else int(limit) for limit in (self.config.device_memory, self.config.host_memory)
        )
        machine = self.machine
        if machine.shares_memory and (device is None or host is None):
            return Budgets(device, host, machine.disk_free, together=machine.host_memory)
        return Budgets(
            machine.device_memory if device is None else device,
            machine.host_memory if host is None else host,
            machine.disk_free,
        )

    @property
    def activations(self) -> tuple[int, int, int]:
        """Bytes of activations on the device (estimated), on the host and on disk."""
        if self.batch is None:
            return 0, 0, 0
        return activation_bytes(self.batch, itemsize(self._compute_dtype), self.precision.autocast_dtype is not None)

    @property
    def activation_work(self) -> dict[str, int]:
        """Bytes per step that offloaded activations and divided sequences move, by road."""
        if self.batch is None:
            return {}
        is_mixed, is_cpu = self.precision.autocast_dtype is not None, self.machine.shares_memory
        moved = activation_work(self.batch, itemsize(self._compute_dtype), is_mixed, is_cpu)
        return {road: self.backward_per_step * nbytes for road, nbytes in moved.items()}

    @property
    def exchanges(self) -> int:
        """Return how often attention exchanges tensors in a step."""
        return 0 if self.batch is None else self.backward_per_step * exchanges(self.batch)

    @property
    def compute_s(self) -> float | None:
        """Seconds of computation. 0: without a batch. None: the rate is not known."""
        if self.batch is None:
            return 0.0
        rate = self.machine.flops.get(self._compute_dtype)
        flops = compute_flops(self.layout, self.batch.tokens * self.backward_per_step, self.batch.checkpointing)
        return None if rate is None else flops / rate

    @property
    def _compute_dtype(self) -> str:
        """The compute dtype of most parameters."""
        numel: dict[str, int] = {}
        for span in self.layout.spans:
            numel[span.spec.compute_dtype] = numel.get(span.spec.compute_dtype, 0) + span.used_numel
        return max(numel, key=lambda dtype: numel[dtype], default="float32")

    def all_in(self, parameters: Tier, optimizer: Tier) -> tuple[Placement, ...]:
        """Place all parameters in one tier and all optimizer state in another."""
        placements = []
        for span in self.layout.spans:
            stretches = ((optimizer, span.slice_numel),) if span.is_updated else ()
            placements.append(Placement(together(parameters, span, stretches), stretches))
        return tuple(placements)

    def memory(self, placements: Sequence[Placement]) -> Memory:
        return memory_of(self.layout, placements, self.setup, self.activations)


Move = tuple[bool, Tier]
"""True if optimizer state moves, False if parameters move; and the new tier."""
Pair = tuple[Tier, Tier]
"""The tier of parameters, the tier of optimizer state."""
Bytes = dict[Tier, int]


def solve(inputs: PlanInputs) -> tuple[Placement, ...] | None:
    """Return placements by span index that fit the budgets; None where none does. The same tiers on every rank."""
    filler = _Filler(inputs)
    found = min(filler.solutions(inputs.budgets), key=filler.cost, default=None)
    return None if found is None else _sized(inputs.layout, found)


def _sized(layout: Layout, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements with this layout's sizes of ragged slices."""
    return tuple(
        Placement(each.parameters, tuple((tier, span.slice_numel) for tier, _ in each.optimizer)) if span.cuts else each
        for span, each in zip(layout.spans, placements)
    )


class _Unit:
    """Bytes of one unit's states by tier."""

    def __init__(self, unit: UnitLayout, setup: Setup) -> None:
        self._spans, self._setup = [*unit.spans], setup
        self._known: dict[Pair, Bytes] = {}
        self.kind = tuple(
            (span.spec.compute_dtype, span.spec.master_dtype, span.spec.gathered_in, span.is_updated)
            + (
                span.slice_numel,
                span.numel,
                span.is_whole,
                span.share,
                *(slot.spec.state_bytes for slot in span.owned_slots),
            )
            + (is_in_files(span, Placement(Tier.DISK, ()), setup),)
            for span in self._spans
        )

    def placements(self, tiers: Pair) -> Iterator[tuple[int, Placement]]:
        parameters, optimizer = tiers
        for span in self._spans:
            states = ((optimizer, span.slice_numel),) if span.is_updated else ()
            yield span.index, Placement(together(parameters, span, states), states)

    def bytes(self, tiers: Pair) -> Bytes:
        if tiers not in self._known:
            out = dict.fromkeys(TIERS, 0)
            for span, (_, placement) in zip(self._spans, self.placements(tiers)):
                for (tier, _), nbytes in state_bytes(span, placement, self._setup).items():
                    out[tier] += nbytes
            self._known[tiers] = out
        return self._known[tiers]


class _Filler:
    """Moves units up as far as budgets allow, in a layout where every rank owns the mean."""

    def __init__(self, inputs: PlanInputs) -> None:
        self._layout = inputs.layout
        self._inputs = replace(inputs, layout=inputs.layout.evened())
        rates: dict[str, Any] = {name: getattr(inputs.machine, name) or rate for name, rate in NOMINAL.items()}
        self._machine = replace(inputs.machine, **rates)
        kinds: dict[object, list[_Unit]] = {}
        for unit in self._inputs.layout.units:
            made = _Unit(unit, inputs.setup)
            kinds.setdefault(made.kind, []).append(made)
        self._kinds = [*kinds.values()]
        config = inputs.config
        self._allowed = TIERS_OF[config.offload_params], TIERS_OF[config.offload_optimizer]
        self._slowest = sorted(product(*self._allowed), key=lambda pair: sum(map(TIERS.index, pair)))
        self._reserved: dict[Pair, Bytes] = {}

    def solutions(self, budgets: Budgets) -> Iterator[tuple[Placement, ...]]:
        """Yield placements that fit: for every pair of slowest tiers, in every order of moves."""
        for pair in self._slowest:
            for moves in self._orders(pair):
                found = self._filled(pair, moves, budgets)
                if found is not None:
                    yield found

    def _orders(self, pair: Pair) -> Iterator[list[Move]]:
        """Yield the orders of moves from two tiers: optimizer state or parameters first, to each tier."""
        targets = TIERS[: max(map(TIERS.index, pair))]
        both = (True, False) if self._allowed == (TIERS, TIERS) else (True,)
        for first in product(both, repeat=len(targets)):
            moves = [(each, tier) for tier, is_first in zip(targets, first) for each in (is_first, not is_first)]
            yield [(each, tier) for each, tier in moves if tier in self._allowed[each]]

    def _filled(self, pair: Pair, moves: Sequence[Move], budgets: Budgets) -> tuple[Placement, ...] | None:
        """Start in two tiers and move units up as far as budgets allow; None if that does not fit."""
        spare: dict[str, int] = {}
        for _ in range(ATTEMPTS):
            rows = [(tiers, limit - spare.get(name, 0)) for name, tiers, limit in budgets.rows()]
            placements = self._moved_up(pair, moves, rows)
            if placements is None:
                return None
            over = self._excess(budgets, placements)
            if not over:
                return placements
            # Too little was reserved, or a rank owns more than the mean.
            spare |= {name: 2 * (spare.get(name, 0) + value) for name, value in over.items()}
        return None

    def _moved_up(
        self, pair: Pair, moves: Sequence[Move], rows: Sequence[tuple[Sequence[Tier], int]]
    ) -> tuple[Placement, ...] | None:
        used = dict(self._reserve(pair))
        where = [[(pair, len(units))] for units in self._kinds]
        for units in self._kinds:
            for tier, nbytes in units[0].bytes(pair).items():
                used[tier] += len(units) * nbytes
        for of_optimizer, target in moves:
            for units, parts in zip(self._kinds, where):
                for now, count in parts[:]:
                    if TIERS.index(now[of_optimizer]) <= TIERS.index(target):
                        continue
                    then = (now[0], target) if of_optimizer else (target, now[1])
                    before, after = units[0].bytes(now), units[0].bytes(then)
                    added = {tier: after[tier] - before[tier] for tier in TIERS}
                    moved = count
                    for tiers, limit in rows:
                        each, free = sum(added[tier] for tier in tiers), limit - sum(used[tier] for tier in tiers)
                        moved = min(moved, max(0, free) // each) if each > 0 else moved
                    at = parts.index((now, count))
                    parts[at : at + 1] = [(then, moved), (now, count - moved)]
                    for tier, nbytes in added.items():
                        used[tier] += moved * nbytes
        if any(sum(used[tier] for tier in tiers) > limit for tiers, limit in rows):
            return None
        found: dict[int, Placement] = {}
        for units, parts in zip(self._kinds, where):
            tiers_of = (tiers for tiers, count in parts for _ in range(count))
            for unit, tiers in zip(units, tiers_of):
                found.update(unit.placements(tiers))
        return tuple(found[index] for index in sorted(found))

    def _reserve(self, pair: Pair) -> Bytes:
        """Return the bytes that are not states, with all states in these tiers."""
        if pair not in self._reserved:
            memory = self._inputs.memory(self._inputs.all_in(*pair))
            self._reserved[pair] = {
                tier: memory.at_most(tier) - sum(memory.stored[tier][kind] for kind in STATES) for tier in TIERS
            }
        return self._reserved[pair]

    def cost(self, placements: Sequence[Placement]) -> float:
        """Return the seconds of a step, and a small share of the sum of its parts."""
        inputs = self._inputs
        work = work_in_total(inputs.layout, placements, inputs.setup)
        parts = {key: value or 0.0 for key, value in seconds(work, self._machine, inputs.compute_s or 0.0).items()}
        return (step_seconds(parts, self._machine, inputs.setup) or 0.0) + TIE * sum(parts.values())

    def _excess(self, budgets: Budgets, placements: Sequence[Placement]) -> dict[str, int]:
        """Return the bytes by which any rank may exceed each limit."""
        over = budgets.excess(self._inputs.memory(placements))
        if self._layout is not self._inputs.layout and self._layout.imbalance():
            for rank in range(self._layout.shards):
                seen = replace(self._inputs, layout=self._layout.seen_from(rank))
                for name, value in budgets.excess(seen.memory(_sized(seen.layout, placements))).items():
                    over[name] = max(value, over.get(name, 0))
        return over
