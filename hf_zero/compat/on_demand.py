"""On-demand unshard: gathers a released parameter when user code reads it.

Heads that are fused with their loss, penalties on weights, moving averages and logging read parameters outside the forward of
their unit: `F.linear(hidden, model.lm_head.weight)`, `p.square().sum()`, `p.detach()`, `p.item()`. The schedule treats one such
operation as a forward of the unit: the unit is gathered before, and released when another unit is used. A backward that
reaches the operation's output gathers it again. A collective, so all ranks must make the same reads.

An operation that returns a view (`p.T`, `p.data`, `p.numpy()`) keeps the unit gathered. With a graph, which may save views
unseen, it stays until the next step. Otherwise it stays until the next forward, step or end of a backward, or until the view is
dropped and another unit is read. A view that outlives this keeps its values: the span moves to a new storage. If the view was
taken between passes, the next forward or step raises, because the view is stale.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.engine import Engine
from ..engine.graph import backward_id, storage_of, tensors_in
from ..engine.observer import Observer
from ..engine.parameter import place_of
from ..engine.tape import Calls
from ..engine.unit import Unit
from ..errors import StateError

_ADDRESSES = frozenset(
    {"data_ptr", "storage", "untyped_storage", "numpy", "__array__", "__dlpack__", "__cuda_array_interface__"}
)
"""Functions whose result refers to the memory and is not a tensor."""

_COLLECTIVE_S = 0.5
"""User code's own collectives (`dist.broadcast(p.data, 0)`) drop their tensors some time after they have ended."""


class OnDemand(Observer):
    """Runs operations of user code on parameters of released units."""

    def __init__(self) -> None:
        self._views: dict[Unit, list[tuple[Any, Any]]] = {}
        """By unit, weak references to the views that user code got since the unit was gathered, each with the parameter and
        storage that it shows (`_shown_by`)."""
        self._untracked: set[Unit] = set()
        """Units to whose memory user code got untracked references: views that a graph saves, addresses, arrays."""
        self._old: dict[str, list[tuple[Any, Any]]] = {}
        """By unit, under its name, the views that existed when it was released."""

    def attach(self, engine: Engine) -> None:
        self._schedule, self._wire = engine.schedule, engine.wire

    def sharded_read(self, units: Sequence[Unit], func: Any, run: Callable[[], Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__repr__", "__format__"):  # debuggers print on one rank alone
            return f"Parameter(values of unit {units[0].name!r} are sharded over the ranks)"
        if backward_id() < 0:
            self._drop_unused(units)
        calls: list[tuple[Unit, Calls]] = [(unit, []) for unit in units]
        found: list[Tensor] = []
        try:
            with self._wire.watch.operation(f"{name}() of a sharded parameter"):
                for unit, call in calls:
                    self._schedule.begin_use(unit, call)
            result = run()
            found = tensors_in(result)
            for unit in units:
                views = [tensor for tensor in found if _is_view(tensor, unit)]
                if views or name in _ADDRESSES:
                    self._keep(unit, views)
            return result
        finally:
            for unit, call in reversed(calls):
                self._schedule.end_use(unit, call, found or None)

    def _keep(self, unit: Unit, views: Sequence[Tensor]) -> None:
        has_graph = any(view.requires_grad for view in views)
        self._watch(unit, () if has_graph or backward_id() >= 0 else views)
        self._schedule.keep(unit, to_step=has_graph)

    def _watch(self, unit: Unit, views: Sequence[Tensor]) -> None:
        """Track views of a unit's memory that user code got. No views: user code got a reference that cannot be tracked."""
        if unit.is_pinned or not views:
            self._untracked.add(unit)
        if not unit.is_pinned:  # pinned units may be read on one rank alone, so ranks could not agree on their views
            self._views.setdefault(unit, []).extend((_shown_by(view, unit), _weak(view)) for view in views)

    def data_assigned(self, param: nn.Parameter, values: Tensor) -> None:
        """Stop tracking earlier views, which keep the former values as in plain training, unless one of them was assigned."""
        place = place_of(param)
        if place is not None and place.unit in self._views:
            views, memory = self._views[place.unit], values.untyped_storage()._cdata
            self._views[place.unit] = [
                (shown, view) for shown, view in views if shown is None or shown[0] is not param or shown[1] == memory
            ]

    def _drop_unused(self, used: Sequence[Unit]) -> None:
        """Release units whose views were dropped. The ranks agree on it, because garbage collection differs between ranks."""
        units = [unit for unit in self._views if unit not in used and unit not in self._untracked]
        if units:
            for unit, is_pinned in zip(
                units, self._wire.start_maximum([_any_alive(self._views[unit]) for unit in units])()
            ):
                if not is_pinned:
                    self._schedule.release(unit)

    def unit_released(self, unit: Unit) -> None:
        views, is_untracked = self._views.pop(unit, None), unit in self._untracked
        if views is None and not is_untracked:
            return
        self._untracked.discard(unit)
        if views is not None:
            self._old[unit.name] = views
        alive = _any_alive(views or ())
        for span in unit.spans:
            # Memory that was shared with numpy cannot be resized, also after the array is freed.
            is_fixed = not span.full.untyped_storage().resizable()
            is_seen = is_untracked and span.has_outside_views
            if not span.is_persistent and (alive or is_fixed or is_seen):
                span.move_to_new_storage()

    def before_forward(self, args: Any, kwargs: Any) -> None:
        self._end_views()

    def before_unsharded(self) -> None:
        self._end_views()  # inside, one rank alone may run a forward

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._end_views()

    def _end_views(self) -> None:
        for unit in [*self._views]:
            self._schedule.release(unit)
        if not self._old:
            return
        old, self._old = self._old, {}
        if any(map(_any_alive, old.values())):
            gc.collect()
            deadline = time.monotonic() + _COLLECTIVE_S
            while any(map(_any_alive, old.values())) and time.monotonic() < deadline:
                time.sleep(0.001)
        for name, is_pinned in zip(old, self._wire.start_maximum([_any_alive(views) for views in old.values()])()):
            if is_pinned:
                raise StateError(
                    f"a view of a parameter of unit {name!r} is still held that was taken between passes (p.data, p.detach(), "
                    "p[0]). It keeps the values that it has, and would not follow the parameter. Keep a clone() instead, or "
                    "read inside zero.GatheredParameters"
                )


def _weak(tensor: Tensor) -> Any:
    """Return a weak reference to a tensor, which does not expire while a view of the tensor exists."""
    native: Any = torch._C
    return native._WeakTensorRef(tensor)


def _any_alive(views: Sequence[tuple[Any, Any]]) -> int:
    return int(not all(view.expired() for _, view in views))


def _shown_by(view: Tensor, unit: Unit) -> tuple[nn.Parameter, int] | None:
    """Return the parameter in whose memory a view begins, and the storage's address."""
    try:
        address, memory = view.data_ptr(), view.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, and tensors inside functional transforms
        return None
    for span in unit.spans:
        for param, values in zip(span.params, span.views):
            if values.data_ptr() <= address < values.data_ptr() + values.nbytes:
                return param, memory
    return None


def _is_view(tensor: Tensor, unit: Unit) -> bool:
    """Return whether a tensor views the unit's memory and is not one of its parameters."""
    memory = storage_of(tensor)
    if not memory:  # it may be: tensors inside functional transforms have no storage
        return True
    return memory in map(storage_of, (span.full for span in unit.spans)) and not any(
        tensor is param for param in unit.params
    )
