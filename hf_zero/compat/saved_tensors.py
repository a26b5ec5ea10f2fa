"""Saved tensors: hooks that gather a unit when a backward reaches it by a path that does not pass its output.

A loss on an activation from inside a block (an auxiliary loss, a forward hook's output) reaches the block's nodes, and none of
the hooks on its output. So in the first backwards every tensor that a forward saves passes through hooks. One in a unit's
memory is unpacked only after the unit is gathered. Units that a backward reached unannounced keep the hooks. The others lose
them, because they cost Python work per operation.

The hooks also count the views of a unit's memory that graphs hold. If there are more at a release, user code holds some
(`p.detach()` in a forward): these views keep their memory and values, and the span moves to a new storage. Without hooks, the
expected number is the one that graphs alone held at the same point of an earlier pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.engine import Engine
from ..engine.graph import GONE, backward_id, storage_of
from ..engine.observer import Observer
from ..engine.span import Span
from ..engine.unit import Unit
from ..errors import StateError

_BACKWARDS = 4
"""The number of backwards in which all units are watched."""
_Point = tuple[int, bool]
"""A point at which a span is released: uses with a graph since the last backward; whether it is inside a backward."""

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
_hooks: Any = torch._C._autograd


class SavedTensor:
    """A tensor that a graph saved. Torch checks no version of what hooks return."""

    __slots__ = ("__weakref__", "is_parameter", "tensor", "unit", "version")

    def __init__(self, tensor: Tensor, unit: Unit | None) -> None:
        self.unit = None if unit is None else weakref.ref(unit)
        self.version, self.is_parameter = tensor._version, isinstance(tensor, nn.Parameter)
        # An operation's own output would form a cycle with the operation. A view must count as the graph's.
        self.tensor = tensor.detach() if tensor.requires_grad or unit is not None else tensor


class SavedTensors(Observer):
    """Puts hooks for saved tensors around forwards of units whose parameters are released."""

    def attach(self, engine: Engine) -> None:
        self._schedule = weakref.ref(engine.schedule)  # graphs hold these hooks, and must not hold the engine
        self._spans: dict[int, weakref.ref[Span]] = {}
        """By address of a storage, the span that has it, or had it: see `_span_of`."""
        self._saved: dict[int, set[weakref.ref[SavedTensor]]] = {}
        """By address of a storage, the saved tensors in it that graphs hold: see `_pack`."""
        self._left = _BACKWARDS
        # Units and spans by number: graphs hold this observer, and must not hold units.
        self._watched: set[int] = set()
        """Units that keep the hooks."""
        self._hooked: dict[int, bool] = {}
        """By unit, whether its last use with a graph had hooks."""
        self._uses: dict[int, int] = {}
        """By unit, uses with a graph since the last backward."""
        self._usual: dict[int, dict[_Point, int]] = {}
        """By `id` of a span and point, the number of views that graphs without hooks hold."""
        self._on: list[Pack | None] = []

    def use_begun(self, unit: Unit) -> None:
        pack = None
        if torch.is_grad_enabled():
            index = unit.index
            pack = self._push(unit) if self._left or index in self._watched else None
            self._hooked[index] = pack is not None
            if backward_id() < 0:
                self._uses[index] = self._uses.get(index, 0) + 1
        self._on.append(pack)

    def use_ended(self, unit: Unit, found: Sequence[Tensor]) -> None:
        self._pop()

    def unit_released(self, unit: Unit) -> None:
        for span in unit.spans:
            if not span.is_freed_in_place:
                continue
            # Memory that was shared with numpy cannot be resized, also after the array is freed.
            views = span.outside_views
            if (views > 0 and not self._are_saved(span, views)) or not span.full.untyped_storage().resizable():
                span.move_to_new_storage()
                self._watched.add(unit.index)

    def _are_saved(self, span: Span, views: int) -> bool:
        """Return whether graphs hold all views of a span's memory: they read them after the next gather."""
        index = span.unit.index
        point = self._uses.get(index, 0), backward_id() >= 0
        usual = self._usual.setdefault(id(span), {})
        if not self._hooked.get(index):
            return usual.get(point) == views
        saved = self._saved.get(storage_of(span.full), ())
        if views > len(saved):
            return False
        held = [reference() for reference in [*saved]]
        usual[point] = sum(each is not None and not each.is_parameter for each in held)
        return True

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
        self._uses.clear()

    def _push(self, unit: Unit) -> Pack | None:
        if not _hooks._saved_tensors_hooks_is_enabled():  # inside torch.func
            return None
        outer = _hooks._top_saved_tensors_default_hooks(True)
        while outer is not None and _is_stale(outer[0]):
            _hooks._pop_saved_tensors_default_hooks()
            outer = _hooks._top_saved_tensors_default_hooks(True)
        if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            return None  # checkpointing recomputes saved tensors, by forwards that have hooks on their outputs
        for span in unit.spans:
            memory = storage_of(span.full)
            self._spans[memory] = weakref.ref(span)
            self._saved.setdefault(memory, set())
        pack, unpack = (self._pack, self._unpack) if outer is None else self._around(*outer)
        _hooks._push_saved_tensors_default_hooks(pack, unpack)
        return pack

    def _pack(self, tensor: Tensor) -> SavedTensor:
        memory = storage_of(tensor)
        span = self._span_of(memory)
        if span is None:
            return SavedTensor(tensor, None)
        saved = SavedTensor(tensor, span.unit)
        # The callback must not be Python code, as a WeakSet's is: Python drops exceptions of signal handlers in callbacks.
        known = self._saved[memory]
        known.add(weakref.ref(saved, known.discard))
        return saved

    def _span_of(self, memory: int) -> Span | None:
        reference = self._spans.get(memory)
        span = None if reference is None else reference()
        # A span may have left its storage, whose address another one may then have.
        return None if span is None or storage_of(span.full) != memory else span

    def _unpack(self, saved: SavedTensor) -> Tensor:
        unit = None
        if saved.unit is not None:
            schedule, unit = self._schedule(), saved.unit()
            if schedule is None:
                raise StateError(GONE)
            if unit is not None and schedule.reach(unit):
                self._watched.add(unit.index)
        tensor = saved.tensor
        if tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {saved.version} "
                "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
        return tensor if unit is None else tensor.detach()  # user code may keep it

    def _around(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """Pass all tensors but those in a unit's memory to user code's hooks (`save_on_cpu`)."""

        def packed(tensor: Tensor) -> Any:
            return self._pack(tensor) if self._span_of(storage_of(tensor)) is not None else (pack(tensor),)

        def unpacked(saved: Any) -> Tensor:
            return self._unpack(saved) if type(saved) is SavedTensor else unpack(saved[0])

        return packed, unpacked


def _is_stale(pack: Pack) -> bool:
    """Return whether hooks belong to an engine that is freed: torch does not pop them if Ctrl-C ends a forward."""
    owner = getattr(pack, "__self__", None)
    return isinstance(owner, SavedTensors) and owner._schedule() is None
