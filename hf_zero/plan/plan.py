"""From a model to its layout, and a plan for it: no process group, no device, no values needed.

A plan is a layout, a tier for every state, and the bytes and seconds that follow, each choice with its reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..config import ZeroConfig
from ..core.layout import Layout, ParamSpec, itemsize
from ..core.precision import Precision, castable_params, dtype_name
from ..core.units import Group, find_groups, find_visits
from ..errors import ConfigError, LayoutError
from ..tiers.tier import SIZES, Sizes, Tier
from .activations import Batch, activation_bytes
from .costs import KINDS, TIERS, Memory, Placement, Setup, memory_of, together
from .machine import Machine
from .solve import Budgets, Problem, lacking, solve
from .work import Traffic, compute_flops, seconds, step_seconds, work_in_total

TIERS_OF = {"none": (Tier.DEVICE,), "cpu": (Tier.HOST,), "disk": (Tier.DISK,), "auto": TIERS}
MOST_RANKS = 1 << 14
"""How far a plan that does not fit looks for a number of ranks that would."""
_RANKS_PARTS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What lives where on each rank, and what it costs; `to_dict()` gives plain values for JSON."""

    layout: Layout
    config: ZeroConfig
    world_size: int
    placements: tuple[Placement, ...]
    """By `Span.index`."""
    memory: Memory
    """Bytes per rank, by tier and kind; activations are an estimate."""
    traffic: Traffic
    """Bytes per rank and step."""
    parts: Mapping[str, float | None]
    """Predicted seconds of every part of a step by itself, as `phase road`; None where no speed is known."""
    step_s: float | None
    """Predicted seconds of a step; None where a part is not known."""
    budgets: Budgets
    reasons: tuple[str, ...]
    """One line per choice."""
    shortfall: str = ""
    """What is missing, and what would fit; empty where everything fits."""

    @property
    def fits(self) -> bool:
        return not self.shortfall

    def share(self, tier: Tier) -> float:
        """The part of the optimizer state in `tier`, 0 to 1."""
        total = sum(numel for placement in self.placements for _, numel in placement.optimizer)
        return sum(placement.numel(tier) for placement in self.placements) / max(1, total)

    def to_dict(self) -> dict[str, Any]:
        def table(by_tier: Mapping[Tier, Mapping[str, int]]) -> dict[str, dict[str, int]]:
            return {tier.value: dict(kinds) for tier, kinds in by_tier.items()}

        budgets = {name: limit for name, _, limit in self.budgets.rows()}
        return {
            "stage": self.config.stage,
            "world_size": self.world_size,
            "parameters": self.layout.numel,
            "trainable": self.layout.trainable_numel,
            "states_bytes_per_rank": self.memory.states,
            "states": {kind: sum(self.memory.rest[tier][kind] for tier in TIERS) for kind in KINDS[:3]},
            "rest": table(self.memory.rest),
            "peak": table(self.memory.peak),
            "rest_bytes": {tier.value: self.memory.at_rest(tier) for tier in TIERS},
            "peak_bytes": {tier.value: self.memory.at_peak(tier) for tier in TIERS},
            "budgets": budgets,
            "traffic": {road: getattr(self.traffic, road) for road in Traffic.__slots__},
            "step_s": self.step_s,
            "parts_s": dict(self.parts),
            "optimizer_share": {tier.value: self.share(tier) for tier in TIERS},
            "fits": self.fits,
            "shortfall": self.shortfall,
            "reasons": list(self.reasons),
            "offload_optimizer": self.config.offload_optimizer,
            "offload_params": self.config.offload_params,
        }


def plan(
    layout: Layout,
    machine: Machine,
    config: ZeroConfig,
    *,
    world_size: int,
    precision: Precision,
    optimizer_tensors: int = 2,
    batch: Batch | None = None,
    backward_per_step: int = 1,
    in_files: frozenset[str] = frozenset(),
    sizes: Sizes = SIZES,
) -> Plan:
    """Place every span of `layout` and predict what that takes: pure arithmetic, the same on every rank.

    Args:
        layout: cut for `world_size` owners (one at stage 0).
        machine: one rank's share of it.
        optimizer_tensors: tensors of state per master; 2 for Adam.
        batch: for activations and computing time; None: both are left out.
        backward_per_step: micro-batches that add up to a step.
        in_files: names of parameters whose values the model's own files have, and may keep.
        sizes: of the blocks and records that offloaded state is updated and moved in.

    Raises:
        ConfigError: an offload that the stage does not allow; `auto`, and nothing fits: the message says what would.
    """
    request = _Request(
        layout, machine, config, world_size, precision, optimizer_tensors, batch, backward_per_step, in_files, sizes
    )
    problem = request.problem()
    placements = solve(problem) if config.is_auto else _as_asked(problem)
    if placements is None:
        raise ConfigError(request.shortfall(problem))
    memory = memory_of(layout, placements, problem.setup, problem.activations)
    work = work_in_total(layout, placements, problem.setup)
    parts = seconds(work, machine, request.compute_s())
    made = Plan(
        layout,
        config,
        world_size,
        placements,
        memory,
        Traffic.of(work),
        {" ".join(key): value for key, value in parts.items()},
        step_seconds(parts, machine, problem.setup),
        problem.budgets,
        (),
        request.shortfall(problem, memory) if problem.budgets.excess(memory) else "",
    )
    return replace(made, reasons=tuple(_reasons(made, problem, batch)))


