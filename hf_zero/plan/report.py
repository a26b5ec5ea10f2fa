"""The report of an engine: memory, traffic and waits per rank, predicted, measured, and under plain data parallel.

Tiers, kinds and roads are strings here: `device`, `host`, `disk`; those of `costs.KINDS` and `work.ROADS`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ..config import size_text
from ..core.layout import Layout, Span, itemsize

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One unit: its name, parameters in elements, spans, and the bytes of its gathered parameters."""

    name: str
    numel: int
    spans: int
    gathered_bytes: int


@dataclass(frozen=True, slots=True)
class TierRow:
    """Bytes of one kind in one tier."""

    tier: str
    kind: str
    """`all`: the sum of all kinds, whose peak is that of one moment."""
    predicted: int
    """Stored bytes; gradients as between backward and step."""
    measured: int
    """Current bytes."""
    predicted_peak: int
    measured_peak: int | None
    """Peak of this kind since recording began; None without a recorder. Of activations, those in host memory are counted."""


@dataclass(frozen=True, slots=True)
class RoadRow:
    """Traffic and waits of one channel: a collective, the link, the disk, or the thread of the optimizer."""

    road: str
    predicted_bytes: int | None
    """Bytes per step; None without a prediction."""
    measured_bytes: float | None
    """Median bytes of the recorded steps; None without a recorder."""
    wait_s: float | None
    """Median seconds per step that training waited for it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory limit of one or more tiers, in bytes: given, or free on this machine."""

    tiers: tuple[str, ...]
    limit_bytes: int
    is_budget: bool
    """True: given by a setting; False: free now."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank, over all tiers. `gathered` is temporary; the others are stored from backward to step.

    Masters of another dtype than the parameters count as optimizer state.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Report:
    """`str(report)` is a table for people, `report.to_dict()` plain values for JSON."""

    stage: int
    world_size: int
    precision: str
    parameters: int
    """Parameter elements of the whole model."""
    trainable: int
    predicted: States
    data_parallel: States
    measured: Mapping[str, int]
    """Current bytes of this rank's parameters (gathered ones too), gradients and optimizer state, over all tiers."""
    traffic: Mapping[str, Mapping[str, int]]
    units: tuple[UnitRow, ...] = field(default=())
    tiers: tuple[TierRow, ...] = ()
    """Each kind in each tier with a predicted or measured value."""
    roads: tuple[RoadRow, ...] = ()
    steps: int = 0
    """Steps recorded."""
    step_s: float | None = None
    """Seconds per step, the median of the recorded ones."""
    predicted_step_s: float | None = None
    process: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the whole process as the system counts them, other libraries included."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ranks(self) -> str:
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._of_tiers(), *self._of_roads(), "", *self._of_units()])

    def comparison(self) -> str:
        """Return the table of predictions and measurements: the second half of `str(report)`."""
        return "\n".join([*self._of_tiers(), *self._of_roads()]).lstrip("\n")

    def _head(self) -> list[str]:
        lines = [
            f"ZeRO stage {self.stage} on {self.ranks}: "
            f"{self.parameters:,} parameters ({self.trainable:,} trained) in {len(self.units)} units",
            self.precision,
            "",
            f"{'MiB per rank':<16}{'plain DP':>12}{'planned':>12}{'counted now':>14}",
        ]
        for name in ("parameters", "gradients", "optimizer"):
            lines.append(
                f"{name:<16}{getattr(self.data_parallel, name) / _MIB:>12.1f}{getattr(self.predicted, name) / _MIB:>12.1f}"
                f"{_held(self.measured.get(name, 0)):>14}"
            )
        lines += [
            f"{'sum':<16}{self.data_parallel.total / _MIB:>12.1f}{self.predicted.total / _MIB:>12.1f}"
            f"{_held(sum(self.measured.values())):>14}",
            f"{'unsharded':<16}{'':>12}{self.predicted.gathered / _MIB:>12.1f}{'':>14}"
            "  (parameters that are gathered at one time)",
        ]
        return lines

    def _of_tiers(self) -> list[str]:
        if not self.tiers:
            return []
        recorded = any(row.measured_peak is not None for row in self.tiers)
        counted = f"{'counted':>12}" if recorded else ""
        lines = ["", f"{'MiB by tier':<24}{'stored':>12}{'counted now':>14}{'planned peak':>16}{counted}"]
        for row in self.tiers:
            peak = f"{_mib(row.measured_peak):>12}" if recorded else ""
            line = f"{f'{row.tier}, {row.kind}':<24}{row.predicted / _MIB:>12.1f}{_held(row.measured):>14}"
            lines.append(f"{line}{row.predicted_peak / _MIB:>16.1f}{peak}".rstrip())
        return lines

    def _of_roads(self) -> list[str]:
        lines = []
        if self.roads:
            recorded = any(row.measured_bytes is not None or row.wait_s is not None for row in self.roads)
            counted = f"{'MiB':>10}{'waited, ms':>14}" if recorded else ""
            lines += ["", f"{'per step':<24}{'MiB planned':>14}{counted}"]
            for row in self.roads:
                waited = "" if row.wait_s is None else f"{row.wait_s * 1e3:.1f}"
                moved = f"{_mib(row.measured_bytes):>10}{waited:>14}" if recorded else ""
                lines.append(f"{row.road:<24}{_mib(row.predicted_bytes):>14}{moved}".rstrip())
        if self.step_s is not None:
            told = "" if self.predicted_step_s is None else f" (predicted {self.predicted_step_s * 1e3:,.1f} ms)"
            lines.append(f"{self.steps} steps recorded, {self.step_s * 1e3:,.1f} ms each{told}")
        if self.process:
            texts = (f"{name} {value / _MIB:,.0f} MiB" for name, value in self.process.items())
            lines.append(f"the whole process: {', '.join(texts)}")
        return lines

    def _of_units(self) -> list[str]:
        lines = [f"{'unit':<32}{'parameters':>14}{'flat tensors':>14}{'MiB gathered':>14}"]
        for _, alike in groupby(self.units, key=lambda row: (row.numel, row.spans)):
            row, *others = alike
            name = f"{row.name} and {len(others)} alike" if others else row.name
            lines.append(f"{name:<32}{row.numel:>14,}{row.spans:>14}{row.gathered_bytes / _MIB:>14.2f}")
        return lines


