"""What `hf-zero plan` and `hf-zero probe` show: tables, recommendations, the picture of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ..config import size_text
from ..errors import needs
from ..plan.costs import KINDS, STATES, TIERS
from ..plan.plan import Plan
from ..plan.work import ROADS
from ..tiers.tier import Tier
from . import advice
from .advice import GPUS, Asked, Choice, first_that_fits, usable_bytes
from .commands import typed
from .models import Model
from .options import PlanOptions
from .show import pasted, ranks_text, short_size, table, text

GOOD, BAD = "green", "bold red"
_ROADS = {"device": "optimizer, on the device", "host": "optimizer, on the host", "compute": "forward and backward"}


def worded(line: str) -> str:
    """In the words of the command line."""
    return typed(line, PlanOptions)


def _pair(rest: int, peak: int) -> str:
    if not peak:
        return ""
    return short_size(peak) if rest == peak else f"{short_size(rest)} → {short_size(peak)}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _verdict(fits: bool) -> Text:
    return Text("yes", style=GOOD) if fits else Text("no", style=BAD)


def _smallest_gpu(device_bytes: int) -> Text:
    name = next((name for name, size in GPUS.items() if device_bytes <= usable_bytes(size)), None)
    return Text(f"none of {len(GPUS)}", style=BAD) if name is None else Text(name, style=GOOD)


def plan(made: Plan, model: Model, source: str) -> None:
    """One plan with all details."""
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
                _seconds(alone[road]),
            ]
            for road in ("compute", *ROADS, "device", "host")
            if road in alone
        ]
        if made.traffic.node:
            rows.insert(
                1 + [row[0] for row in rows].index("gather"),
                ["of these, within nodes", short_size(made.traffic.node), ""],
            )
        whole = [["step, overlapped", "", _seconds(made.step_s)]] if made.step_s is not None else []
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


def stages(plans: Sequence[Plan], model: Model, refused: dict[int, str]) -> None:
    """Stages side by side; `refused`: why there are no others."""
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
            f"· stages {' and '.join(map(str, equal))} are equal here: a gradient rests only at its owner from stage 1 on (the "
            "paper's stage 1 keeps it on all ranks); they differ with --accumulation above 1, where stage 1 sends less and "
            "holds more",
        )
    if plans and plans[0].inputs.batch is None:
        text(console, "· activations are not counted in this table: --batch ROWS counts them")
    _notes(console, model)


def recommend(found: Sequence[Choice], asked: Asked) -> None:
    """The cheapest settings that fit the budget, or each size of GPU."""
    console, limit = Console(), asked.budgets[Tier.DEVICE]
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
        choice = first_that_fits(found, {**asked.budgets, Tier.DEVICE: usable_bytes(size)})
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
    for line in advice.pasted(choice, asked):
        pasted(console, line)


def remedies(found: Sequence[tuple[str, int, int, bool]], best: tuple[Choice, Asked] | None, asked: Asked) -> None:
    """What each change saves, the largest first; then settings that fit."""
    console, limit = Console(), asked.budgets[Tier.DEVICE]
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


def sweep(rows: Sequence[dict[str, Any]], model: Model) -> None:
    """Model states on the device by stage, offload and ranks, and the paper's count beside them; ranks for sizes of GPUs."""
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
        least.append([str(stage), offload, *(_least_ranks(by_ranks, usable_bytes(size)) for size in GPUS.values())])
    sections = [[*of, [str(stage), "paper", *(paper[stage][n] for n in ranks)]] for stage, of in by_stage.items()]
    title = (
        f"{model.name}: {rows[0]['parameters']:,} parameters, model states on the device, per rank, by number of ranks"
    )
    caption = (
        "paper: all states as arXiv 1910.02054, figure 1, counts them (fp16, K = 12), without offload. Stage 0 offloads on one "
        "rank alone. Stages 1 and 2 are equal: a gradient rests only at its owner from stage 1 on."
    )
    columns = ("stage", "offload", *(f"{n:,}" for n in ranks))
    table(console, title, columns, *sections, caption=caption, left=2, fold=True)
    title, caption = (
        "ranks from which the model states fit a GPU",
        "activations need room beside them: hf-zero plan --batch",
    )
    table(console, title, ("stage", "offload", *GPUS), least, caption=caption, left=2)
    _notes(console, model)


def _least_ranks(by_ranks: Mapping[int, dict[str, Any]], device_bytes: int) -> Text:
    fits = [n for n, row in sorted(by_ranks.items()) if row["states_bytes_by_tier"]["device"] <= device_bytes]
    return Text(f"{fits[0]:,}", style=GOOD) if fits else Text("-", style=BAD)


def _series(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str], dict[int, dict[str, Any]]]:
    out: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        out.setdefault((row["stage"], row["offload"]), {})[row["world_size"]] = row
    return out


def draw_sweep(rows: Sequence[dict[str, Any]], name: str, path: str) -> None:
    """Model states on the device over ranks; lines at what GPUs of each size have room for."""
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
    for line, keys in names.items():  # what coincides is one line
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
