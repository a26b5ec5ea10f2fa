"""`debug=True`: what all ranks must have alike is compared around each step. Values are compared by fingerprints."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.graph import backward_id
from ..engine.observer import Observer
from ..engine.parameter import raw_data
from ..engine.span import Span
from ..engine.unit import State, Unit
from ..tiers.fingerprint import fingerprint
from .differences import Named, refuse_difference
from .options import plain

CLOSE, EVERY = 10, 10
"""Weights and buffers are compared in the first `CLOSE` steps, and in one of `EVERY` afterwards."""


class SameValues(Observer):
    """Compares flags, step counts, weights and buffers of one model over the ranks. Looking sends nothing.

    Values are sent only in `before_step` and `after_step`, where every rank is in every step: numbers of forwards may differ.
    """

    def attach(self, engine: Engine) -> None:
        self._engine, self._context, self._wire = engine, engine.context, engine.context.wire
        self._in_pass: dict[Named, Any] = {}
        self._after: dict[Named, Any] = {}
        self._step = 0
        self._handles = [
            host.register_forward_hook(lambda *_, unit=unit: self._after_unit(unit))
            for unit in engine.units
            for host in unit.hosts
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def _is_due(self) -> bool:
        step = self._wire.watch.step
        return step < CLOSE or step % EVERY == 0

    def before_forward(self, args: Any, kwargs: Any) -> None:
        if self._is_due and torch.is_grad_enabled() and not any(kind == "buffer" for kind, _ in self._in_pass):
            for name, buffer in self._context.model.named_buffers():
                if not buffer.is_meta and buffer.layout is torch.strided:
                    key = f"buffer {name!r} ({str(buffer.dtype).removeprefix('torch.')} {tuple(buffer.shape)})"
                    self._in_pass["buffer", key] = _print(buffer)

    def unit_gathered(self, unit: Unit) -> None:
        self._look_at(unit, "gathered weight")

    def _after_unit(self, unit: Unit) -> None:
        if unit.state is State.GATHERED:
            self._look_at(unit, "weight after a forward")

    def _look_at(self, unit: Unit, kind: str) -> None:
        if not self._context.frees or not self._is_due or not torch.is_grad_enabled() or backward_id() >= 0:
            return
        for name, span, index in _parameters(unit):
            if (kind, name) not in self._in_pass:
                self._in_pass[kind, name] = _print(span.view(index))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what ranks had before the step. A collective.

        Raises:
            RankMismatchError: with the first difference, on every rank.
        """
        self._engine.wait_for_host_steps()
        self._step = self._wire.watch.step
        found: dict[Named, Any] = {
            ("flag", f"requires_grad of {name}"): span.params[index].requires_grad
            for unit in self._engine.units
            for name, span, index in _parameters(unit)
        }
        found |= dict(self._counts())
        written: dict[str, bool] = {}
        if self._is_due:
            if not self._context.config.step_in_backward:  # there, owners have new slices at the step
                weights = self._weights("weight before the step")
                before = {name: value for (_, name), value in self._after.items()}
                written = {name: value != before[name] for (_, name), value in weights.items() if name in before}
                found |= weights
            found |= self._in_pass
        self._in_pass, self._after = {}, {}
        self._compare(found, written)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the weights after the step. A collective.

        Raises:
            RankMismatchError: with the first difference, on every rank.
        """
        if self._is_due:
            self._engine.wait_for_host_steps()
            self._after = self._weights("weight after the step")
            self._compare(self._after, {})

    def _weights(self, kind: str) -> dict[Named, Any]:
        """Return spans whose full parameters stay."""
        if self._context.frees:
            return {}
        return {
            (kind, name): _print(raw_data(span.params[index]))
            for unit in self._engine.units
            for name, span, index in _parameters(unit)
        }

    def _counts(self) -> Iterator[tuple[Named, Any]]:
        """Yield states of the optimizers that are one value for a parameter (`step`)."""
        for binding in self._engine.bindings:
            for segment in (each for group in binding.segments for each in group):
                span = segment.span
                if segment.is_matrix and span.layout.shards > 1:
                    continue  # one owner each: there is nothing to compare
                for key, value in binding.state_of(segment).items():
                    has_elements = segment.numel == (value.numel() if isinstance(value, Tensor) else 1)
                    found = plain(value) if not has_elements or key == "step" else None
                    if found is not None:
                        for index in segment.members:
                            yield ("count", f"the optimizer's {key!r} of {_name(span, index)}"), found[0]

    def _compare(self, found: Mapping[Named, Any], written: Mapping[str, bool]) -> None:
        digest = zlib.crc32(repr(sorted((name, repr(value)) for name, value in found.items())).encode())
        if len(set(self._wire.exchange(digest))) > 1:
            told = self._wire.exchange((dict(found), dict(written)))
            refuse_difference([named for named, _ in told], self._step, [mine for _, mine in told])


def _parameters(unit: Unit) -> Iterator[tuple[str, Span, int]]:
    """Yield the parameters of a unit: a name for messages, the span and the index there."""
    for span in unit.spans:
        for index in range(len(span.params)):
            yield _name(span, index), span, index


def _name(span: Span, index: int) -> str:
    return f"parameter {span.name_of(index)!r} of unit {span.unit.name!r}"


def _print(values: Tensor) -> list[int]:
    with torch.no_grad():
        prints: list[int] = fingerprint(values.detach()).tolist() if values.numel() else []
    return prints
