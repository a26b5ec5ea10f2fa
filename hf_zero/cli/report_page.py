"""`hf-zero report`: a run's report in the terminal, as one interactive page that needs no other file (plotly), and as a picture
(matplotlib).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..config import size_text
from ..errors import ConfigError, needs
from ..plan.costs import TIERS
from ..plan.work import CHANNELS
from .commands import ReportOptions, print_json
from .files import writable
from .report import BETWEEN, Run, differences, median_parts, parts_of, read_all, summary
from .show import ranks_text, seconds, table, text

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
    model = facts.get("about", {}).get("model")
    machine = f"{facts['machine']['device']} with {facts['machine']['cores']} cores"
    return (
        f"stage {facts['stage']} on {ranks_text(facts['world_size'])}{''.join(f', {text}' for text in offloads)}; "
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


# In the terminal ------------------------------------------------------------------------------------------------------


TEMPLATE = "report.html.jinja"
MOST_POINTS = 1500
"""Steps that are drawn; of longer runs every n-th, and the slowest."""
COLORS = (
    "#2f6fde", "#e07b00", "#1d9a6c", "#b0407f", "#7a6ad8", "#c9a100",
    "#4bb3c9", "#8f5b34", "#d96b8f", "#5f8a1f", "#5c7080",
)  # fmt: skip
"""Of runs and ranks; of the parts of a step, of which there are eleven. They hold on a light ground and on a dark one."""
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def run(options: ReportOptions) -> None:
    """Records are used as they are found: what is wrong with them shows when they are summed up and drawn."""
    for path in (options.png, options.html):
        writable(path)
    if options.png and Path(options.png).suffix.lower() != ".png":
        raise ConfigError(f"--png {options.png}: expected a name that ends in .png")
    folders = [folder for folder in (options.folder, options.other) if folder]
    try:
        _draw_and_show(options, [read_all(Path(folder)) for folder in folders])
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{' or '.join(folders)} has records that hf_zero does not write ({found})") from error


def _draw_and_show(options: ReportOptions, runs: Sequence[Sequence[Run]]) -> None:
    outs = [summary(ranks) for ranks in runs]
    drawable = all(out["steps"] for out in outs)
    differ = differences(*outs) if len(outs) == 2 and drawable else []
    if drawable:  # first: what cannot be drawn is refused before tables are shown
        if options.png:
            draw(runs[0], options.png)
        if options.html:
            Path(options.html).write_text(page(runs, outs, differ), encoding="utf-8")
    if options.json:
        print_json({"runs": outs, "differences": differ} if options.other else outs[0])
    else:
        show(outs, differ)
        if not drawable and (options.png or options.html):
            print("hf-zero: nothing to draw yet", file=sys.stderr)


@dataclass(frozen=True)
class Chart:
    """One figure of the page: plotly's traces and layout as plain values, and what it shows in words."""

    name: str
    title: str
    about: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def page(
    runs: Sequence[Sequence[Run]], outs: Sequence[dict[str, Any]], differences: Sequence[Mapping[str, Any]]
) -> str:
    """One HTML page with everything in it: verdicts, charts of all ranks, tables. `runs` and `outs` go together."""
    with needs("report"):
        from plotly.io.json import to_json_plotly
        from plotly.offline import get_plotlyjs
    from jinja2 import Environment, PackageLoader

    charts = [chart for chart in _charts(runs, outs) if chart.traces]
    figures = {chart.name: {"data": chart.traces, "layout": chart.layout} for chart in charts}
    room = Environment(loader=PackageLoader("hf_zero", "templates"), autoescape=True, trim_blocks=True)
    room.filters.update(bytes=size_text, percent=percent, seconds=seconds)
    return room.get_template(TEMPLATE).render(
        runs=[{"name": name, "head": head(out), **out} for name, out in zip(_names(outs), outs)],
        differences=[
            {**row, "shown": [value_text(value, row["unit"]) for value in row["values"]]} for row in differences
        ],
        charts=charts,
        # A loss may be NaN or infinite: such points are left out of a line. A script element ends at the first `</script`,
        # wherever it stands, in a run's name, too: these characters are escaped.
        figures=to_json_plotly(figures),
        plotly=get_plotlyjs(),
        tiers=[tier.value for tier in TIERS],
    )


