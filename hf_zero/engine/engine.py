"""One sharded model in training: what user code calls, and in which order the engine's parts work in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..config import ZeroConfig
from ..errors import StateError
from .build import give_back
from .clipping import clip_norm, clip_value
from .context import Context
from .host_step import Stepper
from .observer import Observer
from .optimizer import Binding, StepWrapper
from .precision import Autocast
from .presence import Presence
from .schedule import Schedule
from .span import Span
from .unit import Unit

Attached = TypeVar("Attached", bound=Observer)
_ENGINE = "_hf_zero_engine"
"""Where a sharded module keeps its engine."""


class Engine:
    """Runs forward, backward and step of one sharded model. `shard` creates it.

    Attributes:
        model: the user's model, whose parameters are sharded.
        context: settings, transports and units.
        schedule: when units are gathered, released and reduced.
        bindings: the optimizers.
    """

    def __init__(self, context: Context, bindings: list[Binding]) -> None:
        self.context, self.bindings = context, bindings
        self.model, self.units, self._wire, self.events = context.model, context.units, context.wire, context.events
        self.schedule = Schedule(context, self._after_sync)
        self.stepper = Stepper(context, bindings, self.schedule) if context.config.offload_optimizer != "none" else None
        self._presence = Presence(context, self.schedule.reduce_late, self._split)
        self._undo: list[Callable[[], None]] = [self.schedule.detach]
        if context.precision.autocast_dtype is not None:
            spans = [span for unit in self.units for span in unit.spans if span.compute_dtype != span.master_dtype]
            cast = {param for span in spans for param in span.params}
            hosts = [host for unit in self.units for host in unit.hosts]
            self._undo.append(Autocast(self.model, context.precision, context.device, hosts, cast).remove)
        for binding in bindings:
            self._take_methods(binding)
        for observer in context.events.observers:
            observer.attach(self)
            self._undo.append(observer.detach)
        self.model.__dict__[_ENGINE] = self
        self._undo.append(lambda: self.model.__dict__.pop(_ENGINE, None))

    @property
    def config(self) -> ZeroConfig:
        return self.context.config

    @property
    def rank(self) -> int:
        return self._wire.rank

    @property
    def world_size(self) -> int:
        return self._wire.size

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that update the model, in their order."""
        return tuple(binding.optimizer for binding in self.bindings)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The first optimizer; None if there is none."""
        return self.bindings[0].optimizer if self.bindings else None

    @property
    def trained(self) -> list[Span]:
        return [span for unit in self.units for span in unit.trained]

    def _take_methods(self, binding: Binding) -> None:
        optimizer = binding.optimizer
        self._undo.append(StepWrapper(binding, self._before_step, self._after_step, self._step_failed).remove)

        def zero_grad(set_to_none: bool = True) -> None:
            self.zero_grad(set_to_none, optimizer=optimizer if len(self.bindings) > 1 else None)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._undo.append(lambda: optimizer.__dict__.pop("zero_grad", None))

    # Backward ---------------------------------------------------------------------------------------------------------

    def _after_sync(self) -> None:
        self._presence.agree()

    def _split(self, span: Span) -> None:
        for binding in self.bindings:
            if span in binding.spans:
                binding.split(span)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank: backwards inside do not communicate them at stages 0 and 1.

        Example:
            >>> with engine.no_sync():
            ...     model(first).loss.backward()
            >>> model(second).loss.backward()  # reduces the sum of both
        """
        before, self.schedule.sync = self.schedule.sync, False
        try:
            yield
        finally:
            self.schedule.sync = before

    # Step -------------------------------------------------------------------------------------------------------------

    def _before_step(self, binding: Binding) -> None:
        if self.schedule.in_backward:
            self.schedule.recover()
        if self.schedule.in_backward:
            raise StateError(
                "optimizer.step() was called inside a backward, before the gradients of all ranks are there"
            )
        self.context.check()
        self._wire.watch.phase = "optimizer.step()"
        self.schedule.flush()
        if self.schedule.lost is not None:
            raise StateError(f"optimizer.step(): {self.schedule.lost}. Call zero_grad() and repeat the step")
        for event in self.events.before_step:
            event(binding.optimizer)
        self.schedule.quiesce()
        if self.stepper is not None:
            self.stepper.prepare(binding)

    def _after_step(self, binding: Binding) -> None:
        if self.stepper is not None:
            self.stepper.begin(binding)
        self.refresh(binding.spans)
        if not self.context.frees:
            self.context.raise_failures("optimizer.step()")
        self._wire.watch.step += 1
        self.schedule.stepped()
        for event in self.events.after_step:
            event(binding.optimizer)

    def _step_failed(self, binding: Binding, reason: str) -> None:
        self.context.failure = reason

    @torch.no_grad()
    def refresh(self, spans: list[Span]) -> None:
        """The masters of these spans were written: full parameters that the stage keeps are gathered again. A collective."""
        by_unit: dict[Unit, list[Span]] = {}
        chosen = set(map(id, spans))
        for unit in self.units:
            mine = [span for span in unit.spans if id(span) in chosen]
            if mine:
                by_unit[unit] = mine
        for unit, mine in by_unit.items():
            unit.mark_old(mine)
            if not self.context.frees:
                unit.gather()
        if not self.context.frees:
            for unit in by_unit:
                unit.wait()

    def zero_grad(self, set_to_none: bool = True, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Clear the gradients: those of one optimizer, or of all.

        Args:
            set_to_none: False: gradients that exist become zeros.
        """
        self.schedule.recover()
        self.schedule.lost = None
        if not set_to_none:
            self.wait_for_steps()
        for binding in self.bindings:
            if optimizer is not None and binding.optimizer is not optimizer:
                continue
            for group in binding.segments:
                for segment in group:
                    if set_to_none:
                        segment.tensor.grad = None
                    elif segment.tensor.grad is not None:
                        segment.tensor.grad.zero_()
        for span in self.trained if optimizer is None else self._spans_of(optimizer):
            if set_to_none:
                span.bucket.clear()
            elif span.bucket.grad is not None:
                span.bucket.grad.zero_()
                span.bucket.drop_local()
        for event in self.events.after_zero_grad:
            event()

    def wait_for_steps(self) -> None:
        """Return when no other thread updates masters or reads gradients."""
        if self.stepper is not None:
            self.stepper.settle()

    def _spans_of(self, optimizer: torch.optim.Optimizer) -> list[Span]:
        return [span for binding in self.bindings if binding.optimizer is optimizer for span in binding.spans]

    # Clipping ---------------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients to `max_norm`. A collective.

        Args:
            max_norm: `inf` only measures.
            norm_type: order of the norm; `inf` for the largest magnitude.

        Returns:
            The norm before clipping, a scalar tensor, the same on every rank.
        """
        self._before_clipping("clip_grad_norm_")
        return clip_norm(self.trained, self._wire, float(max_norm), float(norm_type))

    def clip_grad_value_(self, clip_value_: float) -> None:
        """Clamp every gradient element to `[-clip_value_, clip_value_]`."""
        self._before_clipping("clip_grad_value_")
        clip_value(self.trained, self._wire, clip_value_)

    def _before_clipping(self, what: str) -> None:
        if self.context.config.step_in_backward and self.stepper is not None:
            raise StateError(
                f"{what}: step_in_backward updates parameters before all gradients are there, so nothing can be clipped. "
                "Set step_in_backward to False, or do not clip (max_grad_norm=0 in TrainingArguments)"
            )
        self.schedule.flush()
        self.wait_for_steps()

    # End --------------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give model and optimizers back as plain ones, with full parameters and full optimizer state. A collective."""
        self.schedule.quiesce()
        self.wait_for_steps()
        self.context.raise_failures("detach()")
        if self.stepper is not None:
            self.stepper.close()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        give_back(self.context)
        for binding in self.bindings:
            for group, params in zip(binding.optimizer.param_groups, binding.originals):
                group["params"] = list(params)

    def observer(self, kind: type[Attached]) -> Attached:
        """Return the observer of a class.

        Raises:
            StateError: none is attached.
        """
        for each in self.events.observers:
            if isinstance(each, kind):
                return each
        raise StateError(f"no {kind.__name__} observes this engine. Build the engine by zero.shard, which attaches one")


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a sharded model, also through wrappers that hold it as a submodule; None for any other module."""
    for module in model.modules():
        engine: Engine | None = module.__dict__.get(_ENGINE)
        if engine is not None:
            return engine
    return None
