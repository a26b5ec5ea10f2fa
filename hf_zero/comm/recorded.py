"""Wires that tell what they are asked for, in order; and one rank of a world that is not there.

Recording changes neither what is sent nor when: the wire's own methods do the work, over real ranks as over none.
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
    """Hears of every collective of a wire."""

    def issued(
        self, kind: str, bytes_: int, unit: str, phase: str, ranks: int, stride: int, is_all_reduce: bool
    ) -> int:
        """This rank begins it, and sends so many bytes to `ranks` ranks, itself among them, that are `stride` apart.

        Returns its number.
        """

    def waited(self, number: int) -> None:
        """Its result is needed."""


class _Told(Traffic):
    """Counters that remember the last kind and bytes that were counted."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[tuple[str, int]] = []

    def moved(self, kind: str, bytes_: int) -> None:
        super().moved(kind, bytes_)
        self.last.append((kind, bytes_))


class _Recorded(GroupWire):
    """A wire of one of the two kinds; the methods that move a step's bytes are told to `listener`."""

    listener: Listener
    traffic: _Told
    stride = 1
    """Ranks of this wire are so many apart."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, lane: str = "") -> None:
        super().__init__(device, group, lane)
        self.traffic = _Told()

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

    def _tell(self, moved: Sequence[tuple[str, int]], tag: int = -1, is_all_reduce: bool = False) -> Callable[[], None]:
        """What is returned tells that the results are needed."""
        unit, phase = self.watch.units.get(tag, ""), self.watch.phase
        numbers = [
            self.listener.issued(kind, bytes_, unit, phase, self.size, self.stride, is_all_reduce)
            for kind, bytes_ in moved
        ]

        def waited() -> None:
            for number in numbers:
                self.listener.waited(number)

        return waited

    def _heard(self, begin: Callable[..., Inflight], tag: int, *given: Any, is_all_reduce: bool = False) -> Inflight:
        moved = self._begin()
        inner = begin(*given)
        if not moved:
            return inner
        told = self._tell(moved, tag, is_all_reduce)

        def finish() -> None:
            told()
            inner.wait()

        return Inflight((), (together([inner]),), finish, lambda: inner.ready)

    def _answered(self, ask: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        moved = self._begin()
        found = ask(value)
        self._tell(moved)()
        return found

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        return self._heard(super().gather, tag, full, own, tag, cuts)

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        return self._heard(super().reduce, tag, source, out, tag, cuts)

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        return self._heard(super().average, tag, source, out, tag, is_all_reduce=True)

    def sum_scalar(self, value: Tensor) -> Tensor:
        return self._answered(super().sum_scalar, value)

    def max_scalar(self, value: Tensor) -> Tensor:
        return self._answered(super().max_scalar, value)

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        moved = self._begin()
        answer = super().start_maximum(values, at_end=at_end)
        waited = self._tell(moved)

        def told() -> list[int]:
            waited()
            return answer()

        return told


class RecordedPairs(_Recorded, PairWire):
    """gloo's wire, recorded."""

    is_direct = False  # there is no memory of ranks that are not there


class RecordedCollectives(_Recorded, CollectiveWire):
    """NCCL's, recorded."""


def recorded_wire(listener: Listener, device: torch.device, *, collectives: bool = False) -> SoloWire:
    """The wire of the default process group for buffers in host memory; one rank has nothing to tell.

    Args:
        collectives: as NCCL would be used, in place of gloo's messages.
    """
    if dist.get_world_size() == 1:
        return SoloWire()
    wire = (RecordedCollectives if collectives else RecordedPairs)(device)
    wire.listener = listener
    return wire


@contextmanager
def absent_ranks(world_size: int) -> Iterator[None]:
    """This process is rank 0 of a process group whose other ranks are not there: every collective returns at once.

    What would arrive stays what the memory held: the calls and their bytes are real, the values are not.

    Raises:
        StateError: this process has a process group already.
    """

    if dist.is_initialized():
        raise StateError("a process group is open in this process: ranks that are not there need one of their own")
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 -- makes the backend "fake" known

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