def _names(outs: Sequence[dict[str, Any]]) -> list[str]:
    names = [name_of(out) for out in outs]
    return (
        names if len(set(names)) == len(names) else [f"{name} ({place})" for place, name in enumerate(names, start=1)]
    )


# Charts -------------------------------------------------------------------------------------------------------------


def _charts(runs: Sequence[Sequence[Run]], outs: Sequence[dict[str, Any]]) -> Iterator[Chart]:
    shown = [[run for run in ranks if run.steps] for ranks in runs]
    names = _names(outs)
    prefixes = [f"{name}, " if len(names) > 1 else "" for name in names]
    yield _loss(outs, prefixes)
    yield _speed(shown, prefixes)
    for tier in (tier.value for tier in TIERS):
        yield _memory(shown, prefixes, tier)
    yield _process(shown, prefixes)
    yield _medians(shown, prefixes)
    for place, ranks in enumerate(shown):
        yield _steps(ranks[0], prefixes[place], place)


def _drawn(run: Run) -> list[dict[str, Any]]:
    """The steps of a chart."""
    steps = run.steps
    if len(steps) <= MOST_POINTS:
        return steps
    every = -(-len(steps) // MOST_POINTS)
    slow = {id(step) for step in sorted(steps, key=lambda step: step["seconds"])[-5:]}
    return [step for at, step in enumerate(steps) if at % every == 0 or id(step) in slow]


def _line(
    x: Sequence[Any], y: Sequence[Any], name: str, color: str, hover: str, dash: str = "solid", **more: Any
) -> dict[str, Any]:
    mode = "lines+markers" if len(x) < 60 else "lines"
    hover = f"%{{x}}: {hover}<extra>{name}</extra>"
    trace = {"type": "scatter", "x": list(x), "y": list(y), "name": name, "mode": mode, "hovertemplate": hover}
    return {**trace, "line": {"color": color, "width": 2, "dash": dash}, "marker": {"size": 5}, **more}


def _level(steps: Sequence[int], value: float, name: str, color: str, hover: str, **more: Any) -> dict[str, Any]:
    """A dashed line at one height, from the first of these steps to the last."""
    return _line([steps[0], steps[-1]], [value, value], name, color, hover, "dash", mode="lines", **more)


def _layout(y: str, **more: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}, **more}


def _loss(outs: Sequence[dict[str, Any]], prefixes: Sequence[str]) -> Chart:
    traces = []
    for place, out in enumerate(outs):
        for name, dash in (("loss", "solid"), ("eval_loss", "dot")):
            points = [(log["step"], log[name]) for log in out["losses"] if name in log]
            if points:
                label = f"{prefixes[place]}{'training' if name == 'loss' else 'evaluation'}"
                steps, values = zip(*points)
                traces.append(_line(steps, values, label, COLORS[place], "%{y:.4g}", dash))
    about = "As the Trainer logged it."
    return Chart("loss", "Loss", about, traces, {"xaxis": {"title": {"text": "step"}}, "yaxis": {}})


