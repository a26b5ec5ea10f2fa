"""On-demand unshard: gathers a released parameter when user code reads it.

Heads that are fused with their loss, penalties on weights, moving averages and logging read parameters outside the forward of
their unit: `F.linear(hidden, model.lm_head.weight)`, `p.square().sum()`, `p.detach()`, `p.item()`. One such operation is to
the schedule what one forward of the unit is: the unit is gathered before, and released when another unit is used; a backward
that comes to the operation's output gathers it again. A collective, so all ranks must read alike.

An operation whose result is a view (`p.T`, `p.data`, `p.numpy()`) keeps the unit gathered: until the next step where a graph is
built, for autograd saves views without a trace; else until the next forward, step or end of a backward, or until the view is
dropped and another unit is read. A view that outlives this keeps its values: the span gets another storage. The next forward
or step raises then, for the view would be old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.graph import backward_id, tensors_in
from ..engine.observer import Observer
from ..engine.schedule import Calls
from ..engine.span import Span
from ..engine.unit import State, Unit
from ..errors import StateError

_ADDRESSES = frozenset(
    {"data_ptr", "storage", "untyped_storage", "numpy", "__array__", "__dlpack__", "__cuda_array_interface__"}
)
"""Functions whose result refers to the memory and is no tensor."""

_COLLECTIVE_S = 0.5
"""User code's own collectives (`dist.broadcast(p.data, 0)`) drop their tensors some time after they have ended."""


class OnDemand(Observer):
    """Runs operations of user code on parameters of released units."""

    def __init__(self) -> None:
        self._viewed: dict[Unit, dict[Span, int]] = {}
        """Units of which user code was given views, with the references to their memory before that."""

    def attach(self, engine: Engine) -> None:
        self._schedule, self._watch = engine.schedule, engine.context.wire.watch
        self._usual = {span: span.references for unit in engine.units for span in unit.spans}

    def sharded_read(self, units: Sequence[Unit], func: Any, run: Callable[[], Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__repr__", "__format__"):  # debuggers print on one rank alone
            return f"Parameter(values of unit {units[0].name!r} are sharded over the ranks)"
        if backward_id() < 0:
            self._drop_unused(units)
        calls: list[tuple[Unit, Calls]] = [(unit, []) for unit in units]
        known = {}
        found: list[Tensor] = []
        with self._watch.doing(f"{name}() of a sharded parameter"):
            for unit, call in calls:
                self._schedule.begin_use(unit, call)
        try:
            known = {unit: {span: span.references for span in unit.spans} for unit in units}
            result = run()
            found = tensors_in(result)
            for unit in units:
                if name in _ADDRESSES or any(_is_view(tensor, unit) for tensor in found):
                    self._viewed.setdefault(unit, known[unit])
                    self._schedule.keep(unit, to_step=any(tensor.requires_grad for tensor in found))
            return result
        finally:
            for unit, call in reversed(calls):
                self._schedule.end_use(unit, call, found or None)

    def _drop_unused(self, used: Sequence[Unit]) -> None:
        """Release units whose views are gone."""
        for unit in [unit for unit in self._viewed if unit not in used]:
            if not self._is_held(unit):
                self._schedule.release(unit)

    def _is_held(self, unit: Unit) -> bool:
        """Views that were given out since the unit was gathered exist."""
        return any(span.references > count for span, count in self._viewed[unit].items())

    def unit_resharded(self, unit: Unit) -> None:
        if self._viewed.pop(unit, None) is not None:
            for span in unit.spans:
                # Memory that numpy has seen cannot be resized, also when the array is gone.
                is_fixed = not span.full.untyped_storage().resizable()
                if not span.stays and (is_fixed or span.references > self._usual[span]):
                    span.leave_storage()

    def before_forward(self, args: Any, kwargs: Any) -> None:
        self._end_views()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._end_views()

    def _end_views(self) -> None:
        viewed = [unit for unit in self._viewed if unit.state is State.GATHERED]
        deadline = time.monotonic() + _COLLECTIVE_S
        while any(map(self._is_held, viewed)) and time.monotonic() < deadline:
            time.sleep(0.001)
        held = [unit for unit in viewed if self._is_held(unit)]
        for unit in [*self._viewed]:
            self._schedule.release(unit)
        for unit in held:
            if unit not in self._viewed:
                raise StateError(
                    f"a view of a parameter of unit {unit.name!r} is still held that was taken between passes (p.data, "
                    "p.detach(), p[0]). It keeps the values that it has, and would not follow the parameter. Keep a clone() "
                    "instead, or read inside zero.GatheredParameters"
                )


def _is_view(tensor: Tensor, unit: Unit) -> bool:
    """Whether a tensor that is none of the unit's parameters has its memory."""
    try:
        memory = tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors, and tensors inside functional transforms
        return True
    return any(memory == span.full.untyped_storage()._cdata for span in unit.spans) and not any(
        tensor is param for param in unit.params
    )
