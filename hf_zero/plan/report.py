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
class Limit:
    """What tiers may take together, in bytes: as it was given, or what is free on this machine."""

    tiers: tuple[str, ...]
    limit_bytes: int
    is_budget: bool
    """Given, by a setting; else free now."""


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
        lines = ["", f"{'MiB by tier':<24}{'at rest':>12}{'counted now':>14}{'planned peak':>16}{counted}"]
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
        for row, count in _collapse(self.units):
            name = row.name if count == 1 else f"{row.name} and {count - 1} alike"
            lines.append(f"{name:<32}{row.numel:>14,}{row.spans:>14}{row.gathered_bytes / _MIB:>14.2f}")
        return lines


def _held(bytes_: int) -> str:
    """Nothing is there yet, or no more, where an optimizer makes its state with its first step."""
    return f"{bytes_ / _MIB:.1f}" if bytes_ else "-"


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
