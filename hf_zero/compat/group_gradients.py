"""Answers `.grad` of tensors in optimizer groups by lazy gradients of this rank's slices, with norms over all ranks.

So loss scalers, and clipping over `optimizer.param_groups`, work as in plain training. Ranks have different tensors in their
groups, and different numbers of them, so one collective answers for all tensors.

Inside the optimizer's own step gradients are plain tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..core.lazy_grad import DistributedGrad, GradSource
from ..engine.clipping import over_ranks, power_sum
from ..engine.engine import Engine
from ..engine.graph import backward_id
from ..engine.observer import Observer
from ..engine.parameter import place_of
from ..engine.segments import Segment
from ..engine.span import Span
from ..errors import RankMismatchError, StateError
from ..tiers.tier import Tier


class GroupGradients(Observer):
    """Answers `.grad` of the tensors in the groups of one model's optimizers."""

    def attach(self, engine: Engine) -> None:
        self.engine, self._wire, self._device = engine, engine.wire, engine.context.device
        self.is_shared = engine.context.layout.shards > 1
        self._shown: dict[Segment, DistributedGrad] = {}
        self._forget()
        self._report(True)

    def detach(self) -> None:
        self.after_zero_grad()
        self._report(False)

    def _report(self, reports: bool, optimizer: torch.optim.Optimizer | None = None) -> None:
        for binding in self.engine.bindings:
            if optimizer is None or binding.optimizer is optimizer:
                for group in binding.segments:
                    for segment in group:
                        segment.set_reports_access(reports)
                        if not segment.members:
                            segment.is_cleared = False

    # Events -----------------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        self._forget()

    def after_backward(self) -> None:
        self._forget()
        self._report(True)  # also after a step that raised

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._forget()
        self._report(False, optimizer)

    def step_paused(self, optimizer: torch.optim.Optimizer) -> None:
        self._report(True, optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._report(True, optimizer)

    def after_zero_grad(self) -> None:
        self._forget()
        for segment in [segment for segment in self._shown if not segment.has_grad and not self._shows_zeros(segment)]:
            self._retire(segment)

    def gradients_written(self, span: Span) -> None:
        self._norms.clear()

    def segment_grad_read(self, segment: Segment, raw: Tensor | None) -> Tensor | None:
        if backward_id() >= 0:
            return raw
        for event in self.engine.events.before_gradients:
            event()
        arrived = [segment.span.bucket.had_local[index] for index in segment.members]
        # With step_in_backward gradients no longer exist; using them raises an error.
        is_gone = self.engine.config.step_in_backward and any(arrived)
        if not segment.has_grad and not is_gone and not self._shows_zeros(segment):
            return None
        if segment not in self._shown:
            like = torch.empty(segment.shape, dtype=segment.span.master_dtype, device="meta")
            own = raw if not self.is_shared and segment.span.tier is Tier.DEVICE else None
            self._shown[segment] = DistributedGrad(_OfSegment(self, segment, own), like, segment.tensor.device)
        return self._shown[segment]

    def segment_grad_assigned(self, segment: Segment, grad: Tensor | None) -> bool:
        if backward_id() >= 0:
            return False
        if grad is self._shown.get(segment, self):  # `param.grad *= 2`
            return True
        if isinstance(grad, DistributedGrad):
            grad = grad.plain().clone()
        bucket = segment.span.bucket
        if grad is not None:
            self.engine.complete_gradients("assigning a gradient")
            if grad.shape != segment.shape:
                raise StateError(
                    f"a gradient of shape {tuple(grad.shape)} was assigned to a tensor of {tuple(segment.shape)}"
                )
            self._retire(segment, is_replaced=True)
            bucket.write(segment.as_slice, grad.detach().reshape(-1))
            segment.is_cleared = False
            for index in segment.members:
                bucket.present[index] = bucket.had_local[index] = True
        elif segment.has_grad or self._shows_zeros(segment):
            self._retire(segment)
            if segment.has_grad:  # other ranks have other members: parameters keep theirs, as zeros
                segment.span.unit.wait_for_step()
                bucket.write(
                    segment.as_slice, torch.zeros(segment.numel, dtype=segment.span.master_dtype, device="cpu")
                )
            segment.is_cleared = True
            group, params = self._group_of(segment)
            if not any(each.has_grad for each in group):  # all of the group is cleared, on every rank
                for param in params:
                    param.grad = None
        elif self.engine.schedule.holds_gradients:
            segment.is_cleared = True
            group, params = self._group_of(segment)
            if all(each.is_cleared for each in group):  # what `no_sync` left of the group, on every rank
                for param in params:
                    param.grad = None
                for each in group:
                    each.is_cleared = False
        segment.show_grad()
        return True

    def _group_of(self, segment: Segment) -> tuple[list[Segment], list[nn.Parameter]]:
        """Return the segments and the parameters of the group that holds a segment."""
        each = ((group, params) for b in self.engine.bindings for group, params in zip(b.segments, b.originals))
        return next(((group, params) for group, params in each if segment in group), ([], []))

    def _retire(self, segment: Segment, *, is_replaced: bool = False) -> None:
        grad = self._shown.pop(segment, None)
        if grad is not None:
            grad.source.is_alive = False
            if is_replaced and isinstance(grad.source, _OfSegment):
                grad.source.own = None  # its memory is about to be overwritten

    # Over all ranks -----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._norms: dict[float, dict[Segment, Tensor]] = {}  # by order
        self._overflow: Tensor | None = None
        self._left: dict[int, int] = {}  # by group: segments whose derived norm this rank has not asked for yet

    def _groups(self) -> list[list[Segment]]:
        """Return by group the segments that show a gradient."""
        each = ((group, params) for b in self.engine.bindings for group, params in zip(b.segments, b.originals))
        return [self._with_gradient(group, params) for group, params in each]

    @staticmethod
    def _with_gradient(group: list[Segment], params: list[nn.Parameter]) -> list[Segment]:
        """Return a group's segments that show a gradient. If only other ranks have one, the first segment shows zeros.

        So every rank takes part in collectives over a group's gradients.
        """
        found = [segment for segment in group if segment.has_grad]
        if found or any(segment.is_cleared for segment in group):
            return found
        places = [place for param in params if (place := place_of(param)) is not None]
        return group[:1] if any(place.span.bucket.present[place.index] for place in places) else []

    def _shows_zeros(self, segment: Segment) -> bool:
        group, params = self._group_of(segment)
        return segment in group[:1] and segment in self._with_gradient(group, params)

    def _power_sum(self, segments: list[Segment], order: float) -> Tensor:
        values = [each.span.bucket.read(each.as_slice).reshape(-1) for each in segments if each.has_grad]
        return power_sum(values, order, self._device)

    @torch.no_grad()
    def norm(self, segment: Segment, order: float) -> Tensor:
        """Return a segment's part of its group's norm: all of it for this rank's first segment, else nothing.

        One collective answers for all segments, until user code asks for one again.
        """
        if segment not in self._norms.get(order, ()):
            groups = self._groups()
            powers = torch.stack([self._power_sum(group, order) for group in groups])
            norms = over_ranks(powers, order, self._wire, is_shared=self.is_shared)
            nothing = torch.full_like(norms[0], float("inf") if order < 0 else 0.0)
            self._norms[order] = {each: nothing for group in groups for each in group}
            self._norms[order] |= {group[0]: norm for group, norm in zip(groups, norms) if group}
        return self._norms[order].pop(segment)

    @torch.no_grad()
    def norm_of(self, segment: Segment, values: Tensor, order: float) -> Tensor:
        """Return the norm of values computed from a segment's gradient. Each rank must ask once per segment of the group.

        A rank with fewer segments joins the other ranks' remaining collectives at its last one.

        Raises:
            RankMismatchError: another rank asks for another group, or for a norm of another order.
        """
        powers = [power_sum([values.reshape(-1)], order, self._device)]
        if self.is_shared:
            number, group = next((number, each) for number, each in enumerate(self._groups()) if segment in each)
            self._left[number] = left = (self._left.get(number) or len(group)) - 1
            mine, waits = float(powers.pop()), True
            while waits:
                answers = (self._wire.shard_group or self._wire).exchange((number, order, left, mine))
                if any(each[:2] != (number, order) for each in answers):
                    raise RankMismatchError(
                        f"norms of values computed from gradients of the optimizer's groups: rank {self._wire.rank} asks for "
                        f"order {order} of group {number}, others for something else. Take norms group by group, one order "
                        "at a time"
                    )
                powers += [torch.tensor(each[3], dtype=torch.float64, device=self._device) for each in answers]
                mine = float(power_sum([], order, self._device))
                waits = left == 0 and any(each[2] for each in answers)
        together = torch.stack(powers)
        power = together.max() if math.isinf(order) else together.sum()
        return over_ranks(power, order, self._wire, is_shared=False)

    @torch.no_grad()
    def overflow(self, segment: Segment) -> Tensor:
        """Return 1 (0-dim) if a gradient of the segment's optimizer is not finite on any rank. One collective for all."""
        bindings = self.engine.bindings
        if self._overflow is None:
            found = [[each for group in binding.segments for each in group] for binding in bindings]
            flags = torch.stack([~self._power_sum(segments, float("inf")).isfinite() for segments in found])
            self._overflow = self._wire.max_scalar(flags.float())
        number = next(
            number for number, each in enumerate(bindings) if any(segment in group for group in each.segments)
        )
        return self._overflow[number]


class _OfSegment(GradSource):
    """The reduced gradient of the elements that an optimizer's group holds on this rank."""

    def __init__(self, gradients: GroupGradients, segment: Segment, own: Tensor | None) -> None:
        self._gradients, self._segment = gradients, segment
        self.own, self.is_slice = own, own is None
        """The elements, if this rank has all: they stay usable after the gradient is cleared, as in plain training."""

    def _check(self) -> None:
        self.check_alive("a gradient of the optimizer's groups")
        self._gradients.engine.complete_gradients("using a gradient of the optimizer's groups")

    def values(self) -> Tensor:
        if self.own is not None:
            return self.own
        self._check()
        segment = self._segment
        if not segment.has_grad:
            return torch.zeros(segment.shape, dtype=segment.span.master_dtype, device=segment.tensor.device)
        return segment.span.bucket.read(segment.as_slice).view(segment.shape)

    def write(self, values: Tensor) -> None:
        if not self._segment.has_grad:
            self._gradients.gradients_written(self._segment.span)
        elif self.is_alive:
            self._segment.span.bucket.write(self._segment.as_slice, values.reshape(-1))

    def norm(self, order: float) -> Tensor:
        if self.own is not None:
            return self._gradients.norm_of(self._segment, self.own, order)
        self._check()
        return self._gradients.norm(self._segment, order)

    def overflow(self) -> Tensor:
        if self.own is not None:
            return torch.zeros((), device="cpu")
        self._check()
        return self._gradients.overflow(self._segment)

    def derived(self, values: Tensor) -> GradSource:
        return _Derived(self._gradients, self._segment, values)


class _Derived(GradSource):
    """A result computed element by element from a gradient of the groups."""

    is_slice = True

    def __init__(self, gradients: GroupGradients, segment: Segment, values: Tensor) -> None:
        self._gradients, self._segment, self._values = gradients, segment, values

    def values(self) -> Tensor:
        return self._values

    def write(self, values: Tensor) -> None:
        if values.data_ptr() != self._values.data_ptr():
            self._values.copy_(values)

    def norm(self, order: float) -> Tensor:
        return self._gradients.norm_of(self._segment, self._values, order)

    def derived(self, values: Tensor) -> GradSource:
        return _Derived(self._gradients, self._segment, values)
