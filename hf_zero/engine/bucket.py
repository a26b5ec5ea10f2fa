"""Gradients of one span: from the parameters into one buffer, over the wire, to the slice that this rank owns.

* `source`: this rank's local gradients as one 1-D buffer in the reduce dtype.
* `grad`: 1-D, the mean over ranks of this rank's slice, in the master dtype; it adds up over the backwards of a step.
* `held`: local gradients that wait for a later backward to be reduced (`no_sync` at stages 0 and 1).
* `present`: which parameters have a gradient on any rank. A parameter without one keeps its value and its state.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm.inflight import DONE, Inflight
from ..comm.wire import SoloWire
from ..core.precision import Precision
from .parameter import has_raw_grads, raw_grad, take_raw_grads

if TYPE_CHECKING:
    from .span import Span


class Bucket:
    """The gradients of one span on this rank."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.grad: Tensor | None = None
        self.present: list[bool] = [False] * len(span.params)
        self.arrived: list[bool] = [False] * len(span.params)
        """Which parameters have had a gradient on this rank since `clear`."""
        self._held: Tensor | None = None
        self._storage = span.context.storage
        self._account = self._storage.ledger.device
        self.reduce_dtype = span.context.precision.reduce_dtype_of(span.master_dtype)
        layout = span.layout
        self._numel, self._used_numel = layout.numel, layout.used_numel
        self._bytes = self._numel * self.reduce_dtype.itemsize
        self._parts = [(slice(slot.offset, slot.stop), slot.spec.shape) for slot in layout.slots]

    # Local gradients --------------------------------------------------------------------------------------------------

    @property
    def has_local(self) -> bool:
        """Gradients of this rank wait to be reduced."""
        if self._held is not None:
            return True
        return has_raw_grads(self.span.params)

    def hold(self) -> None:
        """Keep local gradients for a later reduce, in float32 at least. What is float32 already stays on the parameters."""
        if self.span.compute_dtype != self.span.master_dtype:
            self._held = self._collect(Precision.hold_dtype(self.reduce_dtype))

    def local(self, index: int) -> Tensor | None:
        """This rank's gradient of one parameter, not reduced yet; a copy."""
        slot, grad = self.span.layout.slots[index], raw_grad(self.span.params[index])
        parts = [] if grad is None else [_dense(grad)]
        if self._held is not None and self.arrived[index]:
            parts.append(self._held[slot.offset : slot.stop].view(slot.spec.shape))
        if not parts:
            return None
        return parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]

    def _collect(self, dtype: torch.dtype) -> Tensor:
        """Local gradients as one buffer over the span, with what is held; parameters have none afterwards."""
        span, grads = self.span, take_raw_grads(self.span.params)
        if False in self.arrived:
            self.arrived = [grad is not None or old for grad, old in zip(grads, self.arrived)]
        dense = [
            grad if grad is None or grad.layout is torch.strided else grad.to_dense() for grad in grads
        ]  # no call for each
        buffer, self._held = self._held, None
        if buffer is None:
            purpose = f"gradients of {span.layout.spec.name!r} and its neighbours"
            make = partial(torch.empty, self._numel, dtype=dtype, device=span.device)
            buffer = self._storage.allocate("communication", purpose, self._numel * dtype.itemsize, make)
            views = self._views(buffer)
            # The padding has a master, too, and counts in norms.
            buffer[self._used_numel :].zero_()
            if None not in dense:
                torch._foreach_copy_(views, dense)
            else:
                for view, grad in zip(views, dense):
                    if grad is None:  # this rank's loss does not reach the parameter
                        view.zero_()
                    else:
                        view.copy_(grad)
            return buffer
        pairs = [(view, grad) for view, grad in zip(self._views(buffer), dense) if grad is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])
        return buffer

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [buffer[part].view(shape) for part, shape in self._parts]

    def take_source(self, wire: SoloWire) -> Tensor:
        """The local gradients as one 1-D buffer in the reduce dtype. The parameters have none afterwards."""
        span = self.span
        if len(span.params) == 1 and wire.ragged and self._held is None:
            grad = raw_grad(span.params[0])
            if grad is not None and grad.dtype == self.reduce_dtype and grad.is_contiguous() and not grad.is_sparse:
                self.arrived = [True]
                take_raw_grads(span.params)
                self._account.add("communication", self._bytes)
                return grad.view(-1)  # no copy: it is the buffer, less the padding
        buffer = self._collect(self.reduce_dtype)
        if buffer.dtype != self.reduce_dtype:
            buffer = buffer.to(self.reduce_dtype)
        return buffer

    # Reduced gradients ------------------------------------------------------------------------------------------------

    def reduce(self) -> tuple[Inflight, Tensor, Tensor]:
        """Start the reduce. Returns the transfer, this rank's slice of the mean, and the buffer that must live until then."""
        wire, span = self.span.context.wire, self.span
        source = self.take_source(wire)
        if wire.size == 1:
            return DONE, source, source
        mean = torch.empty(span.local_numel, dtype=span.master_dtype, device=span.device)
        if span.layout.shards > 1:
            return wire.reduce(source, mean, span.layout.index, span.layout.cuts), mean, source
        return wire.average(source, mean, span.layout.index), mean, source

    @torch.no_grad()
    def add(self, mean: Tensor) -> None:
        """Add a reduced gradient of this rank's slice."""
        self._account.now["communication"] -= self._bytes
        if self.grad is None:
            numel = self.span.local_numel
            if mean.numel() != numel or mean.dtype != self.span.master_dtype:
                padded = torch.zeros(numel, dtype=self.span.master_dtype, device=mean.device)
                padded[: mean.numel()].copy_(mean)
                mean = padded
            self.grad = mean
        else:
            self.grad[: mean.numel()].add_(mean)

    def clear(self, *, local: bool = True) -> None:
        """Forget all gradients: the reduced ones and, with `local`, this rank's."""
        self.grad = None
        self.present = [False] * len(self.present)
        if local:
            self.drop_local()

    def drop_local(self) -> None:
        """Forget gradients that are not reduced."""
        take_raw_grads(self.span.params)
        self._held = None
        self.arrived = [False] * len(self.arrived)


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()
