"""The placement of `auto`: the least predicted step time whose bytes fit the budgets.

Every cost of a span is linear in the elements that rest in each pair (parameter tier, optimizer tier), here called a *mode*;
equal spans are one *kind*. So the best split is a linear program over (kind, mode), with one more variable per phase of the
step for its busiest resource. A span's parameters rest in one tier, which makes their counts integers: branch and bound. What
depends on the largest of its sort (staging, gathered units) is reserved as a whole before, once for every set of tiers that
may be used. Counts become spans at the end: faster tiers go to the first units, which the next forward needs first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, floor
from typing import Any

import numpy as np

from ..core.layout import ALIGN_NUMEL, Layout, Span
from ..tiers.tier import Tier
from .costs import STATES, TIERS, Memory, Placement, Setup, memory_of, state_bytes, together
from .machine import Machine
from .work import PASSES, PHASES, phase_of, resource, speed, uses, work_of

Mode = tuple[Tier, Tier]
_Array = np.ndarray[Any, np.dtype[np.float64]]
_Indices = np.ndarray[Any, np.dtype[np.int64]]

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
"""Relative distance from the optimum at which branch and bound stops."""
NODES = 256
_SMALL = 1e-10
_MARGINS = tuple(mib << 20 for mib in (0, 1, 4, 16, 64, 256))
ATTEMPTS = 4


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
    reserved: dict[Mode, Mapping[Tier, int]] = field(default_factory=dict, compare=False, repr=False)
    """By slowest tiers: what `_reserved` has found. It does not depend on budgets, so it stays when these are replaced."""


def solve(problem: Problem) -> tuple[Placement, ...] | None:
    """Placements by span index that fit the budgets in the least predicted time; None where nothing fits."""
    budgets = problem.budgets
    for _ in range(ATTEMPTS):
        best = min(
            filter(None, (regime.best() for regime in _regimes(problem))), default=None, key=lambda found: found[0]
        )
        if best is None:
            return None
        placements = best[1]
        over = budgets.excess(memory_of(problem.layout, placements, problem.setup, problem.activations))
        if not over:
            return placements
        # Whole blocks and pages take a little more than the program knew: leave that much free.
        tighter = {name: max(0, getattr(problem.budgets, name) - 2 * value) for name, value in over.items()}
        problem = replace(problem, budgets=replace(problem.budgets, **tighter))
    return None


def lacking(problem: Problem) -> dict[str, int]:
    """By budget: bytes by which that one alone would have to grow for something to fit; left out where it cannot help."""
    least: dict[str, int] = {}
    for regime in _regimes(problem):
        for name, value in regime.lacking().items():
            least[name] = min(value, least.get(name, value))
    out: dict[str, int] = {}
    for name, value in least.items():
        for margin in _MARGINS:  # the cuts fall on whole blocks
            budget = getattr(problem.budgets, name)
            limit = as_told(budget + value + margin)
            if solve(replace(problem, budgets=replace(problem.budgets, **{name: limit}))) is not None:
                out[name] = limit - budget
                break
    return out


def as_told(nbytes: int) -> int:
    """Rounded up to hundredths of its unit, as people are told it: what they are told has to fit."""
    power = max(0, min(4, (nbytes.bit_length() - 1) // 10))
    return (-(-100 * nbytes >> 10 * power) << 10 * power) // 100


def minimise(c: _Array, upper: _Array, limits: _Array, equal: _Array, values: _Array) -> _Array | None:
    """x >= 0 with the least c @ x, upper @ x <= limits and equal @ x == values; None where there is none.

    The simplex method in two phases on a dense tableau (Dantzig's rule, then Bland's, which cannot cycle). `c` has no
    negative entry, so there always is a least value.
    """
    n, rows = len(c), len(limits) + len(values)
    a = np.vstack([upper, equal])
    b = np.concatenate([limits, values])
    scale = np.abs(a).max(axis=1, initial=0.0)
    scale[scale == 0] = 1.0
    a, b = a / scale[:, None], b / scale
    slack = np.vstack([np.eye(len(limits)), np.zeros((len(values), len(limits)))])
    sign = np.where(b < 0, -1.0, 1.0)
    total = n + len(limits)
    table = np.hstack([np.hstack([a, slack]) * sign[:, None], np.eye(rows), np.abs(b)[:, None]])
    basis = np.arange(total, total + rows)
    own = np.flatnonzero(sign[: len(limits)] > 0)  # rows whose slack will do to begin with
    basis[own] = n + own
    absent = np.concatenate([np.zeros(total), np.ones(rows)])
    _pivot(table, basis, absent, total)
    if absent[basis] @ table[:, -1] > _SMALL * (1 + float(np.abs(b).max(initial=0.0))):
        return None
    for row in np.flatnonzero(basis >= total):  # a helper that stays at zero must not grow again
        column = int(np.argmax(np.abs(table[row, :total])))
        if abs(table[row, column]) > _SMALL:
            _exchange(table, basis, int(row), column)
        else:
            table[row] = 0.0
    _pivot(table, basis, np.concatenate([c, np.zeros(len(limits) + rows)]), total)
    x = np.zeros(total + rows)
    x[basis] = table[:, -1]
    return x[:n]


def _pivot(table: _Array, basis: _Indices, cost: _Array, width: int) -> None:
    """Exchanges until no column of the first `width` lowers the cost."""
    small = _SMALL * float(np.abs(cost).max(initial=0.0))
    for turn in range(100 * sum(table.shape)):
        reduced = cost[:width] - cost[basis] @ table[:, :width]
        falling = np.flatnonzero(reduced < -small)
        if not len(falling):
            return
        column = int(falling[0] if turn > 10 * len(basis) else falling[np.argmin(reduced[falling])])
        down = np.flatnonzero(table[:, column] > _SMALL)
        if not len(down):
            return
        ratios = table[down, -1] / table[down, column]
        ties = down[ratios <= ratios.min() + _SMALL]
        _exchange(table, basis, int(ties[np.argmin(basis[ties])]), column)


def _exchange(table: _Array, basis: _Indices, row: int, column: int) -> None:
    """`column` becomes basic in `row`."""
    table[row] /= table[row, column]
    others = np.flatnonzero(table[:, column])
    others = others[others != row]
    table[others] -= np.outer(table[others, column], table[row])
    basis[row] = column


@dataclass(frozen=True, slots=True)
class _Regime:
    """The problem with a fixed set of tiers, in numbers: one column per (kind, mode), one more per phase."""

    problem: Problem
    kinds: tuple[tuple[Span, ...], ...]
    columns: tuple[tuple[int, Mode], ...]
    reserved: Mapping[Tier, int]
    bytes_: Mapping[Tier, _Array]
    times: Mapping[tuple[str, str], _Array]
    """Of each resource, by (phase, resource)."""
    constant: Mapping[tuple[str, str], float]
    """What no placement changes: computation."""
    unit_s: float
    """The times' unit in seconds: what takes longest in one span."""

    def best(self) -> tuple[float, tuple[Placement, ...]] | None:
        """Branch and bound over the numbers of spans of each kind by parameter tier."""
        found: tuple[float, _Array] | None = None
        open_: list[tuple[float, tuple[tuple[int, Tier, float, bool], ...]]] = [(0.0, ())]
        for _ in range(NODES):
            if not open_:
                break
            open_.sort(key=lambda node: -node[0])
            bound, cuts = open_.pop()
            if found is not None and bound >= found[0] * (1 - GAP):
                break
            x = self._relaxed(cuts)
            if x is None:
                continue
            value = float(self._objective() @ x)
            if found is not None and value >= found[0] * (1 - GAP):
                continue
            split = self._fraction(x)
            if split is None:
                found = (value, x)
                continue
            kind, tier, count = split
            open_ += [
                (value, (*cuts, (kind, tier, floor(count), True))),
                (value, (*cuts, (kind, tier, ceil(count), False))),
            ]
        return None if found is None else (found[0] * self.unit_s, self._placements(found[1]))

    def lacking(self) -> dict[str, int]:
        out = {}
        upper, limits, names = self._limits()
        n = upper.shape[1]
        for row, name in enumerate(names):
            wider = np.hstack([upper, np.zeros((len(limits), 1))])
            wider[row, n] = -max(1.0, float(np.abs(upper[row]).max(initial=0.0)))
            cost = np.zeros(n + 1)
            cost[n] = 1.0
            equal, values = self._counts()
            x = minimise(cost, wider, limits, np.hstack([equal, np.zeros((len(values), 1))]), values)
            if x is not None:
                out[name] = ceil(-x[n] * wider[row, n])
        return out

    def _objective(self) -> _Array:
        every = sum(self.times.values(), np.zeros(len(self.columns)))
        return np.concatenate([TIE * every, np.ones(len(PHASES))])

    def _counts(self) -> tuple[_Array, _Array]:
        """Every span is in some mode."""
        equal = np.zeros((len(self.kinds), len(self.columns) + len(PHASES)))
        for place, (kind, _) in enumerate(self.columns):
            equal[kind, place] = 1
        return equal, np.array([float(len(spans)) for spans in self.kinds])

    def _limits(self) -> tuple[_Array, _Array, list[str]]:
        """Budgets first, by name; then the resources of each phase."""
        rows, limits, names = [], [], []
        for name, tiers, limit in self.problem.budgets.rows():
            fixed = sum(self.reserved[tier] for tier in tiers)
            rows.append(np.concatenate([sum(self.bytes_[tier] for tier in tiers), np.zeros(len(PHASES))]))
            limits.append(min(float(limit - fixed), self._most(rows[-1])))
            names.append(name)
        for key, times in self.times.items():
            phase = np.zeros(len(PHASES))
            phase[PHASES.index(key[0])] = -1
            rows.append(np.concatenate([times, phase]))
            limits.append(-self.constant.get(key, 0.0))
        width = len(self.columns) + len(PHASES)
        return np.array(rows).reshape(len(rows), width), np.array(limits), names

    def _most(self, row: _Array) -> float:
        """What `row` could come to: a limit above it is none, and large numbers cost precision."""
        return sum(
            len(spans)
            * max((row[place] for place, (owner, _) in enumerate(self.columns) if owner == kind), default=0.0)
            for kind, spans in enumerate(self.kinds)
        )

    def _relaxed(self, cuts: Sequence[tuple[int, Tier, float, bool]]) -> _Array | None:
        upper, limits, _ = self._limits()
        extra, bounds = np.zeros((len(cuts), upper.shape[1])), np.zeros(len(cuts))
        for row, (kind, tier, count, at_most) in enumerate(cuts):
            sign = 1 if at_most else -1
            for place, (owner, mode) in enumerate(self.columns):
                if owner == kind and mode[0] is tier:
                    extra[row, place] = sign
            bounds[row] = sign * count
        equal, values = self._counts()
        return minimise(self._objective(), np.vstack([upper, extra]), np.concatenate([limits, bounds]), equal, values)

    def _fraction(self, x: _Array) -> tuple[int, Tier, float] | None:
        """The number of spans of a kind in a parameter tier that is furthest from an integer."""
        counts: dict[tuple[int, Tier], float] = {}
        for place, (kind, mode) in enumerate(self.columns):
            counts[kind, mode[0]] = counts.get((kind, mode[0]), 0.0) + float(x[place])
        (kind, tier), count = max(counts.items(), key=lambda item: abs(item[1] - round(item[1])))
        return (kind, tier, count) if abs(count - round(count)) > 1e-6 else None

    def _placements(self, x: _Array) -> tuple[Placement, ...]:
        out: dict[int, Placement] = {}
        for kind, spans in enumerate(self.kinds):
            shares = {mode: float(x[place]) for place, (owner, mode) in enumerate(self.columns) if owner == kind}
            rest = list(spans)
            for tier in TIERS:
                of = {mode[1]: share for mode, share in shares.items() if mode[0] is tier and share > 1e-9}
                taken, rest = rest[: round(sum(of.values()))], rest[round(sum(of.values())) :]
                out.update(_cut(taken, tier, of, self.problem.setup.sizes.block_numel))
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


