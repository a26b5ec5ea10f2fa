"""The placement of `auto`: the least predicted step time whose bytes fit the budgets.

Every cost of a span is linear in the elements that rest in each pair (parameter tier, optimizer tier), here called a *mode*;
equal spans are one *kind*. So the best split is a mixed-integer linear program over (kind, mode), solved by HiGHS. Its size
depends on the number of kinds, not of spans. Integers are: the numbers of spans by parameter tier, as a span's parameters rest
in one tier; and a choice among the *sets*, pairs of slowest tiers that may be used: what depends on the largest of its sort
(staging, gathered units) is reserved as a whole for the set that is chosen. Counts become spans at the end: faster tiers go to
the first units, which the next forward needs first.

Every rank solves the same program and must find the same placement: there is no time limit, only one of nodes, and HiGHS gives
the same solution for the same program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, floor, inf
from typing import Any

import numpy as np

from ..core.layout import ALIGN_NUMEL, Layout, Span
from ..tiers.tier import Tier
from .costs import STATES, TIERS, Memory, Placement, Setup, memory_of, state_bytes, together
from .machine import Machine
from .work import PASSES, PHASES, phase_of, resource, speed, uses, work_of

Mode = tuple[Tier, Tier]
_Array = np.ndarray[Any, np.dtype[np.float64]]
_Row = tuple[Mapping[int, float], float, float]
"""Coefficients by variable, and the least and the most that they may sum up to."""
_Spare = dict[tuple[tuple[int, int], str], int]
"""Bytes to leave free, by set and budget."""

NOMINAL = Machine(
    device_bandwidth=1e12,
    host_bandwidth=2e10,
    link_down=1.2e10,
    link_up=1.2e10,
    disk_read=2.5e9,
    disk_write=2.5e9,
    collective=1e10,
)
"""Speeds that order the choices where none are known."""
TIE = 1e-3
"""Weight of the sum of all parts beside the time itself: of placements that take equally long, the one that moves less."""
GAP = 1e-4
"""Relative distance from the optimum at which the search stops."""
NODES = 10_000
"""Of the search tree: a limit that is the same on every rank, as one of time is not."""
_FEWER_TIERS = 1e-5
"""Weight of each slower tier that may be used, in the time of the slowest span: of equal sets, the fastest is looked at."""
_NOISE = 1e-6
"""What HiGHS takes for an integer may be so far from it."""
_MARGINS = tuple(mib << 20 for mib in (0, 1, 4, 16, 64, 256))
ATTEMPTS = 4
"""Per set, to leave enough free for what is rounded."""


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


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be placed, and how. `parameters` and `optimizer` are the tiers that may be used, fastest first."""

    layout: Layout
    setup: Setup
    machine: Machine
    budgets: Budgets
    parameters: tuple[Tier, ...]
    optimizer: tuple[Tier, ...]
    compute_s: float = 0.0
    activations: tuple[int, int] = (0, 0)
    reserved: dict[tuple[int, int], Mapping[Tier, int]] = field(default_factory=dict, compare=False, repr=False)
    """By indices of the slowest tiers: what `reserve` has found. No budget changes it: it stays when they are replaced."""

    def reserve(self, slowest: tuple[int, int]) -> None:
        """Find what is there whichever spans use these tiers: everything but states, as with all spans in the slowest ones.

        With the fastest tiers of all it is the least.
        """
        parameters, optimizer = self.parameters[slowest[0]], self.optimizer[slowest[1]]
        placements = []
        for span in self.layout.spans:
            stretches = ((optimizer, span.slice_numel),) if span.is_updated else ()
            placements.append(Placement(together(parameters, span, stretches), stretches))
        memory = memory_of(self.layout, placements, self.setup, self.activations)
        self.reserved[slowest] = {
            tier: memory.at_most(tier) - sum(memory.rest[tier][kind] for kind in STATES) for tier in TIERS
        }


def solve(problem: Problem) -> tuple[Placement, ...] | None:
    """Placements by span index that fit the budgets in the least predicted time; None where nothing fits."""
    return _Program(problem).placements(problem.budgets)


def lacking(problem: Problem) -> dict[str, int]:
    """By budget: bytes by which that one alone would have to grow for something to fit; left out where it cannot help."""
    program = _Program(problem)
    out: dict[str, int] = {}
    for name, _, budget in problem.budgets.rows():
        more = program.more(name)
        for margin in _MARGINS if more is not None else ():  # the cuts fall on whole blocks
            limit = as_told(budget + (more or 0) + margin)
            if program.placements(replace(problem.budgets, **{name: limit})) is not None:
                out[name] = limit - budget
                break
    return out


