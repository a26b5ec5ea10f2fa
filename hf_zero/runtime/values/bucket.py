"""The gradients of one span on this rank: what a backward leaves on parameters, put into one bucket, reduced, added to shards.

`bucket`  1-D, whole span, in the reduce dtype (wider where gradients wait in it between backwards of one step). Made once; its
          *storage* is resized to 0 while it is not in use.
Gradients of a low-precision copy must not add up in that precision: inside `no_sync` they are held in the bucket instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...comm.wire import SoloWire
from ...config import StagePolicy
from ...core.layout import Extent, Slot, Span
from ...core.precision import Precision, dtype_of
from ...errors import StateError
from ...tiers.pool import Storage
from ...tiers.tier import Tier
from .gradients import Gradient, Handles
from .state_shard import Shard, assembled, extents

T = TypeVar("T", bound=Tensor | torch.UntypedStorage)


class Common(Protocol):
    """What all spans of one model have alike; `sharded.Sharded` has it."""

    wire: SoloWire
    policy: StagePolicy
    precision: Precision
    storage: Storage


class SpanGradients:
    """Gradients of one span on this rank. `flat_param.Flat` adds the values, and fills `shards`.

    Attributes:
        arrived: by parameter, this rank has had a gradient of it since `drop_master_grad`.
        present: the same on any rank, after a backward.
        local_bytes: what a backward leaves on the parameters; `grad_bytes` of each.
        moving_bytes: beside the bucket, what the ledger has of this span as communication: local gradients, the mean, a copy of
            the bucket in the type that is sent.
        waiting_bytes: local gradients that add up on the parameters between backwards; gradients in the ledger.
        shards: this rank's slice, in one stretch or several; the reduced gradients are theirs.
    """

    def __init__(self, span: Span, params: Sequence[nn.Parameter], common: Common) -> None:
        wire, storage = common.wire, common.storage
        self.span = span
        self.params = list(params)
        self.rank = (wire.shard_group or wire).rank if span.shards > 1 else 0
        self.storage = storage
        self.device = storage.device
        self.compute_dtype, self.master_dtype = dtype_of(span.spec.compute_dtype), dtype_of(span.spec.master_dtype)
        self.reduce_dtype = common.precision.reduce_dtype_of(self.master_dtype) if wire.size > 1 else self.master_dtype
        self.shards: list[Shard] = []
        self.arrived = [False] * len(self.params)
        self.present = self.arrived
        shapes = [slot.spec.shape for slot in span.slots]
        self.handles: Handles[Any] = Handles(self, shapes, self.compute_dtype, self.device)
        self._none, self._all = [False] * len(self.params), [True] * len(self.params)  # never written to
        self._held = self._allocating = False
        self._use = f"gradients of {span.spec.name!r} and what is with it"
        self._bucket: Tensor | None = None
        self._bucket_storage: torch.UntypedStorage | None = None
        self._bucket_views: list[Tensor] = []
        self._bucket_bytes = self._bucket_there_bytes = 0
        self._bucket_kind = "communication"
        """In the ledger. Local gradients that wait for the last backward are gradients, and so is the gradient on one rank."""
        self.local_bytes = span.used_numel * self.compute_dtype.itemsize
        self.grad_bytes = [slot.spec.numel * self.compute_dtype.itemsize for slot in span.slots]
        self.moving_bytes = self.waiting_bytes = 0
        self.account = storage.ledger.device

    def cut_up(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.offset : slot.stop].view(slot.spec.shape) for slot in self.span.slots]

    def pieces(self, index: int) -> Iterator[tuple[Shard, Extent[Slot]]]:
        """This rank's elements of a parameter, shard by shard. "Here" is the shard."""
        part = self.span.part_of(self.span.slots[index], self.rank)
        return extents(() if part is None else (part,), self.shards)

    def has_grads(self) -> bool:
        if self._held:
            return True
        for param in self.params:
            grad = param.grad
            if grad is not None and (type(grad) is not Gradient or grad.local is not None):
                return True
        return False

    def has_nan_grads(self) -> bool:
        for param in self.params:
            grad = param.grad.local if isinstance(param.grad, Gradient) else param.grad
            if grad is not None and bool(grad.isnan().any()):
                return True
        return False

    def local_parts(self, index: int) -> list[Tensor]:
        """What adds up to this rank's own gradient of a parameter, not reduced yet."""
        grad = self.params[index].grad
        local = grad.local if isinstance(grad, Gradient) else grad
        parts = [] if local is None else [local.to_dense() if local.layout is not torch.strided else local]
        return [*parts, self._bucket_views[index]] if self._held else parts

    def drop_grads(self, *, local: bool = False) -> None:
        """Forget what this rank's backward has made; unless only that is meant (`local`), there are no gradients afterwards."""
        for param in self.params:  # no name for what it shows: a stand-in that somebody holds is not shown again
            if local and type(param.grad) is Gradient:
                param.grad.local = None
            else:
                param.grad = None
        if self.moving_bytes or self.waiting_bytes:
            self.drop_moving()
        if not local:
            self.handles.drop()
            self.present = self._all
        if self._held:
            self._held = False
            self.drop_bucket()

    def hold(self) -> None:
        """Between backwards of one step, without a reduce: keep the local gradients, in float32 at least."""
        if self.compute_dtype != self.master_dtype:
            if not self.moving_bytes:
                self.count_local()
            self._gather_local(self.take(), Precision.hold_dtype(self.reduce_dtype), "gradients")
            self._held = True
            self.drop_moving()
        elif not self.waiting_bytes and self.has_grads():  # they add up where they are
            self.waiting_bytes = self.local_bytes
            self.account.add("gradients", self.local_bytes)

    def count_local(self) -> None:
        """The ledger has what backward has just left on the parameters."""
        now = self.account.now
        if self.waiting_bytes:
            now["gradients"] -= self.waiting_bytes
            self.waiting_bytes = 0
        for param in self.params:
            if param.grad is not None:
                self.moving_bytes = self.local_bytes
                now["communication"] += self.local_bytes
                return

    def drop_moving(self) -> None:
        """What is beside the bucket has gone."""
        self.account.now["communication"] -= self.moving_bytes
        self.account.now["gradients"] -= self.waiting_bytes
        self.moving_bytes = self.waiting_bytes = 0

    def _gather_local(
        self, grads: list[Tensor | None], dtype: torch.dtype | None = None, kind: str = "communication"
    ) -> Tensor:
        if not self._held:
            bucket, views = self.bucket(dtype, kind)
            _fill(views, grads)
            return bucket
        _add(self._bucket_views, grads)
        if self._bucket is None:
            raise StateError("gradients are held without a bucket")
        return self._bucket

    def take(self) -> list[Tensor | None]:
        """The local gradients, dense, in order; the parameters forget them."""
        # Taken off before anything is sent: autograd adds in place to what `.grad` is, and a later backward of this step would
        # write into what is on its way.
        grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        if True in self.handles.placed:
            grads, cleared = self.handles.sort_out(grads)
            if cleared:
                self.clear_reduced(cleared)
        if False in self.arrived:
            self.arrived = [grad is not None or old for grad, old in zip(grads, self.arrived)]
        for index, grad in enumerate(grads):
            if grad is not None and grad.layout is not torch.strided:
                grads[index] = grad.to_dense()
        return grads

    def notice_cleared(self) -> None:
        """What `take` would notice, without taking: whoever looks at gradients before finds those that are still there."""
        if True in self.handles.placed:
            cleared = self.handles.cleared([param.grad for param in self.params])
            if cleared:
                self.clear_reduced(cleared)

    @torch.no_grad()
    def clear_reduced(self, cleared: Sequence[int]) -> None:
        """These parameters (places in `params`) have no gradient any more: where none of the span has one, there is none."""
        self.arrived = [has and index not in cleared for index, has in enumerate(self.arrived)]
        self.present = [has and index not in cleared for index, has in enumerate(self.present)]
        if True not in self.present:
            self.drop_master_grad()
            if self._held:
                self._held = False
                self.drop_bucket()
            return
        for index in cleared:
            if self._held:
                self._bucket_views[index].zero_()
            for shard, piece in self.pieces(index):
                grad = shard.whole_grad()
                if grad is not None:
                    grad[piece.here].zero_()

    @property
    def waits(self) -> bool:
        """Gradients of backwards inside `no_sync` are held in the bucket."""
        return self._held

    def waiting(self, index: int) -> Tensor:
        """One of them, in its parameter's shape."""
        return self._bucket_views[index]

    @property
    def is_reduced(self) -> bool:
        for shard in self.shards:  # noqa: SIM110 -- asked for often
            if shard.has_grad:
                return True
        return False

    def bucket(self, dtype: torch.dtype | None = None, kind: str = "communication") -> tuple[Tensor, list[Tensor]]:
        """The span's gradient buffer, its storage present (values undefined but for the zero padding), and its views. The
        ledger has it as `kind`."""
        wanted = dtype or self.reduce_dtype
        if self._bucket is None or self._bucket_storage is None or self._bucket.dtype != wanted:
            self.drop_bucket()
            self._bucket = self.allocate(self.span.numel, wanted, kind)
            self._bucket_storage = self._bucket.untyped_storage()
            self._bucket_views = self.cut_up(self._bucket)
            self._bucket_bytes = self._bucket.nbytes
        elif not self._bucket_there_bytes:
            self._reserve(self._bucket_bytes, partial(self._bucket_storage.resize_, self._bucket_bytes), kind)
        self._bucket_kind, self._bucket_there_bytes = kind, self._bucket_bytes
        # Padding has a master, too, and counts in norms: what is there by chance would be in both.
        if self.span.used_numel < self.span.numel:
            self._bucket[self.span.used_numel :].zero_()
        return self._bucket, self._bucket_views

    def allocate(self, numel: int, dtype: torch.dtype, kind: str = "communication") -> Tensor:
        """Device memory for gradients, 1-D, undefined. The ledger has it as `kind`."""
        make = partial(torch.empty, numel, dtype=dtype, device=self.device)
        return self._reserve(numel * dtype.itemsize, make, kind)

    def _reserve(self, nbytes: int, make: Callable[[], T], kind: str) -> T:
        self._allocating = True
        try:
            return self.storage.allocate(kind, self._use, nbytes, make)
        finally:
            self._allocating = False

    @property
    def in_use(self) -> bool:
        """Local gradients are in the bucket, or about to be."""
        return self._held or self._allocating

    def drop_bucket(self) -> None:
        if self._bucket_there_bytes and self._bucket_storage is not None:
            if self._bucket_storage.resizable():
                self._bucket_storage.resize_(0)
            else:  # the program has the memory, too (`p.grad.numpy()`): it keeps that, and the next gradients get another
                self._bucket, self._bucket_storage, self._bucket_views = None, None, []
            self.account.now[self._bucket_kind] -= self._bucket_there_bytes
            self._bucket_there_bytes = 0

    def source(self, wire: SoloWire) -> Tensor:
        """The local gradients as one 1-D buffer in the reduce dtype."""
        grads = self.take()
        if len(grads) == 1 and wire.ragged and not self._held:
            # A span of one parameter needs no copy: its gradient is the buffer, less the padding.
            grad = grads[0]
            if grad is not None and grad.dtype == self.reduce_dtype and grad.is_contiguous():
                return grad.view(-1)
        bucket = self._gather_local(grads)
        is_single = len(grads) == 1
        del grads  # copied: they go
        now = self.account.now
        now["communication"] -= self.moving_bytes
        self.moving_bytes = 0
        if self._held:  # the bucket is what is sent: it waits no more, and the next backward fills it anew
            self._held = False
            now["gradients"] -= self._bucket_there_bytes
            now["communication"] += self._bucket_there_bytes
            self._bucket_kind = "communication"
        if bucket.dtype != self.reduce_dtype:
            sent = self.allocate(self.span.numel, self.reduce_dtype).copy_(bucket)
            self.moving_bytes = sent.nbytes
            self.drop_bucket()
            bucket = sent
        # Every rank must send as much as its peers wait for, whether it has a gradient or not.
        return bucket[: self.span.used_numel] if wire.ragged and is_single else bucket

    @property
    def in_memory(self) -> bool:
        """One shard, on the device: gradients need no copying."""
        first = self.shards[0]
        return first is self.shards[-1] and first.tier is Tier.DEVICE

    def add_local(self) -> None:
        """World size 1: local gradients go straight into the master's gradient, which is the bucket itself."""
        grads = self.take()
        if not self.in_memory:
            # In the type they came in: nothing is lost, and half the bytes go down.
            bucket, views = self.bucket(self.compute_dtype)
            _fill(views, grads)
            self.add_reduced(bucket)
            self.drop_bucket()
            self.drop_moving()
            return
        shard = self.shards[0]
        grad = shard.device_grad
        bucket, views = self.bucket(kind="gradients")
        if grad is None:
            _fill(views, grads)
        else:
            if grad.data_ptr() != bucket.data_ptr():  # it has been elsewhere meanwhile, or was assigned
                bucket.copy_(grad)
            _add(views, grads)
        shard.use_bucket(bucket)
        self.drop_moving()

    def add_reduced(self, mean: Tensor) -> None:
        """Add a gradient of this rank's slice, 1-D on the device; it may become a shard's own memory."""
        if self.in_memory and self.shards[0].master.grad is None:
            self.shards[0].device_grad = mean  # no copy: it was allocated for this alone
            return
        for shard in self.shards:
            shard.add(mean[shard.start : shard.stop])

    def grads(self) -> list[tuple[Shard, Tensor]]:
        return [(shard, grad) for shard in self.shards if (grad := shard.whole_grad()) is not None]

    def grad(self) -> Tensor:
        """The slice's reduced gradient, 1-D in the master dtype; zeros where a shard has none."""
        out = assembled(self.shards, lambda shard: shard.whole_grad(), 0, self.span.slice_numel, self.device)
        return torch.zeros(self.span.slice_numel, dtype=self.master_dtype, device=self.device) if out is None else out

    def some_grad(self, wire: SoloWire) -> None:
        """Zeros, from now on, for shards that have no gradient."""
        if self.in_memory and wire.size == 1 and self.shards[0].device_grad is None:
            self.shards[0].use_bucket(self.bucket(kind="gradients")[0].detach().zero_())
        for shard in self.shards:
            shard.some_grad()

    def drop_master_grad(self) -> None:
        for shard in self.shards:
            shard.drop_grad()
        self.present = self.arrived = self._none

    def set_present(self, present: list[bool]) -> None:
        """Which parameters have a gradient on any rank. Without one there is no gradient, whatever was sent for it."""
        if True in present:
            self.present = present
        else:
            self.drop_master_grad()


def _fill(views: list[Tensor], grads: list[Tensor | None]) -> None:
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(views):
        torch._foreach_copy_(views, present)
        return
    # A parameter that took no part in this rank's loss contributes zeros.
    for view, grad in zip(views, grads):
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad)


def _add(views: list[Tensor], grads: list[Tensor | None]) -> None:
    pairs = [(view, grad) for view, grad in zip(views, grads) if grad is not None]
    if pairs:
        torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])
