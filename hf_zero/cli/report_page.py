"""`hf-zero report`: a run in the terminal, as one HTML page (plotly), and as a picture (matplotlib)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..config import ranks_text, size_text
from ..diagnostics.recorder import value_at
from ..errors import ConfigError, needs
from ..plan.costs import TIERS
from .files import writable
from .report import KIND_LABELS, LABELS, PARTS, Run, differences, read_all, summary
from .show import print_json, table, text

MARKS = {True: ("ok", "green"), False: ("!!", "bold red"), None: ("··", "dim")}
"""Mark and style of a verdict's `ok`."""
MAX_POINTS = 1500
"""Maximum points of a line. Longer runs are drawn with every n-th step."""
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def run(folder: str, other: str | None, png: str | None, html: str | None, as_json: bool) -> None:
    """Show a run, or compare two."""
    for path in (png, html):
        writable(path)
    if png and Path(png).suffix.lower() != ".png":
        raise ConfigError(f"--png {png}: expected a name that ends in .png")
    if other and (png or html):
        raise ConfigError("a picture or page shows one run, found two. Leave one run or the file out")
    folders = [each for each in (folder, other) if each]
    try:
        found = [read_all(Path(each)) for each in folders]
        if other:
            _compare([summary(runs) for runs in found], folders, as_json)
        else:
            _show(found[0], png, html, as_json)
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{' or '.join(folders)} has records that hf_zero does not write ({what})") from error


def _show(runs: Sequence[Run], png: str | None, html: str | None, as_json: bool) -> None:
    out = summary(runs)
    drawn = [each for each in (png, html) if each]
    if out["steps"] and drawn:
        # Pictures come first: a missing package is reported before any table is printed.
        charts = list(charts_of([each for each in runs if each.steps], out))
        if png:
            draw(charts, title_of(out), png)
        if html:
            Path(html).write_text(page(charts, out), encoding="utf-8")
    if as_json:
        print_json(out)
        return
    console = Console()
    if out["steps"]:
        text(console, title_of(out), "bold")
        text(console, details_of(out), "dim")
    for said in out["verdict"]:
        mark, style = MARKS[said["ok"]]
        line = Text.assemble((f"{mark} ", style), (f"{said['topic']}: {said['value']}, ", "bold"), said["text"])
        console.print(line, highlight=False)
    for line in out.get("warnings", ()):
        text(console, f"warning: {line}", "yellow")
    for line in out["notes"]:
        text(console, f"note: {line}")
    for title, columns, rows in tables_of(out) if out["steps"] else ():
        table(console, title, columns, rows)
    if drawn and not out["steps"]:
        print("hf-zero: nothing to draw yet", file=sys.stderr)
        return
    for path in drawn:
        console.print(f"Written to {Path(path).resolve()}", markup=False, highlight=False, soft_wrap=True)


def _compare(outs: Sequence[dict[str, Any]], folders: Sequence[str], as_json: bool) -> None:
    """Show what differs between two runs."""
    for out, folder in zip(outs, folders):
        if not out["steps"]:
            raise ConfigError(f"{folder}: the first step is not over yet. Compare later")
    rows, left_out = differences(*outs)
    if as_json:
        print_json({"runs": outs, "differences": rows, "not_compared": left_out})
        return
    console = Console()
    shown = [
        (row["what"], *(value_text(value, row["unit"]) for value in row["values"]), _change(row["change"]))
        for row in rows
    ]
    table(console, "Comparison", ("", *folders, "change"), shown)
    for line in left_out:
        text(console, line)


# Words --------------------------------------------------------------------------------------------


def title_of(out: dict[str, Any]) -> str:
    """Return the model and the settings."""
    facts = out["facts"]
    offloads = [
        f"{label} on {facts['config'][name]}"
        for name, label in (("offload_optimizer", "optimizer state"), ("offload_params", "parameters"))
        if facts["config"][name] != "none"
    ]
    model = facts.get("about", {}).get("model") or f"{facts['parameters']:,} parameters"
    return ", ".join([f"{model} at stage {facts['stage']} on {ranks_text(facts['world_size'])}", *offloads])


