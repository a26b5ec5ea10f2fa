"""A model evaluated in another dtype than it is trained in (`bf16_full_eval`, `fp16_full_eval`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of, set_raw_data
from ..engine.unit import State, Unit


class OtherDtype(Observer):
    """Shows the parameters of gathered units in another dtype, while asked to.

    `module.to(dtype)` would round what is trained. Where full parameters are released, one unit's copies are in memory at a
    time; where they stay, all are.
    """

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._dtype: torch.dtype | None = None

    def unit_unsharded(self, unit: Unit) -> None:
        if self._dtype is not None:
            self._show(unit, self._dtype)

    def unit_resharded(self, unit: Unit) -> None:
        if self._dtype is not None:
            self._show(unit, None)

    @staticmethod
    def _show(unit: Unit, dtype: torch.dtype | None) -> None:
        for span in unit.spans:
            for param, view in zip(span.params, span.views):
                is_cast = dtype is not None and view.is_floating_point()
                set_raw_data(param, view.to(dtype) if is_cast else view)

    @contextmanager
    def shown_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Inside, the model is as after `model.to(dtype)`, for forwards without a graph. On every rank."""
        self._engine.quiesce()
        self._dtype = dtype
        for unit in self._engine.units:
            unit.is_apart = True
            if unit.state is State.GATHERED:
                self._show(unit, dtype)
        try:
            with cast(self._engine.model, dtype):
                yield
        finally:
            try:
                self._engine.schedule.quiesce()
            finally:
                self._dtype = None
                for unit in self._engine.units:
                    unit.is_apart = False
                    if unit.state is State.GATHERED:
                        self._show(unit, None)


@contextmanager
def cast(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, floating-point buffers, and parameters that no engine has, are of this dtype."""
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
