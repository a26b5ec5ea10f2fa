"""hf-zero report: a run's steps as they were measured, against what was predicted; tables, warnings, pictures.

A run's file (`plan.record.Recorder` writes it) has one JSON object per line: facts, then steps. Every start of training appends
facts of its own; the last start is reported.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import ConfigError, needs
from ..plan.costs import KINDS, TIERS
from ..plan.plan import size_text
from ..plan.record import FORMAT
from ..plan.work import CHANNELS, ROADS, WAITS

OFF = 0.05
"""A prediction that is further off is warned of, from `SMALL_BYTES` on."""
SMALL_BYTES = 1 << 20
WAITED = 0.2
"""Share of the step that may be waiting for one thing."""
SLOWEST = 5


def add_command(commands: Any) -> None:
    out = commands.add_parser(
        "report",
        help="predicted against measured, of a run's zero_steps.jsonl",
        description="Memory by tier, traffic and waiting of a run that was recorded (ZeroCallback, or engine.record), against "
        "what was predicted; its slowest steps; what to change. Exit status 1: there is no such run.",
    )
    out.add_argument("folder", metavar="RUN", help="folder with zero_steps.jsonl, or that file")
    out.add_argument("--png", metavar="FILE", help="memory by tier and parts of the step, over time, as a picture")
    out.add_argument("--html", metavar="FILE", help="everything on one page that needs no other file")
    out.add_argument("--json", action="store_true", help="print JSON instead of tables")
    out.set_defaults(run=_report)


# Reading ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The last start of training in one rank's file."""

    path: Path
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return int(self.facts.get("rank", 0))

    @property
    def usual(self) -> list[dict[str, Any]]:
        """Steps that the prediction is about: not the first, none beside an evaluation, micro-batches as predicted."""
        passes = self.facts["predicted"]["backward_per_step"]
        usual = [step for step in self.steps[1:] if not step["evaluations"] and step["forwards"] == passes]
        return usual or self.steps

    def median(self, *keys: str) -> float:
        return statistics.median(_at(step, keys) for step in self.usual)

    def peak(self, tier: str, kind: str) -> int:
        return max(step["peak"].get(tier, {}).get(kind, 0) for step in self.steps)


def read(path: Path) -> Run:
    """Raises:
    ConfigError: no such file, of a later version, or without a single whole step.
    """
    facts: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    damaged = starts = 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    for line in filter(None, lines):
        record = _record(line)
        if record is None:
            damaged += 1
        elif record["kind"] == "facts":
            facts, steps, starts = record, [], starts + 1
        elif facts:
            steps.append(record)
    if facts.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"{path} was written by hf_zero {facts.get('version')}, in another format: use that version")
    if not steps:
        raise ConfigError(f"{path} has no whole step in it: expected lines that ZeroCallback or engine.record wrote")
    run = Run(path, facts, steps)
    if damaged:
        run.notes.append(f"{path.name}: {damaged} damaged line{'s' if damaged > 1 else ''} passed over")
    if starts > 1:
        run.notes.append(f"{path.name}: the last of {starts} starts of training")
    return run


def _record(line: bytes) -> dict[str, Any] | None:
    """One whole line of ours; None for any other."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    needed = {
        "facts": ("predicted", "world_size", "stage", "precision"),
        "step": (
            "step",
            "at_s",
            "seconds",
            "between_s",
            "forwards",
            "evaluations",
            "bytes",
            "wait_s",
            "peak",
            "process",
        ),
    }.get(str(record.get("kind")))
    return record if needed is not None and all(name in record for name in needed) else None


def read_all(path: Path) -> list[Run]:
    """Of every rank whose file is there, in rank order.

    Raises:
        ConfigError: none is.
    """
    if path.is_file():
        return [read(path)]
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder or file; expected what ZeroCallback or engine.record wrote to")
    folder = path / "_zero" if (path / "_zero").is_dir() else path
    paths = [entry for entry in folder.iterdir() if re.fullmatch(r"zero_steps(\.rank\d+)?\.jsonl", entry.name)]
    if not paths:
        raise ConfigError(
            f"{path} has no zero_steps.jsonl: train with ZeroCallback (the Trainer's output_dir is the run), or call "
            "engine.record(folder)"
        )
    runs = [read(entry) for entry in paths]
    return sorted(runs, key=lambda run: run.rank)


# Numbers ------------------------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What is shown of a run, as plain values: bytes and seconds, of the first rank that is there; `ranks`: of each."""
    run = runs[0]
    facts, predicted = run.facts, run.facts["predicted"]
    waits = {road: run.median("wait_s", road) for road in WAITS}
    median, between = run.median("seconds"), run.median("between_s")
    slowest = sorted(run.steps, key=lambda step: step["seconds"], reverse=True)[:SLOWEST]
    out: dict[str, Any] = {
        "run": str(run.path),
        "rank": run.rank,
        "steps": len(run.steps),
        "first_step": run.steps[0]["step"],
        "last_step": run.steps[-1]["step"],
        "facts": facts,
        "memory": list(_memory_rows(run)),
        "process": {name: max(step["process"].get(name, 0) for step in run.steps) for name in run.steps[-1]["process"]},
        "traffic": list(_traffic_rows(run)),
        "time": {
            "step_s": median,
            "predicted_step_s": predicted["step_s"],
            "between_s": between,
            "wait_s": waits,
            "rest_s": max(0.0, median - between - sum(waits.values())),
        },
        "slowest": [
            {"step": step["step"], "seconds": step["seconds"], "most": _largest_part(step)} for step in slowest
        ],
        "ranks": [
            {
                "rank": each.rank,
                "step_s": each.median("seconds"),
                "wait_s": statistics.median(sum(step["wait_s"].values()) for step in each.usual),
                "peak_bytes": {tier.value: each.peak(tier.value, "all") for tier in TIERS},
                "rss_peak_bytes": max(step["process"].get("rss peak", 0) for step in each.steps),
            }
            for each in runs
        ],
        "notes": [note for each in runs for note in each.notes],
        "moves": [
            f"rank {each.rank}, {move}" for each in runs for step in each.steps for move in step.get("moves", ())
        ],
    }
    out["warnings"] = list(_warnings(out))
    return out


