"""What lives where, in bytes per rank: predicted from the layout alone, beside plain data parallel and what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .config import StagePolicy
from .layout import Layout, Span, itemsize

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One unit: its name, parameters in elements, spans, and the bytes of its gathered parameters."""

    name: str
    numel: int
    spans: int
    gathered_bytes: int


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank. `gathered` comes and goes within a step; the rest stays from backward to step."""

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
    """Bytes that this rank's tensors take now: parameters, gradients, optimizer."""
    traffic: Mapping[str, Mapping[str, int]]
    units: tuple[UnitRow, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
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
            "  (two largest units gathered, or one and its gradients)",
            "",
            f"{'unit':<40}{'parameters':>14}{'spans':>7}{'MiB gathered':>14}",
        ]
        for row, count in _collapse(self.units):
            name = row.name if count == 1 else f"{row.name} and {count - 1} alike"
            lines.append(f"{name:<40}{row.numel:>14,}{row.spans:>7}{row.gathered_bytes / _MIB:>14.2f}")
        return "\n".join(lines)


def predict(layout: Layout, policy: StagePolicy, optimizer_tensors: int) -> States:
    """Bytes per rank between backward and step, for an optimizer with that many tensors per master element."""
    parameters = gradients = optimizer = 0
    for span in layout.spans:
        compute, master = itemsize(span.spec.compute_dtype), itemsize(span.spec.master_dtype)
        parameters += (span.numel if policy.keep_full else span.slice_numel) * compute
        if span.spec.compute_dtype != span.spec.master_dtype:
            parameters += span.slice_numel * master
        if span.trainable:
            gradients += span.slice_numel * master
            optimizer += span.slice_numel * master * optimizer_tensors
    largest = max((unit.gathered_bytes for unit in layout.units), default=0)
    return States(parameters, gradients, optimizer, gathered=0 if policy.keep_full else 2 * largest)


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
