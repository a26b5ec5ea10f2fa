"""Tables as all commands show them; a report's tables, pictures and page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import size_text
from ..errors import needs
from ..plan.costs import TIERS
from ..plan.work import CHANNELS
from .report import Run, parts_of

Row = Sequence[str | Text]


def table(
    console: Console,
    title: str,
    columns: Row,
    *sections: Iterable[Row],
    caption: str = "",
    left: int = 1,
    fold: bool = False,
) -> None:
    """A title, sections of rows with a line between them, a caption. All but the first `left` columns are numbers.

    `fold`: where it is too wide for the terminal, as several tables with the same left columns: no figure is cut off.
    """
    parts = [list(rows) for rows in sections]
    chosen = [list(range(len(columns)))]
    if fold:
        chosen = _folded(console, columns, parts, left)
    text(console, title, "bold")
    for keep in chosen:
        rows = [[[row[at] for at in keep] for row in rows] for rows in parts]
        console.print(_table([columns[at] for at in keep], rows, left))
    if caption:
        text(console, caption, "italic")


def _table(columns: Row, sections: Iterable[Iterable[Row]], left: int) -> Table:
    made = Table()
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", overflow="fold")
    for rows in sections:
        for row in rows:
            made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        made.add_section()
    return made


def _folded(console: Console, columns: Row, sections: Sequence[Sequence[Row]], left: int) -> list[list[int]]:
    """Which columns go in each table: the left ones in all, of the others as many as there is room for."""
    wide = Console(width=10_000)

    def width(keep: Sequence[int]) -> int:
        rows = [[[row[at] for at in keep] for row in rows] for rows in sections]
        return wide.measure(_table([columns[at] for at in keep], rows, left)).maximum

    out, keep = [], list(range(left))
    for at in range(left, len(columns)):
        if len(keep) > left and width([*keep, at]) > console.width:
            out.append(keep)
            keep = list(range(left))
        keep.append(at)
    return [*out, keep]


def text(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False)


# report -------------------------------------------------------------------------------------------------------------


def _head(out: dict[str, Any]) -> str:
    facts = out["facts"]
    config = facts["config"]
    offloads = [
        f"{name} {config[name]!r}" for name in ("offload_optimizer", "offload_params") if config[name] != "none"
    ]
    ranks = f"{facts['world_size']} rank{'s' if facts['world_size'] > 1 else ''}"
    return (
        f"stage {facts['stage']} on {ranks}{''.join(f', {text}' for text in offloads)}; {facts['parameters']:,} parameters; "
        f"{facts['precision']}; steps {out['first_step']} to {out['last_step']} of rank {out['rank']}, begun "
        f"{facts['started']} on {facts['machine']['device']} with {facts['machine']['cores']} cores"
    )


def report(out: dict[str, Any], console: Console | None = None) -> None:
    """What `summary` found, as tables."""
    console = console or Console()
    text(console, _head(out))
    against = ("", "predicted", "measured", "off")
    memory = [(f"{row['tier']}, {row['kind']}", *_against(row)) for row in out["memory"]]
    process = [
        (f"process, {name}", "", size_text(value), "") for name, value in out["process"].items() if name != "rss"
    ]
    table(console, "memory at its peak", against, memory, process)
    if out["traffic"]:
        rows = [(row["road"], *_against(row)) for row in out["traffic"]]
        table(console, "sent and moved per step (median)", against, rows)
    spent = out["time"]
    parts = {"computing and the rest": spent["rest_s"]}
    parts |= {CHANNELS[road].label: waited for road, waited in spent["wait_s"].items() if waited > 0}
    parts["between steps (data, evaluation, saving)"] = spent["between_s"]
    whole = spent["step_s"]
    told = "" if spent["predicted_step_s"] is None else f", predicted {spent['predicted_step_s']:.4f}"
    shares = [(name, _seconds(value), _percent(value / whole if whole else None)) for name, value in parts.items()]
    table(console, f"a step: {whole:.4f} s (median){told}", ("", "seconds", "share"), shares)
    slowest = [(str(step["step"]), _seconds(step["seconds"]), step["most"]) for step in out["slowest"]]
    table(console, "slowest steps", ("step", "seconds", "of these"), slowest)
    if len(out["ranks"]) > 1:
        ranks = [
            (
                str(row["rank"]),
                _seconds(row["step_s"]),
                _seconds(row["wait_s"]),
                *(size_text(row["peak_bytes"][tier.value]) for tier in TIERS),
                size_text(row["rss_peak_bytes"]),
            )
            for row in out["ranks"]
        ]
        columns = ("rank", "step, s", "waited, s", *(f"{tier.value} peak" for tier in TIERS), "process peak")
        table(console, "ranks", columns, ranks)
    for kind in ("warnings", "moves", "notes"):
        for line in out[kind]:
            text(console, f"{kind[:-1]}: {line}", "bold yellow" if kind == "warnings" else None)


def _against(row: dict[str, Any]) -> tuple[str, str, str]:
    told = "" if row["predicted"] is None else size_text(row["predicted"])
    return told, size_text(row["measured"]), _percent(row["off"])


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def page(out: dict[str, Any], png: bytes) -> str:
    """One HTML page with everything in it: the picture, and what `report` prints."""
    console = Console(record=True, file=io.StringIO(), width=140)
    report(out, console)
    title = html.escape(Path(out["run"]).parent.name).replace("{", "{{").replace("}", "}}")
    image = base64.b64encode(png).decode()
    return console.export_html(
        inline_styles=True,
        code_format='<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>hf_zero run</title></head>'
        f'<body style="font-family:sans-serif"><h1>hf_zero: {title}</h1>'
        f'<img alt="memory and time over the steps" src="data:image/png;base64,{image}" style="max-width:100%">'
        '<pre style="font-family:Menlo,Consolas,monospace;line-height:1.2">{code}</pre></body></html>\n',
    )


def picture(runs: Sequence[Run]) -> bytes:
    """PNG of the first run: memory by tier over the steps, predicted peaks dashed; below it, where each step's time went."""
    with needs("plot"):
        from matplotlib.figure import Figure

    run = runs[0]
    figure = Figure(figsize=(10, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    numbers = [step["step"] for step in run.steps]
    highest = max(max(step["process"].get("rss", 0), *_peaks(step)) for step in run.steps)
    unit, size = ("GiB", 1 << 30) if highest >= 1 << 30 else ("MiB", 1 << 20)
    marker = "." if len(numbers) < 200 else ""
    for color, tier in enumerate(tier.value for tier in TIERS):
        values = [_peaks(step)[color] / size for step in run.steps]
        predicted = run.facts["predicted"]
        told = predicted.get("peak_bytes", {}).get(tier, sum(predicted["peak"][tier].values())) / size
        if any(values) or told:
            above.plot(numbers, values, color=f"C{color}", marker=marker, label=f"{tier}, peak of the step")
            above.axhline(told, color=f"C{color}", linestyle="--", linewidth=1, label=f"{tier}, predicted")
    rss = [step["process"].get("rss", 0) / size for step in run.steps]
    if any(rss):
        above.plot(numbers, rss, color="0.6", linewidth=1, label="process (resident)")
    above.set(ylabel=f"{unit} per rank", ylim=(0, None))
    above.legend(fontsize=8)
    parts = [parts_of(step) for step in run.steps]
    named = {name: [part[name] for part in parts] for name in parts[0] if any(part[name] for part in parts)}
    below.stackplot(numbers, list(named.values()), labels=list(named), alpha=0.85)
    # The first step and evaluations would flatten all others.
    usual = max(step["seconds"] for step in run.usual)
    below.set(xlabel="step", ylabel="seconds", ylim=(0, 1.3 * usual if usual else None))
    below.legend(fontsize=8, loc="upper right")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{run.path.parent.name}: stage {run.facts['stage']}, {run.facts['world_size']} rank(s), rank {run.rank}"
    )
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120)
    return target.getvalue()


def _peaks(step: dict[str, Any]) -> list[int]:
    """Bytes by tier."""
    return [int(step["peak"].get(tier.value, {}).get("all", 0)) for tier in TIERS]
