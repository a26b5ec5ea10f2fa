"""Evaluates a model in another dtype than its training dtype (`bf16_full_eval`, `fp16_full_eval`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of
from ..engine.unit import State, Unit


class OtherDtype(Observer):
    """Shows the parameters of gathered units in another dtype inside `shown_in`.

    `module.to(dtype)` would round the trained values. If the stage releases full parameters, one unit's copies are in memory
    at a time, else those of all units.
    """

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._dtype: torch.dtype | None = None

    def unit_gathered(self, unit: Unit) -> None:
        if self._dtype is not None and not unit.ignores_writes:  # `GatheredParameters` shows exact values
            self._show(unit)

    def _show(self, unit: Unit) -> None:
        if self._dtype is None:
            return
        for span in unit.spans:
            if span.full.is_floating_point() and span.full.dtype != self._dtype:
                if unit.state is State.GATHERED:
                    span.push_buffer(self._dtype, "evaluation", masters=False)
                else:
                    span.push_released_buffer(self._dtype)

    @contextmanager
    def shown_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Show the model as after `model.to(dtype)` inside the block, for forwards without a graph. On every rank."""
        engine, before = self._engine, self._dtype
        engine.quiesce()
        self._dtype = dtype
        hidden = {span: span.buffer_depth for unit in engine.units for span in unit.spans}
        try:
            for unit in engine.units:
                self._show(unit)
            with cast(engine.model, dtype):
                yield
        finally:
            self._dtype = before
            try:
                engine.schedule.quiesce()
                for event in engine.events.before_save:  # writes user code's edits back to the masters
                    event()
            finally:
                for span, number in hidden.items():
                    span.pop_buffers(range(len(span.params)), number)
                for unit in engine.units:
                    for event in engine.events.writes_dropped:
                        event(unit)


@contextmanager
def cast(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast floating-point buffers, and parameters that no engine has, to this dtype inside the block."""
    plain = [
        (param, param.data) for param in model.parameters() if place_of(param) is None and param.is_floating_point()
    ]
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    try:
        for param, data in plain:
            param.data = data.to(dtype)
        for table, buffers in tables:
            table.update({name: _cast(buffer, dtype) for name, buffer in buffers.items()})
        yield
    finally:
        for param, data in plain:
            param.data = data
        for table, buffers in tables:
            table.update(buffers)


def _cast(buffer: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return buffer.to(dtype) if buffer is not None and buffer.is_floating_point() else buffer
