"""Wires that record their collectives in order, and a process group of one real rank.

Recording changes neither the bytes sent nor their order: the wire's own methods do the work, over real and over absent ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import StateError
from .group_wire import CollectiveWire, GroupWire, PairWire
from .inflight import Inflight
from .wire import Cuts, SoloWire, Traffic

T = TypeVar("T")


class Listener(Protocol):
    """Receives every collective of a wire."""

    def issued(
        self, kind: str, bytes_: int, unit: str, phase: str, ranks: int, stride: int, is_all_reduce: bool
    ) -> None:
        """This rank issues a collective of `ranks` ranks that are `stride` apart, and sends `bytes_` bytes."""


class _LastTraffic(Traffic):
    """Counters that also keep the kinds and bytes of the running collective."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[tuple[str, int]] = []

    def moved(self, kind: str, bytes_: int) -> None:
        super().moved(kind, bytes_)
        self.last.append((kind, bytes_))


class _Recorded(GroupWire):
    """A wire that reports its collectives to `listener`."""

    listener: Listener
    traffic: _LastTraffic
    stride = 1
    """Distance between the ranks of this wire."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, lane: str = "") -> None:
        super().__init__(device, group, lane)
        self.traffic = _LastTraffic()

    def among(self, groups: Sequence[Sequence[int]]) -> GroupWire:
        part = super().among(groups)
        if isinstance(part, _Recorded):
            part.listener = self.listener
            mine = next(ranks for ranks in groups if self.rank in ranks)
            part.stride = mine[1] - mine[0] if len(mine) > 1 else 1
        return part

    def _record(self, begin: Callable[[], T], tag: int = -1, is_all_reduce: bool = False) -> T:
        moved = self.traffic.last = []
        result = begin()
        unit, phase = self.watch.units.get(tag, ""), self.watch.phase
        for kind, bytes_ in moved:
            self.listener.issued(kind, bytes_, unit, phase, self.size, self.stride, is_all_reduce)
        return result

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        begin = super().gather
        return self._record(lambda: begin(full, own, tag, cuts), tag)

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        begin = super().reduce
        return self._record(lambda: begin(source, out, tag, cuts), tag)

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        begin = super().average
        return self._record(lambda: begin(source, out, tag), tag, is_all_reduce=True)

    def sum_scalar(self, value: Tensor) -> Tensor:
        ask = super().sum_scalar
        return self._record(lambda: ask(value))

    def max_scalar(self, value: Tensor) -> Tensor:
        ask = super().max_scalar
        return self._record(lambda: ask(value))

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        begin = super().start_maximum
        return self._record(lambda: begin(values, at_end=at_end))


class RecordedPairs(_Recorded, PairWire):
    """gloo's wire, recorded."""

    is_direct = False  # absent ranks have no memory to read


class RecordedCollectives(_Recorded, CollectiveWire):
    """NCCL's wire, recorded."""


def recorded_wire(listener: Listener, device: torch.device, *, collectives: bool = False) -> SoloWire:
    """Return a recorded wire of the default process group, with buffers in host memory; for one rank a plain one.

    Args:
        collectives: use NCCL's wire instead of gloo's messages.
    """
    if dist.get_world_size() == 1:
        return SoloWire()
    wire = (RecordedCollectives if collectives else RecordedPairs)(device)
    wire.listener = listener
    return wire


@contextmanager
def absent_ranks(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a process group whose other ranks do not exist: every collective returns at once.

    Received values are whatever the memory held: the calls and their bytes are real, the values are not.

    Raises:
        StateError: this process already has a process group.
    """

    if dist.is_initialized():
        raise StateError("this process has a process group. Absent ranks need a process without one")
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 -- registers the backend "fake"

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
