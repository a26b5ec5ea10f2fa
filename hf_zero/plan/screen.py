"""The start and the end of training as a person sees them: one screen, and a few lines. Tables are in `report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..config import size_text
from .report import Limit, Report

LEAST_WIDTH, MOST_WIDTH = 40, 100
_LABEL = 12
_LEAST_BAR = 8
_SHARDED = {
    0: "nothing sharded: plain data parallel",
    1: "optimizer state sharded",
    2: "gradients and optimizer state sharded",
    3: "parameters, gradients and optimizer state sharded",
}


@dataclass(frozen=True, slots=True)
class Look:
    """What a terminal can show.

    Attributes:
        width: columns.
        blocks: it has block characters; else `#` and `.`.
    """

    width: int = 80
    blocks: bool = True


def start(report: Report, model: str, limits: Sequence[Limit], about: Mapping[str, str], look: Look) -> str:
    """One screen: what is sharded how, and what each tier will hold at its peak against what it may hold.

    Args:
        model: what it is called.
        limits: of this rank; see `runtime.usage.limits`.
        about: further rows, label and text, after the model.
    """
    look = Look(max(LEAST_WIDTH, min(look.width, MOST_WIDTH)), look.blocks)
    ranks = f"{report.world_size} rank{'s' if report.world_size > 1 else ''}"
    trained = "" if report.trainable == report.parameters else f", {report.trainable:,} of them trained"
    rows = [("model", f"{model}, {report.parameters:,} parameters{trained}, {len(report.units)} units"), *about.items()]
    states = report.predicted.total
    share = f" ({states / report.data_parallel.total:.0%})" if report.data_parallel.total else ""
    rows.append(
        (
            "states",
            f"{size_text(states)} per rank; plain data parallel {size_text(report.data_parallel.total)}{share}",
        )
    )
    if sent := sum(row.predicted_bytes or 0 for row in report.roads if row.road in ("gather", "reduce")):
        rows.append(("sent", f"{size_text(sent)} per step and rank"))
    lines = [f"hf_zero: ZeRO stage {report.stage} on {ranks}", f"  {_SHARDED[report.stage]}"]
    lines += _folded(rows, look.width)
    lines.append("  memory per rank at its peak, planned (activations not counted)")
    lines += _bars(report, limits, look)
    return "\n".join(lines)


def _folded(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """`label text`, broken between words where the terminal ends."""
    for label, text in rows:
        line = f"  {label:<{_LABEL - 2}}"
        for word in text.split(" "):
            if len(line) + len(word) > width and line.strip():
                yield line.rstrip()
                line = " " * _LABEL
            line += word + " "
        yield line.rstrip()


def _bars(report: Report, limits: Sequence[Limit], look: Look) -> Iterator[str]:
    """One line per tier that holds something: a bar where its limit is known."""
    for row in report.tiers:
        if row.kind != "all" or not row.predicted_peak:
            continue
        limit = next((limit for limit in limits if row.tier in limit.tiers), None)
        label = f"  {row.tier:<{_LABEL - 2}}"
        if limit is None or not limit.limit_bytes:
            yield f"{label}{size_text(row.predicted_peak)}"
            continue
        share = row.predicted_peak / limit.limit_bytes
        told = f"{size_text(row.predicted_peak)} of {size_text(limit.limit_bytes)}"
        told += f" {'budget' if limit.is_budget else 'free'}, {share:.1%}"
        told += " DOES NOT FIT" if share > 1 else ""
        room = look.width - len(label) - len(told) - 3
        yield f"{label}{_bar(share, min(30, room), look.blocks)} {told}" if room >= _LEAST_BAR else f"{label}{told}"


def _bar(share: float, width: int, blocks: bool) -> str:
    full, empty = ("█", "░") if blocks else ("#", ".")
    filled = min(width, max(1, round(share * width)))
    return full * filled + empty * (width - filled)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a training ended.

    Attributes:
        steps: optimizer steps of this start of training.
        seconds: from its start to its end.
        tokens_per_s, samples_per_s: of all ranks; 0 where there are none.
        report: taken while the recorder was still there.
        folder: where the steps are recorded, for `hf-zero report`.
        saved: where the model is.
    """

    steps: int
    seconds: float
    tokens_per_s: float
    samples_per_s: float
    report: Report
    folder: str | None = None
    saved: str | None = None


def end(ending: Ending, look: Look) -> str:
    """The verdict in a few lines: time and throughput, memory counted against planned, where the time went, where to look."""
    report = ending.report
    width = max(LEAST_WIDTH, min(look.width, MOST_WIDTH))
    rate = f", {ending.tokens_per_s:,.0f} tokens/s" if ending.tokens_per_s else ""
    rate = rate or (f", {ending.samples_per_s:,.1f} samples/s" if ending.samples_per_s else "")
    each = "" if report.step_s is None else f", {report.step_s:.3g} s each (median)"
    steps = f"{ending.steps:,} step{'s' if ending.steps != 1 else ''}"
    rows = [("time", f"{steps} in {duration(ending.seconds)}{each}{rate}")]
    for row in report.tiers:
        if row.kind == "all" and row.measured_peak is not None:
            off = f" ({row.measured_peak / row.predicted_peak - 1:+.1%})" if row.predicted_peak else ""
            text = f"{size_text(row.measured_peak)} counted at peak, planned {size_text(row.predicted_peak)}{off}"
            rows.append((row.tier, text))
    if outside := outside_text(report.process):
        rows.append(("process", outside))
    waited = sorted(((row.wait_s or 0.0, row.road) for row in report.roads), reverse=True)
    if report.step_s and waited and waited[0][0] > 0:
        total = sum(seconds for seconds, _ in waited) / report.step_s
        rows.append(("waiting", f"{total:.0%} of a step, most for {waited[0][1]} ({waited[0][0] / report.step_s:.0%})"))
    if ending.saved:
        rows.append(("model", ending.saved))
    lines = [f"hf_zero: ZeRO stage {report.stage} on {_ranks(report)}, done", *_folded(rows, width)]
    if ending.folder:
        lines.append(f"  {'more':<{_LABEL - 2}}hf-zero report {ending.folder}")  # to be copied: never broken
    return "\n".join(lines)


def _ranks(report: Report) -> str:
    return f"{report.world_size} rank{'s' if report.world_size > 1 else ''}"


def outside_text(process: Mapping[str, int]) -> str:
    """Of figures that are the system's and torch's, not the engine's counts."""
    parts = []
    if peak := process.get("device allocated peak"):
        parts.append(f"{size_text(peak)} allocated by torch on the device at peak")
    if peak := process.get("rss peak"):
        parts.append(f"{size_text(peak)} resident at peak, Python and libraries included")
    return "; ".join(parts)


def duration(seconds: float) -> str:
    """`1 h 02 min`, `4 min 53 s`, `7.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
