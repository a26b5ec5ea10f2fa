"""One unit's storage and states.

    SHARDED --gather--> GATHERING --wait--> GATHERED --release--> SHARDED

`gather` is a no-op unless SHARDED, so it may be called early (prefetch), late (on demand) or twice. `reduce` sends the
gradients to their owners and is independent of these states.

Storage of one span (class `Flat`), in elements of the compute dtype unless said:
* `full`   1-D, whole span. Made once; a release resizes its *storage* to 0 and a gather refills the same storage,
           because autograd keeps views of it (`weight.t()`) between forward and backward.
* `views`  `full` cut into parameter shapes; a gathered parameter's `.data` is its view.
* `own`    1-D, this rank's slice, always present: a slice of `full` where that stays, else a buffer of its own.
* `master` 1-D, this rank's slice in the master dtype, the optimizer's parameter. The same memory as `own` when the two
           types are equal.
* `guards` one NaN per parameter; a released parameter's `.data` is its guard expanded to the true shape. A stray read
           gives NaN; a stray write changes the guard and is found by the next gather.
All writes go through `full`, `own` and `master`, never through a parameter, so parameters keep their version counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import chain

import torch
from torch import Tensor, nn

from .birth import birth_of, hand_over
from .comm import SoloWire
from .config import StagePolicy
from .errors import StateError
from .inflight import Inflight
from .layout import Span, UnitLayout
from .precision import Precision, dtype_of


class State(Enum):
    SHARDED = "SHARDED"
    GATHERING = "GATHERING"
    GATHERED = "GATHERED"


class Flat:
    """Storage of one span on this rank."""

    def __init__(
        self,
        span: Span,
        params: Sequence[nn.Parameter],
        wire: SoloWire,
        policy: StagePolicy,
        precision: Precision,
    ) -> None:
        self.span = span
        self.params = list(params)
        self.rank = wire.rank if span.shards > 1 else 0
        self.pinned: set[int] = set()
        """Parameters (places in `params`) that `GatheredParameters` has made whole: they stay so."""
        device = params[0].device
        spec = span.spec
        compute, master_dtype = dtype_of(spec.compute_dtype), dtype_of(spec.master_dtype)
        with torch.no_grad():
            whole = torch.zeros(span.numel, dtype=master_dtype, device=device)
            for slot, param in zip(span.slots, params):
                birth = birth_of(param)
                if birth is None:
                    whole[slot.offset : slot.stop].view(slot.spec.shape).copy_(param.detach())
                else:
                    birth.pour(param, whole[slot.offset :])
                    hand_over(param, None)
            whole[span.used_numel :].zero_()
            begin = self.rank * span.slice_numel
            self.full = whole if compute == master_dtype else whole.to(compute)
            # Where nothing is gathered into it from elsewhere, `full` is never given back.
            self.resident = policy.keep_full or span.shards == 1
            place = self.full[begin : begin + span.slice_numel]
            self.own = place if self.resident else place.clone()
            if compute == master_dtype:
                self.master: Tensor = self.own
            else:
                self.master = whole[begin : begin + span.slice_numel].clone()
        if spec.trainable:
            self.master = nn.Parameter(self.master, requires_grad=True)
        self.views = self._cut(self.full)
        self.full_bytes = self.full.numel() * self.full.element_size()
        # A released parameter shows its own type, whatever it is gathered in.
        own_dtype = dtype_of(spec.dtype)
        self._guarded = own_dtype.is_floating_point or own_dtype.is_complex
        self.guards = torch.full((len(params),), float("nan") if self._guarded else 0, dtype=own_dtype, device=device)
        self.sentinels = [guard.expand(slot.spec.shape) for guard, slot in zip(self.guards.unbind(), span.slots)]
        self.reduce_dtype = precision.reduce_dtype_of(master_dtype) if wire.size > 1 else master_dtype
        # Gradients of a low-precision copy must not add up in that precision: they wait in the bucket instead.
        self._holds = compute != master_dtype
        self._held = False
        self._bucket: Tensor | None = None
        self._bucket_views: list[Tensor] = []
        self._bucket_bytes = 0

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.offset : slot.stop].view(slot.spec.shape) for slot in self.span.slots]

    # Parameters -----------------------------------------------------------------------------------------------------

    def point(self, targets: Sequence[Tensor]) -> None:
        pairs = list(zip(self.params, targets))
        if self.pinned:
            pairs = [pair for index, pair in enumerate(pairs) if index not in self.pinned]
        for param, target in pairs:
            param.data = target

    def open(self) -> None:
        """Give `full` its storage back; a gather fills it."""
        if not self.resident:
            self.full.untyped_storage().resize_(self.full_bytes)

    def close(self) -> None:
        if not self.resident:
            self.full.untyped_storage().resize_(0)

    def drop(self) -> None:
        """Give all memory back, whoever still refers to it: other flats hold the values."""
        for tensor in (self.full, self.own, self.master):
            tensor.untyped_storage().resize_(0)

    def refresh(self) -> None:
        """Carry the master's values into `own`, after a step or a load."""
        if self.master.dtype != self.own.dtype:
            self.own.copy_(self.master.detach())

    def intact(self) -> Tensor:
        """0-dim bool: no parameter was written while it was released. No host wait."""
        return (
            self.guards.isnan().all() if self._guarded else torch.ones((), dtype=torch.bool, device=self.guards.device)
        )

    def check_guards(self, unit: str) -> None:
        """Raise if a parameter was written while it was released."""
        if self._guarded and not bool(self.intact()):
            broken = int((~self.guards.isnan()).nonzero()[0])
            name = self.span.slots[broken].spec.name
            self.guards.fill_(float("nan"))
            raise StateError(
                f"parameter {name!r} of unit {unit!r} was written to while it was released (its values live in the "
                "ranks' shards; what was written is lost). Write it inside a forward, through load_state_dict, or "
                "before the model is sharded"
            )

    # Gradients ------------------------------------------------------------------------------------------------------

    def has_grads(self) -> bool:
        return self._held or bool([param for param in self.params if param.grad is not None])

    def drop_grads(self) -> None:
        for param in self.params:
            param.grad = None
        if self._held:
            self._held = False
            self.drop_bucket()

    def hold(self) -> None:
        """Between backwards of one step, without a reduce: keep the local gradients in at least the reduce dtype."""
        if self._holds:
            self._gather_local(self.take())
            self._held = True

    def _gather_local(self, grads: list[Tensor | None]) -> Tensor:
        if not self._held:
            bucket, views = self.bucket()
            _fill(views, grads)
            return bucket
        _add(self._bucket_views, grads)
        if self._bucket is None:
            raise StateError("gradients are held without a bucket")
        return self._bucket

    def take(self) -> list[Tensor | None]:
        """The local gradients, dense, in order; the parameters forget them."""
        grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        return [grad.to_dense() if grad is not None and grad.layout != torch.strided else grad for grad in grads]

    def bucket(self) -> tuple[Tensor, list[Tensor]]:
        """The span's gradient buffer, its storage present (values undefined but for the zero padding), and its views."""
        if self._bucket is None:
            self._bucket = torch.empty(self.span.numel, dtype=self.reduce_dtype, device=self.own.device)
            self._bucket_views = self._cut(self._bucket)
            self._bucket_bytes = self._bucket.numel() * self._bucket.element_size()
        else:
            self._bucket.untyped_storage().resize_(self._bucket_bytes)
        if self.span.used_numel < self.span.numel:
            self._bucket[self.span.used_numel :].zero_()
        return self._bucket, self._bucket_views

    def drop_bucket(self) -> None:
        if self._bucket is not None:
            self._bucket.untyped_storage().resize_(0)

    def source(self, wire: SoloWire) -> Tensor:
        """The local gradients as one 1-D buffer in the reduce dtype."""
        grads = self.take()
        if len(grads) == 1 and wire.ragged and not self._held:
            # A span of one parameter needs no copy: its gradient is the buffer, less the padding.
            grad = grads[0]
            if grad is not None and grad.dtype == self.reduce_dtype and grad.is_contiguous():
                return grad.view(-1)
        bucket = self._gather_local(grads)
        self._held = False
        return bucket

    def add_local(self) -> None:
        """World size 1: local gradients go straight into the master's gradient, which is the bucket itself."""
        grads = self.take()
        if self.master.grad is None:
            bucket, views = self.bucket()
            _fill(views, grads)
            self.master.grad = bucket
            return
        _add(self._bucket_views, grads)

    def add_reduced(self, mean: Tensor) -> None:
        if self.master.grad is None:
            self.master.grad = mean
        else:
            self.master.grad.add_(mean)

    def some_grad(self, wire: SoloWire) -> Tensor:
        """The master's gradient; zeros, from now on, where it had none."""
        if self.master.grad is None:
            grad = self.bucket()[0] if wire.size == 1 else torch.empty_like(self.master)
            self.master.grad = grad.detach().zero_()
        return self.master.grad

    def drop_master_grad(self) -> None:
        self.master.grad = None


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