def _speed(shown: Sequence[Sequence[Run]], prefixes: Sequence[str]) -> Chart:
    traces = []
    has_tokens = any(step.get("tokens") for ranks in shown for step in ranks[0].steps)
    what = "tokens" if has_tokens else "samples"
    for place, ranks in enumerate(shown):
        share = int(ranks[0].facts["world_size"]) / len(ranks)
        by_rank = [{step["step"]: step for step in run.steps} for run in ranks]
        points = []
        for step in _drawn(ranks[0]):
            same = [found for of in by_rank if (found := of.get(step["step"])) is not None]
            rate = sum(each.get(what, 0) / each["seconds"] for each in same if each["seconds"])
            if len(same) == len(ranks) and rate:
                points.append((step["step"], rate * share))
        if not points:
            continue
        steps, rates = zip(*points)
        label = f"{prefixes[place]}all ranks"
        traces.append(_line(steps, rates, label, COLORS[place], f"%{{y:,.4g}} {what}/s"))
        middle = statistics.median(rates[1:] or rates)
        traces.append(_level(steps, middle, f"{prefixes[place]}median", COLORS[place], "%{y:,.4g}", opacity=0.7))
    about = f"{what.capitalize()} per second of all ranks, waiting, data and evaluation included; padding counts."
    return Chart("speed", "Throughput", about, traces, _layout(f"{what}/s"))


def _memory(shown: Sequence[Sequence[Run]], prefixes: Sequence[str], tier: str) -> Chart:
    """Bytes of one tier as counted, of every rank, and the plan's."""
    highest = max((run.peak(tier, "all") for ranks in shown for run in ranks), default=0)
    unit, size = _unit(highest)
    traces = []
    if highest:
        for place, ranks in enumerate(shown):
            for run in ranks:
                steps = _drawn(run)
                values = [step["peak"].get(tier, {}).get("all", 0) / size for step in steps]
                color = COLORS[place] if len(shown) > 1 else COLORS[run.rank % len(COLORS)]
                label = f"{prefixes[place]}rank {run.rank}"
                numbers, opacity = [step["step"] for step in steps], 1.0 if run is ranks[0] else 0.6
                traces.append(_line(numbers, values, label, color, f"%{{y:.4g}} {unit}", opacity=opacity))
            told, numbers = ranks[0].planned_peak(tier) / size, [step["step"] for step in ranks[0].steps]
            color = COLORS[place] if len(shown) > 1 else "#d0342c"
            traces.append(_level(numbers, told, f"{prefixes[place]}plan", color, f"%{{y:.4g}} {unit}"))
    about = (
        "The highest of each step, as hf_zero counts what it allocates itself: parameters, gradients, optimizer state, "
        "gathered units, buffers. Dashed: the plan's highest."
    )
    return Chart(f"memory-{tier}", f"Memory: {tier}", about, traces, _layout(unit))


def _process(shown: Sequence[Sequence[Run]], prefixes: Sequence[str]) -> Chart:
    """What the system says, and torch's allocator: on an axis of their own."""
    figures = (("rss", "resident", "solid"), ("device allocated peak", "allocated by torch", "dot"))
    everything = [
        s["process"].get(name, 0) for ranks in shown for run in ranks for s in run.steps for name, *_ in figures
    ]
    unit, size = _unit(max(everything, default=0))
    traces = []
    for place, ranks in enumerate(shown):
        for run in ranks:
            for name, label, dash in figures:
                steps = _drawn(run)
                values = [step["process"].get(name, 0) / size for step in steps]
                if any(values):
                    color = COLORS[place] if len(shown) > 1 else COLORS[run.rank % len(COLORS)]
                    title = f"{prefixes[place]}rank {run.rank}, {label}"
                    numbers = [step["step"] for step in steps]
                    traces.append(_line(numbers, values, title, color, f"%{{y:.4g}} {unit}", dash))
    about = (
        "The whole process at the end of each step, as the system counts it: Python, libraries and data too, and what "
        "allocators keep. The table below says what of it is what."
    )
    return Chart("process", "Memory: the process", about, traces, _layout(unit))


