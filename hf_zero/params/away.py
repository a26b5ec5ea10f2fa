"""Make room for other programs on the device: move what is stored there to host memory, and back.

Spans, segments and the optimizer's tensors stay the same objects. Only their memory is another, so what is moved can be read
meanwhile. All that computes with it raises until it is back (`Context.away`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.context import Context
from ..engine.optimizer import Binding
from ..engine.span import Span
from ..engine.unit import State
from ..tiers.array import Values
from ..tiers.host import empty_cache
from ..tiers.tier import Tier


class Away:
    """Moves all that one model stores, once. Nothing is gathered that the stage releases, and nothing is under way."""

    def __init__(self, context: Context, bindings: Sequence[Binding]) -> None:
        self._context, self._bindings = context, bindings
        self._states: list[Tensor] = []
        self._masters: list[tuple[Span, bool]] = []  # and whether it was the memory of `local`
        self._copies: list[Span] = []
        self._full: list[Span] = []
        self._gradients: list[Span] = []

    @torch.no_grad()
    def leave(self) -> None:
        """Move everything to host memory."""
        self._context.away = True
        for unit in self._context.units:
            for span in unit.spans:
                self._leave(span)
            if any(span.stays for span in unit.spans):
                unit.state = State.SHARDED
                unit.intercept_all_reads()
                for span in unit.spans:
                    if span.stays:
                        span.drop()
                        self._full.append(span)
        for binding in self._bindings:
            for entries in dict.values(binding.optimizer.state):
                for value in entries.values():
                    if isinstance(value, Tensor) and value.device == self._context.device:
                        value.data = value.to("cpu", copy=True)
                        self._states.append(value)
        empty_cache(self._context.device)

    def _leave(self, span: Span) -> None:
        bucket = span.bucket
        if isinstance(bucket.grad, Tensor) and bucket.tier is Tier.DEVICE:
            bucket.grad = bucket.grad.to("cpu", copy=True)
            self._gradients.append(span)
        if span.tier is Tier.DEVICE:
            self._masters.append((span, span.is_alias))
            span.use_master(_moved(span.master, torch.device("cpu")))
        if span.copy is not None and span.copy_tier is Tier.DEVICE:
            span.copy = _moved(span.copy, torch.device("cpu"))
            self._copies.append(span)
        for segment in span.segments:
            segment.show_grad()

    @torch.no_grad()
    def come_back(self) -> None:
        """Move everything back. A collective where the stage keeps full parameters."""
        context = self._context
        for span in self._full:
            span.restore()
        for span, is_alias in self._masters:
            if is_alias:
                span.local.copy_(span.values())
                span.use_master(span.local)
            else:
                span.use_master(_moved(span.master, context.device))
        for span in self._copies:
            if span.copy is not None:
                span.copy = _moved(span.copy, context.device)
        for value in self._states:
            value.data = value.to(context.device, copy=True)
        for span in self._full:
            span.publish()
            span.is_old = True
        context.away = False
        units = {} if context.frees else {span.unit: None for span in self._full}
        for unit in units:
            unit.gather()
        for unit in units:
            unit.wait()
        for span in self._gradients:
            if isinstance(span.bucket.grad, Tensor):  # no `zero_grad` since
                span.bucket.grad = span.bucket.grad.to(context.device, copy=True)
        for unit in context.units:
            for span in unit.spans:
                for segment in span.segments:
                    segment.show_grad()


def _moved(values: Values, device: torch.device) -> Tensor:
    return values.to(device, copy=True) if isinstance(values, Tensor) else values.read().to(device)