def _regimes(problem: Problem) -> Iterator[_Regime]:
    """One for every prefix of the tiers that may be used: what a slower tier needs in staging is reserved only with it."""
    layout, setup, machine = problem.layout, problem.setup, problem.machine
    groups: dict[tuple[object, ...], list[tuple[Span, int]]] = {}
    for unit, used in zip(layout.units, uses(layout, setup)):
        for span in unit.spans:
            spec = span.spec
            key = (spec.compute_dtype, spec.master_dtype, span.is_updated, span.slice_numel, span.numel, used)
            groups.setdefault(key, []).append((span, used))
    speeds = replace(machine, **{name: getattr(machine, name) or getattr(NOMINAL, name) for name in _SPEEDS})
    for p, o in product(range(len(problem.parameters)), range(len(problem.optimizer))):
        parameters, optimizer = problem.parameters[: p + 1], problem.optimizer[: o + 1]
        reserved = _reserved(problem, parameters[-1], optimizer[-1])
        columns: list[tuple[int, Mode]] = []
        bytes_: dict[Tier, list[float]] = {tier: [] for tier in TIERS}
        times: dict[tuple[str, str], list[float]] = {}
        for kind, members in enumerate(groups.values()):
            span, used = members[0]
            for mode in _modes(span, parameters, optimizer):
                placement = Placement(mode[0], ((mode[1], span.slice_numel),) if span.is_updated else ())
                columns.append((kind, mode))
                states = state_bytes(span, placement, setup)
                for tier in TIERS:
                    bytes_[tier].append(float(sum(value for (place, _), value in states.items() if place is tier)))
                for (phase, road), value in work_of(span, placement, setup, used).items():
                    row = times.setdefault((phase_of(phase, setup), resource(road, machine)), [])
                    row += [0.0] * (len(columns) - len(row))
                    row[-1] += value / (speed(speeds, road) or 1.0)
        compute = (PASSES, "processor" if machine.shares_memory else "compute")
        times.setdefault(compute, [])
        unit_s = max((value for row in times.values() for value in row), default=1.0) or 1.0
        yield _Regime(
            problem,
            tuple(tuple(span for span, _ in members) for members in groups.values()),
            tuple(columns),
            reserved,
            {tier: np.array(values) for tier, values in bytes_.items()},
            {key: np.array(row + [0.0] * (len(columns) - len(row))) / unit_s for key, row in times.items()},
            {compute: problem.compute_s / unit_s},
            unit_s,
        )


