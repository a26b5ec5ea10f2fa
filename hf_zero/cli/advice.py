"""What to use for a model: the cheapest settings that fit, and what each change saves where nothing does.

Settings are tried as plans, in the order of what they cost in time: nothing here is a rule of thumb but that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import STAGES, parse_bytes
from ..errors import ConfigError
from ..plan.costs import Memory
from ..plan.machine import MARGIN, Machine
from ..plan.plan import Plan, plan
from ..tiers.tier import Tier
from .asked import Asked

GPUS = {"24 GB": 24564 << 20, "40 GB": 40960 << 20, "80 GB": 81559 << 20, "141 GB": 143771 << 20}
"""What nvidia-smi reports as their memory: RTX 4090, A100 40GB, H100, H200."""
MOST_RANKS = 1 << 14
_CPU = {"zero_offload_optimizer": "cpu"}
_ALL_CPU = {**_CPU, "zero_offload_params": "cpu"}
_DISK = {"zero_offload_optimizer": "disk", "zero_offload_params": "disk"}
_SMALL = {"gradient_checkpointing": True}
_WHOLE, _SHARDED = 2, 3
"""Stages to choose between: parameters whole, or sharded. (0 and 1 cost as much time as 2, and more memory.)"""
LADDER: tuple[dict[str, Any], ...] = (
    {"zero_stage": _WHOLE},
    {"zero_stage": _SHARDED},
    {"zero_stage": _WHOLE, **_SMALL},
    {"zero_stage": _SHARDED, **_SMALL},
    {"zero_stage": _WHOLE, **_SMALL, **_CPU},
    {"zero_stage": _SHARDED, **_SMALL, **_CPU},
    {"zero_stage": _SHARDED, **_SMALL, **_ALL_CPU},
    {"zero_stage": _SHARDED, **_SMALL, **_DISK},
)
"""What costs less time comes first."""


def usable_bytes(memory_bytes: int) -> int:
    """Of a GPU's memory: the margin is for its context, libraries and the allocator."""
    return int(memory_bytes * (1 - MARGIN))


@dataclass(frozen=True)
class Choice:
    """Settings that were tried, and their plan."""

    changes: Mapping[str, Any]
    made: Plan

    @property
    def device_bytes(self) -> int:
        return self.made.memory.at_most(Tier.DEVICE)

    @property
    def host_bytes(self) -> int:
        return self.made.memory.at_most(Tier.HOST)

    @property
    def text(self) -> str:
        """`stage 3, gradient checkpointing, optimizer on cpu`."""
        words = [f"stage {self.changes['zero_stage']}"] if "zero_stage" in self.changes else []
        words += ["gradient checkpointing"] if "gradient_checkpointing" in self.changes else []
        offloads = {name: self.changes.get(f"zero_offload_{name}", "none") for name in ("optimizer", "params")}
        return " + ".join(words + [f"{name} on {where}" for name, where in offloads.items() if where != "none"])


@dataclass(frozen=True)
class Remedy:
    """One change of what was asked for."""

    text: str
    saved_bytes: int
    """Of device memory at peak, per rank."""
    device_bytes: int
    is_enough: bool


def budget(asked: Asked) -> int | None:
    """Bytes of device memory that were given."""
    given = asked.options.device_memory
    return asked.machine.device_memory if given is None else parse_bytes(given, "--device-memory")


def host_budget(asked: Asked) -> int | None:
    given = asked.options.host_memory
    return asked.machine.host_memory if given is None else parse_bytes(given, "--host-memory")


def _fits(memory: Memory, device_bytes: int | None, host_bytes: int | None) -> bool:
    budgets = ((Tier.DEVICE, device_bytes), (Tier.HOST, host_bytes))
    return all(most is None or memory.at_most(tier) <= most for tier, most in budgets)


