"""The report of an engine: memory, traffic and waits per rank, predicted, measured, and under plain data parallel.

Tiers, kinds and channels (`road`) are strings: `device`, `host`, `disk`; those of `costs.KINDS` and `traffic.CHANNELS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ..config import ranks_text, size_text
from ..core.layout import Layout, itemsize
from ..tiers.tier import Tier
from .costs import KINDS, TIERS, Memory

_MIB = 1 << 20
_WIDTH = 100


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


def tier_rows(
    memory: Memory, now: Mapping[str, Mapping[str, int]], peak: Mapping[str, Mapping[str, int]] | None
) -> tuple[TierRow, ...]:
    """Return a row for each kind in each tier, and their sums.

    Args:
        memory: planned bytes.
        now: current bytes by tier and kind.
        peak: highest bytes by tier and kind; None: not recorded.
    """
    rows = []
    for tier in TIERS:
        name = tier.value
        found = {} if peak is None else peak[name]
        kinds = [
            TierRow(
                name,
                kind,
                memory.stored[tier][kind],
                now[name][kind],
                memory.peak[tier][kind],
                None if peak is None or (kind == "activations" and tier is not Tier.HOST) else found.get(kind, 0),
            )
            for kind in KINDS
            if memory.peak[tier][kind] or now[name][kind] or found.get(kind)
        ]
        if kinds:
            total = sum(now[name].values())
            highest = None if peak is None else found["all"]
            rows += [*kinds, TierRow(name, "all", memory.stored_bytes(tier), total, memory.at_peak(tier), highest)]
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class ChannelRow:
    """Traffic and waits of one channel: a collective, the link, the disk, or the thread of the optimizer."""

    road: str
    predicted_bytes: int | None
    """Bytes per step; None without a prediction."""
    measured_bytes: float | None
    """Median bytes of the recorded steps; None without a recorder."""
    wait_s: float | None
    """Median seconds per step that training waited for it."""


@dataclass(frozen=True, slots=True)
class Report:
    """`str(report)` is a table for people, `report.to_dict()` plain values for JSON."""

    stage: int
    world_size: int
    precision: str
    parameters: int
    """Parameter elements of the whole model."""
    trainable: int
    units: int
    predicted: Mapping[str, int]
    """Bytes of parameters, gradients and optimizer state on one rank over all tiers, between backward and step.

    Masters of another dtype than the parameters count as optimizer state.
    """
    data_parallel: Mapping[str, int]
    """The same bytes under plain data parallel."""
    measured: Mapping[str, int]
    """The same bytes now, with gathered parameters."""
    traffic: Mapping[str, Mapping[str, int]]
    tiers: tuple[TierRow, ...] = ()
    """Each kind in each tier with a predicted or measured value."""
    roads: tuple[ChannelRow, ...] = ()
    steps: int = 0
    """Steps recorded."""
    step_s: float | None = None
    """Seconds per step, the median of the recorded ones."""
    predicted_step_s: float | None = None
    process: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the whole process as the system counts them, other libraries included."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        columns = self.data_parallel, self.predicted, self.measured
        rows: list[Sequence[str | float | None]] = [
            (name, *(column[name] or None for column in columns)) for name in self.predicted
        ]
        rows.append(("sum", *(sum(column.values()) for column in columns)))
        head = (
            f"ZeRO stage {self.stage} on {ranks_text(self.world_size)}: {self.parameters:,} parameters "
            f"({self.trainable:,} trained) in {self.units} units\n{self.precision}"
        )
        table = _table(("MiB per rank", "plain DP", "planned", "counted now"), rows)
        return f"{head}\n{table}\n{self.comparison()}"

    def comparison(self) -> str:
        """Return the tables of predictions and measurements: the second half of `str(report)`."""
        lines = []
        if self.tiers:
            columns = ("MiB by tier", "stored", "counted now", "planned peak", "counted peak")
            rows = [
                (f"{row.tier}, {row.kind}", row.predicted, row.measured or None, row.predicted_peak, row.measured_peak)
                for row in self.tiers
            ]
            lines.append(_table(columns, rows))
        if self.roads:
            waits = ("" if row.wait_s is None else f"{row.wait_s * 1e3:.1f}" for row in self.roads)
            moved = [(row.road, row.predicted_bytes, row.measured_bytes, wait) for row, wait in zip(self.roads, waits)]
            lines.append(_table(("MiB per step", "planned", "counted", "waited, ms"), moved))
        if self.step_s is not None:
            planned = "" if self.predicted_step_s is None else f" (predicted {self.predicted_step_s * 1e3:,.1f} ms)"
            lines.append(f"{self.steps} steps recorded, {self.step_s * 1e3:,.1f} ms each{planned}")
        if self.process:
            texts = (f"{name} {value / _MIB:,.0f} MiB" for name, value in self.process.items())
            lines.append(f"the whole process: {', '.join(texts)}")
        return "\n".join(lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """Return aligned columns: text, and bytes as MiB; None is empty."""
    from rich.console import Console
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left")
    for row in rows:
        cells = ("" if cell is None else cell if isinstance(cell, str) else f"{cell / _MIB:.1f}" for cell in row)
        made.add_row(*cells)
    console = Console(file=StringIO(), width=_WIDTH, color_system=None, markup=False)
    with console.capture() as capture:
        console.print(made)
    return "\n" + capture.get().rstrip("\n")


def data_parallel(layout: Layout, optimizer_tensors: int) -> dict[str, int]:
    """Return the bytes of plain data parallel: all states on every rank, in the parameters' dtypes."""
    sizes = [(span.used_numel * itemsize(span.spec.dtype), span.trainable) for span in layout.spans]
    trained = sum(nbytes for nbytes, trainable in sizes if trainable)
    every = sum(nbytes for nbytes, _ in sizes)
    return {"parameters": every, "gradients": trained, "optimizer": trained * optimizer_tensors}


