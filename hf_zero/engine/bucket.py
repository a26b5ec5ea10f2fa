"""The gradients of one span: collected from parameters into one buffer, reduced, and added to the slice that this rank owns.

* `source`: this rank's local gradients as one 1-D buffer in the reduce dtype.
* `grad`: 1-D, the mean over ranks of this rank's slice, in the master dtype; it adds up over the backwards of a step. It is
  in the tier of the master: `OnDisk` on disk. With `step_in_backward` it is in host memory instead.
* `factor`: multiplies a gradient on disk when it is read: clipping by a norm does not rewrite it.
* `held`: local gradients that wait for a later backward to be reduced (`no_sync` at stages 0 and 1).
* `tier`: stores `grad`.
* `present`: which parameters have a gradient on any rank. A parameter without one keeps its value and its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm.inflight import DONE, Inflight
from ..comm.wire import Wire
from ..core.precision import Precision
from ..errors import ZeroError
from ..tiers.array import OnDisk, Values
from ..tiers.gradient_offload import GradientCopy
from ..tiers.tier import Tier
from .parameter import has_raw_grads, raw_grad, set_raw_grad, take_raw_grads

if TYPE_CHECKING:
    from .span import Span


_LAYOUT = attrgetter("layout")


class Bucket:
    """The gradients of one span on this rank."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.grad: Values | None = None
        self.factor: Tensor | None = None
        self._offloaded: Values | None = None
        self._offload: GradientCopy | None = None
        self.present: list[bool] = [False] * len(span.params)
        self.had_local: list[bool] = [False] * len(span.params)
        """By parameter: it has had a gradient on this rank since `clear`."""
        self._held: Tensor | None = None
        self._storage = span.context.storage
        self.tier = Tier.HOST if self._storage.transient and span.tier is Tier.DISK else span.tier
        self._account = self._storage.ledger.device
        self.reduce_dtype = span.context.precision.reduce_dtype_of(span.master_dtype)
        layout = span.layout
        self._purpose = f"gradients of {layout.spec.name!r} and its neighbours"
        self._numel, self._used_numel = layout.numel, layout.used_numel
        self._fresh_bytes = self._used_numel * span.compute_dtype.itemsize
        self._moving_bytes = self._held_bytes = self._grad_bytes = 0
        """Bytes in the ledger: in transfers, held for a later backward, reduced."""
        self._parts = [(slice(slot.offset, slot.stop), slot.spec.shape) for slot in layout.slots]

    # Local gradients --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep local gradients for a later reduce, in at least float32. Float32 gradients stay on the parameters."""
        if self.span.compute_dtype != self.span.master_dtype:
            self._held = self._collect(Precision.hold_dtype(self.reduce_dtype))
            self._count_held(self._held.nbytes)
        else:
            self._count_held(self._fresh_bytes)
        self._count_moving(0)

    def local(self, index: int) -> Tensor | None:
        """Return this rank's gradient of one parameter, not reduced yet."""
        slot, grad = self.span.layout.slots[index], raw_grad(self.span.params[index])
        parts = [] if grad is None else [_dense(grad)]
        if self._held is not None:
            parts.append(self._held[slot.offset : slot.stop].view(slot.spec.shape))
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def held(self, index: int) -> Tensor | None:
        """Return the memory in which `hold` keeps this rank's gradient of one parameter; None if it has none."""
        if self._held is None or not self.had_local[index]:
            return None
        part, shape = self._parts[index]
        return self._held[part].view(shape)

    def _collect(self, dtype: torch.dtype) -> Tensor:
        """Collect local and held gradients in one buffer over the span. The parameters have none afterwards."""
        span, grads = self.span, take_raw_grads(self.span.params)
        present = [grad for grad in grads if grad is not None]
        if {*map(_LAYOUT, present)} - {torch.strided}:
            grads = [None if grad is None else _dense(grad) for grad in grads]
            present = [grad for grad in grads if grad is not None]
        if len(present) == len(grads):
            self.had_local = [True] * len(grads)
        elif False in self.had_local:
            self.had_local = [grad is not None or old for grad, old in zip(grads, self.had_local)]
        buffer, self._held = self._held, None
        if self._held_bytes:
            self._count_held(0)
        if buffer is None:
            make = partial(torch.empty, self._numel, dtype=dtype, device=span.device)
            buffer = self._storage.allocate("communication", self._purpose, self._numel * dtype.itemsize, make)
            self._moving_bytes += buffer.nbytes
            views = self._views(buffer)
            # The padding must be zero: it has a master, and counts in norms.
            buffer[self._used_numel :].zero_()
            if len(present) == len(views):
                torch._foreach_copy_(views, present)
            else:
                for view, grad in zip(views, grads):
                    if grad is None:  # this rank's loss does not reach the parameter
                        view.zero_()
                    else:
                        view.copy_(grad)
            return buffer
        pairs = [(view, grad) for view, grad in zip(self._views(buffer), grads) if grad is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])
        return buffer

    def _views(self, buffer: Tensor) -> list[Tensor]:
        views: list[Tensor] = torch._C._nn.unflatten_dense_tensors(buffer, self.span.views)
        return views

    def take_source(self, wire: Wire) -> Tensor:
        """Return the local gradients as one 1-D buffer in the reduce dtype. The parameters have none afterwards."""
        span = self.span
        # With one parameter no rank sends padding: the gradient itself may be the buffer, and would be read past its end.
        is_ragged = len(span.params) == 1 and wire.ragged
        if is_ragged and self._held is None:
            grad = raw_grad(span.params[0])
            if grad is not None and grad.dtype == self.reduce_dtype and grad.is_contiguous() and not grad.is_sparse:
                self.had_local = [True]
                take_raw_grads(span.params)
                if self._held_bytes:
                    self._count_held(0)
                return grad.view(-1)  # no copy: it is the buffer, less the padding
        buffer = self._collect(self.reduce_dtype)
        if buffer.dtype != self.reduce_dtype:
            buffer = buffer.to(self.reduce_dtype)
        return buffer[: self._used_numel] if is_ragged else buffer

    # Reduced gradients ------------------------------------------------------------------------------------------------

    def reduce(self) -> tuple[Inflight, Tensor, Tensor]:
        """Start the reduce. Returns the transfer, this rank's slice of the mean, and the buffer that must live until then."""
        wire, span = self.span.context.wire, self.span
        source = self.take_source(wire)
        if wire.size == 1:
            self._count_moving(source.nbytes)
            return DONE, source, source
        mean = torch.empty(span.local_numel, dtype=span.master_dtype, device=span.device)
        self._count_moving(source.nbytes + mean.nbytes)
        if span.layout.shards > 1:
            return wire.reduce(source, mean, span.layout.index, span.layout.cuts), mean, source
        # Without padding, which `take_source` may leave out on another rank: an all-reduce needs equal lengths.
        return wire.average(source[: self._used_numel], mean, span.layout.index), mean, source

    def add(self, mean: Tensor) -> None:
        """Add a reduced gradient of this rank's slice."""
        tier = self.tier
        moves = tier is Tier.DISK or (tier is Tier.HOST and not self._storage.link.shares_memory)
        if self.grad is None or moves:
            numel = self.span.local_numel
            if mean.numel() != numel or mean.dtype != self.span.master_dtype:
                padded = torch.zeros(numel, dtype=self.span.master_dtype, device=mean.device)
                padded[: mean.numel()].copy_(mean)
                mean = padded
        if moves:
            try:
                self._start_offload(mean)
            except ZeroError as error:  # a full disk: all ranks raise at the end of the backward
                self.span.context.record_failure(error)
        elif isinstance(self.grad, Tensor):
            self.grad[: mean.numel()].add_(mean)
        else:
            self.grad = mean
        self._count_moving(0)  # before `count_grad`: the mean may have become the gradient, which must not count twice
        self.count_grad()

    # The ledger -------------------------------------------------------------------------------------------------------

    def count_fresh(self) -> None:
        """Count the local gradients that a backward has made, in addition to those in transfers."""
        self._count_moving(self._moving_bytes + self._fresh_bytes)

    def _count_held(self, nbytes: int) -> None:
        self._account.now["gradients"] += nbytes - self._held_bytes
        self._held_bytes = nbytes

    def _count_moving(self, nbytes: int) -> None:
        account = self._account
        account.now["communication"] += nbytes - self._moving_bytes
        self._moving_bytes = nbytes
        if nbytes:
            account.record_peak()

    def count_grad(self) -> None:
        """Count the reduced gradient in the ledger if it is in memory."""
        if self.grad is None and self._storage.transient:
            self._offloaded = None
        held = self.grad if self._offloaded is None else self._offloaded
        nbytes = held.nbytes if isinstance(held, Tensor) else 0
        if nbytes != self._grad_bytes:
            change, self._grad_bytes = nbytes - self._grad_bytes, nbytes
            if self.tier is not Tier.DEVICE:
                self._storage.ledger.host.add("gradients", change)
                return
            self._account.now["gradients"] += change
            if change > 0:
                self._account.record_peak()

    def _offload_target(self) -> Values:
        if self._offloaded is None:
            self._offloaded = self._storage.empty(self.tier, self.span.local_numel, self.span.master_dtype)
        return self._offloaded

    def _start_offload(self, mean: Tensor) -> None:
        """Start to move a reduced gradient off the device. At most two of all buckets are under way."""
        self.wait_for_offload()
        home = self._offload_target()
        self._fold()
        self._offload = GradientCopy(self._storage, mean, home, adds=self.grad is not None)
        self.grad = home
        self._storage.limit_gradient_copies(self.wait_for_offload)

    def wait_for_offload(self) -> None:
        """Wait until `grad` is stored off the device. Records a failed disk: all ranks raise at the end of the backward."""
        gradient_copy = self._offload
        if gradient_copy is None:
            return
        try:
            gradient_copy.wait()
        except ZeroError as error:
            self.span.context.record_failure(error)
        self._offload = None

    @property
    def is_on_disk(self) -> bool:
        return isinstance(self.grad, OnDisk)

    def parts(self, numel: int = 1 << 20) -> Iterator[tuple[int, Tensor]]:
        """Yield the reduced gradient in parts: first element and values. A gradient in memory is one part, itself.

        Raises:
            TierError: a part could not be read.
        """
        if isinstance(self.grad, OnDisk):
            for start in range(0, self.grad.numel(), numel):
                yield start, self.read(slice(start, start + numel))
        elif self.grad is not None:
            yield 0, self.grad

    def _fold(self) -> None:
        """Multiply a gradient on disk by `factor`."""
        if self.factor is not None and isinstance(self.grad, OnDisk):
            for start, part in self.parts():
                self.grad[start : start + part.numel()].copy_(part)
        self.factor = None

    def read(self, part: slice) -> Tensor:
        """Return elements of the reduced gradient: a view, or a copy if it is on disk.

        Raises:
            TierError: they could not be read, on this rank alone.
        """
        if isinstance(self.grad, OnDisk):
            values = self.grad[part].read()
            return values if self.factor is None else values.mul_(self.factor)
        if self.grad is None:
            return torch.zeros(self.span.local_numel, dtype=self.span.master_dtype, device=self.span.device)[part]
        return self.grad[part]

    @torch.no_grad()
    def write(self, part: slice, values: Tensor) -> None:
        """Write elements of the reduced gradient, 1-D. If there was none, all other elements become zeros.

        Raises:
            TierError: they could not be written, on this rank alone.
        """
        self.wait_for_offload()
        if self.grad is None:
            numel, dtype = self.span.local_numel, self.span.master_dtype
            if self.tier is Tier.DEVICE:
                self.grad = torch.zeros(numel, dtype=dtype, device=self.span.device)
            else:
                self.grad = self._offload_target().zero_()
            self.count_grad()
        self._fold()
        target = self.grad[part]
        if not isinstance(target, Tensor) or target.data_ptr() != values.data_ptr():
            target.copy_(values)
        self._written()

    def _written(self) -> None:
        for event in self.span.events.gradients_written:
            event(self.span)

    def zero(self) -> None:
        """Set gradients that exist to zero, local ones too."""
        self.wait_for_offload()
        if self.grad is not None:
            self.grad.zero_()
            self.factor = None
        waiting = [grad for param in self.span.params if (grad := raw_grad(param)) is not None]
        for grad in (*waiting, *(() if self._held is None else (self._held,))):
            grad.zero_()
        self._written()

    def scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradient."""
        if isinstance(self.grad, OnDisk):
            self._fold()  # else two factors would be rounded once, and twice for a gradient in memory
            self.factor = factor.detach().to("cpu", self.grad.dtype)
        elif self.grad is not None:
            self.grad.mul_(factor.to(self.grad.device))
        self._written()

    def clear(self, *, local: bool = True) -> None:
        """Forget all gradients: the reduced ones and, with `local`, this rank's."""
        if self._offload is not None:
            self.wait_for_offload()
        self.grad = self.factor = None
        self.count_grad()
        self.present = [False] * len(self.present)
        if local:
            self.drop_local()

    def clear_some(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Clear the gradients of some parameters, or set them to zero; the others keep theirs."""
        self.wait_for_offload()
        for index in indices:
            grad, part = raw_grad(self.span.params[index]), self.span.part_of(index)
            if self._held is not None:
                self._held[self._parts[index][0]].zero_()
            if self.grad is not None and part is not None:
                self.grad[part.as_slice].zero_()
            if set_to_none:
                set_raw_grad(self.span.params[index], None)
                self.present[index] = self.had_local[index] = False
            elif grad is not None:
                grad.zero_()
        self._written()

    def drop_local(self) -> None:
        """Forget gradients that are not reduced."""
        take_raw_grads(self.span.params)
        self._held = None
        if self._held_bytes:
            self._count_held(0)
        self.had_local = [False] * len(self.had_local)


def have_local(buckets: Sequence[Bucket]) -> bool:
    """Return whether this rank has gradients that are not reduced."""
    if [bucket for bucket in buckets if bucket._held is not None]:
        return True
    return has_raw_grads([param for bucket in buckets for param in bucket.span.params])


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()
