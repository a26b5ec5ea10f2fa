"""A ring of host buffers for masters, gradients and states on disk: one slab is read, one is updated, one is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.inflight import Inflight
from ..errors import StateError
from ..optimizers.optimizer_copy import is_elementwise
from ..tiers.array import OnDisk, Values
from ..tiers.host import Link
from ..tiers.storage import Storage
from .segments import Segment
from .span import Span

MASTER, GRAD = "\0master", "\0grad"
"""Keys in addition to names of states."""


@dataclass(eq=False)
class SegmentUpdate:
    """One segment to update.

    Attributes:
        grad: the span's full gradient; None for a segment without one that the optimizer updates nevertheless.
        factor: multiplies a gradient on disk, which clipping has not rewritten.
        known: the segment's state when the step began. It must not change during the step: slabs are read ahead.
    """

    segment: Segment
    group: int
    grad: Values | None
    factor: Tensor | None
    known: dict[str, Any]

    @property
    def span(self) -> Span:
        return self.segment.span

    def slabs(self, numel: int) -> Iterator[Slab]:
        """Yield slabs whose bounds are multiples of `numel` in the span's slice: direct transfers need aligned offsets."""
        start = self.segment.start
        while start < self.segment.stop:
            stop = self.segment.stop if self.segment.is_matrix else min(self.segment.stop, (start // numel + 1) * numel)
            yield Slab(self, start, stop)
            start = stop


@dataclass(frozen=True, eq=False)
class Slab:
    """Elements `start` to `stop` of a span's slice that are read, updated and written together."""

    update: SegmentUpdate
    start: int
    stop: int

    @property
    def as_slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def in_segment(self) -> slice:
        return slice(self.start - self.update.segment.start, self.stop - self.update.segment.start)


class SlabMemory:
    """Host memory of one slab of the ring: one buffer for the master, the gradient and each state."""

    def __init__(self, link: Link, account: Callable[[int], None]) -> None:
        self._link, self._account = link, account
        self._memory: dict[str, Tensor] = {}
        self.slab: Slab | None = None
        self.values: dict[str, Tensor] = {}
        self.transfers: list[Inflight] = []

    def get(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        needed = numel * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.numel() < needed:
            self._account(needed - (0 if memory is None else memory.numel()))
            memory = self._memory[name] = self._link.empty(needed, torch.uint8)
        return memory[:needed].view(dtype)

    def read(self, slab: Slab) -> None:
        """Start to read the slab."""
        self.slab, self.values, self.transfers = slab, {}, []
        update, numel = slab.update, slab.stop - slab.start
        sources: dict[str, Any] = {MASTER: update.span.master[slab.as_slice]}
        if update.grad is not None:
            sources[GRAD] = update.grad[slab.as_slice]
        for name, value in update.known.items():
            is_array = not update.segment.is_matrix and _is_elementwise(name, value, update.segment.numel)
            if is_array or isinstance(value, OnDisk):
                flat = value if isinstance(value, OnDisk) else value.reshape(-1)
                sources[name] = flat[slab.in_segment]
        for name, source in sources.items():
            if isinstance(source, OnDisk):
                self.values[name] = self.get(name, numel, source.dtype)
                self.transfers.append(source.begin_read(self.values[name]))
            else:
                self.values[name] = source

    def wait(self) -> None:
        """Wait until no transfer uses the memory.

        Raises:
            TierError: one of them failed.
        """
        transfers, self.transfers = self.transfers, []
        failure: BaseException | None = None
        for transfer in transfers:
            try:
                transfer.close()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure


class Ring:
    """Slabs on their way through host memory, in the order in which they were announced.

    Args:
        before_reuse: waits for transfers from a slot's memory, before the next slab is read into it.
    """

    def __init__(self, storage: Storage, before_reuse: Callable[[], None]) -> None:
        self._storage, self._before_reuse = storage, before_reuse
        self._ahead: deque[Slab] = deque()
        self._reading: deque[SlabMemory] = deque()
        self._writing: deque[SlabMemory] = deque()
        self._free = self._new_slots()

    def _new_slots(self) -> list[SlabMemory]:
        host = self._storage.ledger.host
        return [
            SlabMemory(self._storage.link, lambda nbytes: host.add("staging", nbytes))
            for _ in range(self._storage.sizes.slabs)
        ]

    def slabs_of(self, update: SegmentUpdate) -> Iterator[Slab]:
        return update.slabs(self._storage.sizes.slab_numel)

    def announce(self, update: SegmentUpdate) -> None:
        """Announce the next update in order, so that its slabs are read ahead. For any thread."""
        self._ahead.extend(self.slabs_of(update))

    def next(self, slab: Slab) -> SlabMemory:
        """Wait for a slab and return its memory; start to read those after it.

        Raises:
            TierError: it could not be read, or an earlier one not written.
        """
        self._read_ahead()
        while not self._reading:
            if not self._writing:
                raise StateError("a slab was asked for that was not announced")
            self.finish_writes(len(self._writing) - 1)
        slot = self._reading.popleft()
        found = slot.slab
        if found is None or found.update is not slab.update or found.start != slab.start:
            raise StateError("slabs came from disk in another order than they were announced")
        slot.wait()
        return slot

    def write(self, slot: SlabMemory, targets: Sequence[tuple[OnDisk, Tensor]]) -> None:
        """Start to write an updated slab, and wait until all slabs before it are written."""
        slot.transfers = [target.begin_write(value) for target, value in targets]
        self._writing.append(slot)
        self.finish_writes(1)

    def finish_writes(self, most: int) -> None:
        """Wait until at most `most` slabs are being written.

        Raises:
            TierError: one could not be.
        """
        while len(self._writing) > max(0, most):
            slot = self._writing.popleft()
            self._before_reuse()
            slot.wait()
            self._free.append(slot)
            self._read_ahead()

    def _read_ahead(self) -> None:
        while self._free and self._ahead:
            slot = self._free.pop()
            slot.read(self._ahead.popleft())
            self._reading.append(slot)

    def abandon(self) -> None:
        """Wait for all transfers after an error, and drop slabs that were read ahead."""
        self._ahead.clear()
        for slot in (*self._reading, *self._writing):
            without_error(slot.wait)
        self._reading.clear()
        self._writing.clear()
        self._free = self._new_slots()


def _is_elementwise(name: str, value: Any, numel: int) -> bool:
    on_disk = isinstance(value, OnDisk) and value.numel() == numel
    return on_disk or is_elementwise(name, value, numel)


def without_error(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # the update has failed already, for this or another reason
        return
