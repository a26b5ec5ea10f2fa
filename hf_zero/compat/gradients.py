"""`.grad` of sharded parameters, and of what optimizer groups hold, as lazy gradients (`core/lazy_grad.py`).

* A parameter's gradient has its true shape. Reading its values gathers its span, a collective; writes go to the owners.
* A group's gradient is this rank's slice, whose norm is that over all ranks: torch's clipping over `param_groups` is right.
* Gradients that are not reduced (`no_sync`, hooks inside a backward) are this rank's own plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agree import read
from ..core.lazy_grad import DistributedGrad, Source
from ..engine.clipping import over_ranks, power_sum, power_sums
from ..engine.engine import Engine
from ..engine.graph import backward_id
from ..engine.observer import Observer
from ..engine.parameter import Place, place_of, raw_grad, set_raw_grad
from ..engine.segments import Segment
from ..engine.span import Span
from ..errors import StateError
from ..tiers.tier import Tier


class Gradients(Observer):
    """Answers `.grad` of one model's parameters and optimizer groups."""

    def attach(self, engine: Engine) -> None:
        self._engine, self._wire = engine, engine.context.wire
        self._is_shared = engine.context.layout.shards > 1
        self._shown: dict[Place | Segment, DistributedGrad] = {}
        self._changed: dict[Span, set[int]] = {}
        """Spans in which `.grad` was assigned, and the parameters that were cleared. Optimizers do not see it yet."""
        self._forget()
        self._report(True)

    def detach(self) -> None:
        for grad in self._shown.values():
            grad.source.is_alive = False
        self._shown.clear()
        self._report(False)

    def _report(self, reports: bool, optimizer: torch.optim.Optimizer | None = None) -> None:
        for binding in self._engine.bindings:
            if optimizer is None or binding.optimizer is optimizer:
                for group in binding.segments:
                    for segment in group:
                        segment.report_grad(reports)

    # Events -----------------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        self.settle()
        self._forget()

    def after_backward(self) -> None:
        self._forget()
        self._report(True)

    def before_clip(self) -> None:
        self.settle()
        self._forget()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.settle()
        self._forget()
        self._report(False, optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._report(True, optimizer)

    def after_zero_grad(self) -> None:
        self._forget()
        for key in [key for key in self._shown if not self._has_grad(key)]:
            self._retire(key)

    def grad_read(self, param: nn.Parameter, raw: Tensor | None) -> Tensor | None:
        place = _place(param)
        if self._in_backward:
            return raw
        bucket = place.span.bucket
        if not self._has_grad(place):
            return raw if raw is not None else bucket.held(place.index)
        return self._show(place, lambda: OfParameter(self, place))

    def segment_grad_read(self, segment: Segment, raw: Tensor | None) -> Tensor | None:
        if self._in_backward:
            return raw
        self.settle()
        if not self._has_grad(segment):
            return None
        if not self._is_shared and segment.span.tier is Tier.DEVICE and raw is not None:
            return raw
        return self._show(segment, lambda: OfSegment(self, segment))

    def grad_assigned(self, param: nn.Parameter, grad: Tensor | None) -> bool:
        place = _place(param)
        span, index, bucket = place.span, place.index, place.span.bucket
        if self._in_backward or not span.trainable:
            return False
        if grad is None:
            self._clear(place)
            return True
        if isinstance(grad, DistributedGrad):
            if grad is self._shown.get(place):
                return True  # `param.grad *= 2`
            grad = grad.plain().clone()
        _check_shape(grad, param.shape, span.name_of(index))
        if bucket.grad is None and bucket.has_local:  # this rank's own, to be reduced
            held = bucket.held(index)
            if held is not None:
                held.copy_(grad)
            set_raw_grad(param, grad.to(param.dtype) if held is None else None)
            return True
        self._make_ready(span)
        self.forget_values()
        part = span.part_of(index)
        here = slice(0, 0) if part is None else part.here
        values = grad.detach().reshape(-1)[slice(0, 0) if part is None else part.there].to(span.master_dtype)
        read(self._wire, lambda: bucket.write(here, values), may_fail=span.context.storage.uses_disk)
        bucket.present[index] = bucket.arrived[index] = True
        self._changed.setdefault(span, set()).discard(index)
        return True

    def segment_grad_assigned(self, segment: Segment, grad: Tensor | None) -> bool:
        if self._in_backward:
            return False
        if isinstance(grad, DistributedGrad):
            if grad is self._shown.get(segment):
                return True
            grad = grad.plain().clone()
        if grad is None and not self._has_grad(segment):
            return True
        bucket = segment.span.bucket
        self._make_ready(segment.span)
        self._forget()
        if grad is None:
            self._retire(segment)
            segment.is_cleared = True
            bucket.write(segment.here, torch.zeros(segment.numel, dtype=segment.span.master_dtype))
        else:
            _check_shape(grad, segment.shape, "an optimizer's parameter")
            bucket.write(segment.here, grad.detach().reshape(-1))
            segment.is_cleared = False
            for index in segment.members:
                bucket.present[index] = bucket.arrived[index] = True
        segment.show_grad()
        return True

    # What is shown ------------------------------------------------------------------------------------------------------

    @property
    def _in_backward(self) -> bool:
        return backward_id() >= 0 or self._engine.schedule.in_backward

    def _has_grad(self, key: Place | Segment) -> bool:
        bucket = key.span.bucket
        members = key.members if isinstance(key, Segment) else (key.index,)
        if self._engine.context.config.step_in_backward:  # reading it raises
            return any(bucket.arrived[index] for index in members)
        return key.has_grad if isinstance(key, Segment) else bucket.present[key.index]

    def _show(self, key: Place | Segment, source: Callable[[], Source]) -> DistributedGrad:
        grad = self._shown.get(key)
        if grad is None:
            span = key.span
            shape = key.shape if isinstance(key, Segment) else span.layout.slots[key.index].spec.shape
            like = torch.empty(shape, dtype=span.master_dtype, device="meta")
            device = key.tensor.device if isinstance(key, Segment) else span.device
            grad = self._shown[key] = DistributedGrad(source(), like, device)
        return grad

    def _retire(self, key: Place | Segment) -> None:
        grad = self._shown.pop(key, None)
        if grad is not None:
            grad.source.is_alive = False

    def _clear(self, place: Place) -> None:
        span, index, bucket = place.span, place.index, place.span.bucket
        set_raw_grad(span.params[index], None)
        if (held := bucket.held(index)) is not None:
            held.zero_()
        bucket.arrived[index] = False
        if not bucket.present[index]:
            return
        self._retire(place)
        self._forget()
        bucket.present[index] = False
        self._changed.setdefault(span, set()).add(index)
        if True not in bucket.present:
            del self._changed[span]
            span.unit.wait_for_step()
            bucket.clear(local=False)
            self._engine.fit_segments(span)

    def settle(self) -> None:
        """Optimizers see what was assigned to `.grad` of parameters."""
        if not self._is_shared:
            self._take_replaced()
        changed, self._changed = self._changed, {}
        for span, cleared in changed.items():
            span.unit.wait_for_step()
            for index in cleared:
                part = span.part_of(index)
                if part is not None and span.bucket.grad is not None:
                    span.bucket.write(part.here, torch.zeros(part.numel, dtype=span.master_dtype))
            self._engine.fit_segments(span)
        if changed:
            self._report(True)

    def _take_replaced(self) -> None:
        """Copy plain gradients of the groups that were given other memory: `param.grad.data = values`."""
        for span in self._engine.trained:
            grad = span.bucket.grad
            if not isinstance(grad, Tensor) or span.tier is not Tier.DEVICE:
                continue
            for segment in span.segments:
                raw = raw_grad(segment.tensor)
                if raw is not None and raw.data_ptr() != grad[segment.here].data_ptr():
                    span.bucket.write(segment.here, raw.reshape(-1))
                    segment.show_grad()

    def ready(self, source: Source, span: Span, what: str) -> None:
        """
        Raises:
            StateError: the gradient cannot be used now.
        """
        if not source.is_alive:
            raise StateError(f"{what} has been cleared since it was read. Keep a `clone()` of it instead")
        if self._engine.context.config.step_in_backward:
            raise StateError(
                f"{what}: step_in_backward updates parameters in the backward and keeps no gradients. Set it to False"
            )
        if self._in_backward:
            raise StateError(
                f"{what} was used inside a backward, before those of all ranks are there. Use it after the backward"
            )
        self._make_ready(span)

    def _make_ready(self, span: Span) -> None:
        self.settle()
        self._engine.schedule.flush()  # what waits on this rank is a part of it
        span.unit.wait_for_step()

    # Values -------------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._overflow: dict[Any, Tensor] | None = None
        self._rounds: list[int] = []
        self.forget_values()

    def forget_values(self) -> None:
        """Gradients have other values now."""
        self._whole: tuple[Span, Tensor] | None = None
        self._norms: dict[Place | Segment, Tensor] = {}
        self._order: object = None

    @torch.no_grad()
    def gathered(self, span: Span) -> Tensor:
        """The reduced gradient of a span, all ranks' slices. A collective, but for the span that was gathered last."""
        if self._whole is None or self._whole[0] is not span:
            self._whole = None
            mine = read(
                self._wire,
                lambda: span.bucket.read(slice(0, span.local_numel)).to(span.device),
                may_fail=span.context.storage.uses_disk,
            )
            whole = mine
            if span.layout.shards > 1:
                whole = torch.empty(span.layout.numel, dtype=span.master_dtype, device=span.device)
                self._wire.gather(whole, mine, span.layout.index, span.layout.cuts).close()
            self._whole = span, whole
        return self._whole[1]

    def norm(self, place: Place, order: float) -> Tensor:
        """A parameter's. The first question is answered for all parameters, in one collective."""
        if not self._is_shared:  # a loss scaler writes to plain gradients of the groups, and no event tells
            return self._parameter_norms(order, place.span)[place]
        if place not in self._norms or self._order != order:
            self._norms = self._parameter_norms(order)
            self._order = order
        return self._norms.pop(place)

    @torch.no_grad()
    def _parameter_norms(self, order: float, only: Span | None = None) -> dict[Place | Segment, Tensor]:
        places: list[Place | Segment] = []
        powers: list[Tensor] = []

        def measure() -> None:
            for span in self._engine.trained if only is None else (only,):
                having = [index for index, present in enumerate(span.bucket.present) if present]
                if span.bucket.grad is None or not having:
                    continue
                span.unit.wait_for_step()
                parts = [span.part_of(index) for index in having]
                values = [span.bucket.read(slice(0, 0) if part is None else part.here) for part in parts]
                places.extend(_place(span.params[index]) for index in having)
                powers.append(power_sums(values, order).to(span.device))

        read(self._wire, measure, may_fail=self._engine.context.storage.uses_disk)
        norms = over_ranks(torch.cat(powers), order, self._wire, is_shared=self._is_shared)
        return dict(zip(places, norms.unbind()))

    # Of the groups ------------------------------------------------------------------------------------------------------

    def group_norm(self, segment: Segment, order: float) -> Tensor:
        """A segment's part of its group's norm over all ranks: all of it at a group's first segment, nothing at the others.

        Ranks have different segments, and one collective answers for all of them, until a segment is asked for again.
        """
        if segment not in self._norms or self._order != ("groups", order):
            self._norms = self._segment_norms(order)
            self._order = "groups", order
        return self._norms.pop(segment)

    @torch.no_grad()
    def _segment_norms(self, order: float) -> dict[Place | Segment, Tensor]:
        groups = [[each for each in group if each.has_grad] for b in self._engine.bindings for group in b.segments]
        nothing = torch.zeros((), dtype=torch.float64, device=self._engine.context.device)
        local = [self._power_sum(group, order) for group in groups]
        norms = over_ranks(torch.stack(local), order, self._wire, is_shared=self._is_shared)
        found: dict[Place | Segment, Tensor] = {segment: nothing for group in groups for segment in group}
        # A rank without elements of a group counts that group's norm at the first segment that it has.
        missing = [norm for group, norm in zip(groups, norms) if not group]
        is_first = True
        for group, norm in zip(groups, norms):
            if group:
                both = torch.stack([norm, *missing]) if is_first and missing else norm
                found[group[0]] = torch.linalg.vector_norm(both, order) if both.dim() else norm
                is_first = False
        return found

    def _power_sum(self, segments: list[Segment], order: float) -> Tensor:
        for segment in segments:
            segment.span.unit.wait_for_step()
        parts = [segment.span.bucket.read(segment.here) for segment in segments]
        device = self._engine.context.device
        sums = [power_sum([part], order).to(device) for part in parts]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(sums).max() if order == float("inf") else torch.stack(sums).sum()

    @torch.no_grad()
    def derived_norm(self, values: Tensor, order: float) -> Tensor:
        """The norm over all ranks of what was computed from a segment's gradient. The ranks ask for each of theirs once.

        A rank with fewer segments takes part in the other ranks' collectives at its last one.
        """
        if not self._rounds:
            mine = sum(segment.has_grad for b in self._engine.bindings for group in b.segments for segment in group)
            most = max(self._wire.exchange(mine))
            self._rounds = [1] * (mine - 1) + [1 + most - mine]
        device = self._engine.context.device
        powers = torch.zeros((), dtype=torch.float64, device=device)
        local = power_sum([values.reshape(-1)], order).to(device)
        for number in range(self._rounds.pop(0)):
            norm = over_ranks(local if number == 0 else local * 0, order, self._wire, is_shared=self._is_shared)
            powers = torch.linalg.vector_norm(torch.stack([powers, norm]), order)
        return powers

    @torch.no_grad()
    def overflow(self, segment: Segment) -> Tensor:
        """0-dim: 1 where any rank has a gradient of the segment's optimizer that is not finite. One collective for all."""
        if self._overflow is None:
            device = self._engine.context.device
            flags = torch.zeros(len(self._engine.bindings), dtype=torch.float32, device=device)
            for number, binding in enumerate(self._engine.bindings):
                having = [each for group in binding.segments for each in group if each.has_grad]
                if having:
                    flags[number] = (~self._power_sum(having, float("inf")).isfinite()).float()
            flags = self._wire.max_scalar(flags)
            self._overflow = {b.optimizer: flag for b, flag in zip(self._engine.bindings, flags.unbind())}
        for binding in self._engine.bindings:
            if any(segment in group for group in binding.segments):
                return self._overflow[binding.optimizer]
        return torch.zeros(())


def _place(param: nn.Parameter) -> Place:
    place = place_of(param)
    if place is None:
        raise StateError("a parameter belongs to no sharded model")
    return place


def _check_shape(grad: Tensor, shape: torch.Size, name: str) -> None:
    if grad.shape != shape:
        raise StateError(f"{name}: a gradient of shape {tuple(grad.shape)} was assigned, expected {tuple(shape)}")


# Sources ----------------------------------------------------------------------------------------------------------------


class OfParameter(Source):
    """The reduced gradient of a parameter."""

    def __init__(self, gradients: Gradients, place: Place) -> None:
        self.gradients, self.place = gradients, place
        self.span, self.part = place.span, place.span.part_of(place.index)

    def ready(self) -> None:
        self.gradients.ready(self, self.span, f"the gradient of {self.span.name_of(self.place.index)!r}")

    def values(self) -> Tensor:
        self.ready()
        slot = self.span.layout.slots[self.place.index]
        return self.gradients.gathered(self.span)[slot.offset : slot.stop].view(slot.spec.shape)

    def write(self, values: Tensor) -> None:
        flat = values.reshape(-1)
        self.change(lambda elements, part: elements.copy_(part(flat)))

    def change(self, run: Callable[[Tensor, Callable[[Tensor], Tensor]], object]) -> None:
        self.ready()
        self.gradients.forget_values()
        bucket, part = self.span.bucket, self.part

        def change() -> None:
            if part is not None:
                elements = bucket.read(part.here)
                run(elements, lambda other: other.reshape(-1)[part.there].to(elements.device))
                bucket.write(part.here, elements)

        read(self.span.context.wire, change, may_fail=self.span.context.storage.uses_disk)

    def norm(self, order: float) -> Tensor:
        self.ready()
        return self.gradients.norm(self.place, order)


class OfSegment(Source):
    """The reduced gradient of the elements that an optimizer's group holds on this rank."""

    is_slice = True

    def __init__(self, gradients: Gradients, segment: Segment) -> None:
        self.gradients, self.segment = gradients, segment

    def ready(self) -> None:
        self.gradients.ready(self, self.segment.span, "a gradient of the optimizer's groups")

    def values(self) -> Tensor:
        self.ready()
        return self.segment.span.bucket.read(self.segment.here).view(self.segment.shape)

    def write(self, values: Tensor) -> None:
        self.ready()
        self.gradients.forget_values()
        self.segment.span.bucket.write(self.segment.here, values.reshape(-1))

    def norm(self, order: float) -> Tensor:
        self.ready()
        return self.gradients.group_norm(self.segment, order)

    def overflow(self) -> Tensor:
        self.ready()
        return self.gradients.overflow(self.segment)

    def derived(self, values: Tensor) -> Source:
        return Derived(self.gradients, values)


class Derived(Source):
    """What was computed element by element from a gradient of the groups."""

    is_slice = True

    def __init__(self, gradients: Gradients, values: Tensor) -> None:
        self.gradients, self._values = gradients, values

    def derived(self, values: Tensor) -> Source:
        return Derived(self.gradients, values)

    def values(self) -> Tensor:
        return self._values

    def write(self, values: Tensor) -> None:
        if values.data_ptr() != self._values.data_ptr():
            self._values.copy_(values)

    def norm(self, order: float) -> Tensor:
        return self.gradients.derived_norm(self._values, order)