# One screen -----------------------------------------------------------------------------------------------------------


_SHARDED = {
    0: "nothing sharded: plain data parallel",
    1: "optimizer state sharded",
    2: "gradients and optimizer state sharded",
    3: "parameters, gradients and optimizer state sharded",
}


def start(report: Report, model: str, limits: Mapping[str, tuple[int, str]], about: Mapping[str, str]) -> str:
    """Return one screen: the sharding, and the planned peak of each tier against its limit.

    Args:
        model: its name.
        limits: of this rank by tier; see `diagnostics.usage`.
        about: further rows, label and text, after the model.
    """
    share = f"{report.trainable / max(report.parameters, 1):.2%}"
    trained = "" if report.trainable == report.parameters else f", {report.trainable:,} trainable ({share})"
    rows = [("model", f"{model}, {report.parameters:,} parameters{trained}, {report.units} units"), *about.items()]
    states, plain = sum(report.predicted.values()), sum(report.data_parallel.values())
    share = f" ({states / plain:.0%})" if plain else ""
    rows.append(("states", f"{size_text(states)} per rank; plain data parallel {size_text(plain)}{share}"))
    if sent := sum(row.predicted_bytes or 0 for row in report.roads if row.road in ("gather", "reduce")):
        rows.append(("sent", f"{size_text(sent)} per step and rank"))
    return "\n".join(
        [
            f"hf_zero: ZeRO stage {report.stage} on {ranks_text(report.world_size)}",
            f"  {_SHARDED[report.stage]}",
            *_aligned(rows),
            "  memory per rank at its peak, planned (activations not counted)",
            *_aligned(_peaks(report, limits)),
        ]
    )


def _aligned(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f"  {label:<10}{text}" for label, text in rows)


def _peaks(report: Report, limits: Mapping[str, tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """Yield each used tier and its planned peak, against its limit where that is known."""
    for row in report.tiers:
        if row.kind == "all" and row.predicted_peak:
            limit, kind = limits.get(row.tier, (0, ""))
            share = row.predicted_peak / limit if limit else 0
            against = f" of {size_text(limit)} {kind}, {share:.1%}" if limit else ""
            yield row.tier, f"{size_text(row.predicted_peak)}{against}{' DOES NOT FIT' if share > 1 else ''}"


_PROCESS = {
    "device allocated peak": "allocated by torch on the device at peak",
    "rss peak": "resident at peak, Python and libraries included",
}
"""Measured by the system and by torch, of the whole process."""


def end(
    report: Report,
    steps: int,
    seconds: float,
    throughput: tuple[float, float],
    folder: Path | None,
    saved: Path | None,
) -> str:
    """Return the verdict in a few lines: time, throughput, memory against the plan, waits, and where files are.

    Args:
        report: taken before the recorder was closed.
        steps: optimizer steps of this start of training, which took `seconds`.
        throughput: samples and tokens per second of all ranks; 0: none.
        folder: folder of the record, for `hf-zero report`.
        saved: folder of the model.
    """
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
    for name, what in _PROCESS.items():
        if peak := report.process.get(name):
            rows.append(("process", f"{size_text(peak)} {what}"))
    waited = sorted(((row.wait_s or 0.0, row.road) for row in report.roads), reverse=True)
    if report.step_s and waited and waited[0][0] > 0:
        total = sum(wait_s for wait_s, _ in waited) / report.step_s
        rows.append(("waiting", f"{total:.0%} of a step, most for {waited[0][1]} ({waited[0][0] / report.step_s:.0%})"))
    rows += [("model", str(saved))] if saved else []
    rows += [("more", f"hf-zero report {folder}")] if folder else []
    head = f"hf_zero: ZeRO stage {report.stage} on {ranks_text(report.world_size)}, done"
    return "\n".join([head, *_aligned(rows)])


def duration(seconds: float) -> str:
    """Return `1 h 02 min`, `4 min 53 s` or `7.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes} min {left:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