def choices(asked: Asked) -> list[Choice]:
    """`LADDER` as plans without budgets. Where activations can be counted they are, if need be for one row."""
    counted = _counted(asked)
    found = []
    for changes in LADDER:
        if "gradient_checkpointing" in changes and asked.model.architecture is None:
            changes = {name: value for name, value in changes.items() if name != "gradient_checkpointing"}
        try:
            found.append(Choice(changes, _plan(counted, **changes)))
        except ConfigError:  # what the other flags do not go with
            continue
    return found


def first_that_fits(found: list[Choice], device_bytes: int, host_bytes: int | None) -> Choice | None:
    return next((choice for choice in found if _fits(choice.made.memory, device_bytes, host_bytes)), None)


def best(asked: Asked) -> tuple[Choice, Asked] | None:
    """The first of `LADDER` that fits the budget; else with one row at a time, then in bfloat16."""
    limit = budget(asked)
    tries: list[dict[str, Any]] = [{}]
    if (asked.options.batch or 1) > 1:
        tries.append({"batch": 1, "accumulation": asked.options.accumulation * (asked.options.batch or 1)})
    if asked.options.mixed_precision == "no":
        tries.append({**tries[-1], "mixed_precision": "bf16"})
    for changes in tries:
        other = asked.changed(**changes)
        choice = None if limit is None else first_that_fits(choices(other), limit, host_budget(asked))
        if choice is not None:
            return choice, other
    return None


def remedies(asked: Asked, stage: int) -> list[Remedy]:
    """Single changes of what was asked for, by the device memory that each saves; those that save none are left out."""
    limit, host_limit = budget(asked), host_budget(asked)
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
            found.append(Remedy(text, now - device, device, _fits(made.memory, limit, host_limit)))
    return sorted(found, key=lambda remedy: -remedy.saved_bytes)


def _changes(asked: Asked, stage: int) -> Iterator[tuple[str, dict[str, Any]]]:
    options = asked.options
    if options.batch is not None and asked.model.architecture is not None:
        if not (options.gradient_checkpointing or options.offload_activations):
            yield "--gradient-checkpointing", dict(_SMALL)
        if options.batch > 1:
            yield "--batch 1 (and --accumulation for the rest)", {"batch": 1}
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
    """The least number of ranks, more than were asked for, on which it fits; None: more ranks alone do not help."""
    limit, host_limit = budget(asked), host_budget(asked)

    def is_enough(ranks: int) -> bool:
        return _fits(_plan(asked, zero_stage=stage, world_size=ranks).memory, limit, host_limit)

    short = enough = asked.options.world_size
    if not STAGES[stage].shard:
        return None
    while not is_enough(enough):
        short, enough = enough, 2 * enough
        if enough > MOST_RANKS:
            return None
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if is_enough(middle) else (middle, enough)
    return enough if enough > asked.options.world_size else None


def command_line(choice: Choice, asked: Asked) -> str:
    """Flags of a script with `ZeroTrainingArguments`."""
    flags = []
    for name, value in choice.changes.items():
        flags.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    options = asked.options
    flags += [f"--{options.mixed_precision}"] if options.mixed_precision != "no" else []
    flags += [f"--per-device-train-batch-size {options.batch}"] if options.batch is not None else []
    flags += [f"--gradient-accumulation-steps {options.accumulation}"] if options.accumulation > 1 else []
    return " ".join(flags)


def plugin(choice: Choice) -> str:
    """The same for code."""
    settings = {name.removeprefix("zero_"): value for name, value in choice.changes.items() if name.startswith("zero_")}
    return f"zero.ZeroPlugin({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _counted(asked: Asked) -> Asked:
    has_batch = asked.options.batch is not None or asked.model.architecture is None
    return asked if has_batch else asked.changed(batch=1)


def _plan(asked: Asked, **options: Any) -> Plan:
    """Without budgets, so that it says what is needed."""
    other = asked.changed(**options, device_memory=None, host_memory=None, disk_space=None)
    free = replace(other, machine=Machine(shares_memory=False))
    return plan(free.inputs(other.options.zero_stage or 0))
