"""`hf-zero plan`: a table of memory, whether it fits, and settings that fit, as a command and as code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ..config import DTYPE_ALIASES, STAGES, ZeroConfig, parse_bytes, ranks_text, size_text
from ..core.precision import Precision
from ..errors import ConfigError
from ..plan.activations import Batch
from ..plan.costs import KINDS, STATES, TIERS
from ..plan.machine import MARGIN, Machine, free_memory, host_name, measured
from ..plan.plan import Plan, plan
from ..plan.solve import PlanInputs, excess
from ..plan.traffic import CHANNELS
from ..tiers.tier import Tier
from . import OK, WRONG
from .models import Model, ModelSource, build
from .show import (
    as_command,
    as_training_arguments,
    print_json,
    print_to_copy,
    seconds,
    short_size,
    table,
    text,
)

_NVIDIA_SMI = {
    "8 GB": 8192 << 20, "12 GB": 12288 << 20, "16 GB": 15360 << 20, "24 GB": 24564 << 20, "40 GB": 40960 << 20,
    "48 GB": 46068 << 20, "80 GB": 81559 << 20, "141 GB": 143771 << 20,
}  # fmt: skip
"""Memory that it reports: RTX 3070, RTX 3060, T4, RTX 4090, A100 40GB, L40S, H100, H200."""
GPUS = {name: int(memory_bytes * (1 - MARGIN)) for name, memory_bytes in _NVIDIA_SMI.items()}
"""Usable memory: less a margin for the context, libraries and the allocator."""
_COMMON = "24 GB"
"""The suggestion is for this size, or the next larger one that fits."""
CANDIDATES = (
    (2, False, "none", "none", "none"),
    (3, False, "none", "none", "none"),
    (2, True, "none", "none", "none"),
    (3, True, "none", "none", "none"),
    (2, True, "cpu", "none", "none"),
    (3, True, "cpu", "none", "none"),
    (3, True, "cpu", "cpu", "none"),
    (3, True, "disk", "disk", "none"),
    (3, True, "none", "none", "cpu"),
    (3, True, "cpu", "cpu", "cpu"),
)
"""Stage, gradient checkpointing, tiers of optimizer state, parameters and activations, in the order of their cost in time; the
last two for sequences whose activations alone are too large. Stages 0 and 1 take as much time as 2, and more memory."""
OFFLOADS = {"offload_optimizer": "optimizer", "offload_params": "parameters", "offload_activations": "activations"}
GOOD, BAD = "green", "bold red"
_LABELS = {
    "device": "optimizer, on the device", "host": "optimizer, on the host", "compute": "forward and backward",
    "gather": "gather, between ranks", "reduce": "reduce, between ranks", "down": "down, to host memory",
    "up": "up, to the device", "read": "read, from disk", "write": "write, to disk",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanInputs):
    """The inputs of a plan as the flags of a command give them, and the model that other settings partition again."""

    model: Model
    mixed_precision: str
    batch: Batch
    source: str = ""
    """Source of the machine's numbers."""

    @staticmethod
    def of(
        given: Mapping[str, Any], config: ZeroConfig, found: tuple[ModelSource, str], machine: Machine, **more: Any
    ) -> PlanRequest:
        """Build from the flags of a command.

        Args:
            found: what the name of the model means, from `look_up`.

        Raises:
            ConfigError: no model can be made of its configuration; the settings do not combine.
        """
        mode, lora, in_4bit = given["mixed_precision"], given.get("lora", 0), given.get("load_in_4bit", False)
        model = build(given["model"], *found, lora, DTYPE_ALIASES.get(mode, "float32"), in_4bit)
        if model.architecture is not None and model.architecture.heads % config.sp_size:
            raise ConfigError(f"--zero-sp-size must divide the model's {model.architecture.heads} attention heads")
        precision = Precision.of(mode, config.reduce_dtype, config.full_precision, config.wire)
        checkpoints = given["gradient_checkpointing"] or config.offload_activations != "none"
        batch = Batch(given["batch"], given["sequence"], checkpoints, model.architecture)
        layout = model.layout(precision, config.shards(given["world_size"]), tuple(config.units))
        return PlanRequest(
            layout=layout, machine=machine, config=config, world_size=given["world_size"], precision=precision, batch=batch,
            optimizer_tensors=given.get("optimizer_tensors", 2), backward_per_step=given["accumulation"], model=model,
            mixed_precision=mode, **more,
        )  # fmt: skip

    @property
    def tokens(self) -> str:
        if self.model.architecture is None:
            return "activations not counted"
        sharing = "rank" if self.config.sp_size == 1 else f"group of {self.config.sp_size} ranks"
        return f"batch {self.batch.rows:,} of {self.batch.sequence:,} tokens per {sharing}"

    def plan(self, **settings: Any) -> Plan:
        """Plan with other settings of `ZeroConfig`.

        Raises:
            ConfigError: the settings do not combine.
        """
        config = replace(self.config, **settings)
        layout = self.model.layout(self.precision, config.shards(self.world_size), tuple(config.units))
        return plan(replace(self, config=config, layout=layout))