def _as_asked(problem: Problem) -> tuple[Placement, ...]:
    """Everything in the one tier that the settings name."""
    placements = []
    for span in problem.layout.spans:
        stretches = ((problem.optimizer[0], span.slice_numel),) if span.is_updated else ()
        placements.append(Placement(together(problem.parameters[0], span, stretches), stretches))
    return tuple(placements)


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `plan`."""

    layout: Layout
    machine: Machine
    config: ZeroConfig
    world_size: int
    precision: Precision
    optimizer_tensors: int
    batch: Batch | None
    backward_per_step: int
    in_files: frozenset[str]
    sizes: Sizes

    def problem(self) -> Problem:
        """Raises:
        ConfigError: an offload that the stage does not allow, or a number below 1.
        """
        for name in ("world_size", "backward_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.optimizer_tensors < 0:
            raise ConfigError(f"optimizer_tensors must be at least 0, found {self.optimizer_tensors}")
        self.config.check_world_size(self.world_size)
        owners = self.world_size if self.config.policy.shard else 1
        if self.layout.shards != owners:
            raise ConfigError(
                f"stage {self.config.stage} on {self.world_size} ranks needs a layout of {owners} shards, found one of "
                f"{self.layout.shards}"
            )
        setup = Setup(
            self.config.policy_for(self.world_size),
            self.world_size,
            dtype_name(self.precision.reduce_dtype),
            self.optimizer_tensors,
            self.backward_per_step,
            self.config.step_in_backward,
            self.machine.shares_memory,
            self.in_files,
            self.sizes,
        )
        size = itemsize(self._compute_dtype())
        is_mixed = self.precision.autocast_dtype is not None
        return Problem(
            self.layout,
            setup,
            self.machine,
            self._budgets(),
            TIERS_OF[self.config.offload_params],
            TIERS_OF[self.config.offload_optimizer],
            self.compute_s() or 0.0,
            (0, 0) if self.batch is None else activation_bytes(self.batch, size, is_mixed),
        )

    def compute_s(self) -> float | None:
        """0: no batch is known. None: no rate is."""
        if self.batch is None:
            return 0.0
        rate = self.machine.flops.get(self._compute_dtype())
        flops = compute_flops(self.layout, self.batch.tokens * self.backward_per_step, self.batch.checkpointing)
        return None if rate is None else flops / rate

    def _compute_dtype(self) -> str:
        """The one in which most parameters are used."""
        numel: dict[str, int] = {}
        for span in self.layout.spans:
            numel[span.spec.compute_dtype] = numel.get(span.spec.compute_dtype, 0) + span.used_numel
        return max(numel, key=lambda dtype: numel[dtype], default="float32")

    def _budgets(self) -> Budgets:
        device, host = _limit(self.config.device_memory), _limit(self.config.host_memory)
        machine = self.machine
        if machine.shares_memory and (device is None or host is None):
            return Budgets(device, host, machine.disk_free, together=machine.host_memory)
        return Budgets(
            machine.device_memory if device is None else device,
            machine.host_memory if host is None else host,
            machine.disk_free,
        )

    # What would fit -------------------------------------------------------------------------------------------------

    def shortfall(self, problem: Problem, memory: Memory | None = None) -> str:
        """What is missing (of `memory`, where a placement is there), and what would help, in numbers."""
        limits = ", ".join(f"{NAMES[name]} {size_text(limit)}" for name, _, limit in problem.budgets.rows())
        if memory is None:
            found = f"no placement of {self.layout.numel:,} parameters fits"
        else:
            over = problem.budgets.excess(memory).items()
            found = ", ".join(f"{NAMES[name]} is short of {size_text(value, up=True)}" for name, value in over)
        ways = list(self._ways(problem))
        advice = "; or ".join(ways) if ways else "no single change would: fewer parameters, or several budgets at once"
        return (
            f"{found} at stage {self.config.stage} on {self.world_size} rank{'s' if self.world_size > 1 else ''} "
            f"(per rank: {limits}). What would fit: {advice}"
        )

    def _ways(self, problem: Problem) -> Iterator[str]:
        for name, value in lacking(problem).items():
            limit = getattr(problem.budgets, name) + value
            yield f"{NAMES[name]} of {size_text(limit, up=True)}, {size_text(value, up=True)} more"
        for text, changes in ALTERNATIVES:
            other = replace(self, config=replace(self.config, **changes))
            if other.config != self.config and other._fits():
                yield text
                break
        if self.config.policy.shard:
            ranks = self._ranks_that_fit()
            if ranks is not None:
                yield f"{ranks} ranks with the same budgets each"

    def _fits(self) -> bool:
        try:
            owners = self.world_size if self.config.policy.shard else 1
            return solve(replace(self, layout=recut(self.layout, owners)).problem()) is not None
        except ConfigError:
            return False

    def _ranks_that_fit(self) -> int | None:
        """The least number of ranks, of many to a 64th: found by doubling and halving."""
        low, high = self.world_size, 2 * self.world_size
        while high <= MOST_RANKS and not replace(self, world_size=high)._fits():
            low, high = high, 2 * high
        if high > MOST_RANKS:
            return None
        while high - low > max(1, low // _RANKS_PARTS):
            middle = (low + high) // 2
            low, high = (low, middle) if replace(self, world_size=middle)._fits() else (middle, high)
        return high


OFFLOAD_STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("offload_optimizer='cpu'", {"offload_optimizer": "cpu", "offload_params": "none"}),
    ("offload_optimizer='cpu' and offload_params='cpu'", {"offload_optimizer": "cpu", "offload_params": "cpu"}),
)
NAMES = {
    "device": "device_memory",
    "host": "host_memory",
    "disk": "free space in offload_dir",
    "together": "device and host memory, which are one here,",
}
ALTERNATIVES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("offload_optimizer='auto'", {"offload_optimizer": "auto"}),
    ("offload_params='auto'", {"offload_params": "auto"}),
    ("offload_optimizer='auto' and offload_params='auto'", {"offload_optimizer": "auto", "offload_params": "auto"}),
    ("stage=3", {"stage": 3}),
    ("stage=3 with both offloads 'auto'", {"stage": 3, "offload_optimizer": "auto", "offload_params": "auto"}),
    (
        "stage=3 with both offloads 'auto' and step_in_backward=True",
        {"stage": 3, "offload_optimizer": "auto", "offload_params": "auto", "step_in_backward": True},
    ),
)


def advice(made: Plan, device_bytes: int, precision: Precision, optimizer_tensors: int) -> str:
    """What to change where a plan's device memory, of which so much is in use, was not enough."""
    ways = "; or ".join(alternatives(made, device_bytes, precision, optimizer_tensors))
    return (
        f"{device_bytes} bytes of it are in use; at peak the plan counts {made.memory.at_peak(Tier.DEVICE)} and activations. "
        f"What would take less: {ways or 'more ranks'}; or a smaller batch, or gradient checkpointing"
    )