def details_of(out: dict[str, Any]) -> str:
    facts = out["facts"]
    machine = f"{facts['machine']['device']}, {facts['machine']['cores']} cores"
    return (
        f"{facts['parameters']:,} parameters; {facts['precision']}; steps {out['first_step']:,} to "
        f"{out['last_step']:,}; started {facts.get('started', '')}; {machine}"
    )


def tables_of(out: dict[str, Any]) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Yield title, columns and rows of a run's numbers."""
    ranks = out["ranks"]
    against = ("", "planned", "measured", "difference")
    memory = [(f"{row['tier']}, {KIND_LABELS[row['kind']]}", *_against(row)) for row in out["memory"]]
    yield f"Peak memory of rank {out['rank']} by tier, as hf_zero counts its own allocations", against, memory
    tiers = [tier.value for tier in TIERS if any(row["peak_bytes"][tier.value] for row in ranks)]
    peaks = (name for tier in tiers for name in (f"{tier} peak", "planned"))
    rows = [
        (
            str(row["rank"]),
            *(size_text(row[key][tier]) for tier in tiers for key in ("peak_bytes", "planned_bytes")),
            size_text(row["rss_peak_bytes"]),
            f"{row['step_s']:.4g} s",
            f"{row['wait_s']:.4g} s",
        )
        for row in ranks
    ]
    yield "Every rank", ("rank", *peaks, "process peak", "step", "waiting"), rows
    parts = [
        (label, *(f"{row['parts_s'][part] / (sum(row['parts_s'].values()) or 1):.1%}" for row in ranks))
        for part, label in PARTS.items()
        if any(row["parts_s"][part] > 0 for row in ranks)
    ]
    planned = out["facts"]["predicted"]["step_s"]
    plan = "" if planned is None else f"; planned {planned:.4g} s"
    title = f"Time of a step ({ranks[0]['step_s']:.4g} s, median{plan})"
    yield title, ("", *(f"rank {row['rank']}" for row in ranks)), parts
    moved = [(LABELS[row["road"]][0], *_against(row)) for row in out["traffic"]]
    if moved:
        yield "Bytes sent and moved per step (median)", against, moved


def _against(row: dict[str, Any]) -> tuple[str, str, str]:
    planned = "" if row["predicted"] is None else size_text(row["predicted"])
    return planned, size_text(row["counted"]), _change(row["off"])


def _change(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def value_text(value: Any, unit: str) -> str:
    """Format one value of a comparison."""
    if value is None:
        return ""
    if unit == "bytes":
        return size_text(value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# Page ---------------------------------------------------------------------------------------------


def page(charts: Sequence[dict[str, Any]], out: dict[str, Any]) -> str:
    """Return one HTML page that needs no other file: tiles, charts of all ranks, tables."""
    with needs("report"):
        from plotly.io.json import to_json_plotly
        from plotly.offline import get_plotlyjs
    from jinja2 import Environment, PackageLoader

    room = Environment(loader=PackageLoader("hf_zero", "templates"), autoescape=True, trim_blocks=True)
    return room.get_template("report.html.jinja").render(
        run=out,
        title=title_of(out),
        details=details_of(out),
        tables=list(tables_of(out)),
        charts=charts,
        # to_json_plotly writes NaN and infinity as null and escapes `</script`.
        data=to_json_plotly(charts),
        plotly=get_plotlyjs(),
    )


def draw(charts: Sequence[dict[str, Any]], title: str, path: str) -> None:
    """Write the page's charts as one PNG."""
    with needs("plot"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3 * len(charts)), layout="constrained")
    figure.suptitle(title)
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts):
        for line in chart["lines"]:
            marker = "o" if len(line["x"]) == 1 else None
            axes.plot(
                line["x"],
                line["y"],
                label=line["name"],
                linestyle="-" if line["dash"] == "solid" else "--",
                linewidth=line["width"],
                marker=marker,
            )
        axes.set(title=chart["title"], xlabel="step", ylabel=chart["unit"])
        axes.legend()
        if chart["from_zero"]:
            axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)


