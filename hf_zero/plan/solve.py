"""The inputs of a plan, and the placement of `auto`: a greedy fill of the fastest memory with whole units.

A unit's parameters are in one tier, and so is its optimizer state. All units start in the same two tiers. Then they move to
faster tiers in layout order: first to the device, then from disk to host memory. The predicted step time decides where they
start, and whether optimizer state or parameters move first.

The placement depends only on the inputs, which are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

from ..core.layout import UnitLayout, itemsize
from ..tiers.tier import Tier
from .activations import Batch, activation_bytes, activation_traffic, attention_exchange
from .costs import TIERS, Memory, Placement, Setup, state_bytes, stays
from .network import Network
from .peaks import memory_of
from .traffic import (
    PASSES,
    SEQUENCE,
    Collective,
    bytes_by_channel,
    compute_flops,
    seconds,
    step_seconds,
    total_traffic,
)

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
"""Speeds to compare placements with if none are known."""
TIE_WEIGHT = 1e-3
"""Weight of the sum of all parts, added to the time: of equally fast placements the one with less traffic wins."""
ATTEMPTS = 4
"""Attempts to leave enough memory free for ranks that own more than the mean."""
TIERS_OF_LIMIT = {
    "device": (Tier.DEVICE,),
    "host": (Tier.HOST,),
    "disk": (Tier.DISK,),
    "together": (Tier.DEVICE, Tier.HOST),
}
"""The tiers that each limit counts. `together` limits device and host memory as one."""


def excess(budgets: Mapping[str, int], memory: Memory) -> dict[str, int]:
    """Return the bytes by which `memory` exceeds each limit."""
    over = {name: sum(map(memory.at_peak, TIERS_OF_LIMIT[name])) - limit for name, limit in budgets.items()}
    return {name: value for name, value in over.items() if value > 0}


@dataclass(frozen=True)
class PlanInputs(Setup):
    """The inputs of a plan.

    Args:
        batch: for activations and computing time; None: both are left out.
        network: the machines of the ranks; None: one.
    """

    batch: Batch | None = None
    network: Network | None = None

    @property
    def budgets(self) -> dict[str, int]:
        """The memory limits of the settings, else of the machine, by names of `TIERS_OF_LIMIT`. No limit: no entry."""
        device, host, machine = self.config.device_memory, self.config.host_memory, self.machine
        if machine.shares_memory and None in (device, host):
            found = device, host, machine.disk_free, machine.host_memory
        else:
            device = machine.device_memory if device is None else device
            found = device, machine.host_memory if host is None else host, machine.disk_free, None
        return {name: int(limit) for name, limit in zip(TIERS_OF_LIMIT, found) if limit is not None}

    @property
    def activations(self) -> tuple[int, int, int]:
        """Bytes of activations on the device (estimated), on the host and on disk."""
        if self.batch is None:
            return 0, 0, 0
        is_mixed = self.precision.autocast_dtype is not None
        return activation_bytes(self.batch, self.config, itemsize(self._compute_dtype), is_mixed)

    @property
    def compute_s(self) -> float | None:
        """Seconds of computation. 0: without a batch. None: the rate is not known."""
        if self.batch is None:
            return 0.0
        rate = self.machine.flops.get(self._compute_dtype)
        tokens = self.batch.tokens(self.config) * self.backward_per_step
        flops = compute_flops(self.layout, tokens, self.batch.checkpointing)
        return None if rate is None else flops / rate

    @property
    def _compute_dtype(self) -> str:
        """The compute dtype of most parameters."""
        numel: dict[str, int] = {}
        for span in self.layout.spans:
            numel[span.spec.compute_dtype] = numel.get(span.spec.compute_dtype, 0) + span.used_numel
        return max(numel, key=lambda dtype: numel[dtype], default="float32")

    def uniform_placement(self, parameters: Tier, optimizer: Tier) -> tuple[Placement, ...]:
        """Place all parameters in one tier and all optimizer state in another."""
        return tuple(Placement.of(span, parameters, optimizer) for span in self.layout.spans)

    def candidates(self, placements: Sequence[Placement]) -> list[int]:
        """Return indices of units that a pass gathers twice, those used last first; equal on every rank."""
        units = self.layout.units
        return [
            at
            for at in self.layout.gathered_twice()
            if not all(stays(span, placements[span.index], self.policy) for span in units[at].spans)
        ]

    def keeps(self, placements: Sequence[Placement]) -> tuple[int, ...]:
        """Return the candidates that fit into `keep_gathered` together, those used last first; equal on every rank.

        A kept unit holds its gathered bytes from its forward to its backward. All units save equally much per byte; those used
        last hold memory for the shortest time, and are released before gradients have accumulated.
        """
        budget = self.config.keep_gathered
        order = [] if budget is None else self.candidates(placements)
        sizes = accumulate(self.layout.units[at].gathered_bytes for at in order)
        return tuple(at for at, total in zip(order, sizes) if total <= int(budget or 0))

    def _keeping(self, placements: Sequence[Placement]) -> PlanInputs:
        return self if self.kept is not None else replace(self, kept=frozenset(self.keeps(placements)))

    def memory(self, placements: Sequence[Placement]) -> Memory:
        return memory_of(placements, self._keeping(placements), self.activations)

    def step(self, placements: Sequence[Placement]) -> Step:
        """Return the traffic and the time of a step."""
        batch, micros = self.batch, self.backward_per_step
        moved: dict[str, int] = {}
        exchanges: list[Collective] = []
        if batch is not None:
            size = itemsize(self._compute_dtype)
            moved = activation_traffic(batch, self.config, size, self.precision.autocast_dtype is not None, self.is_cpu)
            count, nbytes = attention_exchange(batch, self.config, size)
            exchanges += [Collective(SEQUENCE, PASSES, micros * count, nbytes, self.config.sp_size)] if count else []
        collectives, traffic = total_traffic(placements, self._keeping(placements), exchanges)
        for channel, nbytes in moved.items():
            traffic[PASSES, channel] = traffic.get((PASSES, channel), 0) + micros * nbytes
        network = self.network or Network(self.world_size)
        parts = seconds(traffic, self.machine, self.compute_s, network.seconds(collectives, self.machine))
        return Step(bytes_by_channel(traffic, collectives), tuple(collectives), parts, step_seconds(parts, self))


@dataclass(frozen=True, slots=True)
class Step:
    """The cost of a step.

    Attributes:
        traffic: bytes per rank, by channel.
        parts: seconds of each part by itself, by phase and channel; None if its speed is not known.
        seconds: of the whole step; None if a part is not known.
    """

    traffic: Mapping[str, int]
    collectives: tuple[Collective, ...]
    parts: Mapping[tuple[str, str], float | None]
    seconds: float | None


def solve(inputs: PlanInputs) -> tuple[Placement, ...] | None:
    """Return placements by span index that fit the budgets; None where none does. The same tiers on every rank."""
    filler = _Filler(inputs)
    return min(filler.solutions(), key=filler.cost, default=None)


Pair = tuple[Tier, Tier]
"""The tier of a unit's parameters, and that of its optimizer state."""


