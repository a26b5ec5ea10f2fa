"""One span on this rank: the full buffer, this rank's slice, and the master weights.

* `full`: 1-D, in the compute dtype, all ranks' slices. Created once; releasing it resizes its *storage* to 0 bytes and a
  gather fills the same storage, because autograd holds views of it (`weight.t()`) between forward and backward.
* `local`: this rank's slice of `full`.
* `master`: 1-D, this rank's slice in the master dtype: the only copy of the values that survives a release. It is the
  memory of `local` where `full` is never released and both dtypes are equal. On the device, in host memory or on disk.
* `copy`: the slice in the compute dtype, which gathers read where the master is not on the device. It is None where `full` is
  never released: gathers then read `local`. Code that writes the master must update either one (`publish_target`).

All writes go through `full`, `local` and `master`, never through a parameter, so parameters keep their version counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..comm.codec import Codec, gather_codec
from ..comm.inflight import DONE, Inflight
from ..core.layout import Extent, Slot, SpanLayout
from ..core.precision import dtype_of
from ..plan.costs import Placement
from ..tiers.array import DiskArray, JoinedSource, OnDisk, Values, fetch
from ..tiers.tier import Tier
from .bucket import Bucket
from .context import Context
from .parameter import Place, make_sharded, set_raw_data, source_of
from .segments import Segment
from .write_back import assign, with_digits

if TYPE_CHECKING:
    from .unit import Unit


_Buffer = tuple[Tensor, Tensor, list[Tensor], torch.UntypedStorage, Codec | None, bool]
"""`full`, `local`, `views`, the storage, the codes in which values are gathered, and whether a release drops the buffer."""


class Span:
    """The values of one span of a unit.

    Args:
        layout: the integers.
        params: in the order of `layout.slots`, with their values.
        placement: the tier of the master and of what gathers read.

    Attributes:
        trainable: one of the parameters requires a gradient.
        segments: contiguous parts of the master that an optimizer updates, in order.
        bucket: this rank's gradients on their way to their owners, and the slice of the mean that this rank owns.
        is_persistent: a release does not free `full`.
        is_old: `full` does not have the masters' values. The same on every rank.
    """

    def __init__(
        self, layout: SpanLayout, params: Sequence[nn.Parameter], context: Context, placement: Placement
    ) -> None:
        self.layout, self.params, self.context = layout, list(params), context
        self.events, self.device = context.events, context.device
        self.rank = context.shard_rank
        self.trainable = layout.trainable
        self.compute_dtype, self.master_dtype = dtype_of(layout.spec.compute_dtype), dtype_of(layout.spec.master_dtype)
        self.tier = placement.master_tier
        self.copy_tier = placement.parameters
        self.codec = gather_codec(layout)
        self.is_persistent = context.policy.keep_full or (layout.shards == 1 and self.copy_tier is Tier.DEVICE)
        self.segments: list[Segment] = []
        self.is_old = False
        self._is_dropped = False
        self._stacked: list[_Buffer] = []
        """Buffers below the current one, the usual one first."""
        self._fill(params)
        self.views = [self.full[slot.offset : slot.stop].view(slot.spec.shape) for slot in layout.slots]
        self._storage = self.full.untyped_storage()
        self.full_bytes = self.full.nbytes
        self._own_views = 3 + 2 * len(self.views)  # `full`, `local`, the storage; each view and its parameter
        self._states: dict[str, OnDisk] = {}
        self._gathered_bytes = 0 if self.is_persistent else self.full_bytes
        context.storage.ledger.device.add("gathered", self._gathered_bytes)
        self.bucket = Bucket(self)

    @torch.no_grad()
    def _fill(self, params: Sequence[nn.Parameter]) -> None:
        layout = self.layout
        low, high = layout.bounds(self.rank)
        files = self._files_of(params)
        exact = torch.empty(layout.numel, dtype=self.master_dtype, device=self.device)
        reads = files is None or self.is_persistent
        for slot, param in zip(layout.slots, params):
            view, source = exact[slot.offset : slot.stop].view(slot.spec.shape), source_of(param)
            if source is None:
                view.copy_(param.detach())
            else:
                if reads:
                    source.fill(param, view, exact[slot.offset :])
                source.end(param)
        exact[layout.used_numel :].zero_()
        self.full = exact if self.compute_dtype == self.master_dtype else exact.to(self.compute_dtype)
        self.local, self.local_numel = self.full[low:high], high - low
        self.master: Values = self._new_master(exact[low:high]) if files is None else files
        self.copy: Values | None = self._new_copy() if reads else files
        if self.codec is not None and self.is_persistent:
            for rank in range(layout.shards):  # as every later gather leaves it
                begin, end = layout.bounds(rank)
                self.full[begin:end].copy_(self.codec.rounded(self.full[begin:end]))

    def _files_of(self, params: Sequence[nn.Parameter]) -> OnDisk | None:
        """Return this rank's slice of a frozen span whose values are in files, else None. A write copies them first."""
        sources = [source for param in params if (source := source_of(param)) is not None]
        if self.tier is not Tier.DISK or self.trainable or len(sources) < len(params):
            return None
        found = [source.files for source in sources]
        in_files = all(each is not None and each.dtype == self.master_dtype for each in found)
        if not all(self.context.wire.exchange(in_files)):  # a rank wrote its part
            return None
        files = {slot.spec.name: each for slot, each in zip(self.layout.slots, found) if each is not None}
        parts = [
            (part.start, files[part.source.spec.name][part.source_slice]) for part in self.layout.overlaps(self.rank)
        ]
        storage, numel = self.context.storage, self.layout.bounds(self.rank)[1] - self.layout.bounds(self.rank)[0]
        base = JoinedSource(numel, self.master_dtype, parts, storage.meter)
        return OnDisk(DiskArray(storage.disk, numel, self.master_dtype, base))

    def _new_master(self, values: Tensor) -> Values:
        if self.tier is Tier.DEVICE:
            is_local = self.is_persistent and self.compute_dtype == self.master_dtype and self.codec is None
            return self.local if is_local else values.clone()
        return self.context.storage.store(self.tier, values)

    def _new_copy(self) -> Values | None:
        """Return the copy that gathers read, in the compute dtype; None where they read the master or `local`."""
        if self.tier is Tier.DEVICE or self.is_persistent:
            return None
        if self.copy_tier is self.tier and self.compute_dtype == self.master_dtype:
            return self.master
        if self.copy_tier is Tier.DEVICE:
            return self.local.clone()
        return self.context.storage.store(self.copy_tier, self.local)

    # Parameters -------------------------------------------------------------------------------------------------------

    def attach_params(self, unit: Unit) -> None:
        """Point the parameters at `full`, and make them report access."""
        self.unit = unit
        for index, (param, view) in enumerate(zip(self.params, self.views)):
            make_sharded(param, Place(self, index))
            set_raw_data(param, view)

    def view(self, index: int) -> Tensor:
        """Return one parameter's values in `full`."""
        return self.views[index]

    def name_of(self, index: int) -> str:
        return self.layout.slots[index].spec.name

    def sync_requires_grad(self) -> None:
        """Read `requires_grad` of the parameters again."""
        flags = [param.requires_grad for param in self.params]
        self.trainable = any(flags)
        for segment in self.segments:
            segment.sync_requires_grad()

    # Gather and release -----------------------------------------------------------------------------------------------

    @property
    def master_is_local(self) -> bool:
        """Return whether the master is the memory of `local`."""
        return self.master is self.local

    def open(self, purpose: str) -> None:
        """Give `full` its storage back; the values are undefined.

        Raises:
            OutOfMemoryError: the device has no memory for it.
        """
        if not self.is_readable:
            self._uncount()  # a signal may have interrupted the last release before this
            resize = partial(self._storage.resize_, self.full_bytes)
            self.context.storage.allocate("gathered", purpose, self.full_bytes, resize)
            self._gathered_bytes = self.full_bytes

    def load_local(self) -> Inflight:
        """Start to fill `local` from the master, or from its copy."""
        if self._stacked:
            return self._load_master()
        if self.tier is not Tier.DEVICE and self.copy is None:
            return DONE  # every write to the master has updated `local`
        source = self.master if self.copy is None else self.copy
        if source is self.master and self.compute_dtype != self.master_dtype:
            return self._load_master()
        if self.tier is Tier.DEVICE or self.copy_tier is Tier.DEVICE:
            if source is not self.local:
                self.local.copy_(source)  # type: ignore[arg-type]  # on the device
            return DONE
        return self.context.storage.load(source, self.local)

    @property
    def publish_target(self) -> Values | None:
        """Return the memory in the compute dtype that writes to an offloaded master must update as well, if there is any."""
        if self.tier is Tier.DEVICE:
            return None
        if self.copy is None:
            return self._stacked[0][1] if self._stacked else self.local
        return None if self.copy is self.master else self.copy

    def gather(self) -> Inflight:
        """Start the all-gather of the slices. `local` must hold this rank's values."""
        wire, layout = self.context.wire, self.layout
        if layout.shards == 1:
            return DONE
        if self.codec is not None:
            exact = self.master if self.tier is Tier.DEVICE else self.local
            own = fetch(exact).to(device=self.device, dtype=self.compute_dtype)
            return wire.gather_coded(self.full, own, self.codec, layout.index)
        return wire.gather(self.full, self.local, layout.index, layout.cuts)

    def close(self) -> None:
        """Release the memory of `full`."""
        while self._is_dropped:
            self._pop_buffer()
        if not self.is_persistent:
            self._storage.resize_(0)
            self._uncount()

    def _uncount(self) -> None:
        self.context.storage.ledger.device.now["gathered"] -= self._gathered_bytes
        self._gathered_bytes = 0

    def drop(self) -> None:
        """Free the memory of a persistent `full`. `restore` allocates it again, with undefined values."""
        if self.has_outside_views or not self._storage.resizable():
            self.move_to_new_storage()
        self._storage.resize_(0)

    def restore(self) -> None:
        self._storage.resize_(self.full_bytes)

    def use_master(self, values: Tensor) -> None:
        """Replace the memory of the master."""
        self.master = values
        for segment in self.segments:
            segment.use_master(values)

    # The stack of buffers ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push_buffer(self, dtype: torch.dtype, purpose: str, *, masters: bool) -> None:
        """Point the parameters at a new buffer in `dtype`, without codes. `pop_buffers` restores the current one.

        Args:
            masters: the next gather fills it from the masters. Else it begins with the parameters' current values.

        Raises:
            OutOfMemoryError: the device has no memory for it.
        """
        values, numel = self.full, self.layout.numel
        make = partial(torch.empty, numel, dtype=dtype, device=self.device)
        full = self.context.storage.allocate("gathered", purpose, numel * dtype.itemsize, make)
        self._push(full, is_dropped=True)
        self.is_old = masters
        if not masters:
            full.copy_(values)

    def push_released_buffer(self, dtype: torch.dtype) -> None:
        """As `push_buffer`, of a released unit: gathers fill the buffer from the masters, and releases free its memory."""
        self._push(torch.empty(self.layout.numel, dtype=dtype, device=self.device), is_dropped=False)
        self._storage.resize_(0)
        self._gathered_bytes = 0

    def _push(self, full: Tensor, *, is_dropped: bool) -> None:
        low, high = self.layout.bounds(self.rank)
        views = [full[slot.offset : slot.stop].view(slot.spec.shape) for slot in self.layout.slots]
        self._stacked.append((self.full, self.local, self.views, self._storage, self.codec, self._is_dropped))
        self._use((full, full[low:high], views, full.untyped_storage(), None, is_dropped))

    def _pop_buffer(self) -> None:
        # The buffer is dropped, not resized: graphs that were built meanwhile hold it.
        self.context.storage.ledger.device.now["gathered"] -= self._storage.nbytes()
        self._use(self._stacked.pop())

    @property
    def buffer_depth(self) -> int:
        """Return the number of buffers below the current one."""
        return len(self._stacked)

    @torch.no_grad()
    def pop_buffers(self, kept: Sequence[int] = (), depth: int = 0) -> None:
        """Point the parameters at a buffer below the current one again.

        Args:
            kept: indices of parameters that were written. Their elements that are not the lower buffer's, rounded, are copied.
            depth: the number of buffers that remain below; 0 for the usual buffer.
        """
        while len(self._stacked) > depth:
            views = self.views
            self._pop_buffer()
            for index in kept if self.is_readable else ():
                old, new = self.views[index], views[index]
                old.copy_(torch.where(old.to(new.dtype) == new, old, new.to(old.dtype)))

    def _use(self, buffer: _Buffer) -> None:
        self.full, self.local, self.views, self._storage, self.codec, self._is_dropped = buffer
        self.full_bytes = self.full.nbytes
        if not self.is_persistent:
            self._gathered_bytes = self._storage.nbytes()
        with torch._C.DisableTorchFunctionSubclass():
            for param, view in zip(self.params, self.views):
                set_raw_data(param, view)

    def _load_master(self) -> Inflight:
        if self.tier is not Tier.DEVICE and self.master_dtype == self.local.dtype:
            return self.context.storage.load(self.master, self.local)
        if isinstance(self.master, OnDisk):
            # Read when waited for: a rank whose file fails must still take part in the gather.
            return Inflight(finish=partial(self.master.read_into, self.local))  # type: ignore[arg-type]
        self.local.copy_(self.master)
        return DONE

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Copy to the master those elements of `local` that are not the master's, rounded: user code wrote them."""
        if not self.master_is_local:
            master = self.values().to(self.device)
            self.write(0, with_digits(master, self.local))

    @torch.no_grad()
    def move_to_new_storage(self) -> None:
        """Move `full` to new memory with the same values. Views that user code holds keep the old memory: a snapshot."""
        old = self._storage
        new = torch.UntypedStorage(self.full_bytes, device=self.device)
        if old.nbytes():
            new.copy_(old)
        local_is_master = self.master_is_local
        for tensor in (self.full, self.local, *self.views):
            tensor.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
        with torch._C.DisableTorchFunctionSubclass():
            for param, view in zip(self.params, self.views):
                set_raw_data(param, view)
        self._storage = new
        if local_is_master:
            self.master = self.local
            for segment in self.segments:
                segment.use_master(self.local)

    # Values -----------------------------------------------------------------------------------------------------------

    def values(self, start: int = 0, numel: int | None = None) -> Tensor:
        """Return this rank's slice, or `numel` elements of it, in the master dtype, 1-D: a copy or a view of the master.

        Raises:
            TierError: it could not be read from disk, on this rank alone.
        """
        self.unit.wait_for_step()
        for event in self.events.master_read:
            event(self)
        stop = self.local_numel if numel is None else start + numel
        return fetch(self.master[start:stop])

    @torch.no_grad()
    def write(self, start: int, values: Tensor) -> None:
        """Write elements of this rank's slice, from `start` on. The gathered copy is stale afterwards."""
        for event in self.events.master_read:
            event(self)
        self.store(start, values)

    @torch.no_grad()
    def store(self, start: int, values: Tensor) -> None:
        """As `write`. The master must already have user code's writes to parameters."""
        self.unit.wait_for_step()
        self.master[start : start + values.numel()].copy_(values)
        if self.publish_target is not None:
            self.publish_target[start : start + values.numel()].copy_(values.to(self.compute_dtype))

    def publish(self) -> None:
        """Copy the master's values to `publish_target`, from which gathers read them.

        Raises:
            TierError: they could not be read or written.
        """
        target = self.publish_target
        if isinstance(target, Tensor) and isinstance(self.master, OnDisk):
            self.master.read_into(target)
        elif target is not None:
            target.copy_(self.master)  # type: ignore[arg-type]

    def state_on_disk(self, name: str, dtype: torch.dtype) -> OnDisk:
        """Return the disk array of one state, shared by all segments so that offsets are aligned like the master's.

        Raises:
            TierError: the disk is full.
        """
        whole = self._states.get(name)
        if whole is None or whole.dtype != dtype:
            whole = OnDisk(DiskArray(self.context.storage.disk, self.local_numel, dtype))
            self._states[name] = whole
        return whole

    def assign(self, index: int, values: Tensor) -> None:
        """Replace one parameter's values: this rank's elements in the master, all of them in `full` where it has memory."""
        if self.unit.state.name == "GATHERING":
            self.unit.wait()
        if self.is_readable and self.has_outside_views:
            self.move_to_new_storage()  # user code's views keep their values, and `values` may be one of them
        assign(self, index, values)

    @property
    def is_readable(self) -> bool:
        """Return whether `full` has memory. Asks the storage itself: a signal may separate a change from any record of it."""
        return self.is_persistent or self._storage.nbytes() == self.full_bytes

    @property
    def is_freed_in_place(self) -> bool:
        """Return whether the next release resizes the memory of `full`."""
        return not self._is_dropped and not self.is_persistent and self._storage.nbytes() > 0

    @property
    def has_outside_views(self) -> bool:
        return self.outside_views > 0

    @property
    def outside_views(self) -> int:
        """Return the number of tensors of user code, or of a graph, that have the memory of `full`."""
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count - self._own_views - (len(self.segments) if self.master is self.local else 0)

    def part_of(self, index: int) -> Extent[Slot] | None:
        """Return this rank's elements of one parameter. Starts count in this rank's slice."""
        return self.layout.part_of(self.layout.slots[index], self.rank)

    def parts(self) -> Iterator[tuple[int, Extent[Slot]]]:
        """Yield the parameters of which this rank has elements: index and part."""
        for index in range(len(self.params)):
            part = self.part_of(index)
            if part is not None:
                yield index, part
