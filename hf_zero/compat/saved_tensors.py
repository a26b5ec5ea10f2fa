"""Saved tensors: a backward that comes to a unit by another way than its output finds the unit gathered.

A loss on an activation from inside a block (an auxiliary loss, a forward hook's output) reaches the block's nodes, and none of
the hooks on its output. So in the first backwards every tensor that a forward saves passes through hooks. One that lies in a
unit's memory is unpacked only when the unit is gathered. A unit that a backward came to unannounced keeps the hooks; the
others lose them, for they cost Python work per operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.schedule import alive
from ..engine.span import Span
from ..engine.unit import Unit

_BACKWARDS = 4
"""In so many backwards all units are watched."""

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
_hooks: Any = torch._C._autograd


class Saved:
    """A tensor that a graph saved. Torch checks no version of what hooks return."""

    __slots__ = ("tensor", "unit", "version")

    def __init__(self, tensor: Tensor, unit: weakref.ref[Unit] | None) -> None:
        self.tensor, self.unit, self.version = tensor, unit, tensor._version


class SavedTensors(Observer):
    """Puts hooks for saved tensors around forwards of units whose parameters are released."""

    def attach(self, engine: Engine) -> None:
        self._schedule = weakref.ref(engine.schedule)  # graphs hold these hooks, and must not hold the engine
        self._spans: dict[int, weakref.ref[Span]] = {}
        """By address of a storage, the span that has it, or had it: see `_unit_of`."""
        self._left = _BACKWARDS
        self._unannounced: set[int] = set()
        self._on: list[Pack | None] = []

    def use_begun(self, unit: Unit) -> None:
        is_watched = torch.is_grad_enabled() and (self._left or unit.index in self._unannounced)
        self._on.append(self._push(unit) if is_watched else None)

    def use_ended(self, unit: Unit, found: Sequence[Tensor]) -> None:
        self._pop()

    def _pop(self) -> None:
        pack = self._on.pop() if self._on else None
        if pack is not None:
            top = _hooks._top_saved_tensors_default_hooks(True)
            if top is not None and top[0] == pack:
                _hooks._pop_saved_tensors_default_hooks()

    def before_forward(self, args: Any, kwargs: Any) -> None:
        while self._on:  # Ctrl-C ended a forward
            self._pop()

    def after_backward(self) -> None:
        self._left = max(0, self._left - 1)

    def _push(self, unit: Unit) -> Pack | None:
        if not _hooks._saved_tensors_hooks_is_enabled():  # inside torch.func
            return None
        outer = _hooks._top_saved_tensors_default_hooks(True)
        if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            return None  # it recomputes what is saved, by forwards that have hooks on their outputs
        self._spans |= {span.full.untyped_storage()._cdata: weakref.ref(span) for span in unit.spans}
        pack, unpack = (self._pack, self._unpack) if outer is None else self._around(*outer)
        _hooks._push_saved_tensors_default_hooks(pack, unpack)
        return pack

    def _pack(self, tensor: Tensor) -> Saved:
        unit = self._unit_of(tensor)
        if tensor.requires_grad:
            tensor = (
                tensor.detach()
            )  # an operation's own output would keep the operation, and that the output, for ever
        return Saved(tensor, None if unit is None else weakref.ref(unit))

    def _unit_of(self, tensor: Tensor) -> Unit | None:
        memory = _memory(tensor)
        reference = self._spans.get(memory)
        span = None if reference is None else reference()
        # A span may have left its storage, whose address then belongs to any other.
        return None if span is None or span.full.untyped_storage()._cdata != memory else span.unit

    def _unpack(self, saved: Saved) -> Tensor:
        if saved.unit is not None:
            schedule, unit = alive(self._schedule), saved.unit()
            if unit is not None and schedule.reach(unit):
                self._unannounced.add(unit.index)
        tensor = saved.tensor
        if tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {saved.version} "
                "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
        return tensor

    def _around(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """User code's hooks (`save_on_cpu`) get all tensors but those in a unit's memory."""

        def packed(tensor: Tensor) -> Any:
            return self._pack(tensor) if self._unit_of(tensor) is not None else (pack(tensor),)

        def unpacked(saved: Any) -> Tensor:
            return self._unpack(saved) if type(saved) is Saved else unpack(saved[0])

        return packed, unpacked


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's storage; of its elements' for a sparse tensor; 0 for a tensor without."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        if tensor.layout is torch.sparse_coo:
            return tensor._values().untyped_storage()._cdata
        is_compressed = tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
        return tensor.values().untyped_storage()._cdata if is_compressed else 0
