"""`hf-zero report`: a run in the terminal, as one HTML page (plotly), and as a picture (matplotlib)."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..config import size_text
from ..errors import ConfigError, needs
from ..plan.costs import TIERS
from .files import writable
from .report import KIND_LABELS, LABELS, Run, differences, read_all, summary
from .show import print_json, ranks_text, table, text

MARKS = {True: ("ok", "green"), False: ("!!", "bold red"), None: ("··", "dim")}
"""Mark and style of a verdict's `ok`."""
TEMPLATE = "report.html.jinja"
MOST_POINTS = 1500
"""Points of a line; of longer runs every n-th step is drawn."""
COLORS = ("#2f6fde", "#e07b00", "#1d9a6c", "#b0407f", "#7a6ad8", "#c9a100", "#4bb3c9", "#8f5b34")
PLAN_COLOR = "#d0342c"
DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def run(folder: str, other: str | None, png: str | None, html: str | None, as_json: bool) -> None:
    """Show one run, or compare two."""
    for path in (png, html):
        writable(path)
    if png and Path(png).suffix.lower() != ".png":
        raise ConfigError(f"--png {png}: expected a name that ends in .png")
    folders = [each for each in (folder, other) if each]
    runs = [read_all(Path(each)) for each in folders]
    try:
        _show(runs, png, html, as_json)
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{' or '.join(folders)} has records that hf_zero does not write ({found})") from error


def _show(runs: Sequence[Sequence[Run]], png: str | None, html: str | None, as_json: bool) -> None:
    outs = [summary(ranks) for ranks in runs]
    drawable = all(out["steps"] for out in outs)
    rows, left_out = differences(*outs) if len(outs) == 2 and drawable else ([], [])
    # Pictures come first: a missing package is reported before any table is printed.
    if drawable and png:
        draw(runs, outs, png)
    if drawable and html:
        Path(html).write_text(page(runs, outs, rows, left_out), encoding="utf-8")
    if as_json:
        two = {"runs": outs, "differences": rows, "not_compared": left_out}
        print_json(two if len(outs) == 2 else outs[0])
        return
    console = Console()
    for out in outs:
        verdict(out, console)
    if len(outs) == 2 and drawable:
        shown = [
            (row["what"], *(value_text(value, row["unit"]) for value in row["values"]), percent(row["change"], True))
            for row in rows
        ]
        table(console, "Comparison", ("", *names_of(outs), "change"), shown)
        for line in left_out:
            text(console, line)
    elif drawable:
        figures(outs[0], console)
    if not drawable and (png or html):
        print("hf-zero: nothing to draw yet", file=sys.stderr)
        return
    text(console, "")
    for out in outs if drawable else ():
        text(console, in_short(out))
    for path in filter(None, (html, png)):
        console.print(f"Written to {Path(path).resolve()}", markup=False, highlight=False, soft_wrap=True)


# Words --------------------------------------------------------------------------------------------