def run(request: PlanRequest, all_stages: bool, as_json: bool) -> int:
    """Print the plan of one stage, or all stages side by side; return status 1 if nothing fits."""
    plans, refused = [], {}
    for stage in sorted(STAGES) if all_stages else [request.config.stage]:
        try:
            plans.append(request.plan(stage=stage))
        except ConfigError as error:
            refused[stage] = str(error)
    if not plans:
        raise ConfigError("; ".join(dict.fromkeys(refused.values())))
    fits = any(made.fits for made in plans)
    suggested = best(request, plans[0].inputs.budgets) if all_stages or not fits else None
    status = OK if fits or (all_stages and suggested is not None) else WRONG
    if as_json:
        values = [{"model": request.model.name, "structure": request.model.source or "the model's own",
                   "mixed_precision": request.mixed_precision, **made.to_dict()} for made in plans]  # fmt: skip
        print_json(values if all_stages else values[0])
        return status
    console = Console()
    share = plans[0].layout.trainable_numel / request.model.parameters
    trained = "" if share == 1 else f" ({share:.2%} trainable)"
    precision = "float32" if request.mixed_precision == "no" else request.mixed_precision
    title = f"{request.model.name}: {request.model.parameters:,} parameters{trained}, {precision}"
    text(console, f"{title}, {ranks_text(request.world_size)}, {request.tokens}", "bold")
    budgets = plans[0].inputs.budgets
    if all_stages or not fits:  # the one stage that was asked for does not fit
        _show_answer(console, request, budgets, suggested)
    elif "device" in budgets or "together" in budgets:
        _show_answer(console, request, budgets, plans[0])
    else:
        _show_choice(console, request, "", plans[0], "")
    if all_stages:
        _show_stages(console, plans, request)
    else:
        _show_details(console, plans[0])
    lines = [f"stage {stage}: {why}" for stage, why in refused.items()]
    lines += [f"· {request.model.source}"] if request.model.source else []
    lines += [f"· sizes and speeds: {request.source}"] if request.source else []
    for line in lines:
        text(console, line)
    return status


def machine_of(config: ZeroConfig, world_size: int, file: str | None, disk_space: str | None) -> tuple[Machine, str]:
    """Return sizes and speeds, and their source. Sizes of this machine are used only if `auto` needs them."""
    if file is not None:
        machine, source = Machine.load(file), file
    else:
        found = measured()
        source = f"hf-zero probe on {host_name()}" if found is not None else ""
        machine = replace(found or Machine(), device_memory=None, host_memory=None, disk_free=None)
        if config.is_auto:
            ranks = max(1, min(world_size, torch.cuda.device_count() or world_size))
            free = free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"), ranks=ranks)
            shares = machine.shares_memory if source else free.shares_memory
            machine = replace(machine, disk_free=free.disk_free, shares_memory=shares)
            if None in (config.device_memory, config.host_memory):
                machine = replace(machine, device_memory=free.device_memory, host_memory=free.host_memory)
                source = f"{source}{'; ' if source else ''}memory that is free on this machine"
    if disk_space is not None:
        machine = replace(machine, disk_free=parse_bytes(disk_space, "--disk-space"))
    return machine, source