class Unit:
    """Parameters that move together."""

    def __init__(self, layout: UnitLayout, flats: Sequence[Flat], wire: SoloWire, policy: StagePolicy) -> None:
        self.layout = layout
        self.name = layout.name
        self.flats = list(flats)
        self.trained = [flat for flat in flats if flat.span.trainable]
        self.wire = wire
        self.policy = policy
        self.gathered_bytes = layout.gathered_bytes
        self.state = State.GATHERED
        self._check_on_gather = bool(flats) and flats[0].own.device.type == "cpu"
        self._gathers: list[Inflight] = []
        self._unsent: list[Inflight] = []
        self._reduces: list[tuple[Flat, Inflight, Tensor, Tensor]] = []
        for flat in self.flats:
            flat.point(flat.views)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value}, {self.layout.numel} elements)"

    def gather(self) -> None:
        """Start to bring the full parameters in."""
        if self.state is not State.SHARDED:
            return
        if self._check_on_gather and not self.policy.keep_full:
            for flat in self.flats:
                flat.check_guards(self.name)
        self.close()
        for flat in self.flats:
            flat.open()
            if flat.span.shards > 1:
                self._gathers.append(self.wire.gather(flat.full, flat.own, flat.span.index))
        self.state = State.GATHERING

    def wait(self) -> None:
        """Full parameters are readable afterwards."""
        if self.state is State.GATHERED:
            return
        if self.state is not State.GATHERING:
            raise StateError(
                f"unit {self.name!r}: wait() in state {self.state.value}, allowed in GATHERING or GATHERED"
            )
        for inflight in self._gathers:
            inflight.wait()
        self._unsent += self._gathers
        self._gathers = []
        for flat in self.flats:
            flat.point(flat.views)
        self.state = State.GATHERED

    def release(self) -> None:
        """Full parameters go away, unless the stage keeps them."""
        if self.state is State.SHARDED or self.policy.keep_full:
            return
        if self.state is State.GATHERING:
            self.wait()
        for flat in self.flats:
            flat.point(flat.sentinels)
            flat.close()
        self.state = State.SHARDED

    def close(self) -> None:
        """Wait until the peers have taken what this rank sent: `own` may be written again."""
        for inflight in self._unsent:
            inflight.close()
        self._unsent.clear()

    def updated(self) -> None:
        """The masters have new values: what is gathered is old."""
        self.close()
        for flat in self.flats:
            flat.refresh()
        if self.policy.keep_full:
            self.state = State.SHARDED

    # Gradients ------------------------------------------------------------------------------------------------------

    def has_grads(self) -> bool:
        return any(flat.has_grads() for flat in self.trained)

    def hold(self) -> None:
        """The end of a backward inside `no_sync`, where nothing is sent."""
        for flat in self.trained:
            flat.hold()

    def reduce(self) -> None:
        """Start to send the local gradients to their owners; `finish_reduce` ends it."""
        self.finish_reduce()
        for flat in self.trained:
            if self.wire.size == 1:
                flat.add_local()
                continue
            source = flat.source(self.wire)
            mean = torch.empty(flat.span.slice_numel, dtype=flat.master.dtype, device=source.device)
            move = self.wire.reduce if flat.span.shards > 1 else self.wire.average
            self._reduces.append((flat, move(source, mean, flat.span.index), mean, source))

    def finish_reduce(self) -> None:
        """The owners' gradients are up to date afterwards."""
        for flat, inflight, mean, _ in self._reduces:
            inflight.close()
            flat.add_reduced(mean)
            flat.drop_bucket()
        self._reduces.clear()

    def drop_grads(self, shards: bool) -> None:
        """Forget local gradients, and with `shards` also the reduced ones."""
        for flat in self.trained:
            flat.drop_grads()
            if shards:
                flat.drop_master_grad()
                if self.wire.size == 1:
                    flat.drop_bucket()

    def settle(self) -> None:
        """Nothing of this unit is on the move afterwards."""
        for inflight in chain(self._gathers, (move for _, move, _, _ in self._reduces)):
            inflight.close()
        self._reduces.clear()
        if self.state is State.GATHERING:
            self.wait()
        self.close()
