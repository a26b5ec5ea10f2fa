"""Recommendations of `hf-zero plan`: the cheapest settings that fit, or what each change saves if none fit.

Each setting is planned, in the order of its cost in time. That order is the only rule of thumb.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config import STAGES, parse_bytes
from ..core.precision import Precision
from ..errors import ConfigError
from ..plan.machine import MARGIN, Machine
from ..plan.outline import Batch
from ..plan.plan import Plan, plan
from ..plan.solve import Budgets, PlanInputs
from ..tiers.tier import Tier
from .commands import PlanOptions, as_flags, as_plugin
from .models import Model

GPUS = {"24 GB": 24564 << 20, "40 GB": 40960 << 20, "80 GB": 81559 << 20, "141 GB": 143771 << 20}
"""Memory that nvidia-smi reports: RTX 4090, A100 40GB, H100, H200."""
MOST_RANKS = 1 << 14
_CPU = {"zero_offload_optimizer": "cpu"}
_ALL_CPU = {**_CPU, "zero_offload_params": "cpu"}
_DISK = {"zero_offload_optimizer": "disk", "zero_offload_params": "disk"}
_SMALL = {"gradient_checkpointing": True}
_AWAY = {"zero_offload_activations": "cpu"}
_WHOLE, _SHARDED = 2, 3
"""Recommended stages: full or sharded parameters. Stages 0 and 1 take as much time as 2, and more memory."""
LADDER: tuple[dict[str, Any], ...] = (
    {"zero_stage": _WHOLE},
    {"zero_stage": _SHARDED},
    {"zero_stage": _WHOLE, **_SMALL},
    {"zero_stage": _SHARDED, **_SMALL},
    {"zero_stage": _WHOLE, **_SMALL, **_CPU},
    {"zero_stage": _SHARDED, **_SMALL, **_CPU},
    {"zero_stage": _SHARDED, **_SMALL, **_ALL_CPU},
    {"zero_stage": _SHARDED, **_SMALL, **_DISK},
    {"zero_stage": _SHARDED, **_SMALL, **_AWAY},
    {"zero_stage": _SHARDED, **_SMALL, **_AWAY, **_ALL_CPU},
)
"""Settings in the order of their cost in time; the last two for sequences whose activations alone are too large."""


@dataclass(frozen=True)
class Asked:
    """The arguments, the model and the machine: all inputs of a plan."""

    options: PlanOptions
    model: Model
    machine: Machine
    source: str = ""
    """Source of the machine's numbers."""

    @cached_property
    def precision(self) -> Precision:
        given = self.options.config(max(STAGES))
        return Precision.of(self.options.mixed_precision, given.reduce_dtype, given.full_precision, given.wire)

    @cached_property
    def budgets(self) -> Budgets:
        """Memory in bytes, given or of the machine; None: no limit."""
        options, machine = self.options, self.machine
        return Budgets(
            machine.device_memory if options.device_memory is None else parse_bytes(options.device_memory),
            machine.host_memory if options.host_memory is None else parse_bytes(options.host_memory),
        )

    def changed(self, **options: Any) -> Asked:
        return replace(self, options=replace(self.options, **options))

    def inputs(self, stage: int, ranks: int | None = None, **settings: Any) -> PlanInputs:
        """Return the inputs of one stage, with another number of ranks or other settings if given."""
        options, world_size = self.options, ranks or self.options.world_size
        config = options.config(stage, **settings)
        batch = None
        if options.batch is not None:
            offload = options.zero_offload_activations
            batch = Batch(
                options.batch,
                options.sequence,
                options.gradient_checkpointing or offload != "none",
                offload,
                self.model.architecture,
                options.zero_sp_size,
            )
        layout = self.model.layout(self.precision, config.shards(world_size), tuple(config.units))
        return PlanInputs(
            layout,
            self.machine,
            config,
            world_size,
            self.precision,
            options.optimizer_tensors,
            batch,
            options.accumulation,
        )


def usable_bytes(memory_bytes: int) -> int:
    """Return a GPU's memory less a margin for its context, libraries and the allocator."""
    return int(memory_bytes * (1 - MARGIN))


@dataclass(frozen=True)
class Choice:
    """Settings and their plan."""

    changes: Mapping[str, Any]
    made: Plan

    @property
    def text(self) -> str:
        """Return such as `stage 3, gradient checkpointing, optimizer on cpu`."""
        words = [f"stage {self.changes['zero_stage']}"] if "zero_stage" in self.changes else []
        words += ["gradient checkpointing"] if "gradient_checkpointing" in self.changes else []
        offloads = {
            name: self.changes.get(f"zero_offload_{name}", "none") for name in ("optimizer", "params", "activations")
        }
        return " + ".join(words + [f"{name} on {where}" for name, where in offloads.items() if where != "none"])


def choices(asked: Asked) -> list[Choice]:
    """Yield plans of `LADDER` without budgets, with activations if they can be counted, for one row if no batch is given."""
    if asked.options.batch is None and asked.model.architecture is not None:
        asked = asked.changed(batch=1)
    found = []
    for changes in LADDER:
        if "gradient_checkpointing" in changes and asked.model.architecture is None:
            changes = {name: value for name, value in changes.items() if name != "gradient_checkpointing"}
        try:
            found.append(Choice(changes, _plan(asked, **changes)))
        except ConfigError:  # does not combine with the other flags
            continue
    return found