def _held(bytes_: int) -> str:
    """Return True if measured state is absent because the optimizer creates it in its first step."""
    return f"{bytes_ / _MIB:.1f}" if bytes_ else "-"


def _mib(bytes_: float | None) -> str:
    return "" if bytes_ is None else f"{bytes_ / _MIB:.1f}"


def data_parallel(layout: Layout, optimizer_tensors: int) -> States:
    """Return the bytes of plain data parallel: all states on every rank, in the parameters' dtypes."""

    def size(span: Span) -> int:
        return span.used_numel * itemsize(span.spec.dtype)

    trained = sum(size(span) for span in layout.spans if span.trainable)
    return States(sum(size(span) for span in layout.spans), trained, trained * optimizer_tensors, 0)


def unit_rows(layout: Layout) -> tuple[UnitRow, ...]:
    return tuple(UnitRow(unit.name, unit.numel, len(unit.spans), unit.gathered_bytes) for unit in layout.units)


# One screen -----------------------------------------------------------------------------------------------------------


LEAST_WIDTH, MOST_WIDTH = 40, 100
_LABEL = 12
_LEAST_BAR = 8
_SHARDED = {
    0: "nothing sharded: plain data parallel",
    1: "optimizer state sharded",
    2: "gradients and optimizer state sharded",
    3: "parameters, gradients and optimizer state sharded",
}