def _memory_rows(run: Run) -> Iterator[dict[str, Any]]:
    predicted, highest = run.facts["predicted"]["peak"], run.facts["predicted"].get("peak_bytes", {})
    for tier in (tier.value for tier in TIERS):
        rows = [(kind, int(predicted[tier][kind]), run.peak(tier, kind)) for kind in KINDS]
        rows = [row for row in rows if row[1] or row[2]]
        if rows:
            rows.append(("all", int(highest.get(tier, sum(row[1] for row in rows))), run.peak(tier, "all")))
        for kind, told, found in rows:
            yield {"tier": tier, "kind": kind, "predicted": told, "measured": found, "off": _off(told, found)}


def _traffic_rows(run: Run) -> Iterator[dict[str, Any]]:
    for road in (*ROADS[:2], "scalar", "agree", *ROADS[2:]):
        told, found = run.facts["predicted"]["traffic"].get(road), run.median("bytes", road)
        if told or found:
            off = None if told is None else _off(told, found)
            yield {"road": road, "predicted": told, "measured": found, "wait_s": run.median("wait_s", road), "off": off}


def _off(told: float, found: float) -> float | None:
    """Relative to what was predicted; None where nothing was."""
    return (found - told) / told if told else None


def _parts(step: dict[str, Any]) -> dict[str, float]:
    """Seconds of one step by what they went to; they add up to the step."""
    waits = {CHANNELS[road].label: float(step["wait_s"].get(road, 0.0)) for road in WAITS}
    between = float(step["between_s"])
    rest = max(0.0, step["seconds"] - between - sum(waits.values()))
    return {"computing and the rest": rest, **waits, "between steps (data, evaluation, saving)": between}


def _largest_part(step: dict[str, Any]) -> str:
    parts = _parts(step)
    name = max(parts, key=lambda part: parts[part])
    return f"{parts[name]:.3f} s {name}"


def _warnings(out: dict[str, Any]) -> Iterator[str]:
    for row in out["memory"]:
        told, found = row["predicted"], row["measured"]
        if (
            row["kind"] == "all"
            and row["off"] is not None
            and abs(row["off"]) > OFF
            and abs(found - told) > SMALL_BYTES
        ):
            kinds = [each for each in out["memory"] if each["tier"] == row["tier"] and each["kind"] != "all"]
            most = max(kinds, key=lambda each: abs(each["measured"] - each["predicted"]))
            yield (
                f"{row['tier']} memory at peak: {size_text(found)}, predicted {size_text(told)} ({row['off']:+.0%}), most of "
                f"it in {most['kind']} ({size_text(most['measured'])}, predicted {size_text(most['predicted'])})"
            )
    for row in out["traffic"]:
        told, found = row["predicted"], row["measured"]
        if row["off"] is not None and abs(row["off"]) > OFF and abs(found - told) > SMALL_BYTES:
            yield f"{row['road']}: {size_text(found)} per step, predicted {size_text(told)} ({row['off']:+.0%})"
    time = out["time"]
    told_s = time["predicted_step_s"]
    if told_s and abs(time["step_s"] - told_s) > OFF * told_s:
        off = (time["step_s"] - told_s) / told_s
        yield (
            f"a step takes {time['step_s']:.3f} s, predicted {told_s:.3f} s ({off:+.0%}): that is a bound for perfect "
            "overlap; hf-zero probe measures this machine's speeds again"
        )
    for road, waited in time["wait_s"].items():
        if waited > WAITED * time["step_s"]:
            yield f"{waited / time['step_s']:.0%} of the step is {CHANNELS[road].label}. What helps: {CHANNELS[road].advice}"


