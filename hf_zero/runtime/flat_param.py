"""Storage of one span on this rank: parameters gathered and at rest, gradients, optimizer state.

In elements of the compute dtype unless said:
* `full`   1-D, whole span. Made once; a release resizes its *storage* to 0 and a gather refills the same storage,
           because autograd keeps views of it (`weight.t()`) between forward and backward.
* `views`  `full` cut into parameter shapes; a gathered parameter's `.data` is its view.
* `own`    1-D, this rank's slice at rest: a slice of `full` where that stays, else a buffer of its own, on the device, in
           host memory or on disk (`rest`). Frozen values that stay in the model's own files are in the type they have there.
* `shards` the slice in the master dtype, the optimizer's parameters, in one stretch or several, each in a tier of its own
           (see `state_shard`). The same memory as `own` when the two types and tiers are equal.
* `guards` what a released parameter's `.data` is, see `Guards`.
All writes go through `full`, `own` and the shards, never through a parameter, so parameters keep their version counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..comm.inflight import Inflight
from ..comm.wire import SoloWire
from ..config import StagePolicy
from ..core.layout import ParamSpec, Span
from ..core.precision import Precision, dtype_of
from ..errors import StateError, ZeroError
from ..plan.costs import Placement
from ..tiers.array import OnDisk, Values, fetch
from ..tiers.fingerprint import copied, digest
from ..tiers.pool import Storage
from ..tiers.records import Records
from ..tiers.tier import Tier
from .gradients import Gradient, Handles
from .initial import left_in_files, poured, shard_over
from .placeholder import Guards
from .state_shard import Fields, Shard, assembled, cut, is_elementwise

T = TypeVar("T")


class Staging(Protocol):
    """What carries updated values up to the device, see `host_step`."""

    def up(self, values: Tensor, target: Tensor) -> None: ...


class Flat:
    """Storage of one span on this rank.

    Args:
        placement: where `own` and the shards rest.
        fields: element-wise states of the span's optimizer group, for shards on disk.
    """

    def __init__(
        self,
        span: Span,
        params: Sequence[nn.Parameter],
        wire: SoloWire,
        policy: StagePolicy,
        precision: Precision,
        storage: Storage,
        placement: Placement,
        fields: Fields = (),
    ) -> None:
        self.span = span
        self.params = list(params)
        self.rank = wire.rank if span.shards > 1 else 0
        self.storage = storage
        self.pinned: set[int] = set()
        """Parameters (places in `params`) that `GatheredParameters` has made whole: they stay so."""
        self.wholes: list[nn.Parameter] = []
        """By parameter, a view of the master of true shape, where the optimizer has those instead (see `whole_matrices`)."""
        self.device = storage.device
        self._account = storage.ledger.device
        spec = span.spec
        self.compute_dtype, self.master_dtype = dtype_of(spec.compute_dtype), dtype_of(spec.master_dtype)
        stretches = placement.optimizer or ((placement.parameters, span.slice_numel),)
        self.rest = placement.parameters
        with torch.no_grad():
            at_rest = left_in_files(span, self.params, wire, storage) if self.rest is Tier.DISK else None
            if at_rest is None:
                whole = poured(span, self.params, self.device)
                self.full = whole if self.compute_dtype == self.master_dtype else whole.to(self.compute_dtype)
            else:
                self.full = whole = torch.empty(span.numel, dtype=self.compute_dtype, device=self.device)
            begin = self.rank * span.slice_numel
            self.place = self.full[begin : begin + span.slice_numel]
            # Where nothing is gathered into it from elsewhere, `full` is never given back.
            self.resident = self.rest is Tier.DEVICE and (policy.keep_full or span.shards == 1)
            self.stale = False
            """Where `full` stays: other ranks' slices of it may be old. The same on every rank: who gathers decides by it."""
            self._region: Records | None = None
            self.shards: list[Shard] = []
            self.own: Values = self.place
            self._settle_in(whole[begin : begin + span.slice_numel], stretches, fields, at_rest)
        self.views = self._cut(self.full)
        self._base, self._addresses = -1, [0] * len(self.params)
        self._none, self._all = [False] * len(self.params), [True] * len(self.params)  # never written to
        self._use = f"gradients of {span.spec.name!r} and what is with it"
        self.keeps = policy.keep_full
        self.unread = False
        """Its place in `full` could not be read from where it rests: it has no values."""
        self.watched: list[tuple[int, int]] = []
        """Stretches of the slice that are compared at every release, see `writes`."""
        self.watched_digests: list[int] = []
        """Of these, as they were gathered; empty where they are compared with masters on the device."""
        self.printed: int | None = None
        """Where whole parameters stay and masters are other memory: the digest of `place` as the engine made it."""
        self._is_fresh = False  # `printed` is of what the next gather brings
        self._versions = [param._version for param in self.params]
        self.note_place()
        self._full_storage = self.full.untyped_storage()
        self.full_bytes = self.full.numel() * self.full.element_size()
        self._gathered_bytes = 0  # of `full`, where it comes and goes: what the ledger has
        if not self.resident and self._full_storage.nbytes():
            self._count_gathered(self.full_bytes)
        storage.ledger.places += 1
        self.guards = Guards(span, self.device)
        self.reduce_dtype = precision.reduce_dtype_of(self.master_dtype) if wire.size > 1 else self.master_dtype
        # Gradients of a low-precision copy must not add up in that precision: they wait in the bucket instead.
        self._holds = self.compute_dtype != self.master_dtype
        self._held = self._allocating = False
        self.arrived = [False] * len(self.params)
        """By parameter: this rank has had a gradient of it since `drop_master_grad`."""
        self.present = self.arrived
        """The same on any rank, after a backward."""
        shapes = [slot.spec.shape for slot in span.slots]
        self.handles = Handles(self, shapes, self.compute_dtype, self.device)
        self._bucket: Tensor | None = None
        self._bucket_storage: torch.UntypedStorage | None = None
        self._bucket_views: list[Tensor] = []
        self._bucket_bytes = 0
        self._bucket_kind = "communication"
        """In the ledger: local gradients that are held, and on one rank the gradient itself, are gradients."""
        self._bucket_is_there = False
        self.fresh_bytes = span.used_numel * self.compute_dtype.itemsize
        self._loose_kind, self._loose_bytes = "communication", 0  # gradients beside the bucket that the ledger has

    def _settle_in(
        self, mine: Tensor, stretches: Sequence[tuple[Tier, int]], fields: Fields, at_rest: Records | None
    ) -> None:
        """`own` and the shards, each in its tier, from the slice's values; `mine` is undefined where they are at rest."""
        if at_rest is not None:
            self.shards.append(shard_over(self.storage, at_rest))
            self.own = self.shards[0].values
            return
        equal = self.compute_dtype == self.master_dtype
        shares = equal and self.rest is Tier.DISK and len(stretches) == 1 and stretches[0][0] is Tier.DISK
        if not shares:
            self.own = self._new_own(self.place)
        start = 0
        for tier, numel in stretches:
            alias = self.own[start : start + numel] if equal and tier is self.rest and tier is not Tier.DISK else None
            self.shards.append(
                Shard(
                    self.storage,
                    start,
                    mine[start : start + numel],
                    tier,
                    trainable=self.span.trainable,
                    travels=equal,
                    alias=alias if isinstance(alias, Tensor) else None,
                    fields=fields,
                )
            )
            start += numel
        if shares:
            self.own = self.shards[0].values
            self.shards[0].aliased = True

    def _new_own(self, values: Tensor) -> Values:
        """A buffer in the parameters' tier, with these values: `place`'s, or those of a former `own`."""
        numel = self.span.slice_numel
        if self.rest is Tier.DISK:
            self._region = Records(self.storage.disk, numel, numel, (("own", self.compute_dtype),))
            return self._region.values("own").copy_(values)
        if self.rest is Tier.HOST:
            return self.storage.link.empty(numel, self.compute_dtype).copy_(values)
        if not self.resident:
            return values.to(self.device, self.compute_dtype, copy=True)
        return self.place if values is self.place else self.place.copy_(values)

    @property
    def needs_all_ranks(self) -> bool:
        """Whether bringing its values together is a collective."""
        return self.span.shards > 1 or self.storage.uses_disk

    @property
    def in_files(self) -> bool:
        """On disk, in the model's own files: nothing more is taken."""
        records = self.shards[0].records
        return self.rest is Tier.DISK and not self.span.trainable and records is not None and records.base is not None

    def serves(self, span: Span, placement: Placement) -> bool:
        """Whether this is what would be built for `span`, too: frozen, of the same slots, at rest in the same places."""
        if span.trainable or self.resident or self.rest is not placement.parameters:
            return False
        places = [(shard.tier, shard.numel) for shard in self.shards]
        wanted = [*placement.optimizer] or [(placement.parameters, span.slice_numel)]
        alike = (span.slice_numel, span.shards) == (self.span.slice_numel, self.span.shards)
        return alike and _slots(span) == _slots(self.span) and (self.in_files or places == wanted)

    def rests_as(self, placement: Placement) -> bool:
        """Whether its parts rest where this says."""
        wanted = [*placement.optimizer] or [(placement.parameters, self.span.slice_numel)]
        return self.rest is placement.parameters and [(shard.tier, shard.numel) for shard in self.shards] == wanted

    @property
    def shares_records(self) -> bool:
        """On disk: `own` is the masters' field of the one shard's records."""
        return self._region is None

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.offset : slot.stop].view(slot.spec.shape) for slot in self.span.slots]

    # Parameters -----------------------------------------------------------------------------------------------------

    def point(self, targets: Sequence[Tensor]) -> None:
        if not self.pinned:
            for param, target in zip(self.params, targets):
                param.data = target
            return
        for index, (param, target) in enumerate(zip(self.params, targets)):
            if index not in self.pinned:
                param.data = target

    def note(self) -> None:
        """`full` is as it should be: what changes from now on is somebody else's doing."""
        for shard in self.shards:
            if shard.tier is Tier.DEVICE:  # else the thread that steps does so
                shard.note()
        if self.keeps and not self._is_fresh:
            self.note_place()
        self._is_fresh = False

    def note_place(self) -> None:
        self.printed, self._is_fresh = None, False
        for shard in self.shards:
            if not shard.aliased:
                if self.keeps and self.full.untyped_storage().nbytes():
                    self.printed = digest(self.place)
                return

    @property
    def addresses(self) -> list[int]:
        """Of `views`."""
        base = self.full.data_ptr()
        if base != self._base:
            size, self._base = self.full.element_size(), base
            self._addresses = [
                base + slot.offset * size if view.numel() else 0 for slot, view in zip(self.span.slots, self.views)
            ]
        return self._addresses

    def moved(self, addresses: list[int]) -> list[int]:
        """Parameters (places in `params`) whose `.data` is not at these any more."""
        now = list(map(Tensor.data_ptr, self.params))
        if now == addresses:
            return []
        return [
            i
            for i, (a, b) in enumerate(zip(now, addresses))
            if a != b and i not in self.pinned and self.params[i].numel()
        ]

    def counted(self) -> list[int]:
        """Parameters (places in `params`) that were written in place since the last call, as torch counts it."""
        versions = self._versions
        for index, param in enumerate(self.params):
            if param._version != versions[index]:
                break
        else:
            return []
        before, self._versions = versions, [param._version for param in self.params]
        return [i for i, (a, b) in enumerate(zip(before, self._versions)) if a != b and i not in self.pinned]

    def uncount(self, index: int) -> None:
        """What was written to a parameter in place so far is known."""
        self._versions[index] = self.params[index]._version

    def pieces(self, index: int) -> Iterator[tuple[Shard, int, int, int]]:
        """This rank's elements of a parameter: shard, first element there, how many, first element in the parameter."""
        slot, low = self.span.slots[index], self.rank * self.span.slice_numel
        start, stop = max(low, slot.offset), min(low + self.span.slice_numel, slot.stop)
        if start < stop:
            for shard, at, numel in cut(self.shards, start - low, stop - start):
                yield shard, at, numel, low + shard.start + at - slot.offset

    def open(self, use: str) -> None:
        """Give `full` its storage back; a gather fills it. `use`: what for, if there is no memory."""
        size = self.full_bytes
        self.storage.allocate("gathered", use, size, partial(self._full_storage.resize_, size))
        self._gathered_bytes = size

    def close(self) -> None:
        if not self.resident:
            self._full_storage.resize_(0)
            self._count_gathered(0)

    def _count_gathered(self, nbytes: int) -> None:
        if nbytes != self._gathered_bytes:
            self._account.add("gathered", nbytes - self._gathered_bytes)
            self._gathered_bytes = nbytes

    def drop(self) -> None:
        """Give all memory back, whoever still refers to it: other flats hold the values."""
        self._count_gathered(0)
        self.drop_bucket()
        self._count_loose("communication", 0)
        for tensor in (self.full, self.own, *(shard.master for shard in self.shards)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)
        self.close_shards()

    def close_shards(self) -> None:
        for shard in self.shards:
            shard.close()
        if self._region is not None:
            self._region.close()
            self._region = None

    def bring(self) -> Inflight:
        """`own` into its place in `full`, from where it rests; `full` is open."""
        own, link = self.own, self.storage.link
        if isinstance(own, OnDisk):
            landing = self.storage.scratch(own.numel(), own.dtype)
            read = own.begin_read(landing)

            def finish() -> None:
                read.close()
                values = landing
                if landing.dtype != self.compute_dtype:
                    values = self.storage.scratch(own.numel(), self.compute_dtype).copy_(landing)
                    self.storage.give_back(landing)
                link.up(values, self.place).close()
                self.storage.give_back(values)

            return Inflight((), (), finish)
        return link.up(own, self.place)

    def publish(self, shard: Shard, at: int, values: Tensor, staging: Staging | None = None) -> None:
        """New master values of `shard`, from its element `at` on, into `own`. `values` are on the device or the host.

        With `staging` (the thread that steps) copies to the device are left under way in it.
        """
        if shard.aliased:
            return
        start, numel, link = shard.start + at, values.numel(), self.storage.link
        # Not counted as a write: other shards may be parts of `own`, whose masters are watched for what the user writes.
        own = self.own.data if isinstance(self.own, Tensor) else self.own
        target = own[start : start + numel]
        if isinstance(target, OnDisk):
            if shard.tier is Tier.DEVICE:
                link.meter.moved("down", numel * target.element_size())
            target.copy_(values)
        elif (shard.tier is Tier.DEVICE) == (self.rest is Tier.DEVICE):
            target.copy_(values)
        elif shard.tier is Tier.DEVICE:
            link.down(values.to(target.dtype), target).close()
        elif staging is not None:
            staging.up(values, target)
        else:
            link.up(values.to(target.dtype), target).close()

    def refresh(self) -> None:
        """Carry all masters' values into `own`, after they were written."""
        width = self.storage.sizes.block_numel
        for shard in self.shards:
            if not shard.aliased:
                values = shard.values
                if isinstance(values, Tensor):
                    self.publish(shard, 0, values)
                else:
                    for at in range(0, shard.numel, width):
                        self.publish(shard, at, values[at : at + width].read())
            shard.note()
        self.note_place()

    def refresh_device(self) -> None:
        """As `refresh`, for the shards that the optimizer's own step has updated."""
        for shard in self.shards:
            if shard.tier is not Tier.DEVICE:
                continue
            if not shard.aliased and self.own is self.place and self.keeps and self.in_memory:
                self.printed, self._is_fresh = copied(shard.master.detach(), self.place), True
            elif not shard.aliased:
                self.publish(shard, 0, shard.master.detach())
            if not self.keeps:
                shard.note()

    def move(
        self, rest: Tier, tiers: Sequence[Tier], optimizer: torch.optim.Optimizer | None, *, keep_full: bool = False
    ) -> None:
        """`own` rests in `rest` and every shard in its tier of `tiers` afterwards, with the same values. The unit is sharded.

        Args:
            keep_full: on the device `own` is a slice of `full`, which is allocated then; its other slices are undefined.

        Raises:
            TierError, ConfigError: a tier failed or has no room; what could not be moved is where it was.
        """
        equal = self.compute_dtype == self.master_dtype
        before, region = self.own, self._region
        moves = rest is not self.rest
        if moves:
            values = fetch(self.own)
            former = self.rest, self.resident, self._region
            self.resident = rest is Tier.DEVICE and (keep_full or self.span.shards == 1)
            if self.resident:
                self._count_gathered(0)
                self.full.untyped_storage().resize_(self.full_bytes)
                self.stale = True
            self.rest, self._region = rest, None
            try:
                self.own = self._new_own(values)
            except ZeroError:
                if self._region is not None:
                    self._region.close()
                self.rest, self.resident, self._region = former
                raise
        self.storage.ledger.places += 1
        for shard, tier in zip(self.shards, tiers):
            place = self.own[shard.start : shard.stop]
            alias = place if equal and tier is rest and isinstance(place, Tensor) else None
            if tier is not shard.tier:
                shard.move(tier, optimizer, alias)
            elif moves and shard.tier is not Tier.DISK:
                shard.rest_on(alias)
            elif moves:
                shard.aliased = False  # what was read from its records rests elsewhere now
        if self.in_memory is False:
            self.drop_bucket()
            self._bucket = self._bucket_storage = None
        if not moves:
            if self.printed is None:
                self.note_place()
            return
        if region is not None:
            region.close()
        if isinstance(before, Tensor):
            self.close()

    def values(self, device: torch.device | None = None) -> Tensor:
        """The slice in the master dtype, 1-D on the span's device (or `device`); a view where it rests there in one piece."""
        out = assembled(self.shards, lambda shard: shard.values, 0, self.span.slice_numel, device or self.device)
        if out is None:
            raise StateError(f"span of {self.span.spec.name!r} has no values")
        return out

    # Optimizer state --------------------------------------------------------------------------------------------------

    def state_names(self, optimizer: torch.optim.Optimizer) -> dict[str, bool]:
        """The optimizer's states of this span, and whether each has one value per element."""
        names: dict[str, bool] = {}
        for shard in self.shards:
            for key, value in shard.entries(optimizer).items():
                names[key] = is_elementwise(key, value, shard.numel)
        return names

    def state(self, optimizer: torch.optim.Optimizer, name: str) -> Any:
        """One of them: 1-D over the slice, on the span's device (a view where it rests there in one piece), or one value."""

        def of(shard: Shard) -> Any:
            return shard.entries(optimizer).get(name)

        if self.state_names(optimizer).get(name):
            return assembled(self.shards, of, 0, self.span.slice_numel, self.device)
        return next((value for shard in self.shards if (value := of(shard)) is not None), None)

    def put_state(self, optimizer: torch.optim.Optimizer, entries: dict[str, Any]) -> None:
        """Replace all of them, from values over the whole slice."""
        numel = self.span.slice_numel
        for shard in self.shards:
            shard.put(
                optimizer,
                {
                    key: (value if len(self.shards) == 1 else value[shard.start : shard.stop].clone())
                    if is_elementwise(key, value, numel)
                    else value.clone()
                    if isinstance(value, Tensor)
                    else value
                    for key, value in entries.items()
                },
            )

    def make_wholes(self) -> None:
        """Nothing of the span is cut: one shard, in the device's memory."""
        if self.span.shards > 1 or not self.in_memory:
            raise StateError(
                f"the span of {self.span.spec.name!r} is cut: an optimizer cannot have its parameters whole"
            )
        master = self.shards[0].master.detach()
        self.wholes = [nn.Parameter(master[slot.offset : slot.stop].view(slot.spec.shape)) for slot in self.span.slots]

    def whole_entries(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """By parameter, the optimizer's state of its whole; nothing where there are none."""
        return [optimizer.state.get(whole, {}) for whole in self.wholes]

    def settle_wholes(self) -> None:
        """A whole that was given other memory (`p.data = …`): its values are the master's."""
        master = self.shards[0].master.detach()
        for whole, slot in zip(self.wholes, self.span.slots):
            place = master[slot.offset : slot.stop]
            if slot.spec.numel and whole.data_ptr() != place.data_ptr():
                place.copy_(whole.detach().reshape(-1))
                whole.data = place.view(slot.spec.shape)

    # Gradients ------------------------------------------------------------------------------------------------------

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

    def drop_grads(self, *, local: bool = False) -> None:
        """Forget what this rank's backward has made; unless only that is meant (`local`), there are no gradients afterwards."""
        for param in self.params:
            grad = param.grad
            if local and type(grad) is Gradient:
                grad.local = None
            else:
                param.grad = None
        if self._loose_bytes:
            self._count_loose("communication", 0)
        if not local:
            self.handles.drop()
            self.present = self._all
        if self._held:
            self._held = False
            self.drop_bucket()

    def hold(self) -> None:
        """Between backwards of one step, without a reduce: keep the local gradients, in float32 at least."""
        if self._holds:
            self.note_fresh()
            self._gather_local(self.take(), Precision.hold_dtype(self.reduce_dtype), "gradients")
            self._held = True
            self._count_loose("communication", 0)
        elif self.has_grads():  # they add up where they are
            self._count_loose("gradients", self.fresh_bytes)

    def note_fresh(self) -> None:
        """The ledger has the gradients that backward has just made; where they add up in place, it has them already."""
        if self._loose_bytes:
            if self._loose_kind != "communication":
                self._count_loose("communication", self._loose_bytes)
            return
        for param in self.params:
            if param.grad is not None:
                self._loose_bytes = self.fresh_bytes
                self._account.add("communication", self.fresh_bytes)
                return

    def _count_loose(self, kind: str, nbytes: int) -> None:
        """Gradients of this span beside its bucket: all that there are now."""
        if self._loose_bytes:
            self._account.add(self._loose_kind, -self._loose_bytes)
        if nbytes:
            self._account.add(kind, nbytes)
        self._loose_kind, self._loose_bytes = kind, nbytes

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
            for shard, at, numel, _ in self.pieces(index):
                grad = shard.whole_grad()
                if grad is not None:
                    grad[at : at + numel].zero_()

    @property
    def waits(self) -> bool:
        """Gradients of backwards inside `no_sync` are held in the bucket."""
        return self._held

    def waiting(self, index: int) -> Tensor:
        """One of them, in its parameter's shape."""
        return self._bucket_views[index]

    @property
    def is_reduced(self) -> bool:
        """Whether the shards have gradients."""
        for shard in self.shards:  # noqa: SIM110 -- asked for often
            if shard.has_grad:
                return True
        return False

    def bucket(self, dtype: torch.dtype | None = None, kind: str = "communication") -> tuple[Tensor, list[Tensor]]:
        """The span's gradient buffer, its storage present (values undefined but for the zero padding), and its views.

        `kind`: what the ledger counts it as.
        """
        wanted = dtype or self.reduce_dtype
        if self._bucket is None or self._bucket_storage is None or self._bucket.dtype != wanted:
            self.drop_bucket()
            self._bucket = self.allocate(self.span.numel, wanted, kind)
            self._bucket_storage = self._bucket.untyped_storage()
            self._bucket_views = self._cut(self._bucket)
            self._bucket_bytes = self._bucket.numel() * self._bucket.element_size()
        elif not self._bucket_is_there:
            self._allocate(self._bucket_bytes, partial(self._bucket_storage.resize_, self._bucket_bytes), kind)
        self._bucket_kind, self._bucket_is_there = kind, True
        if self.span.used_numel < self.span.numel:
            self._bucket[self.span.used_numel :].zero_()
        return self._bucket, self._bucket_views

    def allocate(self, numel: int, dtype: torch.dtype, kind: str = "communication") -> Tensor:
        """Device memory for gradients, 1-D, undefined. The ledger has it as `kind`."""
        return self._allocate(
            numel * dtype.itemsize, partial(torch.empty, numel, dtype=dtype, device=self.device), kind
        )

    def _allocate(self, nbytes: int, make: Callable[[], T], kind: str) -> T:
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
        if self._bucket_is_there and self._bucket_storage is not None:
            self._bucket_storage.resize_(0)
            self._account.add(self._bucket_kind, -self._bucket_bytes)
            self._bucket_is_there = False

    def outgoing(self, wire: SoloWire) -> tuple[Tensor, Tensor]:
        """What a reduce sends, and the memory that the mean comes back to. Both are there until `add_mean`."""
        source = self.source(wire)
        mean = self.allocate(self.span.slice_numel, self.master_dtype)
        self._loose_bytes += mean.nbytes
        return source, mean

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
        del grads
        if self._loose_bytes:
            self._account.add("communication", -self._loose_bytes)
            self._loose_bytes = 0
        if self._held:  # no longer
            self._held = False
            self._account.add("gradients", -self._bucket_bytes)
            self._account.add("communication", self._bucket_bytes)
            self._bucket_kind = "communication"
        if bucket.dtype != self.reduce_dtype:
            sent = self.allocate(self.span.numel, self.reduce_dtype).copy_(bucket)
            self._loose_bytes += sent.nbytes
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
        else:
            shard = self.shards[0]
            grad = shard.device_grad
            bucket, views = self.bucket(kind="gradients")
            if grad is None:
                _fill(views, grads)
            else:
                if grad.data_ptr() != bucket.data_ptr():  # it has been elsewhere meanwhile
                    bucket.copy_(grad)
                _add(views, grads)
            shard.use_bucket(bucket)
        self._count_loose("communication", 0)

    def add_mean(self, mean: Tensor) -> None:
        """A reduce is over: its result goes to the shards, and what it sent goes away."""
        self._account.add("communication", -self._loose_bytes)
        self._loose_bytes = 0
        self.add_reduced(mean)
        self.drop_bucket()

    def add_reduced(self, mean: Tensor) -> None:
        """Add a gradient of this rank's slice, 1-D on the device; it may become a shard's own memory."""
        first = self.shards[0]
        if first is self.shards[-1] and first.tier is Tier.DEVICE and first.master.grad is None:
            first.device_grad = mean
            return
        for shard in self.shards:
            shard.add(mean[shard.start : shard.stop])

    def grads(self) -> list[tuple[Shard, Tensor]]:
        """Every shard that has a gradient, with it."""
        return [(shard, grad) for shard in self.shards if (grad := shard.whole_grad()) is not None]

    def grad(self, device: torch.device) -> Tensor:
        """The slice's reduced gradient, 1-D in the master dtype; zeros where a shard has none."""
        out = assembled(self.shards, lambda shard: shard.whole_grad(), 0, self.span.slice_numel, device)
        return torch.zeros(self.span.slice_numel, dtype=self.master_dtype, device=device) if out is None else out

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


def _slots(span: Span) -> list[tuple[int, ParamSpec]]:
    """Whatever the optimizer's groups are."""
    return [(slot.offset, replace(slot.spec, group=-1)) for slot in span.slots]


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
