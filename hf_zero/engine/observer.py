"""The protocol by which code outside the engine follows a training run.

The engine keeps one list per event, with only the methods that observers define: an event without observers costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Observer:
    """Base class of observers. Subclasses define any of the methods in `Events`.

    The model's passes:
        `before_forward(args, kwargs)`, `after_forward(output)`: around the outermost forward of the model.
        `before_part(unit)`: user code calls a part of the model by itself.
        `before_backward()`, `after_backward()`: around one backward, or gradients that one left on this rank. When the second
            is called, they are reduced, or held inside `no_sync`.
        `before_gradients()`: reduced gradients are about to be used outside a step.
        `gradients_written(span)`: the span's reduced gradients have changed.
        `before_step(optimizer)`, `after_step(optimizer)`, `after_zero_grad()`.
        `step_paused(optimizer)`: between these two, a closure runs next (`before_step` follows again), or the step raised.
        `values_for_max()` returns a fixed number of integers of this rank; `check_max_values(highest)` gets their maxima over
        all ranks. They are part of the agreement at the end of a backward that reduces. An observer defines both or neither.
    One unit:
        `use_begun(unit)`, `use_ended(unit, found)`: around the forward of a host, or one operation, after which parameters may
            be released. `found`: the tensors in the output.
        `before_gather(unit)`, `unit_gathered(unit)`, `unit_released(unit)`,
        `before_reduce(unit)` (local gradients are complete), `unit_reduced(unit)`.
    Checkpoints:
        `before_save()`: masters are about to be read, or written in part. `before_load()`: a load will overwrite all of them.
        `before_unsharded()`: `Engine.unsharded` begins. Inside it ranks run forwards independently.
    Access to a parameter from outside the engine:
        `master_read(span)`: master weights are read, or written in part, outside a step.
        `masters_written(unit)`: masters may have changed; full parameters that the stage keeps will get their values.
        `writes_dropped(unit)`: user code's writes to parameters until now are in the masters, or must be discarded.
        `sharded_read(units, func, run)`: user code calls a function of a tensor on parameters of these units outside their
            forwards. It gathers the units, and returns the value of `run()`, which calls the function.
        `data_read(param, values)`: user code reads `param.data`. `data_assigned(param, values)`: user code assigned it.
        `requires_grad_set(param)`: user code froze or unfroze the parameter.
        `param_copied(param)`: returns the full values for a copy, in their own dtype, on every rank.
        `grad_read(param, raw)`: returns the value of `param.grad`. `grad_assigned(param, grad)`: True if it stored `grad`.
        `segment_grad_read(segment, raw)`, `segment_grad_assigned(segment, grad)`: the same for tensors in optimizer groups.
        `segment_data_read(segment, values)`: user code reads `data` of a tensor in a group, outside a step.
    """

    def check(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Refuse a model that the observer cannot follow, with a named error. Called before anything has changed."""

    def refused(self) -> None:
        """Undo `check`. Called once, in place of `attach`, when the engine was not built."""

    def attach(self, engine: Any) -> None:
        """Attach to the engine. Called once, when all units are built and before the first event."""

    def detach(self) -> None:
        """Detach from the engine. Called once, when it gives the model back."""


class Events:
    """The observers' methods, one list per event."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)
        for name in Events.__annotations__:
            setattr(self, name, [getattr(each, name) for each in observers if hasattr(each, name)])

    before_forward: list[Callable[..., None]]
    after_forward: list[Callable[..., None]]
    before_part: list[Callable[..., None]]
    before_backward: list[Callable[[], None]]
    after_backward: list[Callable[[], None]]
    before_gradients: list[Callable[[], None]]
    gradients_written: list[Callable[..., None]]
    before_step: list[Callable[..., None]]
    after_step: list[Callable[..., None]]
    step_paused: list[Callable[..., None]]
    after_zero_grad: list[Callable[[], None]]
    values_for_max: list[Callable[[], list[int]]]
    check_max_values: list[Callable[[list[int]], None]]
    use_begun: list[Callable[..., None]]
    use_ended: list[Callable[..., None]]
    before_gather: list[Callable[..., None]]
    unit_gathered: list[Callable[..., None]]
    unit_released: list[Callable[..., None]]
    before_reduce: list[Callable[..., None]]
    unit_reduced: list[Callable[..., None]]
    before_save: list[Callable[[], None]]
    masters_written: list[Callable[..., None]]
    writes_dropped: list[Callable[..., None]]
    master_read: list[Callable[..., None]]
    before_load: list[Callable[[], None]]
    before_unsharded: list[Callable[[], None]]
    sharded_read: list[Callable[..., Any]]
    data_read: list[Callable[..., None]]
    data_assigned: list[Callable[..., None]]
    grad_read: list[Callable[..., Any]]
    grad_assigned: list[Callable[..., bool]]
    segment_grad_read: list[Callable[..., Any]]
    segment_grad_assigned: list[Callable[..., bool]]
    segment_data_read: list[Callable[..., None]]
    requires_grad_set: list[Callable[..., None]]
    param_copied: list[Callable[..., Tensor]]
