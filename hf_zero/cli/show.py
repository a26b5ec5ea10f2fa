"""Tables and pictures that the commands show; those of `report` are in `report_text` and `report_page`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config import size_text
from ..errors import needs
from ..plan.costs import KINDS, STATES, TIERS
from ..plan.machine import Machine, host_name
from ..plan.plan import Plan
from ..plan.work import ROADS

Row = Sequence[str]


def table(
    console: Console,
    title: str,
    columns: Row,
    *sections: Iterable[Row],
    caption: str = "",
    left: int = 1,
    wide: bool = False,
) -> None:
    """Sections of rows, with a line between them. All but the first `left` columns are numbers.

    `wide`: as wide as its figures are, since cut off they are wrong; broken over lines by a narrow terminal they are not.
    """
    made = Table(title=title, caption=caption or None, caption_justify="left")
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right")
    for rows in sections:
        for row in rows:
            made.add_row(*row)
        made.add_section()
    width = Console(width=1000).measure(made).maximum if wide else 0
    console.print(made, width=max(width, console.width), crop=not wide)


def text(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False)


def _ranks_text(count: int) -> str:
    return f"{count:,} rank{'s' if count > 1 else ''}"


# plan ---------------------------------------------------------------------------------------------------------------


def plan(made: Plan, name: str, source: str, is_number: bool) -> None:
    """One plan with all details. `is_number`: of the model only a number of parameters is known."""
    console, config, memory = Console(), made.config, made.memory
    kinds = []
    for kind in KINDS:
        cells = [_pair(memory.rest[tier][kind], memory.peak[tier][kind]) for tier in TIERS]
        if any(cells):
            kinds.append([kind + (" (estimate)" if kind == "activations" else ""), *cells])
    sums = [["sum", *(_pair(memory.at_rest(tier), memory.at_peak(tier)) for tier in TIERS)]]
    limits = {of: limit for of, _, limit in made.budgets.rows()}
    if limits:
        sums.append(["budget", *(_gib(limits[tier.value]) if tier.value in limits else "" for tier in TIERS)])
    title = f"{name}: {made.layout.numel:,} parameters, ZeRO stage {config.stage} on {_ranks_text(made.world_size)}"
    columns = ["", *(tier.value for tier in TIERS)]
    table(console, title, columns, kinds, sums, caption="GiB per rank: at rest → at peak")

    alone: dict[str, float | None] = {}
    for part, value in made.parts.items():
        road = part.split()[1]
        before = alone.get(road, 0.0)
        alone[road] = None if value is None or before is None else before + value
    if alone:
        labels = {"device": "device optimizer", "host": "host optimizer"}
        rows = [
            [
                labels.get(road, road),
                size_text(getattr(made.traffic, road)) if road in ROADS else "",
                _seconds(alone[road]),
            ]
            for road in ("compute", *ROADS, "device", "host")
            if road in alone
        ]
        whole = [["step, overlapped", "", _seconds(made.step_s)]] if made.step_s is not None else []
        table(console, "one step", ("", "bytes per rank", "seconds alone"), rows, whole)
    for line in made.reasons:
        text(console, f"· {line}")
    if is_number:
        text(console, "· units are not known: gathers and communication are those of a model that is one unit")
    if source:
        text(console, f"· sizes and speeds: {source}")
    if made.shortfall:
        text(console, f"does not fit: {made.shortfall}", "bold red")


def stages(plans: Sequence[Plan], name: str, refused: dict[int, str]) -> None:
    """Stages side by side; `refused`: why there are no others."""
    console, rows = Console(), []
    for made in plans:
        states = [sum(made.memory.rest[tier][kind] for tier in TIERS) for kind in STATES]
        sizes = [*states, sum(states), *(made.memory.at_peak(tier) for tier in TIERS)]
        fits = "" if not any(made.budgets.rows()) else "yes" if made.fits else "no"
        rows.append([str(made.config.stage), *map(_gib, sizes), fits])
    title = f"{name}: {plans[0].layout.numel:,} parameters on {_ranks_text(plans[0].world_size)}, GiB per rank"
    columns = ("stage", "params", "grads", "optim", "sum", "device", "host", "disk", "fits")
    caption = "params to sum: at rest, over all tiers; device, host and disk: at peak"
    table(console, title, columns, rows, caption=caption, left=0)
    for stage, why in refused.items():
        text(console, f"stage {stage}: {why}")


def _gib(value: float) -> str:
    return f"{value / (1 << 30):.3f}"


def _pair(rest: int, peak: int) -> str:
    if not peak:
        return ""
    return _gib(peak) if rest == peak else f"{_gib(rest)} → {_gib(peak)}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def sweep(rows: Sequence[dict[str, Any]], name: str) -> None:
    """Model states on the device by stage, offload and ranks, and the paper's count beside them."""
    by_stage: dict[int, list[list[str]]] = {}
    paper: dict[int, dict[int, str]] = {}
    ranks = sorted({row["world_size"] for row in rows})
    for (stage, offload), by_ranks in _series(rows).items():
        cells = [_gb(by_ranks[n]["states_bytes_by_tier"]["device"]) if n in by_ranks else "" for n in ranks]
        by_stage.setdefault(stage, []).append([str(stage), offload, *cells])
        found = {n: _gb(row["zero_paper_states_bytes_per_rank"]) for n, row in by_ranks.items()}
        paper[stage] = paper.get(stage, {}) | found
    sections = [[*of, [str(stage), "paper", *(paper[stage][n] for n in ranks)]] for stage, of in by_stage.items()]
    title = f"{name}: {rows[0]['parameters']:,} parameters, model states in GB (10^9 bytes) per rank, on the device"
    caption = "paper: all states as arXiv 1910.02054, figure 1, counts them (fp16, K = 12), without offload"
    table(
        Console(),
        title,
        ("stage", "offload", *(f"{n:,}" for n in ranks)),
        *sections,
        caption=caption,
        left=2,
        wide=True,
    )


