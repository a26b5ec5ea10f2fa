"""One sharded model in training: what user code calls, and in which order the engine's parts work in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..comm.wire import Traffic
from ..config import ZeroConfig
from ..errors import LayoutError, StateError
from .build import give_back
from .clipping import Parts, clip_norm, clip_value
from .context import Context
from .graph import backward_id
from .host_step import Stepper
from .observer import Observer
from .optimizer import Binding, StepWrapper
from .parameter import place_of, set_raw_grad
from .precision import Autocast
from .presence import Presence
from .schedule import Schedule
from .span import Span
from .unit import Unit
from .unsharded import Hold, same_on_all_ranks

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

    def fit_segments(self, span: Span) -> None:
        """After a change of `bucket.present`, the same on every rank: optimizers see which parameters have a gradient."""
        self._presence.fit(span)

    def _split(self, span: Span) -> None:
        for binding in self.bindings:
            if span in binding.spans:
                binding.split(span)

    @contextmanager
    def no_sync(self, *, defer: bool = False) -> Iterator[None]:
        """Let gradients add up on this rank: backwards inside do not communicate them at stages 0 and 1.

        Args:
            defer: nor at stages 2 and 3, where each rank then has memory for whole local gradients.

        Example:
            >>> with engine.no_sync():
            ...     model(first).loss.backward()
            >>> model(second).loss.backward()  # reduces the sum of both
        """
        schedule = self.schedule
        before = schedule.sync, schedule.defers
        schedule.sync, schedule.defers = False, schedule.defers or defer
        try:
            yield
        finally:
            schedule.sync, schedule.defers = before

    # Step -------------------------------------------------------------------------------------------------------------

    def _before_step(self, binding: Binding) -> None:
        if self.schedule.in_backward:
            self.schedule.recover()
        if self.schedule.in_backward:
            raise StateError(
                "optimizer.step() was called inside a backward, before the gradients of all ranks are there"
            )
        self.context.check()
        self.context.refuse_unsharded("optimizer.step()")
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
    def refresh(self, spans: list[Span] | None = None) -> None:
        """The masters of these spans (None: all) were written: full parameters are gathered again where they stay.

        A collective.
        """
        if spans is None:
            spans = [span for unit in self.units for span in unit.spans]
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
            for group in binding.segments if set_to_none else ():
                for segment in group:
                    set_raw_grad(segment.tensor, None)
        for span in self.trained if optimizer is None else self._spans_of(optimizer):
            if set_to_none:
                span.bucket.clear()
            else:
                span.bucket.zero()
        for event in self.events.after_zero_grad:
            event()

    def wait_for_steps(self) -> None:
        """Return when no other thread updates masters or reads gradients."""
        if self.stepper is not None:
            self.stepper.settle()

    def _spans_of(self, optimizer: torch.optim.Optimizer) -> list[Span]:
        return [span for binding in self.bindings if binding.optimizer is optimizer for span in binding.spans]

    # Clipping ---------------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> Tensor:
        """Clip the norm of all gradients to `max_norm`. A collective.

        Args:
            max_norm: `inf` only measures.
            norm_type: order of the norm; `inf` for the largest magnitude.
            parameters: of the model, these alone.

        Returns:
            The norm before clipping, a scalar tensor, the same on every rank.

        Raises:
            LayoutError: a parameter is not of the sharded model.
        """
        self._before_clipping("clip_grad_norm_")
        return clip_norm(self._parts_to_clip(parameters), self._wire, float(max_norm), float(norm_type))

    def clip_grad_value_(self, clip_value_: float, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Clamp every gradient element to `[-clip_value_, clip_value_]`, of all parameters or of some.

        Raises:
            LayoutError: a parameter is not of the sharded model.
        """
        self._before_clipping("clip_grad_value_")
        clip_value(self._parts_to_clip(parameters), self._wire, clip_value_)

    def _parts_to_clip(self, parameters: Iterable[nn.Parameter] | None) -> Parts:
        """By span, which elements of its slice belong to these parameters, or to segments of them."""
        if parameters is None:
            return {span: [slice(0, span.local_numel)] for span in self.trained}
        found: Parts = {span: [] for span in self.trained}
        wanted = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        segments = {segment.tensor: segment for span in self.trained for segment in span.segments}
        for param in wanted:
            place, segment = place_of(param), segments.get(param)
            if segment is not None:
                found[segment.span].append(segment.here)
            elif place is None or place.unit.context is not self.context:
                raise LayoutError(
                    f"a parameter to clip, of shape {tuple(param.shape)}, is not of the sharded model. Clip it with "
                    "torch.nn.utils"
                )
            elif place.span in found and (part := place.span.part_of(place.index)) is not None:
                found[place.span].append(part.here)
        if wanted >= {param for span in self.trained for param in span.params}:
            return self._parts_to_clip(None)
        return {span: sorted(parts, key=lambda part: part.start) for span, parts in found.items()}

    def _before_clipping(self, what: str) -> None:
        if self.context.config.step_in_backward and self.stepper is not None:
            raise StateError(
                f"{what}: step_in_backward updates parameters before all gradients are there, so nothing can be clipped. "
                "Set step_in_backward to False, or do not clip (max_grad_norm=0 in TrainingArguments)"
            )
        self.schedule.flush()
        self.wait_for_steps()
        for event in self.events.before_clip:
            event()

    # Full parameters --------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages that this rank has sent."""
        return self._wire.traffic

    @contextmanager
    def unsharded(self, *, in_compute_dtype: bool = False) -> Iterator[None]:
        """Keep all full parameters gathered inside, on every rank. A collective. See `zero.unsharded`."""
        context = self.context
        if context.is_unsharded:  # the outer one decides
            yield
            return
        if backward_id() >= 0:
            raise StateError("zero.unsharded cannot begin in a backward. Begin it before the forward")
        self.schedule.quiesce()
        hold = Hold(context, self.units, "zero.unsharded", exact=not in_compute_dtype)
        context.is_unsharded = True
        try:
            yield
            same_on_all_ranks(context)
        finally:
            context.is_unsharded = False
            hold.end(hold.written())

    # End --------------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give model and optimizers back as plain ones, with full parameters and full optimizer state. A collective."""
        self.context.refuse_unsharded("Engine.detach")
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
