"""The one protocol through which code outside the engine follows a training run.

The engine keeps one list per event, with only the methods that exist: an event without observers costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

EVENTS = (
    "before_forward",
    "after_forward",
    "before_backward",
    "after_backward",
    "before_clip",
    "before_step",
    "after_step",
    "after_zero_grad",
    "tell",
    "told",
    "before_gather",
    "unit_unsharded",
    "unit_resharded",
    "before_reduce",
    "unit_reduced",
    "before_save",
    "after_load",
    "master_read",
    "sharded_read",
    "data_read",
    "data_assigned",
    "grad_read",
    "grad_assigned",
    "segment_grad_read",
    "segment_grad_assigned",
)
"""Methods that an `Observer` may have."""


class Observer:
    """Base of everything that attaches to an engine. Subclasses define any of the methods in `EVENTS`.

    The model's passes:
        `before_forward(args, kwargs)`, `after_forward(output)`: of the outermost forward of the model.
        `before_backward()`, `after_backward()`: of one backward; gradients are reduced when the second is called.
        `before_clip()`: the engine is about to measure, or clip, reduced gradients.
        `before_step(optimizer)`, `after_step(optimizer)`, `after_zero_grad()`.
        `tell()` returns integers of this rank, always as many; `told(highest)` gets the highest of all ranks. They travel
        with what the ranks agree on at the end of a backward that reduces. Whoever has one of the two methods has both.
    One unit:
        `before_gather(unit)`, `unit_unsharded(unit)`, `unit_resharded(unit)`,
        `before_reduce(unit)` (local gradients are complete), `unit_reduced(unit)`.
    Checkpoints:
        `before_save()`, `after_load()`.
    Access to a parameter from outside the engine:
        `master_read(span)`: master weights are read, or written in part, outside a step.
        `sharded_read(unit)`: an operation reads a parameter whose values are sharded. It may gather the unit.
        `data_read(param)`: user code reads `param.data`. `data_assigned(param, values)`: it assigned other values.
        `grad_read(param, raw)`: returns what `param.grad` is. `grad_assigned(param, grad)`: True if it took the gradient.
        `segment_grad_read(segment, raw)`, `segment_grad_assigned(segment, grad)`: the same of what optimizer groups hold.
    """

    def attach(self, engine: Any) -> None:
        """Called once, when all units are built and before the first event."""

    def detach(self) -> None:
        """Called once, when the engine gives the model back."""


class Events:
    """The observers' methods, one list per event."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)
        for name in EVENTS:
            setattr(self, name, [getattr(each, name) for each in observers if hasattr(each, name)])

    before_forward: list[Callable[..., None]]
    after_forward: list[Callable[..., None]]
    before_backward: list[Callable[[], None]]
    after_backward: list[Callable[[], None]]
    before_clip: list[Callable[[], None]]
    before_step: list[Callable[..., None]]
    after_step: list[Callable[..., None]]
    after_zero_grad: list[Callable[[], None]]
    tell: list[Callable[[], list[int]]]
    told: list[Callable[[list[int]], None]]
    before_gather: list[Callable[..., None]]
    unit_unsharded: list[Callable[..., None]]
    unit_resharded: list[Callable[..., None]]
    before_reduce: list[Callable[..., None]]
    unit_reduced: list[Callable[..., None]]
    before_save: list[Callable[[], None]]
    after_load: list[Callable[[], None]]
    master_read: list[Callable[..., None]]
    sharded_read: list[Callable[..., None]]
    data_read: list[Callable[..., None]]
    data_assigned: list[Callable[..., None]]
    grad_read: list[Callable[..., Any]]
    grad_assigned: list[Callable[..., bool]]
    segment_grad_read: list[Callable[..., Any]]
    segment_grad_assigned: list[Callable[..., bool]]
