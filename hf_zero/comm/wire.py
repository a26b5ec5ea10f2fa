"""The wire: what every one offers, and how its bytes and waits are counted. Those of several ranks are in `group_wire`.

Bytes are counted as sent by this rank in the payload, (N-1)/N of a buffer for a gather or a reduce.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .codec import Codec
from .inflight import DONE, Counters, Inflight
from .watch import Watch

Cuts = Sequence[int]


class Traffic(Counters):
    """Counters by kind: `gather`, `reduce`, `scalar`, `agree` (which units take part), `other` (start-up, state dicts).

    Calls are the collectives that this rank took part in, bytes what it sent. On CUDA waiting occupies the stream and not the
    host: next to no time there.
    """

    KINDS = ("gather", "reduce", "scalar", "agree", "other")

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Without the times."""
        return {kind: {"calls": count.calls, "bytes": count.bytes} for kind, count in self.kinds.items()}


class SoloWire:
    """One rank. Also the base: what every wire offers."""

    rank = 0
    size = 1
    ragged = True
    """`reduce` takes a source without the padding at the span's end."""
    ends_alone = True
    """A reduce that has begun ends without a message that this rank begins then: ranks may wait for it at different places."""
    codec: Codec | None = None
    """In whose format reduces travel, where it is shorter."""
    shard_group: SoloWire | None = None
    """Of the ranks among which one copy of the sharded state is cut, where these are not all: slices go by its `rank`."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.watch = Watch()

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        """Fill `full` (1-D, `size` equal slices) from all ranks; `own` is this rank's slice, in `full` itself or apart.

        `own` must stay unchanged until the Inflight is closed.

        Args:
            cuts: where the ranks' slices of `full` begin, and its end, where they are not equal.
        """
        return DONE

    def gather_coded(self, full: Tensor, own: Tensor, codec: Codec, tag: int) -> Inflight:
        """As `gather`, in a narrower format: every rank's `full` has what the codes of all slices stand for, also of its own.

        `own` may be written again at once.
        """
        return DONE

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        """Average the ranks' `source` (1-D, `size` slices) and put this rank's slice of it into `out` (float32 or wider).

        `source` must stay unchanged until closed.

        Args:
            cuts: as for `gather`.
        """
        land(source, out, 1.0)
        return DONE

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        """Average the ranks' `source` whole: plain data parallel."""
        return self.reduce(source, out, tag)

    def collect(self, own: Tensor, full: Tensor | None, tag: int, cuts: Cuts = ()) -> None:
        """All slices to rank 0, which passes `full` (CPU); the other ranks pass None. Synchronous."""
        if full is not None:
            full.copy_(own)

    def open_groups(self) -> None:
        """Before the first message within a part of the ranks. A collective."""

    def carry(self, values: Tensor | None, landing: Tensor, source: int) -> None:
        """`values` of rank `source` into rank 0's `landing` (1-D CPU of the same type and length). Other ranks: nothing."""
        if values is not None:
            landing.copy_(values)

    def side(self) -> SoloWire:
        """A CPU wire of its own over the same ranks, for another thread. A collective."""
        return self

    def start(self, stall_s: float) -> None:
        """Before an engine's first message: tags that no other engine's messages have, and the same watch. A collective.

        Args:
            stall_s: of the process group from now on, see `watch.Watcher`; 0: waits are not watched.
        """

    def sum_scalar(self, value: Tensor) -> Tensor:
        """Sum of a tensor (any shape, a few elements) over the ranks, in rank order."""
        return value

    def max_scalar(self, value: Tensor) -> Tensor:
        """Maximum over the ranks of each element of a tensor (any shape, a few elements)."""
        return value

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        """Start to find the maximum over the ranks, element by element; what is returned waits and has it.

        Args:
            at_end: of a backward, else at its start: the two do not meet each other.
        """
        own = list(values)
        return lambda: own

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Rank `source`'s values everywhere. Synchronous."""

    def exchange(self, value: Any) -> list[Any]:
        """Small Python values of all ranks, in rank order."""
        return [value]

    def barrier(self) -> None:
        """Return when every rank is here."""

    def ranks_here(self) -> int:
        """How many ranks run on this machine; a collective."""
        names = host_names(self)
        return names.count(names[self.rank])


def host_names(wire: SoloWire) -> list[str]:
    """Of each rank's machine. A collective."""
    return wire.exchange(socket.gethostname())


def land(source: Tensor, out: Tensor, scale: float) -> None:
    """out = source * scale; the padding that `source` may lack is zero."""
    out[: source.numel()].copy_(source)
    if scale != 1.0:
        out[: source.numel()].mul_(scale)
    out[source.numel() :].zero_()


def average_in_order(parts: list[Tensor], out: Tensor) -> None:
    """out = (((p0 + p1) + p2) + …) / N, summed in the type of `out`."""
    if parts[0].dtype == out.dtype:
        torch.add(parts[0], parts[1], out=out)
        rest = parts[2:]
    else:
        out.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        out.add_(part)
    out.mul_(1.0 / len(parts))


def wire_device(wire: SoloWire, default: torch.device) -> torch.device:
    """Where a tensor must be to travel."""
    device = getattr(wire, "device", None)
    return device if isinstance(device, torch.device) else default