def charts_of(runs: Sequence[Run], out: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the charts that have lines, as plain values; the page gives lines their colours."""
    losses = [
        _line(label, [(log["step"], log[name]) for log in out["losses"] if name in log])
        for name, label in (("loss", "training"), ("eval_loss", "evaluation"))
    ]
    yield from _chart("loss", "Loss", "As the training loop logged it.", "loss", losses, from_zero=False)
    yield from _speed(runs, out)
    for tier in (tier.value for tier in TIERS):
        unit, size = _unit(max(each.highest("peak", tier, "all") for each in runs))
        lines = [_rank_line(each, size, "", "peak", tier, "all") for each in runs]
        ends = (runs[0].steps[0]["step"], runs[0].steps[-1]["step"])
        plan = _line("plan", [(step, runs[0].planned_peak(tier) / size) for step in ends], dash="dash")
        about = "Highest of each step: parameters, gradients, optimizer state and buffers. Dashed: the plan."
        if any(any(line["y"]) for line in lines):
            yield from _chart(f"memory-{tier}", f"Memory: {tier}", about, unit, [*lines, plan])
    unit, size = _unit(max(each.highest("process", name) for each in runs for name in _PROCESS))
    lines = [_rank_line(each, size, label, "process", name) for name, label in _PROCESS.items() for each in runs]
    about = "The whole process, with Python, libraries and data, as the system counts it at the end of each step."
    yield from _chart("process", "Memory: whole process", about, unit, lines)


_PROCESS = {"rss": ", process", "device allocated peak": ", torch on the device"}


def _chart(
    name: str, title: str, about: str, unit: str, lines: Sequence[Mapping[str, Any]], from_zero: bool = True
) -> Iterator[dict[str, Any]]:
    lines = [line for line in lines if any(value != 0 for value in line["y"])]
    several = sum(line["name"].startswith("rank ") for line in lines) > 1
    # The first rank's line is the widest: equal ranks stay visible on top of each other.
    widths = (
        1.5 if line["dash"] == "dash" else max(1.5, 6 - 2 * at) if several else 2 for at, line in enumerate(lines)
    )
    lines = [{**line, "width": width} for line, width in zip(lines, widths)]
    if lines:
        yield {"name": name, "title": title, "about": about, "unit": unit, "lines": lines, "from_zero": from_zero}


def _line(name: str, points: Sequence[tuple[int, float]], dash: str = "solid") -> dict[str, Any]:
    return {"name": name, "x": [step for step, _ in points], "y": [value for _, value in points], "dash": dash}


def _rank_line(run: Run, size: int, label: str, *keys: str) -> dict[str, Any]:
    return _line(f"rank {run.rank}{label}", [(step["step"], value_at(step, *keys) / size) for step in _drawn(run)])


def _drawn(run: Run) -> list[dict[str, Any]]:
    return run.steps[:: -(-len(run.steps) // MAX_POINTS)]


def _speed(runs: Sequence[Run], out: dict[str, Any]) -> Iterator[dict[str, Any]]:
    what = "tokens" if any(step.get("tokens") for step in runs[0].steps) else "samples"
    share = int(runs[0].facts["world_size"]) / len(runs)
    by_rank = [{step["step"]: step for step in run.steps} for run in runs]
    points = []
    for step in _drawn(runs[0]):
        same = [found for steps in by_rank if (found := steps.get(step["step"]))]
        rate = sum(each.get(what, 0) / each["seconds"] for each in same if each["seconds"])
        if len(same) == len(runs) and rate:
            points.append((step["step"], rate * share))
    if points:
        middle = out["throughput"][f"{what}_per_s"] or 0.0
        median = _line("median", [(points[0][0], middle), (points[-1][0], middle)], "dash")
        about = (
            f"{what.capitalize()} per second of all ranks. Waiting, data loading, evaluation and padding are included."
        )
        yield from _chart("speed", "Throughput", about, f"{what}/s", [_line("all ranks", points), median])


def _unit(highest: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in _UNITS if highest >= size), _UNITS[-1])
