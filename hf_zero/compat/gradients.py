"""Answers `.grad` of sharded parameters by lazy gradients (`core/lazy_grad.py`), whose elements stay on their owner ranks.

Norms need one collective for all parameters. Element-wise writes change the owners' elements. Any other use gathers the span,
a collective. Gradients that are not reduced (`no_sync`, hooks inside a backward) are this rank's own plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..comm.agreement import read_on_all_ranks
from ..core.lazy_grad import DistributedGrad, GradSource
from ..engine.bucket import have_local
from ..engine.clipping import over_ranks, power_sums
from ..engine.engine import Engine
from ..engine.graph import backward_id
from ..engine.observer import Observer
from ..engine.parameter import Place, place_of, set_raw_grad
from ..engine.span import Span
from ..errors import StateError


class Gradients(Observer):
    """Answers `.grad` of one model's parameters."""

    def attach(self, engine: Engine) -> None:
        self.engine, self._wire, self._may_fail = engine, engine.wire, engine.context.storage.uses_disk
        self._shown: dict[Place, DistributedGrad] = {}
        self._changed: dict[Span, set[int]] = {}
        """Spans in which `.grad` was assigned, with the parameters that were cleared. Optimizers do not see it yet."""
        self._forget()

    def detach(self) -> None:
        for place in [*self._shown]:
            self._retire(place)

    # Events -----------------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        self.before_gradients()
        self._forget()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.before_gradients()
        self._forget()

    def before_gradients(self) -> None:
        """Show optimizers the assigned gradients. Must be late: most programs clear all gradients, one after another."""
        changed, self._changed = self._changed, {}
        for span, cleared in changed.items():
            for index in cleared:
                self._store(span, index, None)
            self.engine.fit_segments(span)

    def after_zero_grad(self) -> None:
        self._forget()
        for place in [place for place in self._shown if not self._has_grad(place)]:
            self._retire(place)

    def gradients_written(self, span: Span) -> None:
        self._forget()

    def grad_read(self, param: nn.Parameter, raw: Tensor | None) -> Tensor | None:
        if backward_id() >= 0:
            return raw
        place = _place(param)
        span, index = place.span, place.index
        if not self._has_grad(place):
            return raw if raw is not None else span.bucket.held(index)
        if place not in self._shown:
            like = torch.empty(span.layout.slots[index].spec.shape, dtype=span.master_dtype, device="meta")
            self._shown[place] = DistributedGrad(_OfParameter(self, place), like, span.device)
        return self._shown[place]

    def grad_assigned(self, param: nn.Parameter, grad: Tensor | None) -> bool:
        place = _place(param)
        span, index, bucket = place.span, place.index, place.span.bucket
        if backward_id() >= 0 or not (span.trainable or bucket.grad is not None):
            return False
        if grad is None:
            self._clear(place)
            return True
        if grad is self._shown.get(place):  # `param.grad *= 2`
            return True
        if isinstance(grad, DistributedGrad):
            grad = grad.plain().clone()
        if grad.shape != param.shape:
            raise StateError(
                f"a gradient of shape {tuple(grad.shape)} was assigned to {span.name_of(index)!r} of {tuple(param.shape)}"
            )
        # Must depend on state that all ranks share: on one of them a backward may not have reached the parameter.
        if bucket.grad is None and (have_local([bucket]) or self.engine.schedule.holds_gradients):
            held = bucket.held(index)
            if held is not None:
                held.copy_(grad)
            set_raw_grad(param, grad.to(param.dtype) if held is None else None)
            return True
        self.engine.complete_gradients("assigning a gradient")
        self._retire(place)  # user code may keep it: in plain torch it would be the previous gradient
        self._store(span, index, grad.detach())
        bucket.present[index] = bucket.had_local[index] = True
        self._changed.setdefault(span, set()).discard(index)
        return True

    # Lifetime of gradients ----------------------------------------------------------------------------------------------

    def _has_grad(self, place: Place) -> bool:
        bucket = place.span.bucket
        # With step_in_backward gradients no longer exist; using them raises an error.
        return (bucket.had_local if self.engine.config.step_in_backward else bucket.present)[place.index]

    def _retire(self, place: Place) -> None:
        grad = self._shown.pop(place, None)
        if grad is not None:
            grad.source.is_alive = False

    def _clear(self, place: Place) -> None:
        span, index, bucket = place.span, place.index, place.span.bucket
        set_raw_grad(span.params[index], None)
        if (held := bucket.held(index)) is not None:
            held.zero_()
        bucket.had_local[index] = False
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
            self.engine.fit_segments(span)

    def _store(self, span: Span, index: int, grad: Tensor | None) -> None:
        """Write this rank's elements of a parameter's gradient; None: zeros."""
        part = span.part_of(index)
        here, there = (slice(0, 0), slice(0, 0)) if part is None else (part.as_slice, part.source_slice)
        values = grad.reshape(-1)[there] if grad is not None else torch.zeros(here.stop - here.start, device="cpu")
        span.unit.wait_for_step()
        read_on_all_ranks(
            self._wire, lambda: span.bucket.write(here, values.to(span.master_dtype)), may_fail=self._may_fail
        )

    # Values -------------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._whole: tuple[Span, Tensor] | None = None
        self._norms: dict[float, dict[Place, Tensor]] = {}  # by order

    @torch.no_grad()
    def gathered(self, span: Span) -> Tensor:
        """Return all ranks' slices of a span's reduced gradient. A collective, except for the span gathered last."""
        if self._whole is None or self._whole[0] is not span:
            self._whole, mine = None, slice(0, span.local_numel)
            own = read_on_all_ranks(self._wire, lambda: span.bucket.read(mine).to(span.device), may_fail=self._may_fail)
            whole = own
            if span.layout.shards > 1:
                whole = torch.empty(span.layout.numel, dtype=span.master_dtype, device=span.device)
                self._wire.gather(whole, own, span.layout.index, span.layout.cuts).close()
            self._whole = span, whole
        return self._whole[1]

    def change(self, place: Place, run: Callable[[Tensor, Callable[[Tensor], Tensor]], object]) -> None:
        bucket, part = place.span.bucket, place.span.part_of(place.index)

        def change() -> None:
            if part is not None:
                elements = bucket.read(part.as_slice)
                run(elements, lambda other: other.reshape(-1)[part.source_slice].to(elements.device))
                bucket.write(part.as_slice, elements)

        read_on_all_ranks(self._wire, change, may_fail=self._may_fail)
        self._forget()

    @torch.no_grad()
    def norm(self, place: Place, order: float) -> Tensor:
        """Return the norm of one gradient. The first call computes all; a second call for a parameter computes all again."""
        if place not in self._norms.get(order, ()):
            places: list[Place] = []
            powers: list[Tensor] = []

            def measure() -> None:
                for span in self.engine.trained:
                    having = [index for index, present in enumerate(span.bucket.present) if present]
                    if span.bucket.grad is not None and having:
                        parts = [span.part_of(index) for index in having]
                        values = [span.bucket.read(slice(0, 0) if part is None else part.as_slice) for part in parts]
                        places.extend(_place(span.params[index]) for index in having)
                        powers.append(power_sums(values, order).to(span.device))

            read_on_all_ranks(self._wire, measure, may_fail=self._may_fail)
            is_shared = self.engine.context.layout.shards > 1
            norms = over_ranks(torch.cat(powers), order, self._wire, is_shared=is_shared)
            self._norms[order] = dict(zip(places, norms.unbind()))
        return self._norms[order].pop(place)


