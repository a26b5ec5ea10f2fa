"""Methods that an optimizer has besides torch's: `eval`, `train`, `first_step`, `current_lr`, …

What a method writes to the optimizer's tensors must reach the parameters on all ranks, which is a collective. Whether it wrote
is decided without one, from the operations and not from the values: all ranks then come to the same answer, and a method that
only reads may be called on one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.layout import Span
from .instance_methods import Patches
from .values.reads import AsTheyAre
from .values.unit import Unit


class OwnMethods:
    """Watches every method that an optimizer has and torch's base class has not.

    Args:
        units: the engine's own list.
        before: called once before the first write of a call.
        wrote: called with every write.
    """

    def __init__(self, units: Sequence[Unit], before: Callable[[], None], wrote: Callable[[], None]) -> None:
        self._units, self._before, self._wrote = units, before, wrote
        self._running: list[_Writes] = []

    def take(self, optimizer: torch.optim.Optimizer, patches: Patches) -> None:
        """Static and class methods are left alone: they have no optimizer to change, and are not to be called with one."""
        for name in dir(type(optimizer)):
            if name.startswith("_") or hasattr(torch.optim.Optimizer, name) or name in optimizer.__dict__:
                continue
            method = inspect.getattr_static(type(optimizer), name)
            if inspect.isfunction(method):
                watched = partial(self._run, partial(method, optimizer))
                watched.__wrapped__ = method  # type: ignore[attr-defined]  # another optimizer of its class has the method itself
                patches.method(optimizer, name, watched)

    def compare(self) -> None:
        """Before a step, which a method may make itself: what it wrote so far is known."""
        for writes in self._running:
            writes.compare()

    def stepped(self) -> None:
        """The tensors are where the step left them."""
        for writes in self._running:
            writes.note()

    def _run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        masters = _masters_of(self._units)
        if masters is None:
            self._before()
            try:
                return method(*args, **kwargs)
            finally:
                self._wrote()
        writes = _Writes(masters, self._before, self._wrote)
        self._running.append(writes)
        try:
            with writes:
                out = method(*args, **kwargs)
        finally:
            self._running.remove(writes)
            writes.compare()
        if hasattr(out, "__enter__") or hasattr(out, "__next__"):  # it may write later
            writes.found()
        return out


def _masters_of(units: Iterable[Unit]) -> list[nn.Parameter] | None:
    """Return the tensors of all optimizers. None where ranks share whole matrices out and one rank has none of a group: it
    could not see what the others write.
    """
    flats = [flat for unit in units for flat in unit.trained]
    shared: dict[tuple[int, int], list[Span]] = {}
    for flat in flats:
        if flat.span.cuts:
            shared.setdefault((flat.span.optimizer, flat.span.spec.group), []).append(flat.span)
    for spans in shared.values():
        for rank in range(spans[0].shards):
            if not any(next(span.overlaps(rank), None) for span in spans):
                return None
    return [shard.master for flat in flats for shard in flat.shards]


class _Writes(TorchDispatchMode):
    """Operations that write the memory of some tensors, also through `.data` or a view; and other memory in its place."""

    def __init__(self, tensors: Iterable[nn.Parameter], before: Callable[[], None], wrote: Callable[[], None]) -> None:
        super().__init__()
        self._before, self._wrote, self._is_first = before, wrote, True
        self._tensors = [*tensors]
        self.note()

    def note(self) -> None:
        """The tensors are as they should be."""
        with AsTheyAre():
            self._places = [*map(Tensor.data_ptr, self._tensors)]
            self._storages = {tensor.untyped_storage()._cdata for tensor in self._tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                given = kwargs.get(argument.name, args[index] if index < len(args) else None)
                if any(self._is_watched(each) for each in (given if isinstance(given, (list, tuple)) else (given,))):
                    self.found()
                    break
        return func(*args, **kwargs)

    def _is_watched(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._storages

    def found(self) -> None:
        if self._is_first:
            self._is_first = False
            self._before()
        self._wrote()

    def compare(self) -> None:
        """Memory was replaced (`param.data = x`), which is no operation."""
        with AsTheyAre():
            places = [*map(Tensor.data_ptr, self._tensors)]
        if places != self._places:
            self.found()
            self.note()