def names_of(outs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the folders' names, numbered if they are equal."""
    folders = [Path(out["run"]).resolve().parent for out in outs]
    names = [(folder.parent if folder.name == "_zero" else folder).name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def title_of(out: dict[str, Any]) -> str:
    """Model and setting."""
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


def in_short(out: dict[str, Any]) -> str:
    """Summarise the run in one line."""
    *numbers, state = out["verdict"]
    parts = (f"{said['topic'].lower()} {said['value']}" for said in numbers)
    return f"{names_of([out])[0]}: {state['text']}; {'; '.join(parts)}"


def verdict(out: dict[str, Any], console: Console) -> None:
    """Print the answers: did it finish, did it fit the plan, how fast was it, what took the time."""
    console.print(Text(names_of([out])[0], style="bold"))
    if out["steps"]:
        text(console, title_of(out))
        text(console, details_of(out), "dim")
    for said in out["verdict"]:
        mark, style = MARKS[said["ok"]]
        line = Text.assemble((f"{mark} ", style), (f"{said['topic']}: {said['value']}, ", "bold"), said["text"])
        console.print(line, highlight=False)
    for kind, label in (("warnings", "warning"), ("notes", "note")):
        for line in out.get(kind, ()):
            text(console, f"{label}: {line}", "yellow" if kind == "warnings" else None)


def tables_of(out: dict[str, Any]) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """(title, columns, rows) of a run's numbers."""
    ranks = out["ranks"]
    rank_names = [f"rank {row['rank']}" for row in ranks]
    against = ("", "planned", "measured", "difference")
    memory = [(f"{row['tier']}, {KIND_LABELS[row['kind']]}", *_against(row)) for row in out["memory"]]
    yield f"Peak memory of rank {out['rank']} by tier, as hf_zero counts its own allocations", against, memory
    tiers = [tier.value for tier in TIERS if any(row["peak_bytes"][tier.value] for row in ranks)]
    columns = (
        "rank",
        *(name for tier in tiers for name in (f"{tier} peak", "planned")),
        "process peak",
        "step",
        "waiting",
    )
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
    yield "Every rank", columns, rows
    parts = [
        (name, *(percent(row["parts_s"][name] / (sum(row["parts_s"].values()) or 1)) for row in ranks))
        for name in ranks[0]["parts_s"]
        if any(row["parts_s"][name] > 0 for row in ranks)
    ]
    planned = out["time"]["predicted_step_s"]
    plan = "" if planned is None else f"; planned {planned:.4g} s"
    yield f"Time of a step ({out['time']['step_s']:.4g} s, median{plan})", ("", *rank_names), parts
    moved = [(LABELS[row["road"]][0], *_against(row)) for row in out["traffic"]]
    if moved:
        yield "Bytes sent and moved per step (median)", against, moved


def figures(out: dict[str, Any], console: Console) -> None:
    for title, columns, rows in tables_of(out):
        table(console, title, columns, rows)


def _against(row: dict[str, Any]) -> tuple[str, str, str]:
    planned = "" if row["predicted"] is None else size_text(row["predicted"])
    return planned, size_text(row["counted"]), percent(row["off"], sign=True)


def percent(share: float | None, sign: bool = False) -> str:
    return "" if share is None else f"{share:+.1%}" if sign else f"{share:.1%}"


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


@dataclass(frozen=True)
class Chart:
    """One chart: plotly's traces as plain values, and what it shows in words."""

    name: str
    title: str
    about: str
    unit: str
    traces: list[dict[str, Any]]
    from_zero: bool = True

    @property
    def layout(self) -> dict[str, Any]:
        mode = {"rangemode": "tozero"} if self.from_zero else {}
        return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": self.unit}, **mode}}


def page(
    runs: Sequence[Sequence[Run]],
    outs: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    left_out: Sequence[str],
) -> str:
    """One HTML page that needs no other file: tiles, charts of all ranks, tables."""
    with needs("report"):
        from plotly.io.json import to_json_plotly
        from plotly.offline import get_plotlyjs
    from jinja2 import Environment, PackageLoader

    charts = list(charts_of(runs, outs))
    room = Environment(loader=PackageLoader("hf_zero", "templates"), autoescape=True, trim_blocks=True)
    return room.get_template(TEMPLATE).render(
        runs=[
            {
                **out,
                "name": name,
                "title": title_of(out),
                "details": details_of(out),
                "tables": list(tables_of(out)),
            }
            for name, out in zip(names_of(outs), outs)
        ],
        differences=[
            (row["what"], [value_text(v, row["unit"]) for v in row["values"]], percent(row["change"], True))
            for row in rows
        ],
        left_out=left_out,
        charts=charts,
        # to_json_plotly writes NaN and infinity as null and escapes `</script`.
        figures=to_json_plotly({chart.name: {"data": chart.traces, "layout": chart.layout} for chart in charts}),
        plotly=get_plotlyjs(),
    )


def charts_of(runs: Sequence[Sequence[Run]], outs: Sequence[dict[str, Any]]) -> Iterator[Chart]:
    """Charts that have something to show."""
    shown = [[run for run in ranks if run.steps] for ranks in runs]
    prefixes = [f"{name}, " if len(outs) > 1 else "" for name in names_of(outs)]
    charts = [
        _loss(outs, prefixes),
        _speed(shown, prefixes),
        *(_memory(shown, prefixes, tier.value) for tier in TIERS),
        _process(shown, prefixes),
    ]
    yield from (chart for chart in charts if chart.traces)


def _drawn(run: Run) -> list[dict[str, Any]]:
    return run.steps[:: -(-len(run.steps) // MOST_POINTS)]


def _line(x: Sequence[Any], y: Sequence[Any], name: str, color: str, dash: str = "solid", width: float = 2) -> Any:
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": list(x),
        "y": list(y),
        "name": name,
        "line": {"color": color, "width": width, "dash": dash},
        "hovertemplate": "step %{x}: %{y:,.4g}",
    }


def _loss(outs: Sequence[dict[str, Any]], prefixes: Sequence[str]) -> Chart:
    traces = []
    for place, out in enumerate(outs):
        for name, label, dash in (("loss", "training", "solid"), ("eval_loss", "evaluation", "dot")):
            points = [(log["step"], log[name]) for log in out["losses"] if name in log]
            if points:
                width = 2 + 2 * (len(outs) - 1 - place)  # equal losses stay visible on top of each other
                steps, losses = zip(*points)
                traces.append(_line(steps, losses, f"{prefixes[place]}{label}", COLORS[place], dash, width))
    return Chart("loss", "Loss", "As the training loop logged it.", "loss", traces, from_zero=False)


def _speed(shown: Sequence[Sequence[Run]], prefixes: Sequence[str]) -> Chart:
    what = "tokens" if any(step.get("tokens") for ranks in shown for step in ranks[0].steps) else "samples"
    traces = []
    for place, ranks in enumerate(shown):
        share = int(ranks[0].facts["world_size"]) / len(ranks)
        by_rank = [{step["step"]: step for step in run.steps} for run in ranks]
        points = []
        for step in _drawn(ranks[0]):
            same = [found for steps in by_rank if (found := steps.get(step["step"]))]
            rate = sum(each.get(what, 0) / each["seconds"] for each in same if each["seconds"])
            if len(same) == len(ranks) and rate:
                points.append((step["step"], rate * share))
        if points:
            steps, rates = zip(*points)
            middle = statistics.median(rates[1:] or rates)
            traces.append(_line(steps, rates, f"{prefixes[place]}all ranks", COLORS[place]))
            ends = (steps[0], steps[-1])
            traces.append(_line(ends, (middle, middle), f"{prefixes[place]}median", COLORS[place], "dash", 1.5))
    about = f"{what.capitalize()} per second of all ranks. Waiting, data loading, evaluation and padding are included."
    return Chart("speed", "Throughput", about, f"{what}/s", traces)


def _rank_lines(
    shown: Sequence[Sequence[Run]],
    prefixes: Sequence[str],
    values: Any,
    size: int,
    suffix: str = "",
    dash: str = "solid",
) -> Iterator[dict[str, Any]]:
    """One line per rank. Later ranks are thinner: equal ranks stay visible on top of each other."""
    number = 0
    for place, ranks in enumerate(shown):
        for at, run in enumerate(ranks):
            steps = _drawn(run)
            y = [values(step) / size for step in steps]
            if any(y):
                name, width = f"{prefixes[place]}rank {run.rank}{suffix}", max(1.5, 6 - 2 * at)
                yield _line([s["step"] for s in steps], y, name, COLORS[number % len(COLORS)], dash, width)
            number += 1


def _memory(shown: Sequence[Sequence[Run]], prefixes: Sequence[str], tier: str) -> Chart:
    unit, size = _unit(max((run.peak(tier, "all") for ranks in shown for run in ranks), default=0))
    traces = list(_rank_lines(shown, prefixes, lambda step: step["peak"].get(tier, {}).get("all", 0), size))
    for place, ranks in enumerate(shown if traces else ()):
        planned, steps = ranks[0].planned_peak(tier) / size, ranks[0].steps
        color, name = (COLORS[place] if len(shown) > 1 else PLAN_COLOR), f"{prefixes[place]}plan"
        if planned:
            traces.append(_line((steps[0]["step"], steps[-1]["step"]), (planned, planned), name, color, "dash"))
    about = "Highest of each step: parameters, gradients, optimizer state and buffers. Dashed: the plan."
    return Chart(f"memory-{tier}", f"Memory: {tier}", about, unit, traces)


def _process(shown: Sequence[Sequence[Run]], prefixes: Sequence[str]) -> Chart:
    names = (("rss", ", process", "solid"), ("device allocated peak", ", torch on the device", "dot"))
    highest = max((run.process_peak(name) for ranks in shown for run in ranks for name, *_ in names), default=0)
    unit, size = _unit(highest)
    traces: list[dict[str, Any]] = []
    for name, suffix, dash in names:
        traces += _rank_lines(shown, prefixes, lambda step, n=name: step["process"].get(n, 0), size, suffix, dash)
    about = "The whole process, with Python, libraries and data, as the system counts it at the end of each step."
    return Chart("process", "Memory: whole process", about, unit, traces)


def _unit(highest: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in _UNITS if highest >= size), _UNITS[-1])


def draw(runs: Sequence[Sequence[Run]], outs: Sequence[dict[str, Any]], path: str) -> None:
    """Draw the page's charts below each other."""
    with needs("plot"):
        from matplotlib.figure import Figure

    charts = list(charts_of(runs, outs))
    figure = Figure(figsize=(10, 3 * len(charts) + 0.5), layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), 1, squeeze=False)[:, 0], charts):
        for trace in chart.traces:
            line = trace["line"]
            style = {"color": line["color"], "linewidth": line["width"] * 0.75, "linestyle": DASHES[line["dash"]]}
            marker = "o" if len(trace["x"]) == 1 else None
            axes.plot(trace["x"], trace["y"], label=trace["name"], marker=marker, **style)
        axes.set(title=chart.title, ylabel=chart.unit)
        if chart.from_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set(xlabel="step")
    figure.suptitle("\n".join(title_of(out) for out in outs))
    figure.savefig(path, format="png", dpi=120)
