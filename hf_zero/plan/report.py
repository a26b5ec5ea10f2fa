"""What lives where, in bytes per rank, what moves and what is waited for: predicted, measured, and under plain data parallel.

Tiers, kinds and roads are plain words here: `device`, `host`, `disk`; those of `costs.KINDS` and `work.ROADS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """`all`: their sum, whose peak is that of one moment."""
    predicted: int
    """At rest; gradients as between backward and step."""
    measured: int
    """Now."""
    predicted_peak: int
    measured_peak: int | None
    """Highest since recording began, on its own; None where nobody records, and for activations, which nobody counts."""


@dataclass(frozen=True, slots=True)
class RoadRow:
    """What goes one way: collectives, the link, the disk; and the thread that steps, which only makes others wait."""

    road: str
    predicted_bytes: int | None
    """Per step; None where no prediction is made."""
    measured_bytes: float | None
    """Per step, the median of the recorded ones; None where nobody records."""
    wait_s: float | None
    """Per step, the median: how long training stood still for it."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank, over all tiers. `gathered` comes and goes within a step; the rest stays from backward to step.

    Masters of another type than the parameters count as optimizer state.
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
    """Bytes that this rank's parameters (gathered ones too), gradients and optimizer state take now, over all tiers."""
    traffic: Mapping[str, Mapping[str, int]]
    units: tuple[UnitRow, ...] = field(default=())
    tiers: tuple[TierRow, ...] = ()
    """Every kind in every tier where something is predicted or measured."""
    roads: tuple[RoadRow, ...] = ()
    steps: int = 0
    """Steps recorded."""
    step_s: float | None = None
    """Seconds per step, the median of the recorded ones."""
    predicted_step_s: float | None = None
    process: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the whole process as the system counts them, what is not ours included."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._of_tiers(), *self._of_roads(), "", *self._of_units()])

    def comparison(self) -> str:
        """Predicted against measured alone: the second half of `str(report)`."""
        return "\n".join([*self._of_tiers(), *self._of_roads()]).lstrip("\n")

    def _head(self) -> list[str]:
        lines = [
            f"ZeRO stage {self.stage} on {self.world_size} rank{'s' if self.world_size > 1 else ''}: "
            f"{self.parameters:,} parameters ({self.trainable:,} trained) in {len(self.units)} units",
            self.precision,
            "",
            f"{'MiB per rank':<16}{'plain DP':>12}{'predicted':>12}{'now':>12}",
        ]
        for name in ("parameters", "gradients", "optimizer"):
            lines.append(
                f"{name:<16}{getattr(self.data_parallel, name) / _MIB:>12.1f}{getattr(self.predicted, name) / _MIB:>12.1f}"
                f"{self.measured.get(name, 0) / _MIB:>12.1f}"
            )
        lines += [
            f"{'sum':<16}{self.data_parallel.total / _MIB:>12.1f}{self.predicted.total / _MIB:>12.1f}"
            f"{sum(self.measured.values()) / _MIB:>12.1f}",
            f"{'in passing':<16}{'':>12}{self.predicted.gathered / _MIB:>12.1f}{'':>12}"
            "  (three largest units gathered, or one and its gradients)",
        ]
        return lines

    def _of_tiers(self) -> list[str]:
        if not self.tiers:
            return []
        lines = ["", f"{'MiB by tier':<24}{'predicted':>12}{'now':>12}{'predicted peak':>16}{'peak':>12}"]
        for row in self.tiers:
            lines.append(
                f"{f'{row.tier}, {row.kind}':<24}{row.predicted / _MIB:>12.1f}{row.measured / _MIB:>12.1f}"
                f"{row.predicted_peak / _MIB:>16.1f}{_mib(row.measured_peak):>12}"
            )
        return lines

    def _of_roads(self) -> list[str]:
        lines = []
        if self.roads:
            lines += ["", f"{'per step':<24}{'MiB predicted':>14}{'MiB':>10}{'waited, ms':>14}"]
            for row in self.roads:
                waited = "" if row.wait_s is None else f"{row.wait_s * 1e3:.1f}"
                lines.append(f"{row.road:<24}{_mib(row.predicted_bytes):>14}{_mib(row.measured_bytes):>10}{waited:>14}")
        if self.step_s is not None:
            told = "" if self.predicted_step_s is None else f" (predicted {self.predicted_step_s * 1e3:,.1f} ms)"
            lines.append(f"{self.steps} steps recorded, {self.step_s * 1e3:,.1f} ms each{told}")
        if self.process:
            texts = (f"{name} {value / _MIB:,.0f} MiB" for name, value in self.process.items())
            lines.append(f"the whole process: {', '.join(texts)}")
        return lines

    def _of_units(self) -> list[str]:
        lines = [f"{'unit':<40}{'parameters':>14}{'spans':>7}{'MiB gathered':>14}"]
        for row, count in _collapse(self.units):
            name = row.name if count == 1 else f"{row.name} and {count - 1} alike"
            lines.append(f"{name:<40}{row.numel:>14,}{row.spans:>7}{row.gathered_bytes / _MIB:>14.2f}")
        return lines


def _mib(bytes_: float | None) -> str:
    return "" if bytes_ is None else f"{bytes_ / _MIB:.1f}"


def data_parallel(layout: Layout, optimizer_tensors: int) -> States:
    """The same model under plain data parallel: everything everywhere, in the parameters' own types."""

    def size(span: Span) -> int:
        return span.used_numel * itemsize(span.spec.dtype)

    trained = sum(size(span) for span in layout.spans if span.trainable)
    return States(sum(size(span) for span in layout.spans), trained, trained * optimizer_tensors, 0)


def unit_rows(layout: Layout) -> tuple[UnitRow, ...]:
    return tuple(UnitRow(unit.name, unit.numel, len(unit.spans), unit.gathered_bytes) for unit in layout.units)


def _collapse(rows: tuple[UnitRow, ...]) -> list[tuple[UnitRow, int]]:
    """Runs of equal units as one line."""
    out: list[tuple[UnitRow, int]] = []
    for row in rows:
        if out and (out[-1][0].numel, out[-1][0].spans) == (row.numel, row.spans):
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((row, 1))
    return out
