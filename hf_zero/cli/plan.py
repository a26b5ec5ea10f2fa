"""`hf-zero plan`: plan a model and print tables or JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ..config import STAGES, StagePolicy, parse_bytes, size_text
from ..errors import ConfigError, needs
from ..plan.costs import KINDS, STATES, TIERS
from ..plan.machine import Machine, here, host_name, kept
from ..plan.plan import Plan, plan
from ..plan.solve import fits
from ..plan.work import ROADS
from ..tiers.tier import Tier
from . import advice
from .advice import GPUS, Asked, Choice, as_typed, best, choices, first_that_fits, usable_bytes
from .commands import OK, WRONG, PlanOptions, print_json
from .files import cache_folder, writable
from .models import Model, find_model
from .show import pasted, ranks_text, seconds, short_size, table, text

SWEEP_RANKS = tuple(1 << power for power in range(11))


def run(options: PlanOptions) -> int:
    """Print the plans; return status 1 if nothing fits."""
    if options.plot and not options.sweep:
        raise ConfigError("--plot draws a sweep: add --sweep")
    writable(options.plot)
    if options.world_size < 1:
        raise ConfigError(f"--world-size must be at least 1, found {options.world_size}")
    options.config(max(STAGES), offload_optimizer="none", offload_params="none").check_world_size(options.world_size)
    if options.zero_stage is not None:
        options.config(options.zero_stage).check_world_size(
            options.world_size
        )  # raises for invalid settings before a model is looked up
    model = find_model(options.model, options.parameters)
    if options.sweep:
        rows = list(_sweep(Asked(options, model, Machine())))
        if options.plot:
            draw_sweep(rows, model.name, options.plot)
        if options.json:
            print_json(rows)
        else:
            show_sweep(rows, model)
        return OK
    machine, source = _machine_of(options)
    asked = Asked(options, model, machine, source)
    return _stages(asked) if options.zero_stage is None else _one(asked, options.zero_stage)


def _machine_of(options: PlanOptions) -> tuple[Machine, str]:
    """Return sizes and speeds, and their source. Sizes of this machine are used only if `auto` needs them."""
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
        print(f"hf-zero: {worded(str(error))}", file=sys.stderr)
        return WRONG
    if options.json:
        print_json(_values(made, asked))
    else:
        show_plan(made, asked.model, asked.source)
        if not made.fits:
            show_remedies(advice.remedies(asked, stage), best(asked), asked)
    return OK if made.fits else WRONG


def _stages(asked: Asked) -> int:
    """Print all stages side by side, and a recommendation."""
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
    show_stages(plans, asked.model, refused)
    if any(made.fits for made in plans):
        if not asked.options.zero_offload_optimizer == asked.options.zero_offload_params == "none":
            return OK
        show_recommend(choices(asked), asked)
        return OK
    show_remedies(advice.remedies(asked, max(STAGES)), best(asked), asked)
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
    """Return model states per rank for every number of ranks, stage and tier: in all, and on the device."""
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
    """Return bytes of model states per rank as Rajbhandari et al. count them (arXiv 1910.02054, figure 1), to compare.

    fp16 parameters and gradients, 2 bytes each, and K = 12 bytes of optimizer state: fp32 master, momentum, variance. This
    library's numbers differ: from stage 1 on only the owner stores a gradient, in float32.
    """
    return parameters * (
        2 / (1 if policy.keep_full else ranks)
        + 2 / (ranks if policy.reduce_each_backward else 1)
        + 12 / (ranks if policy.shard else 1)
    )


# Tables ---------------------------------------------------------------------------------------------------------------


GOOD, BAD = "green", "bold red"
_ROADS = {"device": "optimizer, on the device", "host": "optimizer, on the host", "compute": "forward and backward"}


def worded(line: str) -> str:
    """Return the settings in words."""
    return line


def _pair(rest: int, peak: int) -> str:
    if not peak:
        return ""
    return short_size(peak) if rest == peak else f"{short_size(rest)} → {short_size(peak)}"


def _verdict(fits: bool) -> Text:
    return Text("yes", style=GOOD) if fits else Text("no", style=BAD)


def _smallest_gpu(device_bytes: int) -> Text:
    name = next((name for name, size in GPUS.items() if device_bytes <= usable_bytes(size)), None)
    return Text(f"none of {len(GPUS)}", style=BAD) if name is None else Text(name, style=GOOD)


def show_plan(made: Plan, model: Model, source: str) -> None:
    """Print one plan with all details."""
    console, config, memory = Console(), made.config, made.memory
    shown = [tier for tier in TIERS if memory.at_peak(tier) or tier is Tier.DEVICE]
    kinds = []
    for kind in KINDS:
        cells = [_pair(memory.rest[tier][kind], memory.peak[tier][kind]) for tier in shown]
        if any(cells):
            kinds.append([kind + (" (estimate)" if kind == "activations" else ""), *cells])
    sums: list[list[str | Text]] = [
        ["all, at the highest moment", *(_pair(memory.at_rest(tier), memory.at_peak(tier)) for tier in shown)]
    ]
    limits = {of: limit for of, _, limit in made.budgets.rows()}
    if limits:
        sums.append(["budget", *(short_size(limits[tier.value]) if tier.value in limits else "" for tier in shown)])
    if not limits.keys() & {"device", "together"}:
        blank = [""] * (len(shown) - 1)
        sums.append(["smallest GPU", _smallest_gpu(memory.at_most(Tier.DEVICE)), *blank])
    title = (
        f"{model.name}: {made.layout.numel:,} parameters, ZeRO stage {config.stage} on {ranks_text(made.world_size)}"
    )
    columns = ["per rank", *(tier.value for tier in shown)]
    table(console, title, columns, kinds, sums, caption="between backward and step → at peak", fold=True)

    alone: dict[str, float | None] = {}
    for part, value in made.parts.items():
        road = part.split()[1]
        before = alone.get(road, 0.0)
        alone[road] = None if value is None or before is None else before + value
    if alone:
        rows = [
            [
                _ROADS.get(road, road),
                short_size(getattr(made.traffic, road)) if road in ROADS else "",
                seconds(alone[road]),
            ]
            for road in ("compute", *ROADS, "device", "host")
            if road in alone
        ]
        whole = [["step, overlapped", "", seconds(made.step_s)]] if made.step_s is not None else []
        table(console, "one step", ("", "moved per rank", "seconds alone"), rows, whole)
    for line in made.reasons:
        text(console, f"· {worded(line)}")
    _notes(console, model, source)
    if made.shortfall:
        text(console, f"does not fit: {worded(made.shortfall)}", BAD)


def _notes(console: Console, model: Model, source: str = "") -> None:
    if model.source:
        text(console, f"· {model.source}")
    if source:
        text(console, f"· sizes and speeds: {source}")


def show_stages(plans: Sequence[Plan], model: Model, refused: dict[int, str]) -> None:
    """Print stages side by side; `refused`: why others are missing."""
    console = Console()
    rows: list[list[str | Text]] = []
    tiers = [tier for tier in TIERS if any(made.memory.at_peak(tier) for made in plans) or tier is Tier.DEVICE]
    has_budget = any(any(made.budgets.rows()) for made in plans)
    for made in plans:
        states = [sum(made.memory.rest[tier][kind] for tier in TIERS) for kind in STATES]
        sizes = [*states, *(made.memory.at_peak(tier) for tier in tiers)]
        fits = _verdict(made.fits) if has_budget else _smallest_gpu(made.memory.at_most(Tier.DEVICE))
        rows.append([str(made.config.stage), *map(short_size, sizes), fits])
    if plans:
        title = f"{model.name}: {plans[0].layout.numel:,} parameters on {ranks_text(plans[0].world_size)}, per rank"
        peaks = [f"{tier.value} peak" for tier in tiers]
        columns = ("stage", "params", "grads", "optim", *peaks, "fits" if has_budget else "GPU")
        caption = "params, grads, optim: between backward and step, over all tiers"
        if not has_budget:
            caption += f"; GPU: the smallest of {', '.join(GPUS)} with room"
        table(console, title, columns, rows, caption=caption, left=1, fold=True)
    for stage, why in refused.items():
        text(console, f"stage {stage}: {worded(why)}")
    equal = {
        made.config.stage: made.memory for made in plans if made.config.policy.shard and made.config.policy.keep_full
    }
    if len({(memory.states, memory.at_peak(Tier.DEVICE)) for memory in equal.values()}) < len(equal):
        text(
            console,
            f"· stages {' and '.join(map(str, equal))} are equal here: from stage 1 on only the owner stores a gradient (the "
            "paper's stage 1 keeps it on all ranks); they differ with --accumulation above 1, where stage 1 sends less and "
            "holds more",
        )
    if plans and plans[0].inputs.batch is None:
        text(console, "· activations are not counted in this table: --batch ROWS counts them")
    _notes(console, model)


def show_recommend(found: Sequence[Choice], asked: Asked) -> None:
    """Print the cheapest settings that fit the budget, or each size of GPU."""
    console, limit = Console(), asked.budgets.device
    if not found:
        return
    batch = found[0].made.inputs.batch
    counted = (
        "without activations"
        if batch is None or not batch.architecture
        else f"with {batch.rows} x {batch.sequence:,} tokens"
    )
    if limit is not None:
        choice = first_that_fits(found, asked.budgets)
        if choice is not None:
            _paste(console, f"fits {size_text(limit)}", choice, asked, counted)
        return
    text(console, "")
    text(console, f"What to use ({counted} per rank), by the memory of each GPU:", "bold")
    groups: dict[int, list[str]] = {}
    for name, size in GPUS.items():
        choice = first_that_fits(found, replace(asked.budgets, device=usable_bytes(size)))
        groups.setdefault(found.index(choice) if choice else -1, []).append(name)
    for place, names in groups.items():
        if place < 0:
            text(console, f"{', '.join(names)}: nothing fits on {ranks_text(asked.options.world_size)}", BAD)
        else:
            _paste(console, ", ".join(names), found[place], asked)


def _paste(console: Console, what: str, choice: Choice, asked: Asked, counted: str = "") -> None:
    device, host = (choice.made.memory.at_most(tier) for tier in (Tier.DEVICE, Tier.HOST))
    beside = f", host {short_size(host)}" if host else ""
    needed = f"{short_size(device)} of device memory at peak{beside}{', ' if counted else ''}{counted}"
    text(console, f"{what}: {choice.text} ({needed})", GOOD)
    for line in as_typed(choice, asked):
        pasted(console, line)


def show_remedies(found: Sequence[tuple[str, int, int, bool]], best: tuple[Choice, Asked] | None, asked: Asked) -> None:
    """Print what each change saves, largest first; then settings that fit."""
    console, limit = Console(), asked.budgets.device
    if found:
        rows: list[list[str | Text]] = [
            [worded(change), short_size(saved), short_size(then), _verdict(fits)] for change, saved, then, fits in found
        ]
        table(console, "what one change gains, per rank", ("change", "less on the device", "then", "fits"), rows)
    if best is not None and limit is not None:
        _paste(console, f"fits {size_text(limit)}", *best)
    elif not any(fits for *_, fits in found):
        text(console, "nothing fits, all of it together neither: more memory, or a smaller model")


# sweep --------------------------------------------------------------------------------------------------------------


def show_sweep(rows: Sequence[dict[str, Any]], model: Model) -> None:
    """Print device memory of model states by stage, offload and ranks, with the paper's count, and the ranks for GPU sizes."""
    console = Console()
    by_stage: dict[int, list[list[str]]] = {}
    paper: dict[int, dict[int, str]] = {}
    ranks = sorted({row["world_size"] for row in rows})
    least: list[list[str | Text]] = []
    for (stage, offload), by_ranks in _series(rows).items():
        cells = [short_size(by_ranks[n]["states_bytes_by_tier"]["device"]) if n in by_ranks else "" for n in ranks]
        by_stage.setdefault(stage, []).append([str(stage), offload, *cells])
        found = {n: short_size(row["zero_paper_states_bytes_per_rank"]) for n, row in by_ranks.items()}
        paper[stage] = paper.get(stage, {}) | found
        least.append([str(stage), offload])
        for size in map(usable_bytes, GPUS.values()):
            fits = (n for n, row in sorted(by_ranks.items()) if row["states_bytes_by_tier"]["device"] <= size)
            first = next(fits, None)
            least[-1].append(Text("-", style=BAD) if first is None else Text(f"{first:,}", style=GOOD))
    sections = [[*of, [str(stage), "paper", *(paper[stage][n] for n in ranks)]] for stage, of in by_stage.items()]
    title = (
        f"{model.name}: {rows[0]['parameters']:,} parameters, model states on the device, per rank, by number of ranks"
    )
    caption = (
        "paper: all states as arXiv 1910.02054, figure 1, counts them (fp16, K = 12), without offload. Stage 0 offloads on one "
        "rank alone. Stages 1 and 2 are equal: from stage 1 on only the owner stores a gradient."
    )
    columns = ("stage", "offload", *(f"{n:,}" for n in ranks))
    table(console, title, columns, *sections, caption=caption, left=2, fold=True)
    title, caption = (
        "ranks from which the model states fit a GPU",
        "activations need more room: hf-zero plan --batch",
    )
    table(console, title, ("stage", "offload", *GPUS), least, caption=caption, left=2)
    _notes(console, model)


