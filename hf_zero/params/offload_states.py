"""Offload states for a while: move everything stored on the device to host memory, and back.

Spans, segments and the optimizer's tensors stay the same objects over other memory, so their values can still be read.
Forwards, steps and saves raise until `reload`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.binding import Binding
from ..engine.context import Context
from ..engine.span import Span
from ..engine.unit import State
from ..tiers.array import Values
from ..tiers.host import empty_cache
from ..tiers.tier import Tier


class StateOffload:
    """Moves everything that one model stores, once. Requires released units and no running transfers."""

    def __init__(self, context: Context, bindings: Sequence[Binding]) -> None:
        self._context, self._bindings = context, bindings
        self._spans = [span for unit in context.units for span in unit.spans]
        self._states: list[Tensor] = []
        self._aliases: set[Span] = set()  # spans whose masters shared the memory of `local`

    @torch.inference_mode(False)  # the optimizer updates what is allocated here
    @torch.no_grad()
    def offload(self) -> None:
        """Move everything to host memory."""
        stays = [*dict.fromkeys(span.unit for span in self._spans if span.is_persistent)]
        for unit in stays:
            for event in self._context.events.unit_released:  # observers write user code's edits to the masters
                event(unit)
        self._context.states_offloaded = True
        for span in self._spans:
            self._offload_span(span)
        for unit in stays:
            unit.state = State.SHARDED
            unit.intercept_all_reads()
        for span in self._spans:
            if span.is_persistent:
                span.drop()
        for binding in self._bindings:
            for entries in dict.values(binding.optimizer.state):
                for value in entries.values():
                    if isinstance(value, Tensor) and value.device == self._context.device:
                        value.data = value.to("cpu", copy=True)
                        self._states.append(value)
        empty_cache(self._context.device)

    def _offload_span(self, span: Span) -> None:
        cpu = torch.device("cpu")
        self._move_grad(span, cpu)
        if span.tier is Tier.DEVICE:
            if span.master_is_local:
                self._aliases.add(span)
            span.use_master(_copy_to(span.master, cpu))
        if span.copy is not None and span.copy_tier is Tier.DEVICE:
            span.copy = _copy_to(span.copy, cpu)
        for segment in span.segments:
            segment.show_grad()

    @torch.inference_mode(False)  # the optimizer updates what is allocated here
    @torch.no_grad()
    def reload(self) -> None:
        """Move everything back. A collective where the stage keeps full parameters."""
        context, full = self._context, [span for span in self._spans if span.is_persistent]
        for span in full:
            span.restore()
        for span in self._spans:
            if span in self._aliases:
                span.local.copy_(span.values())
                span.use_master(span.local)
            elif span.tier is Tier.DEVICE:
                span.use_master(_copy_to(span.master, context.device))
            if span.copy is not None and span.copy_tier is Tier.DEVICE:
                span.copy = _copy_to(span.copy, context.device)
        for value in self._states:
            value.data = value.to(context.device, copy=True)
        for span in full:
            span.publish()
            span.is_old = True
        context.states_offloaded = False
        units = {} if context.reshards else {span.unit: None for span in full}
        for unit in units:
            unit.gather()
        for unit in units:
            unit.wait()
        for span in self._spans:
            self._move_grad(span, context.device)
            for segment in span.segments:
                segment.show_grad()

    def _move_grad(self, span: Span, device: torch.device) -> None:
        if isinstance(span.bucket.grad, Tensor) and span.bucket.tier is Tier.DEVICE:
            span.bucket.grad = span.bucket.grad.to(device, copy=True)


def _copy_to(values: Values, device: torch.device) -> Tensor:
    return values.to(device, copy=True) if isinstance(values, Tensor) else values.read().to(device)
