"""What a plan is made from, and the placement of `auto`: the least predicted step time whose bytes fit the budgets.

Every cost of a span is linear in the elements that rest in each pair (parameter tier, optimizer tier), here called a *mode*;
equal spans are one *kind*. So the best split is a mixed-integer linear program over (kind, mode), solved by HiGHS. Its size
depends on the number of kinds, not of spans. Integers are the numbers of spans by parameter tier, as a span's parameters rest
in one tier. What depends on the largest of its sort (staging, gathered units) is not linear: it is reserved as a whole for the
slowest tiers that may be used, and there is one program for each such pair. Counts become spans at the end: faster tiers go to
the first units, which the next forward needs first.

Every rank solves the same program and must find the same placement: there is no time limit, only one of nodes, and HiGHS gives
the same solution for the same program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import product
from math import floor, inf
from typing import Any

import numpy as np

from ..config import ZeroConfig
from ..core.layout import ALIGN_NUMEL, Layout, Span, itemsize
from ..core.precision import Precision, dtype_name
from ..errors import ConfigError
from ..tiers.tier import SIZES, Sizes, Tier
from .costs import STATES, TIERS, Memory, Placement, Setup, state_bytes, together
from .machine import Machine
from .outline import Batch, activation_bytes
from .peaks import memory_of
from .work import PASSES, PHASES, compute_flops, phase_of, resource, speed, uses, work_of

Mode = tuple[Tier, Tier]
Slowest = tuple[Tier, Tier]
"""The slowest tier that parameters may rest in, and the slowest of optimizer state."""
_Array = np.ndarray[Any, np.dtype[np.float64]]

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
"""Speeds that order the choices where none are known."""
TIE = 1e-3
"""Weight of the sum of all parts beside the time itself: of placements that take equally long, the one that moves less."""
GAP = 1e-4
"""Relative distance from the optimum at which the search stops."""
NODES = 10_000
"""Of the search tree: a limit that is the same on every rank, as one of time is not."""
_FEWER_TIERS = 1e-5
"""Relative to the time, by place in the order of pairs of slowest tiers: of those that are equal, the fastest is looked at."""
_NOISE = 1e-6
"""What HiGHS takes for an integer may be so far from it."""
ATTEMPTS = 4
"""To leave enough free for what is rounded."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes per rank by tier; None: no limit. `together` limits device and host memory as one."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    together: int | None = None

    def rows(self) -> Iterator[tuple[str, tuple[Tier, ...], int]]:
        """The limits there are: name, tiers, bytes."""
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
        """Bytes by which `memory` may be over each limit."""
        over = {name: sum(memory.at_most(tier) for tier in tiers) - limit for name, tiers, limit in self.rows()}
        return {name: value for name, value in over.items() if value > 0}


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made from.

    Args:
        layout: cut for `world_size` owners (one at stage 0).
        machine: one rank's share of it.
        optimizer_tensors: tensors of state per master; 2 for Adam.
        batch: for activations and computing time; None: both are left out.
        backward_per_step: micro-batches that add up to a step.
        in_files: names of parameters whose values the model's own files have, and may keep.
        sizes: of the blocks and records that offloaded state is updated and moved in.

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

    def changed(self, world_size: int, **settings: Any) -> PlanInputs:
        """The same model with other settings, or on another number of ranks: cut anew where that needs it."""
        config = replace(self.config, **settings)
        shards = config.shards(world_size)
        units = ((unit.name, [slot.spec for span in unit.spans for slot in span.slots]) for unit in self.layout.units)
        layout = self.layout if shards == self.layout.shards else Layout.build(units, shards, self.layout.visits)
        return replace(self, layout=layout, config=config, world_size=world_size)

    @cached_property
    def setup(self) -> Setup:
        """What the formulas of `costs` need of it."""
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
        """Of the settings, else of the machine."""
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
    def activations(self) -> tuple[int, int]:
        """Bytes on the device and on the host: an estimate."""
        if self.batch is None:
            return 0, 0
        return activation_bytes(self.batch, itemsize(self._compute_dtype), self.precision.autocast_dtype is not None)

    @property
    def compute_s(self) -> float | None:
        """0: no batch is known. None: no rate is."""
        if self.batch is None:
            return 0.0
        rate = self.machine.flops.get(self._compute_dtype)
        flops = compute_flops(self.layout, self.batch.tokens * self.backward_per_step, self.batch.checkpointing)
        return None if rate is None else flops / rate

    @property
    def _compute_dtype(self) -> str:
        """The one in which most parameters are used."""
        numel: dict[str, int] = {}
        for span in self.layout.spans:
            numel[span.spec.compute_dtype] = numel.get(span.spec.compute_dtype, 0) + span.used_numel
        return max(numel, key=lambda dtype: numel[dtype], default="float32")

    def all_in(self, parameters: Tier, optimizer: Tier) -> tuple[Placement, ...]:
        """Everything in these two tiers."""
        placements = []
        for span in self.layout.spans:
            stretches = ((optimizer, span.slice_numel),) if span.is_updated else ()
            placements.append(Placement(together(parameters, span, stretches), stretches))
        return tuple(placements)

    def memory(self, placements: Sequence[Placement]) -> Memory:
        return memory_of(self.layout, placements, self.setup, self.activations)