def alternatives(made: Plan, device_bytes: int, precision: Precision, optimizer_tensors: int) -> Iterator[str]:
    """Other settings than a plan's, with the device memory that each would save at peak, the cheapest first."""
    now = made.memory.at_peak(Tier.DEVICE)
    for text, changes in OFFLOAD_STEPS:
        config = replace(made.config, **changes, device_memory=None, host_memory=None)
        with contextlib.suppress(ConfigError):
            other = plan(
                made.layout,
                Machine(),
                config,
                world_size=made.world_size,
                precision=precision,
                optimizer_tensors=optimizer_tensors,
            )
            saved = now - other.memory.at_peak(Tier.DEVICE)
            if saved > 0:
                yield f"{text} ({size_text(min(saved, max(device_bytes, 1)))} less)"


def recut(layout: Layout, shards: int) -> Layout:
    """The same units for another number of owners."""
    if shards == layout.shards:
        return layout
    units = ((unit.name, [slot.spec for span in unit.spans for slot in span.slots]) for unit in layout.units)
    return Layout.build(units, shards, layout.visits)


def size_text(nbytes: int, *, up: bool = False) -> str:
    """`1.50 GiB`; `200 B`. `up`: never less than it is."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            hundredths = -(-100 * nbytes // size) if up else round(100 * nbytes / size)
            return f"{hundredths / 100:.2f} {unit}"
    return f"{nbytes} B"


def _limit(value: int | str | None) -> int | None:
    return None if value is None else int(value)  # ZeroConfig has made bytes of text


def _reasons(made: Plan, problem: Problem, batch: Batch | None) -> Iterator[str]:
    config, memory, setup = made.config, made.memory, problem.setup
    own: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for span, placement in zip(made.layout.spans, made.placements):
        own[placement.parameters] += span.slice_numel
    yield _where("parameters", own, config.offload_params, "offload_params")
    state = {tier: sum(placement.numel(tier) for placement in made.placements) for tier in TIERS}
    if any(state.values()):
        yield _where("optimizer state", state, config.offload_optimizer, "offload_optimizer")
    asked = TIERS_OF[config.offload_params]
    if len(asked) == 1 and any(place.parameters is not asked[0] for place in made.placements):
        yield "parameters of their master's type rest with it: they are one memory"
    if state[Tier.HOST] or state[Tier.DISK]:
        if setup.step_in_backward and setup.backward_per_step == 1:
            yield "gradients of offloaded state do not rest: the step takes them as backward makes them (step_in_backward)"
        elif setup.world_size == 1 and setup.backward_per_step == 1:
            yield "gradients of offloaded state rest on the host in the type they come in: one rank, one backward per step"
        else:
            yield (
                f"gradients of offloaded state rest on the host in float32: sums over {setup.world_size} rank(s) and "
                f"{setup.backward_per_step} backward(s) per step keep their last bits"
            )
    for name, tiers, limit in made.budgets.rows():
        peak = sum(memory.at_peak(tier) for tier in tiers)
        yield f"{NAMES[name].rstrip(',')}: {size_text(peak)} at peak of {size_text(limit)}"
    staging = memory.rest[Tier.HOST]["staging"]
    if staging:
        yield f"staging: {size_text(staging)} of host memory for blocks and slabs on their way"
    if batch is None:
        yield "activations and computing time are not counted: no batch was given"
    elif batch.architecture is None:
        yield "activations are not counted: the architecture's sizes are not known"
    else:
        yield (
            f"activations: {size_text(sum(problem.activations))}, an estimate for {batch.rows} x {batch.sequence} tokens"
            f"{' with checkpointing' if batch.checkpointing else ''}"
        )
    unknown = [name for name, value in made.parts.items() if value is None]
    if unknown:
        yield f"step time is not predicted: no speed is known for {', '.join(unknown)} (hf-zero probe measures them)"


def _where(what: str, numel: Mapping[Tier, int], asked: str, setting: str) -> str:
    """One line on where `numel` elements by tier rest, and why."""
    total = max(1, sum(numel.values()))
    shares = {
        tier: "all" if count == total else f"{100 * count / total:.1f} %" for tier, count in numel.items() if count
    }
    places = ", ".join(f"{share} on {tier.value}" for tier, share in shares.items())
    if asked != "auto":
        return f"{what}: {places}, as {setting}={asked!r} says"
    return (
        f"{what}: {places}; {'it fits there' if numel[Tier.DEVICE] == total else 'the least predicted time that fits'}"
    )


class Drafter:
    """Turns one model's parameters into specs, unit by unit; again, when its optimizer groups change."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.names = names_of(model)
        self.groups: list[Group] = find_groups(model)
        self._visits = find_visits(model, self.groups)
        self._precision = precision
        self._castable = castable_params(model, self.names, precision)

    def specs(
        self, group_of: Mapping[nn.Parameter, int], old: Mapping[nn.Parameter, ParamSpec] | None = None
    ) -> list[list[ParamSpec]]:
        """One list per unit. `group_of` gives optimizer groups (-1: in none); `old` the specs of a layout in force."""
        known = old or {}
        return [
            [self._spec(param, group_of.get(param, -1), known.get(param)) for param in g.params] for g in self.groups
        ]

    def layout(self, specs: Sequence[Sequence[ParamSpec]], shards: int) -> Layout:
        return Layout.build(zip((group.name for group in self.groups), specs), shards, self._visits)

    def _spec(self, param: nn.Parameter, group: int, old: ParamSpec | None) -> ParamSpec:
        if old is None:
            own = dtype_name(param.dtype)
            # What no optimizer has needs no finer copy of itself.
            master = dtype_name(Precision.master_dtype(param)) if group >= 0 else own
            compute = dtype_name(self._precision.compute_dtype(param, param in self._castable))
        else:  # the parameter's `.data` is the engine's now, and may be of another type
            own, compute, master = old.dtype, old.compute_dtype, old.master_dtype
            if param.requires_grad and group >= 0 and own in ("bfloat16", "float16"):
                master = "float32"
        shape, names = tuple(param.shape), tuple(self.names[param])
        cohort = 0 if old is None else old.cohort
        return ParamSpec(names, shape, own, compute, master, param.requires_grad, group, cohort)


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter once, with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise LayoutError(f"parameter {name!r} has no shape yet: run one forward before sharding")
        names.setdefault(param, []).append(name)
    if not names:
        raise LayoutError(f"{type(model).__name__} has no parameters to shard")
    return names