def _series(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str], dict[int, dict[str, Any]]]:
    out: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        out.setdefault((row["stage"], row["offload"]), {})[row["world_size"]] = row
    return out


def draw_sweep(rows: Sequence[dict[str, Any]], name: str, path: str) -> None:
    """Draw model states on the device over ranks, with lines for the sizes of GPUs."""
    with needs("plot"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    names: dict[tuple[tuple[int, float], ...], list[tuple[int, str]]] = {}
    for key, by_ranks in _series(rows).items():
        points = [(ranks, row["states_bytes_by_tier"]["device"]) for ranks, row in by_ranks.items()]
        shown = tuple(point for point in points if point[1] > 0)  # the axis is logarithmic
        if shown:
            names.setdefault(shown, []).append(key)
    for line, keys in names.items():  # equal curves are one line
        label = "; ".join(f"stage {stage}" + (f", {offload}" if offload != "none" else "") for stage, offload in keys)
        style = "-" if any(offload == "none" for _, offload in keys) else "--"
        axes.plot(*zip(*line), style, marker="o", markersize=3, label=label)
    most = max(row["world_size"] for row in rows)
    for gpu, size in GPUS.items():
        axes.axhline(usable_bytes(size), color="0.5", linewidth=0.8, linestyle=":")
        axes.annotate(gpu, (most, usable_bytes(size)), color="0.35", fontsize=8, ha="right", va="bottom")
    axes.set(xlabel="ranks", ylabel="model states per rank on the device")
    axes.set_yscale("log", base=2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_size(value)))
    axes.set_title(f"{name}: {rows[0]['parameters']:,} parameters")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