def as_told(nbytes: int) -> int:
    """Rounded up to hundredths of its unit, as people are told it: what they are told has to fit."""
    power = max(0, min(4, (nbytes.bit_length() - 1) // 10))
    return (-(-100 * nbytes >> 10 * power) << 10 * power) // 100


class _Program:
    """The problem in numbers. Variables: spans of each (kind, mode), seconds of each phase, the choice of a set, spans of each
    (kind, parameter tier), and the growth of one budget.
    """

    def __init__(self, problem: Problem) -> None:
        layout, setup, machine = problem.layout, problem.setup, problem.machine
        self._problem = problem
        self._sets = list(product(range(len(problem.parameters)), range(len(problem.optimizer))))
        self._columns: list[tuple[int, Mode]] = []
        self._bytes: dict[Tier, dict[int, float]] = {tier: {} for tier in TIERS}
        compute = (PASSES, "processor" if machine.shares_memory else "compute")
        times: dict[tuple[str, str], dict[int, float]] = {compute: {}}
        allowed: list[list[int]] = []  # by column: the sets that have its mode
        kinds: dict[tuple[object, ...], list[tuple[Span, int]]] = {}
        for unit, used in zip(layout.units, uses(layout, setup)):
            for span in unit.spans:
                spec = span.spec
                key = (spec.compute_dtype, spec.master_dtype, span.is_updated, span.slice_numel, span.numel, used)
                kinds.setdefault(key, []).append((span, used))
        self._kinds = [[span for span, _ in members] for members in kinds.values()]
        speeds = replace(machine, **{name: getattr(machine, name) or getattr(NOMINAL, name) for name in _SPEEDS})
        for kind, ((span, used), *_) in enumerate(kinds.values()):
            by_set = [_modes(span, problem.parameters[: p + 1], problem.optimizer[: o + 1]) for p, o in self._sets]
            for mode in by_set[-1]:
                column = len(self._columns)
                self._columns.append((kind, mode))
                allowed.append([place for place, modes in enumerate(by_set) if mode in modes])
                placement = Placement(mode[0], ((mode[1], span.slice_numel),) if span.is_updated else ())
                for (tier, _), nbytes in state_bytes(span, placement, setup).items():
                    self._bytes[tier][column] = self._bytes[tier].get(column, 0.0) + nbytes
                for (phase, road), value in work_of(span, placement, setup, used).items():
                    row = times.setdefault((phase_of(phase, setup), resource(road, machine)), {})
                    row[column] = row.get(column, 0.0) + value / (speed(speeds, road) or 1.0)
        # In units of what takes longest in one span, so that HiGHS' absolute tolerances are small beside it.
        unit_s = max((value for row in times.values() for value in row.values()), default=1.0) or 1.0
        n = len(self._columns)
        self._first_set = n + len(PHASES)
        self._cost = [0.0] * n + [1.0] * len(PHASES) + [_FEWER_TIERS * (p + o) for p, o in self._sets]
        self._most = [float(len(self._kinds[kind])) for kind, _ in self._columns] + [inf] * len(PHASES)
        self._most += [1.0] * len(self._sets)
        self._rows: list[_Row] = [({self._first_set + place: 1.0 for place in range(len(self._sets))}, 1.0, 1.0)]
        for (phase, name), row in times.items():
            for column, value in row.items():
                self._cost[column] += TIE * value / unit_s
            known = problem.compute_s / unit_s if (phase, name) == compute else 0.0
            scaled = {column: value / unit_s for column, value in row.items()}
            self._rows.append(({**scaled, n + PHASES.index(phase): -1.0}, -inf, -known))
        for column, (kind, _) in enumerate(self._columns):
            if len(allowed[column]) < len(self._sets):
                choices = {self._first_set + place: -float(len(self._kinds[kind])) for place in allowed[column]}
                self._rows.append(({column: 1.0, **choices}, -inf, 0.0))
        self._add_counts()

    def _add_counts(self) -> None:
        """Every span is in some mode, and its parameters in one tier."""
        by_tier: list[dict[Tier, dict[int, float]]] = [{} for _ in self._kinds]
        for column, (kind, mode) in enumerate(self._columns):
            by_tier[kind].setdefault(mode[0], {})[column] = 1.0
        for spans, tiers in zip(self._kinds, by_tier):
            count = float(len(spans))
            self._rows.append(({column: 1.0 for columns in tiers.values() for column in columns}, count, count))
            for columns in tiers.values() if len(tiers) > 1 else ():
                self._rows.append(({**columns, len(self._cost): -1.0}, 0.0, 0.0))
                self._cost.append(0.0)
                self._most.append(count)

    def placements(self, budgets: Budgets) -> tuple[Placement, ...] | None:
        """Within the budgets, in the least time."""
        problem = self._problem
        spare: _Spare = {}
        for _ in range(ATTEMPTS * len(self._sets)):
            x = self._solution(budgets, spare)
            if x is None:
                return None
            found = self._spans(x)
            over = budgets.excess(memory_of(problem.layout, found, problem.setup, problem.activations))
            if not over:
                return found
            # Whole blocks and pages take a little more than the program knew: leave that much free with these tiers.
            for name, value in over.items():
                spare[self._chosen(x), name] = 2 * (spare.get((self._chosen(x), name), 0) + value)
        return None

    def more(self, name: str) -> int | None:
        """Bytes by which a budget would have to grow by itself; None where that cannot help."""
        x = self._solution(self._problem.budgets, {}, name)
        return None if x is None else ceil(x[-1])

    def _solution(self, budgets: Budgets, spare: _Spare, grows: str = "") -> _Array | None:
        """The best values of all variables: those of least time, or of least growth of the budget that `grows`.

        What a set reserves takes a while to find. So that is looked up only for the set that is chosen, until it stays chosen:
        the others have a bound from below till then.
        """
        known = self._problem.reserved
        while (x := self._optimum(budgets, spare, grows)) is not None and (chosen := self._chosen(x)) not in known:
            self._problem.reserve(chosen if self._sets[0] in known else self._sets[0])
        return x

    def _chosen(self, x: _Array) -> tuple[int, int]:
        return self._sets[int(np.argmax(x[self._first_set : self._first_set + len(self._sets)]))]

    def _optimum(self, budgets: Budgets, spare: _Spare, grows: str) -> _Array | None:
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes a second: only where `auto` is used
        from scipy.sparse import csr_array

        rows, cost, unit = list(self._rows), [*self._cost, 0.0], 1.0
        bound = self._problem.reserved.get(self._sets[0], {})
        for name, tiers, limit in budgets.rows():
            row = {
                column: sum(self._bytes[tier][column] for tier in tiers)
                for column in range(self._first_set - len(PHASES))
            }
            for place, chosen in enumerate(self._sets):
                reserved = self._problem.reserved.get(chosen, bound)
                fixed = sum(reserved.get(tier, 0) for tier in tiers) + spare.get((chosen, name), 0)
                row[self._first_set + place] = float(fixed)
            scale = max(row.values(), default=0.0) or 1.0
            scaled = {variable: value / scale for variable, value in row.items()}
            if name == grows:
                scaled[len(cost) - 1], unit = -1.0, scale
            rows.append((scaled, -inf, limit / scale))
        if grows:
            cost = [0.0] * (len(cost) - 1) + [1.0]
        entries = [(value, row, column) for row, (of, _, _) in enumerate(rows) for column, value in of.items() if value]
        values, places, variables = zip(*entries)
        matrix = csr_array((values, (places, variables)), shape=(len(rows), len(cost)))
        integers = np.arange(len(cost)) >= self._first_set
        integers[-1] = False
        found = milp(
            np.array(cost),
            integrality=integers.astype(int),
            bounds=Bounds(np.zeros(len(cost)), np.array([*self._most, inf])),
            constraints=LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
            options={"mip_rel_gap": GAP, "node_limit": NODES},
        )
        if found.x is None:
            return None
        x: _Array = np.where(np.abs(found.x - np.round(found.x)) < _NOISE, np.round(found.x), found.x)
        x[-1] = found.x[-1] * unit
        return x

    def _spans(self, x: _Array) -> tuple[Placement, ...]:
        out: dict[int, Placement] = {}
        for kind, spans in enumerate(self._kinds):
            shares = {mode: float(x[column]) for column, (owner, mode) in enumerate(self._columns) if owner == kind}
            rest = spans
            for tier in TIERS:
                of = {mode[1]: share for mode, share in shares.items() if mode[0] is tier and share > 1e-9}
                taken, rest = rest[: round(sum(of.values()))], rest[round(sum(of.values())) :]
                out.update(_cut(taken, tier, of, self._problem.setup.sizes.block_numel))
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
        for tier, stop in zip(used, stops):
            end = min(max(stop, low), high)
            if end > start:
                stretches.append((tier, end - start))
                start = end
        cut = tuple(stretches) if span.is_updated else ()
        yield span.index, Placement(together(parameters, span, cut), cut)


_SPEEDS = ("device_bandwidth", "host_bandwidth", "link_down", "link_up", "disk_read", "disk_write", "collective")


def _modes(span: Span, parameters: Sequence[Tier], optimizer: Sequence[Tier]) -> tuple[Mode, ...]:
    """Where one memory is both, the parameters are never in a slower tier than the master."""
    if not span.is_updated:
        return tuple((tier, tier) for tier in parameters)
    modes = list(product(parameters, optimizer))
    if span.spec.compute_dtype == span.spec.master_dtype:
        return tuple(dict.fromkeys((together(p, span, ((o, 1),)), o) for p, o in modes))
    return tuple(modes)