def _medians(shown: Sequence[Sequence[Run]], prefixes: Sequence[str]) -> Chart:
    """Where a usual step's time goes, a bar for each rank."""
    labels, parts = [], []
    for place, ranks in enumerate(shown):
        for run in reversed(ranks):
            labels.append(f"{prefixes[place]}rank {run.rank}")
            parts.append(median_parts(run))
    traces = []
    for name, color, values in _drawn_parts(parts):
        hover = f"%{{x:.4g}} s {name}<extra>%{{y}}</extra>"
        bar = {"type": "bar", "orientation": "h", "x": values, "y": labels, "name": name, "hovertemplate": hover}
        traces.append({**bar, "marker": {"color": color}})
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"automargin": True},
        "height": 190 + 26 * min(len(labels), 40),
    }
    about = "Medians over the usual steps: not the first, none beside an evaluation."
    return Chart("parts", "Where a step's time goes", about, traces, layout)


def _drawn_parts(parts: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, str, list[float]]]:
    """Parts of a step that took any time, each with its colour, the same in every chart, and its values."""
    for name, color in zip(parts[0], COLORS):
        values = [part[name] for part in parts]
        if any(values):
            yield name, color, values


def _steps(run: Run, prefix: str, place: int) -> Chart:
    """The same, step by step, of one rank. The axis is for usual steps: what takes far longer is cut off until zoomed out."""
    steps = _drawn(run)
    parts = [parts_of(step) for step in steps]
    numbers = [step["step"] for step in steps]
    traces = []
    for name, color, values in _drawn_parts(parts):
        hover = f"step %{{x}}: %{{y:.4g}} s<extra>{name}</extra>"
        bar = {"type": "bar", "x": numbers, "y": values, "name": name, "hovertemplate": hover}
        traces.append({**bar, "marker": {"color": color, "line": {"width": 0}}})
    usual = [step["seconds"] for step in run.usual]
    middle = statistics.median(usual)
    traces.append(_level(numbers, middle, "median", COLORS[-1], "%{y:.4g} s"))
    layout = _layout("seconds", barmode="stack", bargap=0.1)
    layout["yaxis"]["range"] = [0, min(1.3 * max(usual), 4 * middle)]
    about = (
        f"Rank {run.rank}. Bars that are cut off at the top (the first step, evaluations) are whole when zoomed out."
    )
    return Chart(f"steps-{place}", f"{prefix}every step" if prefix else "Every step", about, traces, layout)


def _unit(highest: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in _UNITS if highest >= size), _UNITS[-1])


# Picture ------------------------------------------------------------------------------------------------------------


_DASHES = {"solid": "-", "dash": "--", "dot": ":"}


def draw(runs: Sequence[Run], path: str) -> None:
    """The page's charts of memory and of every step, one below the other."""
    with needs("plot"):
        from matplotlib.figure import Figure

    runs = [run for run in runs if run.steps]
    shown, names = [runs], [""]
    charts = [_memory(shown, names, tier.value) for tier in TIERS]
    charts = [chart for chart in (*charts, _process(shown, names), _steps(runs[0], "", 0)) if chart.traces]
    figure = Figure(figsize=(10, 3.5 * len(charts)), layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0], charts):
        below = [0.0] * len(_drawn(runs[0]))
        for trace in chart.traces:
            if trace["type"] == "bar":
                above = [low + value for low, value in zip(below, trace["y"])]
                axes.fill_between(trace["x"], below, above, label=trace["name"], color=trace["marker"]["color"])
                below = above
            else:
                line = trace["line"]
                style = _DASHES[line["dash"]]
                axes.plot(trace["x"], trace["y"], style, label=trace["name"], color=line["color"], linewidth=1.5)
        y = chart.layout["yaxis"]
        highest = 1.05 * axes.get_ylim()[1]  # a line that never moves would lie on the frame
        axes.set(title=chart.title, ylabel=y["title"]["text"], ylim=y.get("range", (0, highest)))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set(xlabel="step")
    ran = f"stage {runs[0].facts['stage']}, {runs[0].facts['world_size']} rank(s), times of rank {runs[0].rank}"
    figure.suptitle(f"{runs[0].path.resolve().parent.name}: {ran}")
    figure.savefig(path, format="png", dpi=120)
