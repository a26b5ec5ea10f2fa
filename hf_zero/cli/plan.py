"""`hf-zero plan`: plans of a model for what was typed, and what they say as tables or JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..config import STAGES, StagePolicy, parse_bytes
from ..errors import ConfigError
from ..plan.costs import STATES, TIERS
from ..plan.machine import Machine, here, host_name, kept
from ..plan.plan import Plan, plan
from ..plan.solve import fits
from . import advice, plan_tables
from .advice import Asked
from .commands import OK, WRONG, print_json
from .files import cache_folder, writable
from .models import find_model
from .options import PlanOptions

SWEEP_RANKS = tuple(1 << power for power in range(11))


def run(options: PlanOptions) -> int:
    """Prints what was asked for; the exit status says whether it fits."""
    if options.plot and not options.sweep:
        raise ConfigError("--plot draws a sweep: add --sweep")
    writable(options.plot)
    if options.world_size < 1:
        raise ConfigError(f"--world-size must be at least 1, found {options.world_size}")
    if options.nodes < 1 or options.world_size % options.nodes:
        raise ConfigError(f"{options.world_size} ranks do not divide by {options.nodes} nodes")
    if options.zero_stage is not None:
        options.config(options.zero_stage).check_world_size(
            options.world_size
        )  # refuses what cannot be, before a model is looked for
    model = find_model(options.model, options.parameters)
    if options.sweep:
        rows = list(_sweep(Asked(options, model, Machine())))
        if options.plot:
            plan_tables.draw_sweep(rows, model.name, options.plot)
        if options.json:
            print_json(rows)
        else:
            plan_tables.sweep(rows, model)
        return OK
    machine, source = _machine_of(options)
    asked = Asked(options, model, machine, source)
    return _stages(asked) if options.zero_stage is None else _one(asked, options.zero_stage)


def _machine_of(options: PlanOptions) -> tuple[Machine, str]:
    """Sizes and speeds, and where they are from. Sizes of this machine are used only where `auto` needs some."""
    if options.machine is not None:
        machine, source = Machine.load(options.machine), options.machine
    else:
        path = kept(cache_folder())
        machine, source = (Machine.load(path), f"hf-zero probe on {host_name()}") if path.exists() else (Machine(), "")
        machine = replace(machine, device_memory=None, host_memory=None, disk_free=None)
        if "auto" in (options.zero_offload_optimizer, options.zero_offload_params):
            ranks = max(1, min(options.world_size, torch.cuda.device_count() or options.world_size))
            free = here(torch.device("cuda" if torch.cuda.is_available() else "cpu"), ranks=ranks)
            shares = machine.shares_memory if source else free.shares_memory
            machine = replace(machine, disk_free=free.disk_free, shares_memory=shares)
            if None in (options.device_memory, options.host_memory):
                machine = replace(machine, device_memory=free.device_memory, host_memory=free.host_memory)
                source = f"{source}{'; ' if source else ''}memory that is free on this machine"
    if options.disk_space is not None:
        machine = replace(machine, disk_free=parse_bytes(options.disk_space, "--disk-space"))
    return machine, source


def _one(asked: Asked, stage: int) -> int:
    options, inputs = asked.options, asked.inputs(stage)
    try:
        made = plan(inputs)
    except ConfigError as error:
        if not inputs.config.is_auto or fits(inputs):
            raise
        print(f"hf-zero: {plan_tables.worded(str(error))}", file=sys.stderr)
        return WRONG
    if options.json:
        print_json(_values(made, asked))
    else:
        plan_tables.plan(made, asked.model, asked.source)
        if not made.fits:
            plan_tables.remedies(advice.remedies(asked, stage), advice.best(asked), asked)
    return OK if made.fits else WRONG


def _stages(asked: Asked) -> int:
    """All of them side by side, and what to use."""
    plans, refused, lacking = [], {}, False
    for stage in sorted(STAGES):
        try:
            inputs = asked.inputs(stage)
            plans.append(plan(inputs))
        except ConfigError as error:
            refused[stage] = str(error)
            lacking |= asked.options.config(max(STAGES)).is_auto
    if not plans and not lacking:
        raise ConfigError("; ".join(dict.fromkeys(refused.values())))
    if asked.options.json:
        print_json([_values(made, asked) for made in plans])
        return OK if any(made.fits for made in plans) else WRONG
    plan_tables.stages(plans, asked.model, refused)
    if any(made.fits for made in plans):
        if not asked.options.zero_offload_optimizer == asked.options.zero_offload_params == "none":
            return OK
        plan_tables.recommend(advice.choices(asked), asked)
        return OK
    plan_tables.remedies(advice.remedies(asked, max(STAGES)), advice.best(asked), asked)
    return WRONG


def _values(made: Plan, asked: Asked) -> dict[str, Any]:
    paper = paper_states_bytes(made.layout.numel, STAGES[made.config.stage], made.world_size)
    return {
        "model": asked.model.name,
        "structure": asked.model.source or "the model's own",
        "mixed_precision": asked.options.mixed_precision,
        **made.to_dict(),
        "zero_paper_states_bytes_per_rank": round(paper),
    }


def _sweep(asked: Asked) -> Iterator[dict[str, Any]]:
    """Every number of ranks, stage and tier: model states per rank, all of them and those on the device."""
    options = asked.options
    for stage, policy in sorted(STAGES.items()):
        if not policy.shard and (options.zero_replicas > 1 or options.zero_wire != "none"):
            continue
        for offload in ("none", "cpu", "disk"):
            for ranks in SWEEP_RANKS:
                if ranks % options.zero_replicas or (offload != "none" and not policy.shard and ranks > 1):
                    continue
                params = "none" if policy.keep_full and ranks > 1 else offload
                tiers = {"offload_optimizer": offload, "offload_params": params}
                made = plan(asked.inputs(stage, ranks, **tiers, device_memory=None, host_memory=None))
                yield {
                    "stage": stage,
                    "offload": offload,
                    "world_size": ranks,
                    "parameters": made.layout.numel,
                    "states_bytes_per_rank": made.memory.states,
                    "states_bytes_by_tier": {
                        tier.value: sum(made.memory.rest[tier][kind] for kind in STATES) for tier in TIERS
                    },
                    "zero_paper_states_bytes_per_rank": round(paper_states_bytes(made.layout.numel, policy, ranks)),
                }


def paper_states_bytes(parameters: int, policy: StagePolicy, ranks: int) -> float:
    """Bytes of model states per rank as Rajbhandari et al. (arXiv 1910.02054, figure 1) count them, to compare with them.

    fp16 parameters and gradients, 2 bytes each, and K = 12 bytes of optimizer state: fp32 master, momentum, variance. This
    library's own figures differ: gradients rest at their owner alone, in float32, at stages 1, 2 and 3.
    """
    return parameters * (
        2 / (1 if policy.keep_full else ranks)
        + 2 / (ranks if policy.reduce_each_backward else 1)
        + 12 / (ranks if policy.shard else 1)
    )