_SPEEDS = ("device_bandwidth", "host_bandwidth", "link_down", "link_up", "disk_read", "disk_write", "collective")


def _modes(span: Span, parameters: Sequence[Tier], optimizer: Sequence[Tier]) -> tuple[Mode, ...]:
    """Where one memory is both, the parameters are never in a slower tier than the master."""
    if not span.is_updated:
        return tuple((tier, tier) for tier in parameters)
    modes = list(product(parameters, optimizer))
    if span.spec.compute_dtype == span.spec.master_dtype:
        return tuple(dict.fromkeys((together(p, span, ((o, 1),)), o) for p, o in modes))
    return tuple(modes)


def _reserved(problem: Problem, parameters: Tier, optimizer: Tier) -> Mapping[Tier, int]:
    """What is there whichever spans use the tiers: everything but states, as with all spans in the slowest ones."""
    if (known := problem.reserved.get((parameters, optimizer))) is not None:
        return known
    slowest = []
    for span in problem.layout.spans:
        stretches = ((optimizer, span.slice_numel),) if span.is_updated else ()
        slowest.append(Placement(together(parameters, span, stretches), stretches))
    memory = memory_of(problem.layout, slowest, problem.setup, problem.activations)
    found = {tier: memory.at_most(tier) - sum(memory.rest[tier][kind] for kind in STATES) for tier in TIERS}
    problem.reserved[parameters, optimizer] = found
    return found