def solve(inputs: PlanInputs) -> tuple[Placement, ...] | None:
    """Placements by span index that fit the budgets in the least predicted time; None where nothing fits.

    The same tiers on every rank, also where ranks have unequal parts of spans: collectives have one order.
    """
    found = _Program(inputs).fastest()
    return None if found is None else _sized(inputs.layout, found)


def _sized(layout: Layout, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """With as many elements of ragged slices as this layout's."""
    return tuple(
        Placement(each.parameters, tuple((tier, span.slice_numel) for tier, _ in each.optimizer)) if span.cuts else each
        for span, each in zip(layout.spans, placements)
    )


def fits(inputs: PlanInputs) -> bool:
    """Whether any placement fits; cheaper than to find the fastest."""
    return _Program(inputs).fastest(any_will_do=True) is not None


def needed_bytes(inputs: PlanInputs) -> dict[str, int]:
    """By budget: the least that it has to be for something to fit, the others as they are; left out where it cannot help."""
    program = _Program(inputs)
    out = {}
    for name, tiers, _ in inputs.budgets.rows():
        placements = program.smallest(name, tiers)
        if placements is not None:
            memory = inputs.memory(placements)
            out[name] = sum(memory.at_most(tier) for tier in tiers)
    return out


class _Program:
    """The problem in numbers. Variables: spans of each (kind, mode), seconds of each phase, spans of each (kind, tier of the
    parameters).
    """

    def __init__(self, inputs: PlanInputs) -> None:
        self._layout = inputs.layout
        self._inputs = inputs = replace(inputs, layout=inputs.layout.evened())
        layout, setup, machine = inputs.layout, inputs.setup, inputs.machine
        parameters, optimizer = TIERS_OF[inputs.config.offload_params], TIERS_OF[inputs.config.offload_optimizer]
        self._slowest: list[Slowest] = list(product(parameters, optimizer))
        kinds: dict[tuple[object, ...], list[tuple[Span, int]]] = {}
        for unit, used in zip(layout.units, uses(layout, setup)):
            for span in unit.spans:
                spec = span.spec
                types = spec.compute_dtype, spec.master_dtype, spec.gathered_in
                whole = span.share, *(slot.spec.state_bytes for slot in span.wholes)
                key = (*types, span.is_updated, span.slice_numel, span.numel, used, span.is_whole, whole)
                kinds.setdefault(key, []).append((span, used))
        self._kinds = [[span for span, _ in members] for members in kinds.values()]
        modes = [_modes(span, parameters, optimizer) for (span, _), *_ in kinds.values()]
        self._columns = [(kind, mode) for kind, of in enumerate(modes) for mode in of]
        n = len(self._columns)
        counts = sorted({(kind, mode[0]) for kind, mode in self._columns}, key=lambda at: (at[0], TIERS.index(at[1])))
        self._n, self._size = n, n + len(PHASES) + len(counts)
        self._integers = (np.arange(self._size) >= n + len(PHASES)).astype(int)
        self._integers[:n] = [self._kinds[kind][0].is_whole for kind, _ in self._columns]

        self._bytes = {tier: np.zeros(self._size) for tier in TIERS}
        times: dict[tuple[str, str], _Array] = {}
        compute = (PASSES, "processor" if machine.shares_memory else "compute")
        times[compute] = np.zeros(self._size)
        rates: dict[str, Any] = {name: getattr(machine, name) or rate for name, rate in NOMINAL.items()}
        speeds = replace(machine, **rates)
        examples = [members[0] for members in kinds.values()]
        for column, (kind, mode) in enumerate(self._columns):
            span, used = examples[kind]
            placement = Placement(mode[0], ((mode[1], span.slice_numel),) if span.is_updated else ())
            for (tier, _), nbytes in state_bytes(span, placement, setup).items():
                self._bytes[tier][column] += nbytes
            for (phase, road), value in work_of(span, placement, setup, used).items():
                row = times.setdefault((phase_of(phase, setup), resource(road, machine)), np.zeros(self._size))
                row[column] += value / (speed(speeds, road) or 1.0)
        # In units of what takes longest in one span, so that HiGHS' absolute tolerances are small beside it.
        unit_s = max(row.max() for row in times.values()) or 1.0
        self._cost: _Array = TIE * np.sum(list(times.values()), axis=0) / unit_s
        self._cost[n : n + len(PHASES)] = 1.0
        self._most = np.array([len(self._kinds[kind]) for kind, _ in self._columns] + [inf] * (self._size - n))
        rows: list[tuple[_Array, float, float]] = []
        for (phase, name), row in times.items():  # a phase lasts as long as its busiest resource
            scaled = row / unit_s
            scaled[n + PHASES.index(phase)] = -1.0
            known = (inputs.compute_s or 0.0) / unit_s if (phase, name) == compute else 0.0
            rows.append((scaled, -inf, -known))
        for kind, spans in enumerate(self._kinds):  # every span is in some mode
            rows.append((self._sum_of([owner == kind for owner, _ in self._columns]), len(spans), len(spans)))
        for place, at in enumerate(counts):  # and its parameters in one tier
            row = self._sum_of([(owner, mode[0]) == at for owner, mode in self._columns])
            row[n + len(PHASES) + place] = -1.0
            rows.append((row, 0.0, 0.0))
        self._rows = rows
        self._reserved: dict[Slowest, Mapping[Tier, int]] = {}

    def _sum_of(self, columns: Sequence[bool]) -> _Array:
        return np.concatenate([np.array(columns, dtype=float), np.zeros(self._size - self._n)])

    def fastest(self, any_will_do: bool = False) -> tuple[Placement, ...] | None:
        """Within the budgets, in the least time; or, if any will do, the first that is found."""
        budgets = self._inputs.budgets
        found = self._best(budgets, self._cost, (), any_will_do)
        least = self._reserve(self._slowest[0])
        if found is not None or self._solution(budgets, self._cost, self._slowest[-1], least, {}) is None:
            return found
        for name, tiers, _ in budgets.rows():  # in whole blocks the fastest ones are too large: does another one fit?
            found = self.smallest(name, tiers)
            if found is not None and not self._excess(budgets, found):
                return found
        return None

    def _excess(self, budgets: Budgets, placements: Sequence[Placement]) -> dict[str, int]:
        """Bytes by which any rank may be over each limit."""
        over = budgets.excess(self._inputs.memory(placements))
        if self._layout is not self._inputs.layout and self._layout.imbalance():
            for rank in range(self._layout.shards):
                seen = replace(self._inputs, layout=self._layout.seen_from(rank))
                for name, value in budgets.excess(seen.memory(_sized(seen.layout, placements))).items():
                    over[name] = max(value, over.get(name, 0))
        return over

    def smallest(self, name: str, tiers: Sequence[Tier]) -> tuple[Placement, ...] | None:
        """With the fewest bytes in these tiers, without a limit on them."""
        cost = np.sum([self._bytes[tier] for tier in tiers], axis=0)
        return self._best(replace(self._inputs.budgets, **{name: None}), cost, tiers)

    def _best(
        self, budgets: Budgets, cost: _Array, reserved_in: Sequence[Tier], any_will_do: bool = False
    ) -> tuple[Placement, ...] | None:
        """Of least cost over all pairs of slowest tiers. `reserved_in`: tiers where what is reserved is a cost, too.

        A search from the best bound on: what is reserved for the fastest pair is a bound from below for all of them, and to
        find out what another pair reserves takes as long as a plan.
        """
        ahead: list[tuple[float, bool, int]] = []  # cost, whether that is only a bound, place in `_slowest`

        def note(place: int, reserved: Mapping[Tier, int], is_bound: bool) -> bool:
            x = self._solution(budgets, cost, self._slowest[place], reserved, {})
            if x is not None:
                value = float(cost @ x) + sum(reserved[tier] for tier in reserved_in)
                heappush(ahead, (value * (1 + _FEWER_TIERS * place), is_bound, place))
            return x is not None

        for place in range(len(self._slowest)):
            note(place, self._reserve(self._slowest[0]), is_bound=True)
        while ahead:
            _, is_bound, place = heappop(ahead)
            fits_so = not is_bound or note(place, self._reserve(self._slowest[place]), is_bound=False)
            if fits_so and (any_will_do or not is_bound):
                found = self._rounded(budgets, cost, self._slowest[place])
                if found is not None:
                    return found
        return None

    def _rounded(self, budgets: Budgets, cost: _Array, slowest: Slowest) -> tuple[Placement, ...] | None:
        """Placements with these tiers, cut into whole blocks."""
        spare: dict[str, int] = {}
        for _ in range(ATTEMPTS):
            x = self._solution(budgets, cost, slowest, self._reserve(slowest), spare)
            if x is None:
                return None
            placements = self._spans(x)
            over = self._excess(budgets, placements)
            if not over:
                return placements
            # Whole blocks and pages take a little more than the program knew: leave that much free.
            spare |= {name: 2 * (spare.get(name, 0) + value) for name, value in over.items()}
        return None

    def _reserve(self, slowest: Slowest) -> Mapping[Tier, int]:
        """What is there whichever spans use these tiers: everything but states, as with all spans in the slowest ones."""
        if slowest not in self._reserved:
            memory = self._inputs.memory(self._inputs.all_in(*slowest))
            self._reserved[slowest] = {
                tier: memory.at_most(tier) - sum(memory.rest[tier][kind] for kind in STATES) for tier in TIERS
            }
        return self._reserved[slowest]

    def _solution(
        self, budgets: Budgets, cost: _Array, slowest: Slowest, reserved: Mapping[Tier, int], spare: Mapping[str, int]
    ) -> _Array | None:
        """The best values of all variables; None where nothing fits."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes a second: only where `auto` is used

        rows = list(self._rows)
        for name, tiers, limit in budgets.rows():
            row = np.sum([self._bytes[tier] for tier in tiers], axis=0)
            scale = row.max() or 1.0
            left = limit - sum(reserved[tier] for tier in tiers) - spare.get(name, 0)
            rows.append((row / scale, -inf, left / scale))
        allowed = np.ones(self._size, dtype=bool)
        for column, (kind, mode) in enumerate(self._columns):
            allowed[column] = mode in _modes(
                self._kinds[kind][0], *(TIERS[: TIERS.index(tier) + 1] for tier in slowest)
            )
        matrix, low, high = zip(*rows)
        found = milp(
            cost / (np.abs(cost).max() or 1.0),
            integrality=self._integers,
            bounds=Bounds(np.zeros(self._size), np.where(allowed, self._most, 0.0)),
            constraints=LinearConstraint(np.array(matrix), low, high),
            options={"mip_rel_gap": GAP, "node_limit": NODES},
        )
        if found.x is None:
            return None
        x: _Array = np.where(np.abs(found.x - np.round(found.x)) < _NOISE, np.round(found.x), found.x)
        return x

    def _spans(self, x: _Array) -> tuple[Placement, ...]:
        out: dict[int, Placement] = {}
        for kind, spans in enumerate(self._kinds):
            shares = {mode: float(x[column]) for column, (owner, mode) in enumerate(self._columns) if owner == kind}
            rest = spans
            for tier in TIERS:
                of = {mode[1]: share for mode, share in shares.items() if mode[0] is tier and share > 1e-9}
                taken, rest = rest[: round(sum(of.values()))], rest[round(sum(of.values())) :]
                out.update(_cut(taken, tier, of, self._inputs.sizes.block_numel))
        return tuple(out[index] for index in sorted(out))


def _cut(
    spans: Sequence[Span], parameters: Tier, shares: Mapping[Tier, float], block_numel: int
) -> Iterator[tuple[int, Placement]]:
    """Equal spans one after another, cut where the tiers' shares (in spans) end; the slower tier takes what is rounded."""
    if not spans:
        return
    numel = spans[0].slice_numel
    unit = block_numel if numel > block_numel else ALIGN_NUMEL
    used = [tier for tier in TIERS if tier in shares]
    stops, so_far = [], 0.0
    for tier in used:
        so_far += shares[tier]
        whole, part = divmod(so_far + 1e-9, 1.0)
        stops.append(int(whole) * numel + floor(part * numel / unit) * unit)
    stops[-1] = len(spans) * numel
    for place, span in enumerate(spans):
        low, high, stretches, start = place * numel, (place + 1) * numel, [], place * numel
        if span.is_whole:  # in one tier, also without elements
            stretches = [(next(tier for tier, stop in zip(used, stops) if high <= stop), numel)]
            start = high
        for tier, stop in zip(used, stops):
            end = min(max(stop, low), high)
            if end > start:
                stretches.append((tier, end - start))
                start = end
        cut = tuple(stretches) if span.is_updated else ()
        yield span.index, Placement(together(parameters, span, cut), cut)


def _modes(span: Span, parameters: Sequence[Tier], optimizer: Sequence[Tier]) -> tuple[Mode, ...]:
    """Where one memory is both, the parameters are never in a slower tier than the master."""
    if not span.is_updated:
        return tuple((tier, tier) for tier in parameters)
    modes = list(product(parameters, optimizer))
    if span.spec.compute_dtype == span.spec.master_dtype:
        return tuple(dict.fromkeys((together(p, span, ((o, 1),)), o) for p, o in modes))
    return tuple(modes)
