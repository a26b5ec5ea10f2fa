"""Wires that record their collectives in order, and a process group whose other ranks are absent.

Recording changes neither what is sent nor when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import StateError
from .group_wire import CollectiveWire, GroupWire, PairWire
from .inflight import Inflight, together
from .wire import Cuts, SoloWire, Traffic


class Listener(Protocol):
    """Receives every collective of a wire."""

    def issued(
        self, kind: str, bytes_: int, unit: str, phase: str, ranks: int, stride: int, is_all_reduce: bool
    ) -> int:
        """Record the start of a collective. Returns its number.

        Args:
            kind: of `Traffic`.
            bytes_: sent by this rank.
            unit: name of the unit; may be empty.
            phase: of the engine.
            ranks: number of ranks that take part.
            stride: distance between two of them.
            is_all_reduce: the collective is an all-reduce.
        """

    def waited(self, number: int) -> None:
        """Record that the result of a collective is needed."""


class _LastTraffic(Traffic):
    """Counters that keep the kinds and bytes counted since `last` was cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[tuple[str, int]] = []

    def moved(self, kind: str, bytes_: int) -> None:
        super().moved(kind, bytes_)
        self.last.append((kind, bytes_))


class _Recorded(GroupWire):
    """A wire that reports the collectives of a step to `listener`. `stride` is the distance between its ranks."""

    listener: Listener
    traffic: _LastTraffic
    stride = 1

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

    def _begin(self) -> list[tuple[str, int]]:
        self.traffic.last = []
        return self.traffic.last

    def _report(
        self, moved: Sequence[tuple[str, int]], tag: int = -1, is_all_reduce: bool = False
    ) -> Callable[[], None]:
        """Report collectives. Returns a function that reports that their results are needed."""
        unit, phase = self.watch.units.get(tag, ""), self.watch.phase
        numbers = [
            self.listener.issued(kind, bytes_, unit, phase, self.size, self.stride, is_all_reduce)
            for kind, bytes_ in moved
        ]

        def waited() -> None:
            for number in numbers:
                self.listener.waited(number)

        return waited

    def _record(self, begin: Callable[..., Inflight], tag: int, *given: Any, is_all_reduce: bool = False) -> Inflight:
        moved = self._begin()
        inner = begin(*given)
        if not moved:
            return inner
        report_wait = self._report(moved, tag, is_all_reduce)

        def finish() -> None:
            report_wait()
            inner.wait()

        return Inflight((), (together([inner]),), finish, lambda: inner.ready)

    def _record_scalar(self, ask: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        moved = self._begin()
        found = ask(value)
        self._report(moved)()
        return found

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        return self._record(super().gather, tag, full, own, tag, cuts)

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        return self._record(super().reduce, tag, source, out, tag, cuts)

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        return self._record(super().average, tag, source, out, tag, is_all_reduce=True)

    def sum_scalar(self, value: Tensor) -> Tensor:
        return self._record_scalar(super().sum_scalar, value)

    def max_scalar(self, value: Tensor) -> Tensor:
        return self._record_scalar(super().max_scalar, value)

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        moved = self._begin()
        answer = super().start_maximum(values, at_end=at_end)
        report_wait = self._report(moved)

        def wait() -> list[int]:
            report_wait()
            return answer()

        return wait


class RecordedPairs(_Recorded, PairWire):
    """The recorded wire of gloo."""

    is_direct = False  # absent ranks have no memory to read


class RecordedCollectives(_Recorded, CollectiveWire):
    """The recorded wire of NCCL."""


def recorded_wire(listener: Listener, device: torch.device, *, collectives: bool = False) -> SoloWire:
    """Return a recorded wire of the default process group for buffers in host memory; `SoloWire` for one rank.

    Args:
        listener: receives the collectives.
        device: of the buffers.
        collectives: call NCCL's collectives in place of gloo's messages.
    """
    if dist.get_world_size() == 1:
        return SoloWire()
    wire = (RecordedCollectives if collectives else RecordedPairs)(device)
    wire.listener = listener
    return wire


@contextmanager
def absent_ranks(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a process group whose other ranks are absent: every collective returns at once.

    Calls and bytes are real. Received values are not: buffers keep their contents.

    Raises:
        StateError: this process has a process group already.
    """
    if dist.is_initialized():
        raise StateError("this process has a process group. Absent ranks need a process without one")
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 -- makes the backend "fake" known

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
