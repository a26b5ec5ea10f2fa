"""A report in the terminal: the verdict of every run, its figures, what differs between two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..config import size_text
from ..plan.costs import TIERS
from ..plan.work import CHANNELS
from .report import BETWEEN
from .show import table, text

MARKS = {True: ("ok", "green"), False: ("!!", "bold red"), None: ("··", "dim")}
"""Of a verdict's `ok`: what stands before it, and its style."""


def show(outs: Sequence[dict[str, Any]], differences: Sequence[dict[str, Any]]) -> None:
    """What `summary` found of each run, as text; `differences` of the two."""
    console = Console()
    for place, out in enumerate(outs):
        if place:
            console.print()
        verdict(out, console)
    if differences:
        rows = [
            (
                row["what"],
                *(value_text(value, row["unit"]) for value in row["values"]),
                percent(row["change"], sign=True),
            )
            for row in differences
        ]
        names = [name_of(out) for out in outs]
        table(console, "what differs", ("", *(names if names[0] != names[1] else ("first", "second")), "change"), rows)
        return
    for out in outs:
        if out["steps"]:
            figures(out, console)


def name_of(out: dict[str, Any]) -> str:
    """Of a run: its folder's."""
    folder = Path(out["run"]).resolve().parent
    return (folder.parent if folder.name == "_zero" else folder).name


def head(out: dict[str, Any]) -> str:
    """What ran where."""
    facts = out["facts"]
    config = facts["config"]
    offloads = [
        f"{name} {config[name]!r}" for name in ("offload_optimizer", "offload_params") if config[name] != "none"
    ]
    ranks = f"{facts['world_size']} rank{'s' if facts['world_size'] > 1 else ''}"
    model = facts.get("about", {}).get("model")
    machine = f"{facts['machine']['device']} with {facts['machine']['cores']} cores"
    return (
        f"stage {facts['stage']} on {ranks}{''.join(f', {text}' for text in offloads)}; "
        f"{f'{model}, ' if model else ''}{facts['parameters']:,} parameters; {facts['precision']}; steps "
        f"{out['first_step']} to {out['last_step']} of rank {out['rank']}, begun {facts.get('started', '')} on {machine}"
    )


def verdict(out: dict[str, Any], console: Console) -> None:
    """The answers first: did it end, did it fit the plan, how fast was it, where does the time go."""
    console.print(Text(name_of(out), style="bold"), soft_wrap=False)
    if out["steps"]:
        text(console, head(out), "dim")
    for said in out["verdict"]:
        mark, style = MARKS[said["ok"]]
        line = Text.assemble((f"{mark} ", style), (f"{said['topic']}: ", "bold"), said["text"])
        console.print(line, highlight=False)
    for kind in ("warnings", "moves", "notes"):
        for line in out.get(kind, ()):
            text(console, f"{kind[:-1]}: {line}", "yellow" if kind == "warnings" else None)


def figures(out: dict[str, Any], console: Console) -> None:
    """What `summary` found, as tables."""
    against = ("", "planned", "counted", "off")
    memory = [(f"{row['tier']}, {row['kind']}", *_against(row)) for row in out["memory"]]
    table(console, "memory at its peak, as hf_zero counts what it allocates", against, memory)
    for each in out["outside"]:
        parts = [(name, size_text(size), percent(size / each["peak"])) for name, size in each["parts"].items()]
        table(console, f"{each['what']}: {size_text(each['peak'])} at peak", ("of it", "", "share"), parts)
        if each["note"]:
            text(console, each["note"])
    if out["traffic"]:
        rows = [(row["road"], *_against(row)) for row in out["traffic"]]
        table(console, "sent and moved per step (median)", against, rows)
    spent = out["time"]
    whole = spent["step_s"]
    told = "" if spent["predicted_step_s"] is None else f", planned {spent['predicted_step_s']:.4f}"
    waited = [(CHANNELS[road].label, value) for road, value in spent["wait_s"].items() if value > 0]
    parts_s = [("computing and the rest", spent["rest_s"]), *waited, (BETWEEN, spent["between_s"])]
    shares = [(name, seconds(value), percent(value / whole if whole else None)) for name, value in parts_s]
    table(console, f"a step: {whole:.4f} s (median){told}", ("", "seconds", "share"), shares)
    slowest = [(str(step["step"]), seconds(step["seconds"]), step["most"]) for step in out["slowest"]]
    table(console, "slowest steps", ("step", "seconds", "of these"), slowest)
    if len(out["ranks"]) > 1:
        ranks = [
            (
                str(row["rank"]),
                seconds(row["step_s"]),
                seconds(row["wait_s"]),
                *(size_text(row["peak_bytes"][tier.value]) for tier in TIERS),
                size_text(row["rss_peak_bytes"]),
            )
            for row in out["ranks"]
        ]
        columns = ("rank", "step, s", "waited, s", *(f"{tier.value} peak" for tier in TIERS), "process peak")
        table(console, "ranks", columns, ranks)


def _against(row: dict[str, Any]) -> tuple[str, str, str]:
    told = "" if row["predicted"] is None else size_text(row["predicted"])
    return told, size_text(row["counted"]), percent(row["off"])


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def percent(share: float | None, sign: bool = False) -> str:
    return "" if share is None else f"{share:+.1%}" if sign else f"{share:.1%}"


def value_text(value: Any, unit: str) -> str:
    """Of one value of `differences`."""
    if value is None:
        return ""
    if unit == "bytes":
        return size_text(value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
