"""The values of one span on this rank: gathered, and at rest.

In elements of the compute dtype unless said:
* `full`: 1-D, whole span. Made once; a release resizes its *storage* to 0 and a gather refills the same storage, because
  autograd keeps views of it (`weight.t()`) between forward and backward.
* `place`: this rank's slice of `full`.
* `views`: `full` cut into parameter shapes.
* `own`: 1-D, this rank's slice at rest: `place` where `full` stays, else a buffer of its own, on device, in host
  memory or on disk (`rest`). Frozen values that stay in the model's own files are in the type they have there.
* `shards`: the slice in the master dtype, the optimizer's parameters, in one stretch or several, each in a tier of its own
  (see `state_shard`). The same memory as `own` when the two types and tiers are equal, and `own` stays exact.
* `codec`: in whose format slices are gathered. What is in `full` then, also in `place`, is what the codes stand for. So a
  `place` that stays (stages 1 and 2) is never the master; `own` apart from `full` (stage 3) is exact, and may be.
All writes go through `full`, `own` and the shards, never through a parameter, so parameters keep their version counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...comm.codec import gather_codec
from ...comm.inflight import Inflight
from ...comm.wire import SoloWire
from ...core.layout import ParamSpec, Span
from ...errors import StateError, ZeroError
from ...plan.costs import Placement, part_numel, shares_memory
from ...tiers.array import DiskArray, OnDisk, Values, fetch
from ...tiers.fingerprint import copied, digest
from ...tiers.tier import Tier
from .bucket import Common, SpanGradients
from .deferred_spans import left_in_files, poured
from .offloaded_shard import SHARDS, DiskShard, new_shard
from .reads import AsTheyAre
from .state_shard import Shard, assembled


class Staging(Protocol):
    """What carries updated values up to the device, see `host_step`."""

    def up(self, values: Tensor, target: Tensor) -> None: ...


class SpanValues(SpanGradients):
    """Of one span; its gradients are in the base class, what its parameters show of them in `flat_param.Flat`.

    Args:
        placement: where `own` and the shards rest.
    """

    def __init__(self, span: Span, params: Sequence[nn.Parameter], common: Common, placement: Placement) -> None:
        super().__init__(span, params, common)
        policy, storage = common.policy, common.storage
        self.codec = gather_codec(span)
        self.wholes: dict[int, nn.Parameter] | None = None
        """By place in `params`, a view of the master of true shape of each that this rank owns, where the optimizer has those
        (`whole_optimizer.WholeBinding`)."""
        self._shares = shares_memory(span, policy)
        """`own` may be the memory of the masters."""
        self._known: Tensor | None = None
        """With `codec`: what `place` has been, where that is not what a gather made of the masters as they are."""
        stretches = placement.optimizer or ((placement.parameters, span.slice_numel),)
        self.rest = placement.parameters
        with torch.no_grad():
            at_rest = left_in_files(span, self.params, common.wire, storage) if self.rest is Tier.DISK else None
            if at_rest is None:
                whole = poured(span, self.params, self.device)
                self.full = whole if self.compute_dtype == self.master_dtype else whole.to(self.compute_dtype)
            else:
                self.full = whole = torch.empty(span.numel, dtype=self.compute_dtype, device=self.device)
            begin, end = span.bounds(self.rank)
            self.place = self.full[begin:end]
            # Where nothing is gathered into it from elsewhere, `full` is never given back.
            self.resident = self.rest is Tier.DEVICE and (policy.keep_full or span.shards == 1)
            self.stale = False
            """Where `full` stays: other ranks' slices of it may be old. The same on all ranks: gathers depend on it."""
            self._region: DiskArray | None = None
            self.own: Values = self.place
            self._settle_in(whole[begin:end], stretches, at_rest)
        self.views = self.cut_up(self.full)
        self.keeps = policy.keep_full
        self.unread = False
        """Its place in `full` could not be read from where it rests: it has no values."""
        self.part: Tensor | None = None
        """Of what was gathered, between forward and backward; cut among the ranks of a node."""
        self.known_references = 0
        """To the memory of `full`, when every parameter was where it should be; 0: not looked at."""
        self.printed: int | None = None
        """Where whole parameters stay and masters are other memory: the digest of `place` as the engine made it."""
        self._is_fresh = False  # `printed` is of what the next gather brings
        if self.codec is not None and self.keeps:
            for rank in range(span.shards):  # as after every gather from now on
                low, high = span.bounds(rank)
                self.full[low:high].copy_(self.codec.rounded(self.full[low:high]))
        self.note_place()
        self._known = None
        self._full_storage = self.full.untyped_storage()
        self._own_references = 3 + len(self.views)
        self.usual_views = 0
        """Of `full`, those that one graph keeps from a forward to its backward, where hooks have shown that."""
        self.full_bytes = self.full.numel() * self.full.element_size()
        self._gathered_bytes = 0 if self.resident else self._full_storage.nbytes()  # what the ledger has of `full`
        self.account.add("gathered", self._gathered_bytes)
        storage.ledger.places += 1

    def _settle_in(self, mine: Tensor, stretches: Sequence[tuple[Tier, int]], at_rest: DiskArray | None) -> None:
        """`own` and the shards, each in its tier, from the slice's values; `mine` is undefined where they are at rest."""
        if at_rest is not None:
            self.shards.append(DiskShard.over(self.storage, at_rest))
            self.own = self.shards[0].values
            return
        equal = self._shares
        shares = equal and self.rest is Tier.DISK and len(stretches) == 1 and stretches[0][0] is Tier.DISK
        if not shares:
            self.own = self._new_own(self.place)
        start = 0
        for tier, numel in stretches:
            alias = self.own[start : start + numel] if equal and tier is self.rest and tier is not Tier.DISK else None
            self.shards.append(
                new_shard(
                    self.storage,
                    start,
                    mine[start : start + numel],
                    tier,
                    trainable=self.span.trainable,
                    travels=self.compute_dtype == self.master_dtype,
                    alias=alias if isinstance(alias, Tensor) else None,
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
            self._region = DiskArray(self.storage.disk, numel, self.compute_dtype)
            return OnDisk(self._region).copy_(values)
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
        return self.rest is Tier.DISK and not self.span.trainable and self.shards[0].in_files

    def serves(self, span: Span, placement: Placement) -> bool:
        """Whether this is what would be built for `span`, too: frozen, of the same slots, at rest in the same places."""
        if span.trainable or self.resident or self.rest is not placement.parameters:
            return False
        alike = (span.slice_numel, span.shards) == (self.span.slice_numel, self.span.shards)
        return alike and _slots(span) == _slots(self.span) and (self.in_files or self.rests_as(placement))

    def rests_as(self, placement: Placement) -> bool:
        wanted = [*placement.optimizer] or [(placement.parameters, self.span.slice_numel)]
        return self.rest is placement.parameters and [(shard.tier, shard.numel) for shard in self.shards] == wanted

    @property
    def shares_array(self) -> bool:
        """On disk: `own` is the one shard's values."""
        return self._region is None

    def note(self) -> None:
        """`full` is as it should be: what changes from now on is somebody else's doing."""
        for shard in self.shards:
            if shard.tier is Tier.DEVICE:  # else the thread that steps does so
                shard.note()
        if self.keeps and not self._is_fresh:
            self.note_place()
        self._is_fresh = False
        self._known = None

    def note_place(self) -> None:
        self.printed, self._is_fresh = None, False
        if self.codec is not None and self.keeps:
            self.remember()
        for shard in self.shards:
            if not shard.aliased:
                if self.keeps and self.full.untyped_storage().nbytes():
                    self.printed = digest(self.place)
                return

    def remember(self) -> None:
        """`place` is as it should be, though not as it was gathered: what changes from now on is somebody else's doing."""
        if self.codec is not None and self.full.untyped_storage().nbytes():
            self._known = self.place.clone()

    def expected(self) -> Tensor:
        """With `codec`: what `place` is where nobody has written, 1-D."""
        if self._known is not None:
            return self._known
        exact = self.values().to(self.compute_dtype)
        return exact if self.codec is None else self.codec.rounded(exact)

    def has_memory_of(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of `full`."""
        return tensor.untyped_storage()._cdata == self._full_storage._cdata

    @property
    def memory(self) -> int:
        """The address (`_cdata`) of the storage of `full`."""
        address: int = self._full_storage._cdata
        return address

    @property
    def references(self) -> int:
        """How many tensors have the memory of `full`."""
        count: int = torch._C._storage_Use_Count(self._full_storage._cdata)
        return count

    def open(self, use: str) -> None:
        """Give `full` its storage back; a gather fills it. `use`: what for, if there is no memory."""
        self.storage.allocate("gathered", use, self.full_bytes, partial(self._full_storage.resize_, self.full_bytes))
        self._gathered_bytes = self.full_bytes

    def close(self, are_saved: Callable[[SpanValues, int], bool] | None = None, *, as_usual: bool = False) -> None:
        """Release the memory of `full`. Views that user code keeps get it; `full` has other memory from then on.

        Args:
            are_saved: Whether so many views of it belong to graphs, which read them after a gather.
            as_usual: It need not be asked about `usual_views`.
        """
        if not self.resident:
            # A view without memory would crash the process that reads it. Ours are `full`, `place`, `views` and
            # `_full_storage`; parameters point at their guards by now.
            views: int = torch._C._storage_Use_Count(self._full_storage._cdata) - self._own_references
            ask = None if views <= 0 or (as_usual and views == self.usual_views) else are_saved
            # A NumPy array has memory that torch never resizes.
            if not self._full_storage.resizable() or (ask is not None and not ask(self, views)):
                self.leave_storage()
            self._full_storage.resize_(0)
            self.known_references = 0
            self._known = None
            self.account.now["gathered"] -= self._gathered_bytes
            self._gathered_bytes = 0

    @torch.no_grad()
    def leave_storage(self) -> None:
        """`full` has the same values in other memory from here on: somebody keeps views of this one, or a NumPy array of it,
        which torch never resizes."""
        old = self._full_storage
        new = torch.UntypedStorage(self.full_bytes, device=self.device)
        if old.nbytes():
            new.copy_(old)
        for tensor in (self.full, self.place, *self.views):
            tensor.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
        self._full_storage = new
        for shard in self.shards:
            if shard.aliased and self.own is self.place and isinstance(self.own, Tensor):
                shard.rest_on(self.own[shard.start : shard.stop])
        self._point_wholes()

    def keep_part(self, node: SoloWire) -> None:
        """This rank's part of `full`, which is gathered, cut among the ranks of a node, for `gather_part`.

        Raises:
            OutOfMemoryError: there is no room; nothing is kept.
        """
        self.drop_part()
        if self.resident:
            return
        cuts = self._part_cuts(node)
        mine = self.full[cuts[node.rank] : cuts[node.rank + 1]]
        self.part = self.storage.allocate("gathered", "keeping a part for backward", mine.nbytes, mine.clone)

    def gather_part(self, node: SoloWire) -> Inflight:
        """What `keep_part` has cut up into `full`, which is open. A collective of the node. `full` must stay unchanged until
        the Inflight is closed; `part` may go at once."""
        cuts = self._part_cuts(node)
        place = self.full[cuts[node.rank] : cuts[node.rank + 1]]
        if self.part is not None:
            place.copy_(self.part)
        is_even = cuts[-1] == node.size * cuts[1]
        return node.gather(self.full, place, self.span.index, () if is_even else cuts)

    def drop_part(self) -> None:
        if self.part is not None:
            self.account.now["gathered"] -= self.part.nbytes
            self.part = None

    def _part_cuts(self, node: SoloWire) -> list[int]:
        each = part_numel(self.span, node.size)
        return [min(rank * each, self.span.numel) for rank in range(node.size + 1)]

    @torch.no_grad()
    def drop(self) -> None:
        """Let go of all memory, whoever still refers to this span: other flats hold the values."""
        self.account.now["gathered"] -= self._gathered_bytes
        self._gathered_bytes = 0
        self.drop_part()
        self.drop_bucket()
        self.drop_moving()
        # By reference, and no storage to 0: the program may keep views of whole parameters, and a graph has saved them.
        nothing = torch.empty(0, dtype=self.compute_dtype, device=self.device)
        self.full = self.place = self.own = nothing
        self.views, self._full_storage, self._known = [], nothing.untyped_storage(), None
        for tensor in (*(shard.master for shard in self.shards), *(self.wholes or {}).values()):
            with AsTheyAre():
                tensor.data = torch.empty(0, dtype=self.master_dtype, device=tensor.device)
        for shard in self.shards:
            shard.close()
        if self._region is not None:
            self._region.close()
            self._region = None

    def gather(self, wire: SoloWire) -> Inflight:
        """All ranks' slices into `full`, which is open. A collective."""
        own = self.own if self.rest is Tier.DEVICE and isinstance(self.own, Tensor) else self.place
        if self.codec is not None:
            return wire.gather_coded(self.full, own, self.codec, self.span.index)
        return wire.gather(self.full, own, self.span.index, self.span.cuts)

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
        """New master values of `shard`, from its element `at` on, into `own`; from the device or the host. With `staging` (the
        thread that steps) copies to the device are left under way in it."""
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
        self.settle_masters()
        if self.wholes:
            self.settle_wholes()
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
            is_shown = self.own is self.place and self.codec is None
            if not shard.aliased and is_shown and self.keeps and self.in_memory:
                self.printed, self._is_fresh = copied(shard.master.detach(), self.place), True
            elif not shard.aliased:
                self.publish(shard, 0, shard.master.detach())
            elif shard.master.data_ptr() != shard.home:
                self.settle_masters()
            if not self.keeps:
                shard.note()

    @torch.no_grad()
    def settle_masters(self) -> None:
        """Masters that were given other memory (`p.data = …`) in place of the parameters' own: their values go there."""
        given = [
            (shard, shard.plain)
            for shard in self.shards
            if shard.aliased and isinstance(self.own, Tensor) and shard.master.data_ptr() != shard.home
        ]
        if not given or not isinstance(self.own, Tensor):
            return
        there = sum(shard.aliased for shard in self.shards) - len(given)
        if self.own is self.place:
            is_kept = bool(self.known_references) and self.references > self.known_references - len(given)
        else:
            is_kept = torch._C._storage_Use_Count(self.own.untyped_storage()._cdata) > 1 + there
        if is_kept:  # who has the former `.data` keeps it
            self._leave_own()
        for shard, values in given:
            place = self.own[shard.start : shard.stop]
            place.copy_(values)
            shard.rest_on(place)

    def _leave_own(self) -> None:
        """`own` has the same values in other memory from here on."""
        if self.own is self.place:
            self.leave_storage()
            return
        own = fetch(self.own)
        new = self.storage.link.empty(own.numel(), own.dtype) if self.rest is Tier.HOST else torch.empty_like(own)
        self.own = new.copy_(own)
        for shard in self.shards:
            if shard.aliased:
                shard.rest_on(new[shard.start : shard.stop])

    def move(
        self, rest: Tier, tiers: Sequence[Tier], optimizer: torch.optim.Optimizer | None, *, keep_full: bool = False
    ) -> None:
        """`own` rests in `rest` and every shard in its tier of `tiers` afterwards, with the same values. The unit is sharded.

        Args:
            keep_full: on the device `own` is a slice of `full`, which is allocated then; its other slices are undefined.

        Raises:
            TierError, ConfigError: a tier failed or has no room; what could not be moved is where it was.
        """
        equal = self._shares
        before, region = self.own, self._region
        moves = rest is not self.rest
        if moves:
            values = fetch(self.own)
            former = self.rest, self.resident, self._region
            self.resident = rest is Tier.DEVICE and (keep_full or self.span.shards == 1)
            if self.resident:
                self.account.now["gathered"] -= self._gathered_bytes
                self._gathered_bytes = 0
                self._full_storage.resize_(self.full_bytes)
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
        for index, (shard, tier) in enumerate(zip(self.shards, tiers)):
            place = self.own[shard.start : shard.stop]
            alias = place if equal and tier is rest and isinstance(place, Tensor) else None
            if tier is not shard.tier:
                self.shards[index] = shard.move(SHARDS[tier], optimizer, alias, (self.wholes or {}).values())
            elif moves:
                shard.rest_on(alias)
        self._point_wholes()
        if self.in_memory is False:
            self.drop_bucket()
            self._bucket = self._bucket_storage = None  # the next one is other memory
        if not moves:
            if self.printed is None:
                self.note_place()
            return
        if region is not None:
            region.close()
        if self.codec is not None and self.keeps:
            self.refresh()  # what was moved is what was gathered
        if isinstance(before, Tensor):
            self.close()

    def values(self, start: int = 0, numel: int | None = None) -> Tensor:
        """The slice (or so many elements of it) in the master dtype, 1-D on the span's device; maybe a view."""
        numel = self.span.slice_numel if numel is None else numel
        out = assembled(self.shards, lambda shard: shard.values, start, numel, self.device)
        if out is None:
            raise StateError(f"span of {self.span.spec.name!r} has no values")
        return out

    # Whole parameters ------------------------------------------------------------------------------------------------

    def make_wholes(self) -> None:
        """No parameter of the span is cut: one shard, in whatever tier."""
        if (self.span.shards > 1 and not self.span.cuts) or len(self.shards) > 1:
            raise StateError(
                f"the span of {self.span.spec.name!r} is cut: an optimizer cannot have its parameters whole"
            )
        shard = self.shards[0]
        self.wholes = {index: nn.Parameter(part) for index, part in self.own_wholes(shard.plain)}
        for whole in self.wholes.values():
            shard.dress(whole)

    def _point_wholes(self) -> None:
        """The master's memory is another."""
        if self.wholes:
            for index, place in self.own_wholes(self.shards[0].plain):
                with AsTheyAre():
                    self.wholes[index].data = place
                self.shards[0].dress(self.wholes[index])

    def own_wholes(self, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Of values over the slice, which parameters are cut by no boundary: the place in `params` of each, and its view."""
        low, high = self.span.bounds(self.rank)
        for index, slot in enumerate(self.span.slots):
            if low <= slot.offset and slot.stop <= high and self.span.owner(slot) == self.rank:
                yield index, values[slot.offset - low : slot.stop - low].view(slot.spec.shape)

    def whole_entries(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        """By place in `params`, the optimizer's state of this rank's wholes; nothing where there are none."""
        return {index: dict(optimizer.state.get(whole, {})) for index, whole in (self.wholes or {}).items()}

    @property
    def has_moved_wholes(self) -> bool:
        """Whether a whole was given other memory."""
        places = self.own_wholes(self.shards[0].plain)
        return any(self.wholes[index].data_ptr() != place.data_ptr() for index, place in places if self.wholes)

    @torch.no_grad()
    def settle_wholes(self) -> None:
        """A whole that was given other memory (`p.data = …`): its values are the master's."""
        wholes = self.wholes or {}
        for index, place in self.own_wholes(self.shards[0].plain):
            whole = wholes[index]
            if place.numel() and whole.data_ptr() != place.data_ptr():
                place.copy_(whole.detach())
                whole.data = place


def _slots(span: Span) -> list[tuple[int, ParamSpec]]:
    """Whatever the optimizer's groups are."""
    return [(slot.offset, replace(slot.spec, group=-1)) for slot in span.slots]