def start(
    report: Report, model: str, limits: Sequence[Limit], about: Mapping[str, str], columns: int, marks: str
) -> str:
    """Return one screen: the sharding, and the planned peak of each tier against its limit.

    Args:
        model: its name.
        limits: of this rank; see `diagnostics.usage`.
        about: further rows, label and text, after the model.
        columns: of the terminal.
        marks: for the full and the empty part of a bar.
    """
    width = max(LEAST_WIDTH, min(columns, MOST_WIDTH))
    share = f"{report.trainable / max(report.parameters, 1):.2%}"
    trained = "" if report.trainable == report.parameters else f", {report.trainable:,} trainable ({share})"
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
    lines = [f"hf_zero: ZeRO stage {report.stage} on {report.ranks}", f"  {_SHARDED[report.stage]}"]
    lines += _folded(rows, width)
    lines.append("  memory per rank at its peak, planned (activations not counted)")
    lines += _bars(report, limits, width, marks)
    return "\n".join(lines)


def _folded(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Return `label text`, wrapped at the terminal's width."""
    for label, text in rows:
        yield from textwrap.wrap(
            text,
            width,
            initial_indent=f"  {label:<{_LABEL - 2}}",
            subsequent_indent=" " * _LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _bars(report: Report, limits: Sequence[Limit], width: int, marks: str) -> Iterator[str]:
    """Yield one line per used tier, with a bar if its limit is known."""
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
        room = width - len(label) - len(told) - 3
        if room < _LEAST_BAR:
            yield f"{label}{told}"
            continue
        length = min(30, room)
        filled = min(length, max(1, round(share * length)))
        yield f"{label}{marks[0] * filled}{marks[1] * (length - filled)} {told}"


def end(
    report: Report,
    steps: int,
    seconds: float,
    throughput: tuple[float, float],
    folder: Path | None,
    saved: Path | None,
    columns: int,
) -> str:
    """Return the verdict in a few lines: time, throughput, memory against the plan, waits, and where files are.

    Args:
        report: taken before the recorder was closed.
        steps: optimizer steps of this start of training, which took `seconds`.
        throughput: samples and tokens per second of all ranks; 0: none.
        folder: folder of the record, for `hf-zero report`.
        saved: folder of the model.
        columns: of the terminal.
    """
    width = max(LEAST_WIDTH, min(columns, MOST_WIDTH))
    samples_per_s, tokens_per_s = throughput
    rate = f", {tokens_per_s:,.0f} tokens/s" if tokens_per_s else ""
    rate = rate or (f", {samples_per_s:,.1f} samples/s" if samples_per_s else "")
    each = "" if report.step_s is None else f", {report.step_s:.3g} s each (median)"
    made = f"{steps:,} step{'s' if steps != 1 else ''}"
    rows = [("time", f"{made} in {duration(seconds)}{each}{rate}")]
    for row in report.tiers:
        if row.kind == "all" and row.measured_peak is not None:
            off = f" ({row.measured_peak / row.predicted_peak - 1:+.1%})" if row.predicted_peak else ""
            text = f"{size_text(row.measured_peak)} counted at peak, planned {size_text(row.predicted_peak)}{off}"
            rows.append((row.tier, text))
    if outside := outside_text(report.process):
        rows.append(("process", outside))
    waited = sorted(((row.wait_s or 0.0, row.road) for row in report.roads), reverse=True)
    if report.step_s and waited and waited[0][0] > 0:
        total = sum(wait_s for wait_s, _ in waited) / report.step_s
        rows.append(("waiting", f"{total:.0%} of a step, most for {waited[0][1]} ({waited[0][0] / report.step_s:.0%})"))
    if saved:
        rows.append(("model", str(saved)))
    lines = [f"hf_zero: ZeRO stage {report.stage} on {report.ranks}, done", *_folded(rows, width)]
    if folder:
        lines.append(f"  {'more':<{_LABEL - 2}}hf-zero report {folder}")  # a line to copy: never wrapped
    return "\n".join(lines)


def outside_text(process: Mapping[str, int]) -> str:
    """Return the lines of the system's and torch's own measurements."""
    parts = []
    if peak := process.get("device allocated peak"):
        parts.append(f"{size_text(peak)} allocated by torch on the device at peak")
    if peak := process.get("rss peak"):
        parts.append(f"{size_text(peak)} resident at peak, Python and libraries included")
    return "; ".join(parts)


def duration(seconds: float) -> str:
    """Return `1 h 02 min`, `4 min 53 s` or `7.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