def first_that_fits(found: Sequence[Choice], budgets: Budgets) -> Choice | None:
    return next((choice for choice in found if not budgets.excess(choice.made.memory)), None)


def best(asked: Asked) -> tuple[Choice, Asked] | None:
    """Return the first of `LADDER` that fits the budget; else with one row at a time, then in bfloat16."""
    if asked.budgets.device is None:
        return None
    tries: list[dict[str, Any]] = [{}]
    if (asked.options.batch or 1) > 1:
        tries.append({"batch": 1, "accumulation": asked.options.accumulation * (asked.options.batch or 1)})
    if asked.options.mixed_precision == "no":
        tries.append({**tries[-1], "mixed_precision": "bf16"})
    for changes in tries:
        other = asked.changed(**changes)
        choice = first_that_fits(choices(other), asked.budgets)
        if choice is not None:
            return choice, other
    return None


def remedies(asked: Asked, stage: int) -> list[tuple[str, int, int, bool]]:
    """Return single changes with the device bytes at peak that each saves, most first, what is needed then, and if it fits."""
    try:
        now = _plan(asked, zero_stage=stage).memory.at_most(Tier.DEVICE)
    except ConfigError:  # `auto` alone
        asked = asked.changed(zero_offload_optimizer="none", zero_offload_params="none")
        now = _plan(asked, zero_stage=stage).memory.at_most(Tier.DEVICE)
    found = []
    for text, changes in _changes(asked, stage):
        try:
            made = _plan(asked, **{"zero_stage": stage, **changes})
        except ConfigError:
            continue
        device = made.memory.at_most(Tier.DEVICE)
        if device < now:
            found.append((text, now - device, device, not asked.budgets.excess(made.memory)))
    return sorted(found, key=lambda remedy: -remedy[1])


def _changes(asked: Asked, stage: int) -> Iterator[tuple[str, dict[str, Any]]]:
    options = asked.options
    if options.batch is not None and asked.model.architecture is not None:
        if not options.gradient_checkpointing and options.zero_offload_activations == "none":
            yield "--gradient-checkpointing", dict(_SMALL)
        if options.zero_offload_activations == "none":
            yield "--zero-offload-activations cpu (with --gradient-checkpointing)", {**_SMALL, **_AWAY}
        if options.batch > 1:
            yield "--batch 1 (with more --accumulation)", {"batch": 1}
        if options.sequence > 1:
            yield f"--sequence {options.sequence // 2}", {"sequence": options.sequence // 2}
    if options.mixed_precision == "no":
        yield "--mixed-precision bf16", {"mixed_precision": "bf16"}
    if STAGES[stage].keep_full:
        yield f"--zero-stage {_SHARDED}", {"zero_stage": _SHARDED}
    if options.zero_offload_optimizer == "none":
        yield "--zero-offload-optimizer cpu", dict(_CPU)
    if options.zero_offload_params == "none":
        yield "--zero-offload-params cpu", {"zero_offload_params": "cpu"}
    ranks = least_ranks(asked, stage)
    if ranks is not None:
        yield f"{ranks:,} ranks (--world-size {ranks})", {"world_size": ranks}


def least_ranks(asked: Asked, stage: int) -> int | None:
    """Return the least larger number of ranks on which it fits; None: more ranks alone do not help."""

    def is_enough(ranks: int) -> bool:
        return not asked.budgets.excess(_plan(asked, zero_stage=stage, world_size=ranks).memory)

    short = asked.options.world_size
    if not STAGES[stage].shard or is_enough(short):
        return None
    while 2 * short <= MOST_RANKS and not is_enough(2 * short):
        short *= 2
    if 2 * short > MOST_RANKS:
        return None
    return short + 1 + bisect_left(range(short + 1, 2 * short), True, key=is_enough)


def as_typed(choice: Choice, asked: Asked) -> tuple[str, str]:
    """Return the flags for a script with `ZeroTrainingArguments`, and the same as code."""
    options = asked.options
    given = {name: getattr(options, name) for name in ("zero_sp_size", "zero_offload_activations")}
    changes = {name: value for name, value in given.items() if value not in (1, "none")} | dict(choice.changes)
    flags = dict(changes)
    flags |= {} if options.mixed_precision == "no" else {options.mixed_precision: True}
    flags |= {} if options.batch is None else {"per_device_train_batch_size": options.batch}
    flags |= {"gradient_accumulation_steps": options.accumulation} if options.accumulation > 1 else {}
    settings = {name.removeprefix("zero_"): value for name, value in changes.items() if name.startswith("zero_")}
    return as_flags(flags), as_plugin(settings)


def _plan(asked: Asked, **options: Any) -> Plan:
    """Plan without budgets: the result says what is needed."""
    other = asked.changed(**options, device_memory=None, host_memory=None, disk_space=None)
    free = replace(other, machine=Machine(shares_memory=False))
    return plan(free.inputs(other.options.zero_stage or 0))
