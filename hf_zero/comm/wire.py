"""Collectives between ranks, and counters of their bytes and waits. `group_wire` has the wires of several ranks.

Bytes are the payload that this rank sends: (N-1)/N of a buffer for a gather or a reduce.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RankMismatchError
from .codec import Codec
from .inflight import DONE, Counters, Inflight
from .watch import Watch

Cuts = Sequence[int]


class Traffic(Counters):
    """Counters by kind: `gather`, `reduce`, `scalar`, `agree` (which units take part), `other` (start-up, state dicts).

    Calls are the collectives that this rank took part in, bytes those that it sent. On CUDA a wait blocks the stream and takes
    almost no host time.
    """

    KINDS = ("gather", "reduce", "scalar", "agree", "other")

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return calls and bytes, without the times."""
        return {kind: {"calls": count.calls, "bytes": count.bytes} for kind, count in self.kinds.items()}


class RankStatus(NamedTuple):
    """One rank's status in an exchange.

    Attributes:
        depth: number of operations that the rank is in: see `Watch.operation`.
        reason: why the innermost one failed; None: it did not.
        value: any value that pickles.
    """

    depth: int
    reason: str | None
    value: Any


class Wire:
    """The interface of all wires, and the wire of one rank.

    Attributes:
        device: of the tensors that it sends; None: any.
        ragged: `reduce` accepts a source without the padding at the span's end.
        waits_in_any_order: a reduce needs no further messages of this rank, so ranks may wait for reduces in different orders.
        codec: format of reduces, where it makes them shorter.
        shard_group: the wire over which one copy of the sharded state is partitioned, if not over all ranks. Its `rank` is
            the number of this rank's slice.
    """

    rank = 0
    size = 1
    device: torch.device | None = None
    ragged = True
    waits_in_any_order = True
    codec: Codec | None = None
    shard_group: Wire | None = None

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.watch = Watch()

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        """Fill `full` (1-D, `size` equal slices) from all ranks.

        Args:
            full: receives all slices.
            own: this rank's slice, inside `full` or separate. Must stay unchanged until the transfer is closed.
            tag: the span's number.
            cuts: offsets of the ranks' slices in `full` and its end, if they are not equal.
        """
        return DONE

    def gather_coded(self, full: Tensor, own: Tensor, codec: Codec, tag: int) -> Inflight:
        """Gather in a narrower format. Every rank's `full` holds the decoded values, also of its own slice.

        `own` may be written at once.
        """
        return DONE

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        """Average the ranks' `source` (1-D, `size` slices) and write this rank's slice into `out` (float32 or wider).

        Args:
            source: must stay unchanged until the transfer is closed.
            out: receives the slice.
            tag: the span's number.
            cuts: as for `gather`.
        """
        copy_scaled(source, out, 1.0)
        return DONE

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        """Average all of the ranks' `source` into `out`: plain data parallel."""
        return self.reduce(source, out, tag)

    def open_groups(self) -> None:
        """Open the process groups that the engine needs. A collective; must precede gathers and reduces."""

    def send_to_rank_0(self, values: Tensor | None, received: Tensor, source: int) -> None:
        """Send `values` of rank `source` to rank 0's `received` (1-D, CPU, same dtype and length). Other ranks do nothing."""
        if values is not None:
            received.copy_(values)

    def background_wire(self) -> Wire:
        """Return a separate CPU wire over the same ranks, for another thread. A collective."""
        return self

    def start(self, stall_s: float) -> None:
        """Number the engine, so that its messages do not mix with another engine's. A collective.

        Args:
            stall_s: of the process group from now on, see `watcher.Watcher`; 0: waits are not watched.
        """

    def sum_scalar(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor (any shape, a few elements), the same on every rank."""
        return value

    def max_scalar(self, value: Tensor) -> Tensor:
        """Return the maximum over the ranks of each element of a tensor (any shape, a few elements)."""
        return value

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        """Start to compute the maximum over the ranks of each value. Returns a function that waits and returns it.

        Args:
            values: of this rank.
            at_end: at the end of a backward, else at its start: the two messages differ.
        """
        own = list(values)
        return lambda: own

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with rank `source`'s values. Blocks."""

    def exchange(self, value: Any) -> list[Any]:
        """Return the small Python values of all ranks, in rank order.

        Raises:
            RankMismatchError: another rank has left an operation that this one is in; says why.
        """
        statuses = self.exchange_statuses(RankStatus(len(self.watch.operations), None, value))
        mismatch = self.mismatch(statuses)
        if mismatch is not None:
            raise mismatch
        return [each.value for each in statuses]

    def exchange_statuses(self, status: RankStatus) -> list[RankStatus]:
        """Exchange statuses of ranks that may be in different operations."""
        return [status]

    def mismatch(self, statuses: Sequence[RankStatus]) -> RankMismatchError | None:
        """Return the error for ranks that are in different operations; None if all are in the same."""
        depth = min(each.depth for each in statuses)
        failed = next(
            (f" failed on rank {rank}: {each.reason}" for rank, each in enumerate(statuses) if each.reason), ""
        )
        if not failed and all(each.depth == depth for each in statuses):
            return None
        operations = self.watch.operations[depth : depth + 1]
        what = operations[0] if operations else "what other ranks are in"
        error = RankMismatchError(
            f"{what}{failed or ' was ended by one rank, and others wait inside'}. Make the same calls on every rank"
        )
        error.known_at = depth
        return error

    def barrier(self) -> None:
        """Wait until every rank has called it."""

    def local_world_size(self) -> int:
        """Return the number of ranks on this machine. A collective."""
        names = self.exchange(socket.gethostname())
        return names.count(names[self.rank])


def copy_scaled(source: Tensor, out: Tensor, scale: float) -> None:
    """Write source * scale into `out`; padding that `source` lacks becomes zero."""
    out[: source.numel()].copy_(source)
    if scale != 1.0:
        out[: source.numel()].mul_(scale)
    out[source.numel() :].zero_()


def average_in_order(parts: list[Tensor], out: Tensor) -> None:
    """Write (((p0 + p1) + p2) + …) / N into `out`, summed in its dtype."""
    if parts[0].dtype == out.dtype:
        torch.add(parts[0], parts[1], out=out)
        rest = parts[2:]
    else:
        out.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        out.add_(part)
    out.mul_(1.0 / len(parts))