class _OfParameter(GradSource):
    """The reduced gradient of a parameter."""

    def __init__(self, gradients: Gradients, place: Place) -> None:
        self._gradients, self._place = gradients, place

    def _check(self) -> str:
        name = self._place.span.name_of(self._place.index)
        self.check_alive(f"the gradient of {name!r}")
        self._gradients.engine.complete_gradients(f"using the gradient of {name!r}")
        return f"a read of the gradient of {name}"

    def values(self) -> Tensor:
        slot, gradients = self._place.span.layout.slots[self._place.index], self._gradients
        with gradients.engine.wire.watch.operation(self._check()):
            return gradients.gathered(self._place.span)[slot.offset : slot.stop].view(slot.spec.shape)

    def write(self, values: Tensor) -> None:
        self.change(lambda elements, part: elements.copy_(part(values)))

    def change(self, run: Callable[[Tensor, Callable[[Tensor], Tensor]], object]) -> None:
        self._check()
        self._gradients.change(self._place, run)

    def norm(self, order: float) -> Tensor:
        with self._gradients.engine.wire.watch.operation(self._check()):
            return self._gradients.norm(self._place, order)


def _place(param: nn.Parameter) -> Place:
    place = place_of(param)
    if place is None:
        raise StateError("a parameter belongs to no sharded model")
    return place