class _Filler:
    """Moves units to faster tiers as far as budgets allow, in a layout where every rank owns the mean."""

    def __init__(self, inputs: PlanInputs) -> None:
        rates: dict[str, Any] = {name: getattr(inputs.machine, name) or rate for name, rate in NOMINAL.items()}
        self._budgets, self._layout = inputs.budgets, inputs.layout
        self._inputs = replace(
            inputs, layout=inputs.layout.for_average_rank(), machine=replace(inputs.machine, **rates)
        )
        self._tiers = TIERS_OF[inputs.config.offload_params], TIERS_OF[inputs.config.offload_optimizer]
        pairs = [*product(*self._tiers)]
        self._bytes = [{pair: self._bytes_of(unit, pair) for pair in pairs} for unit in self._inputs.layout.units]
        """Bytes of each unit's states by tier, for each pair."""

    def _bytes_of(self, unit: UnitLayout, pair: Pair) -> dict[Tier, int]:
        out = dict.fromkeys(TIERS, 0)
        for span in unit.spans:
            for (tier, _), nbytes in state_bytes(span, Placement.of(span, *pair), self._inputs).items():
                out[tier] += nbytes
        return out

    def solutions(self) -> Iterator[tuple[Placement, ...]]:
        """Yield placements that fit: from every pair of tiers, with optimizer state or parameters first."""
        for start in product(*self._tiers):
            begin = self._inputs.memory(self._inputs.uniform_placement(*start))
            used = {tier: begin.at_peak(tier) for tier in TIERS}
            for order in ((1, 0), (0, 1)):
                moves = [(which, tier) for tier in TIERS[:-1] for which in order if tier in self._tiers[which]]
                found = self._filled(start, moves, used)
                if found is not None:
                    yield found

    def _filled(
        self, start: Pair, moves: Sequence[tuple[int, Tier]], used: Mapping[Tier, int]
    ) -> tuple[Placement, ...] | None:
        """Start in two tiers and move units to faster ones as far as budgets allow; None if that does not fit."""
        spare: dict[str, int] = {}
        for _ in range(ATTEMPTS):
            limits = [(TIERS_OF_LIMIT[name], limit - spare.get(name, 0)) for name, limit in self._budgets.items()]
            pairs = self._moved_up(start, moves, used, limits)
            units = zip(self._inputs.layout.units, pairs)
            placements = tuple(Placement.of(span, *pair) for unit, pair in units for span in unit.spans)
            over = self._excess(placements)
            if not over:
                return placements
            if all(pair == start for pair in pairs):
                return None
            # Temporary bytes grew as units moved, or a rank owns more than the mean.
            spare |= {name: 2 * (spare.get(name, 0) + value) for name, value in over.items()}
        return None

    def _moved_up(
        self,
        start: Pair,
        moves: Sequence[tuple[int, Tier]],
        used: Mapping[Tier, int],
        limits: Sequence[tuple[Sequence[Tier], int]],
    ) -> list[Pair]:
        """Return the tiers of each unit after `moves`: (0 for parameters, 1 for optimizer state; the new tier)."""
        pairs = [start] * len(self._bytes)
        for which, target in moves:
            for at, (now, known) in enumerate(zip(pairs, self._bytes)):
                if TIERS.index(now[which]) <= TIERS.index(target):
                    continue
                then = (now[0], target) if which else (target, now[1])
                added = {tier: known[then][tier] - known[now][tier] for tier in TIERS}
                grown = ((sum(added[t] for t in tiers), sum(used[t] for t in tiers), limit) for tiers, limit in limits)
                if all(more <= 0 or before + more <= limit for more, before, limit in grown):
                    pairs[at] = then
                    used = {tier: used[tier] + added[tier] for tier in TIERS}
        return pairs

    def cost(self, placements: Sequence[Placement]) -> float:
        """Return the seconds of a step, and a small share of the sum of its parts."""
        parts = {key: value or 0.0 for key, value in self._inputs.step(placements).parts.items()}
        whole = step_seconds(parts, self._inputs) or 0.0
        return whole + TIE_WEIGHT * sum(parts.values())

    def _excess(self, placements: Sequence[Placement]) -> dict[str, int]:
        """Return the bytes by which any rank exceeds each limit."""
        over = excess(self._budgets, self._inputs.memory(placements))
        for rank in range(self._layout.shards) if self._layout.imbalance() else ():
            seen = replace(self._inputs, layout=self._layout.for_rank(rank))
            for name, value in excess(self._budgets, seen.memory(placements)).items():
                over[name] = max(value, over.get(name, 0))
        return over