# Showing ------------------------------------------------------------------------------------------------------------


def _report(options: argparse.Namespace) -> int:
    runs = read_all(Path(options.folder))
    out = summary(runs)
    png = picture(runs) if options.png or options.html else b""
    if options.json:
        print(json.dumps(out, indent=1))
    else:
        _print(out)
    if options.png:
        Path(options.png).write_bytes(png)
    if options.html:
        Path(options.html).write_text(page(out, png), encoding="utf-8")
    return 0


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


Cells = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A table: title, column names, rows; all but the first column are numbers."""


def _tables(out: dict[str, Any]) -> Iterator[Cells]:
    memory = [
        [f"{row['tier']}, {row['kind']}", size_text(row["predicted"]), size_text(row["measured"]), _percent(row["off"])]
        for row in out["memory"]
    ]
    memory += [
        [f"process, {name}", "", size_text(value), ""] for name, value in out["process"].items() if name != "rss"
    ]
    yield "memory at its peak", ("", "predicted", "measured", "off"), memory
    traffic = [
        [
            row["road"],
            "" if row["predicted"] is None else size_text(row["predicted"]),
            size_text(row["measured"]),
            _percent(row["off"]),
        ]
        for row in out["traffic"]
    ]
    if traffic:
        yield "sent and moved per step (median)", ("", "predicted", "measured", "off"), traffic
    time = out["time"]
    parts = {"computing and the rest": time["rest_s"]}
    parts |= {CHANNELS[road].label: waited for road, waited in time["wait_s"].items() if waited > 0}
    parts["between steps (data, evaluation, saving)"] = time["between_s"]
    rows = [
        [name, f"{value:.4f}", _percent(value / time["step_s"] if time["step_s"] else None)]
        for name, value in parts.items()
    ]
    told = "" if time["predicted_step_s"] is None else f", predicted {time['predicted_step_s']:.4f}"
    yield f"a step: {time['step_s']:.4f} s (median){told}", ("", "seconds", "share"), rows
    yield (
        "slowest steps",
        ("step", "seconds", "of these"),
        [[str(step["step"]), f"{step['seconds']:.4f}", step["most"]] for step in out["slowest"]],
    )
    if len(out["ranks"]) > 1:
        ranks = [
            [
                str(row["rank"]),
                f"{row['step_s']:.4f}",
                f"{row['wait_s']:.4f}",
                *(size_text(row["peak_bytes"][tier.value]) for tier in TIERS),
                size_text(row["rss_peak_bytes"]),
            ]
            for row in out["ranks"]
        ]
        yield (
            "ranks",
            ("rank", "step, s", "waited, s", *(f"{tier.value} peak" for tier in TIERS), "process peak"),
            ranks,
        )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}" if share < 0 else f"{share:.1%}"


def _print(out: dict[str, Any]) -> None:
    console = Console()
    console.print(_head(out), markup=False, highlight=False)
    for title, columns, rows in _tables(out):
        table = Table(title=title)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for kind in ("warnings", "moves", "notes"):
        for text in out[kind]:
            console.print(f"{kind[:-1]}: {text}", markup=False, highlight=False)


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
    parts = [_parts(step) for step in run.steps]
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


_STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}caption{font-weight:bold;text-align:left;padding:.4em 0}"
    "img{max-width:100%}.warning{background:#fff3cd;padding:.6em}.note{color:#666}"
)


def page(out: dict[str, Any], png: bytes) -> str:
    """One HTML page with everything in it."""

    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = [f"<h1>hf_zero: {html.escape(Path(out['run']).parent.name)}</h1>", f"<p>{html.escape(_head(out))}</p>"]
    body += [f'<p class="warning">{html.escape(text)}</p>' for text in out["warnings"]]
    image = base64.b64encode(png).decode()
    body.append(f'<img alt="memory and time over the steps" src="data:image/png;base64,{image}">')
    for title, columns, rows in _tables(out):
        lines = [row(columns, "th"), *(row(cells, "td") for cells in rows)]
        body.append(f"<table><caption>{html.escape(title)}</caption>{''.join(lines)}</table>")
    body += [f'<p class="note">{html.escape(text)}</p>' for text in (*out["moves"], *out["notes"])]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>hf_zero run</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _at(values: dict[str, Any], keys: Sequence[str]) -> float:
    """`values[keys[0]][keys[1]]…`; 0 where the last is missing."""
    for key in keys[:-1]:
        values = values[key]
    return float(values.get(keys[-1], 0.0))