# Settings that fit --------------------------------------------------------------------------------


def candidate_plans(request: PlanRequest) -> Iterator[Plan]:
    """Yield plans of `CANDIDATES` without budgets, with the offloads that were asked for."""
    for stage, checkpointing, *tiers in CANDIDATES:
        checkpoints = request.batch.checkpointing or (checkpointing and request.model.architecture is not None)
        free = replace(request, machine=Machine(), batch=replace(request.batch, checkpointing=checkpoints))
        offloads = {}
        for name, tier in zip(OFFLOADS, tiers):
            wanted = getattr(request.config, name)
            offloads[name] = tier if wanted in ("none", "auto") else wanted
        with suppress(ConfigError):  # does not combine with the other settings
            yield free.plan(stage=stage, **offloads, device_memory=None, host_memory=None)


def best(request: PlanRequest, budgets: Mapping[str, int]) -> Plan | None:
    """Return the first of `CANDIDATES` that fits the budgets; else with one row at a time."""
    rows_per_step = request.backward_per_step * request.batch.rows
    one_by_one = replace(request, batch=replace(request.batch, rows=1), backward_per_step=rows_per_step)
    tried = (made for each in (request, one_by_one) for made in candidate_plans(each))
    return next((made for made in tried if not excess(budgets, made.memory)), None)


def _described(made: Plan) -> str:
    """Return text such as `stage 3 + gradient checkpointing + optimizer on cpu`."""
    words = [f"stage {made.config.stage}"]
    words += ["gradient checkpointing"] if made.inputs.batch and made.inputs.batch.checkpointing else []
    tiers = ((what, getattr(made.config, name)) for name, what in OFFLOADS.items())
    return " + ".join(words + [f"{what} on {tier}" for what, tier in tiers if tier != "none"])


def _show_answer(console: Console, request: PlanRequest, budgets: Mapping[str, int], made: Plan | None) -> None:
    """Print the plan that fits the given memory, or one for each size of GPU."""
    if "device" in budgets or "together" in budgets:
        memory = size_text(budgets.get("device", budgets.get("together", 0)))
        _show_choice(
            console, request, f"{memory} fits", made, "Nothing fits: use more ranks, more memory or a smaller model."
        )
        return
    found = [made for made in candidate_plans(request) if not excess(budgets, made.memory)]
    fitting: dict[str, Plan | None] = {}
    for name, size in GPUS.items():
        fitting[name] = next((each for each in found if each.memory.at_peak(Tier.DEVICE) <= size), None)
    names = [*GPUS]
    nothing = f"Nothing fits up to {names[-1]} per rank: use more ranks, or a smaller model."
    shown = next((name for name in names[names.index(_COMMON) :] if fitting[name]), names[-1])
    _show_choice(console, request, f"{shown} GPUs fit", fitting[shown], nothing)
    rows: list[tuple[str | Text, ...]] = []
    for _, group in groupby(names, lambda name: id(fitting[name])):
        sizes = list(group)
        if (one := fitting[sizes[0]]) is None:
            rows.append((", ".join(sizes), Text("does not fit", style=BAD), "", ""))
        else:
            peaks = (short_size(one.memory.at_peak(tier)) for tier in (Tier.DEVICE, Tier.HOST))
            rows.append((", ".join(sizes), _described(one), *peaks))
    table(console, "By GPU", ("GPU", "fastest settings that fit", "device peak", "host peak"), rows, left=2)


def _show_choice(console: Console, request: PlanRequest, what: str, made: Plan | None, nothing: str) -> None:
    if made is None:
        text(console, nothing, BAD)
        return
    device, host = (short_size(made.memory.at_peak(tier)) for tier in (Tier.DEVICE, Tier.HOST))
    more = ", one sequence at a time" if made.inputs.backward_per_step != request.backward_per_step else ""
    peaks = f"{device} of device memory at peak{f', {host} of host memory' if host != '0' else ''}"
    text(console, f"{what} {_described(made)}{more}: {peaks}.".lstrip(), GOOD)
    _show_settings(console, request.mixed_precision, made)