def _series(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str], dict[int, dict[str, Any]]]:
    out: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        out.setdefault((row["stage"], row["offload"]), {})[row["world_size"]] = row
    return out


def _gb(value: float) -> str:
    size = value / 1e9
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}" if size >= 1 else f"{size:.3f}"


def draw_sweep(rows: Sequence[dict[str, Any]], name: str, path: str) -> None:
    with needs("plot"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    names: dict[tuple[tuple[int, float], ...], list[tuple[int, str]]] = {}
    for key, by_ranks in _series(rows).items():
        points = [(ranks, row["states_bytes_by_tier"]["device"] / 1e9) for ranks, row in by_ranks.items()]
        shown = tuple(point for point in points if point[1] > 0)  # the axis is logarithmic
        if shown:
            names.setdefault(shown, []).append(key)
    for line, keys in names.items():  # what coincides is one line
        label = "; ".join(f"stage {stage}" + (f", {offload}" if offload != "none" else "") for stage, offload in keys)
        style = "-" if any(offload == "none" for _, offload in keys) else "--"
        axes.plot(*zip(*line), style, marker="o", markersize=3, label=label)
    axes.set(yscale="log", xlabel="ranks", ylabel="model states per rank on the device, GB")
    axes.set_xscale("log", base=2)
    axes.set_title(f"{name} ({rows[0]['parameters']:,})")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


# probe --------------------------------------------------------------------------------------------------------------


def machine(found: Machine, ranks: int, path: Path) -> None:
    sizes = [
        ("device memory free", found.device_memory),
        ("host memory free", found.host_memory),
        ("disk free", found.disk_free),
    ]
    speeds = [
        ("host memory, optimizer", found.host_bandwidth),
        ("device memory, optimizer", found.device_bandwidth),
        ("link, device to host", found.link_down),
        ("link, host to device", found.link_up),
        ("disk, read", found.disk_read),
        ("disk, write", found.disk_write),
        ("collectives, sent per rank", found.collective),
    ]
    table(
        console := Console(),
        f"{host_name()}, one of {_ranks_text(ranks)}",
        ("", ""),
        [(label, "" if size is None else size_text(size)) for label, size in sizes],
        [(label, "" if rate is None else f"{rate / 1e9:.2f} GB/s") for label, rate in speeds],
        [(f"matrix product, {dtype}", f"{rate / 1e12:.3f} TFLOP/s") for dtype, rate in found.flops.items()],
    )
    text(console, f"kept in {path}")