def _show_settings(console: Console, precision: str, made: Plan) -> None:
    """Print a command and the same as code."""
    config, batch, micros = made.config, made.inputs.batch, made.inputs.backward_per_step
    trainer: dict[str, Any] = {} if precision == "no" else {precision: True}
    trainer |= {} if batch is None else {"per_device_train_batch_size": batch.rows}
    trainer |= {"gradient_accumulation_steps": micros} if micros > 1 else {}
    trainer |= {"gradient_checkpointing": True} if batch is not None and batch.checkpointing else {}
    trainer |= {"max_grad_norm": 0} if config.step_in_backward else {}  # clipping needs all gradients before the step
    settings = (config if config.is_auto else replace(config, device_memory=None, host_memory=None)).changed()
    print_to_copy(console, as_command(made.inputs.world_size, settings, trainer))
    for line in as_training_arguments(settings, trainer):
        print_to_copy(console, line)


# Tables -------------------------------------------------------------------------------------------


def _show_stages(console: Console, plans: list[Plan], request: PlanRequest) -> None:
    tiers = [tier for tier in TIERS if any(made.memory.at_peak(tier) for made in plans) or tier is Tier.DEVICE]
    has_budget = any(made.inputs.budgets for made in plans)
    rows: list[list[str | Text]] = []
    for made in plans:
        states = [sum(made.memory.stored[tier][kind] for tier in TIERS) for kind in STATES]
        sizes = [*states, *(made.memory.at_peak(tier) for tier in tiers)]
        fits = [Text("yes", style=GOOD) if made.fits else Text("no", style=BAD)] if has_budget else []
        rows.append([str(made.config.stage), *map(short_size, sizes), *fits])
    peaks = [f"{tier.value} peak" for tier in tiers]
    columns = ("stage", "params", "grads", "optim", *peaks, *(["fits"] if has_budget else []))
    offload = request.config.offloads or request.batch.checkpointing
    caption = "params, grads, optim: between backward and step, over all tiers"
    title = f"All stages, {'with the flags given' if offload else 'without offload or checkpointing'}, per rank"
    table(console, title, columns, rows, caption=caption)


def _pair(stored: int, peak: int) -> str:
    if not peak:
        return ""
    return short_size(peak) if stored == peak else f"{short_size(stored)} → {short_size(peak)}"


def _show_details(console: Console, made: Plan) -> None:
    """Print one plan by kind and tier, its traffic and its reasons."""
    memory = made.memory
    shown = [tier for tier in TIERS if memory.at_peak(tier) or tier is Tier.DEVICE]
    kinds = []
    for kind in KINDS:
        cells = [_pair(memory.stored[tier][kind], memory.peak[tier][kind]) for tier in shown]
        if any(cells):
            kinds.append([kind + (" (estimate)" if kind == "activations" else ""), *cells])
    sums: list[list[str | Text]] = [
        ["all, at the highest moment", *(_pair(memory.stored_bytes(tier), memory.at_peak(tier)) for tier in shown)]
    ]
    limits = made.inputs.budgets
    if limits:
        sums.append(["budget", *(short_size(limits[tier.value]) if tier.value in limits else "" for tier in shown)])
    columns = ["per rank", *(tier.value for tier in shown)]
    caption = "between backward and step → at peak"
    table(console, f"Stage {made.config.stage}", columns, kinds, sums, caption=caption)
    alone: dict[str, float | None] = {}
    for (_, channel), value in made.step.parts.items():
        before = alone.get(channel, 0.0)
        alone[channel] = None if value is None or before is None else before + value
    rows = [
        [
            _LABELS.get(channel, channel),
            short_size(made.traffic[channel]) if channel in CHANNELS else "",
            seconds(alone[channel]),
        ]
        for channel in ("compute", *CHANNELS, "device", "host")
        if channel in alone
    ]
    whole = [["step, overlapped", "", seconds(made.step.seconds)]] if made.step.seconds is not None else []
    if rows:
        table(console, "One step", ("", "moved per rank", "seconds alone"), rows, whole)
    for line in made.reasons:
        text(console, f"· {line}")
    if made.shortfall:
        text(console, f"does not fit: {made.shortfall}", BAD)
