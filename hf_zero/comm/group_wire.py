"""Wires between several ranks, each with the cheapest transfers of its backend.

* `P2PWire`: CPU (gloo). gloo's reduce-scatter sends as much as an all-reduce, and its collectives run one at a time.
  Point-to-point messages send each byte once and run concurrently. Sums are made **in rank order**: the result does not
  depend on the network and equals `((g0 + g1) + g2) / N` to the bit. Ranks of one machine read gathers and reduces from each
  other's memory where the kernel allows it (`direct`), with the same sums.
* `CollectiveWire`: the backend's own collectives (NCCL).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankMismatchError
from .codec import Codec, fits
from .cross_memory import MAX_SPANS
from .direct import DirectTransfers, open_direct
from .inflight import DONE, Inflight
from .process_group import check_ranks, default_group, home_device, interrupt, open_in_thread, reader_of, watcher_of
from .watch import Wait, Watch
from .wire import Cuts, RankStatus, Wire, average_in_order, copy_scaled

PIECE_BYTES = 16 << 20
"""Size of the pieces in which a reduce receives its peers' slices: one is summed while the next arrives."""

_STEPS_APART = 4  # messages carry the step modulo this: ranks that communicate are at most one step apart
_TAGS_EACH, _TAGS_WRAP = 1 << 20, 2048  # tags per engine, engines; gloo's tags have 32 bits
_HIGHEST = 0x7FFFFFFF
_GATHER_TAG, _REDUCE_TAG, _SINGLE_TAG, _TAGS = 0, 1, 2, 3

# torch 2.13 renames these two; older releases have the old names only.
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))


class GroupWire(Wire):
    """Base of the wires of several ranks: exchanges of small values, and coded gathers and reduces.

    Attributes:
        gather_kind, reduce_kind: kinds of `traffic` that gathers and reduces count as.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, lane: str = "") -> None:
        super().__init__()
        home = default_group()
        self.device: torch.device = device
        self.group: dist.ProcessGroup = group or home
        self.rank, self.size = self.group.rank(), self.group.size()
        self.gather_kind, self.reduce_kind = "gather", "reduce"
        self.watch = Watch(partial(interrupt, ref(self.group), device))
        self.watcher = watcher_of(home)
        self.watcher.join(self.watch, lane)

    def subgroup(self, groups: Sequence[Sequence[int]]) -> GroupWire:
        """Return the wire over this rank's group of `groups`, for the same engine, counters and watch. A collective.

        An interrupt of this wire breaks waits of that one too. Later engines use the same process groups: messages carry the
        engine's number.
        """
        known, key = self.watcher.groups, str(groups)
        if key not in known:
            with self.watch.operation("opening process groups"):
                self.barrier()
                call = partial(dist.new_subgroups_by_enumeration, [list(ranks) for ranks in groups])
                known[key], _ = self._open(call)
        part = type(self)(self.device, known[key])
        self.watch.interrupts += part.watch.interrupts
        part.traffic, part.watch, part.codec = self.traffic, self.watch, self.codec
        part.use_engine_number()  # must follow the watch: the engine's number tells messages in a shared group apart
        return part

    def all_to_all(self, sent: Tensor, received: Tensor, tag: int) -> Inflight:
        """Send each rank its part of `sent` (1-D, `size` equal parts). `received` gets one part per rank, in rank order.

        Counts as a reduce. `sent` must stay unchanged until the transfer is closed.
        """
        raise NotImplementedError

    def gather_coded(self, full: Tensor, own: Tensor, codec: Codec, tag: int) -> Inflight:
        numel, nbytes = own.numel(), codec.nbytes(own.numel())
        sent = torch.empty(nbytes, dtype=torch.uint8, device=own.device)
        codec.encode(own, sent, numel)
        received = torch.empty(self.size * nbytes, dtype=torch.uint8, device=own.device)
        move = self.gather(received, sent, tag)

        def finish() -> None:
            move.close()
            for rank, part in enumerate(received.split(nbytes)):
                codec.decode(part, full[rank * numel : (rank + 1) * numel])

        return Inflight((), (), finish)

    def reduce_coded(self, source: Tensor, out: Tensor, codec: Codec, tag: int) -> Inflight:
        """Reduce in a narrower format. `source` may be written at once.

        Every rank receives its slice of all ranks' codes and sums the decoded values in float32, in rank order: each element is
        rounded once per rank, and the sum is not rounded. The owner of a slice uses its own decoded values, too. "ZeRO++"
        (arXiv 2306.10209), section 3.3: a ring would round at every hop.
        """
        numel, nbytes = out.numel(), codec.nbytes(out.numel())
        sent = torch.empty(self.size * nbytes, dtype=torch.uint8, device=source.device)
        for rank, part in enumerate(sent.split(nbytes)):
            codec.encode(source[rank * numel : (rank + 1) * numel], part, numel)
        received = torch.empty_like(sent)
        move = self.all_to_all(sent, received, tag)

        def finish() -> None:
            move.close()
            for rank, part in enumerate(received.split(nbytes)):
                codec.decode(part, out, add=rank > 0)
            out.mul_(1.0 / self.size)

        return Inflight((), (), finish)

    def use_engine_number(self) -> None:
        """Separate this engine's messages from those of other engines, by the number in the watch."""

    def _wait_for(self, work: Any, kind: str, tag: int = -1) -> Wait:
        return Wait(work.wait, self.traffic, self.watch, kind, tag)

    def _call(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function that waits for other ranks."""
        Wait(partial(call, *arguments), self.traffic, self.watch, "other", -1).wait()

    def _open(self, call: Callable[[], Any]) -> Any:
        return open_in_thread(self.group, self.watch, self._call, call)

    def sum_scalar(self, value: Tensor) -> Tensor:
        # Gathered and summed here, so that every rank adds in the same order. The number of launches is constant.
        self.traffic.moved("scalar", value.nbytes * (self.size - 1))
        parts = value.new_empty((self.size, *value.shape))
        work = _all_gather(parts.view(-1), value.reshape(-1), group=self.group, async_op=True)
        self._wait_for(work, "scalar").wait()
        return parts.sum(0, dtype=torch.float64 if value.is_floating_point() else value.dtype).to(value.dtype)

    def max_scalar(self, value: Tensor) -> Tensor:
        self.traffic.moved("scalar", value.nbytes * (self.size - 1))
        value = value.clone()
        self._wait_for(dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group, async_op=True), "scalar").wait()
        return value

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        # In host memory if the group can: on a GPU the answer would wait for all of forward.
        found = torch.tensor(values, dtype=torch.int32, device=home_device(self.group))
        self.traffic.moved("agree", found.numel() * 4 * (self.size - 1))
        work = self._wait_for(dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group, async_op=True), "agree")

        def answer() -> list[int]:
            work.wait()
            return found.tolist()

        return answer

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.traffic.moved("other", tensor.numel() * tensor.element_size())
        self._call(partial(dist.broadcast, tensor, group=self.group, group_src=source))

    def _message(self, begin: Callable[[list[Tensor], int, int], Any], values: Tensor, peer: int) -> None:
        """Start one message and wait for it."""
        try:
            work = begin([values], peer, _SINGLE_TAG)
        except RuntimeError as error:
            self._refuse(error)
        self._wait_for(work, "other").wait()

    def _refuse(self, error: RuntimeError) -> NoReturn:
        """Raise for a message that could not be started because its connection is broken; see `Wait.wait`.

        Callers catch the error themselves: a wrapper around each message would be one more call per message of a step.
        """
        explained = self.watch.explained(error)
        if explained is error:
            raise error
        raise explained from error

    def send_to_rank_0(self, values: Tensor | None, received: Tensor, source: int) -> None:
        if source == 0 or self.rank not in (0, source):
            if self.rank == source and values is not None:
                received.copy_(values)
            return
        if self.rank == source:
            if values is not None and values.numel():
                self.traffic.moved("other", values.numel() * values.element_size())
                self._message(self.group.send, values.to(self.device), 0)
        elif received.numel():
            arrived = received if received.device == self.device else torch.empty_like(received, device=self.device)
            self._message(self.group.recv, arrived, source)
            if arrived is not received:
                received.copy_(arrived)

    def background_wire(self) -> Wire:
        with self.watch.operation("opening a process group"):
            self.barrier()
            group = self._open(partial(dist.new_group, backend="gloo"))
        wire = P2PWire(torch.device("cpu"), group, lane=f"side {self.watch.engine}")
        wire.watch.engine = self.watch.engine
        return wire

    def exchange_statuses(self, status: RankStatus) -> list[RankStatus]:
        watcher = self.watcher
        values: list[Any] = [None] * self.size
        if watcher.has_endpoints or self.group is not default_group():
            self._call(dist.all_gather_object, values, status, self.group)
            return values
        self._call(dist.all_gather_object, values, (watcher.endpoint, status), self.group)
        watcher.set_endpoints([endpoint for endpoint, _ in values])
        return [found for _, found in values]

    def barrier(self) -> None:
        self._call(dist.barrier, self.group)

    def start(self, stall_s: float) -> None:
        watcher = self.watcher
        watcher.stall_s = stall_s
        watcher.engines += 1
        self.watch.engine = self.exchange(watcher.engines)[0]
        self.use_engine_number()

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        # A ring all-reduce sends 2 (N-1)/N of the buffer.
        self.traffic.moved(self.reduce_kind, 2 * _others(source, self.size))
        scale = _divided_first(source, self.size)
        work = self._wait_for(dist.all_reduce(source, group=self.group, async_op=True), self.reduce_kind)

        return Inflight((work,), (), lambda: copy_scaled(source, out, scale))


class P2PWire(GroupWire):
    """Point-to-point messages on gloo. The tag contains the span, so a message only meets its own counterpart.

    Attributes:
        is_direct: use ranks' memory for gathers and reduces, if they can read each other's.
        direct: makes these transfers. None on all ranks, or on no rank.
    """

    is_direct = True

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, lane: str = "") -> None:
        super().__init__(device, group, lane)
        self._first_tag = 0
        self.direct: DirectTransfers | None = None
        self._asked: Wait | None = None
        """The last `start_maximum` without an answer. A receive that is dropped would block its connection."""
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    def use_engine_number(self) -> None:
        self._first_tag = self.watch.engine % _TAGS_WRAP * _TAGS_EACH
        if self.is_direct:
            self.direct = open_direct(self, reader_of)

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        # Not an all-reduce: two of different lengths could meet after ranks have diverged, and gloo would abort the process.
        # The tag has no step: the values show that ranks have made different numbers of steps.
        before, self._asked = self._asked, None
        if before is not None:  # an exception left it unanswered
            before.wait()
        rows = torch.tensor([values] * self.size, dtype=torch.int32, device="cpu")
        self.traffic.moved("agree", len(values) * 4 * (self.size - 1))
        tag, group = self._first_tag + _TAGS_EACH - 1 - at_end, self.group
        try:
            works = [group.recv([rows[p]], p, tag) for p in self._peers]
            works += [group.send([rows[self.rank]], p, tag) for p in self._peers]
        except RuntimeError as error:
            self._refuse(error)
        asked = self._asked = Wait(lambda: _wait_for_all(works), self.traffic, self.watch, "agree", -1)

        def answer() -> list[int]:
            if self._asked is asked:
                self._asked = None
                asked.wait()
            most: list[int] = rows.amax(0).tolist()
            return most

        return answer

    def _message_tag(self, tag: int, kind: int) -> int:
        """Return the tag of this engine's message of a span, kind and step.

        A rank may be ahead in one of two engines. A rank at another step must not receive this message.
        """
        return self._first_tag + (tag * _STEPS_APART + self.watch.step % _STEPS_APART) * _TAGS + kind

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        numel = own.numel()
        if numel == 0 and not cuts:
            return DONE
        cuts = cuts or range(0, numel * (self.size + 1), numel)
        self.traffic.moved(self.gather_kind, numel * own.element_size() * (self.size - 1))
        place = full[cuts[self.rank] : cuts[self.rank + 1]]
        # Must be copied: no message brings this rank's own slice.
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        group, traffic, watch, kind = self.group, self.traffic, self.watch, self.gather_kind
        try:
            if self.direct is not None and tag < MAX_SPANS:
                return self.direct.gather(full, own, tag, cuts, kind)
            span, tag = tag, self._message_tag(tag, _GATHER_TAG)
            receives = [
                Wait(group.recv([full[cuts[p] : cuts[p + 1]]], p, tag).wait, traffic, watch, kind, span)
                for p in self._peers
                if cuts[p] < cuts[p + 1]
            ]
            sends = [Wait(group.send([own], p, tag).wait, traffic, watch, kind, span) for p in self._peers if numel]
        except RuntimeError as error:
            self._refuse(error)
        return Inflight(receives, sends)

    def all_to_all(self, sent: Tensor, received: Tensor, tag: int) -> Inflight:
        self.traffic.moved(self.reduce_kind, _others(sent, self.size))
        out, into = list(sent.chunk(self.size)), list(received.chunk(self.size))
        into[self.rank].copy_(out[self.rank])
        group = self.group
        try:
            if self.direct is not None and tag < MAX_SPANS:
                return self.direct.all_to_all(sent, received, tag, self.reduce_kind)
            span, tag = tag, self._message_tag(tag, _REDUCE_TAG)
            receives = [self._wait_for(group.recv([into[p]], p, tag), self.reduce_kind, span) for p in self._peers]
            sends = [self._wait_for(group.send([out[p]], p, tag), self.reduce_kind, span) for p in self._peers]
        except RuntimeError as error:
            self._refuse(error)
        return Inflight(receives, sends)

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        numel = out.numel()
        if numel == 0 and not cuts:
            return DONE
        if self.codec is not None and not cuts and fits(self.codec, numel, source.dtype):
            return self.reduce_coded(source, out, self.codec, tag)
        cuts = cuts or range(0, numel * (self.size + 1), numel)
        mine = source[cuts[self.rank] : cuts[self.rank + 1]]
        self.traffic.moved(self.reduce_kind, source.element_size() * (source.numel() - mine.numel()))
        piece = max(1, PIECE_BYTES // source.element_size())
        group, traffic, watch = self.group, self.traffic, self.watch
        sends: list[Wait] = []
        try:
            if self.direct is not None and tag < MAX_SPANS:
                return self.direct.reduce(source, out, tag, cuts, self.reduce_kind)
            span, tag = tag, self._message_tag(tag, _REDUCE_TAG)
            for peer in self._peers:
                theirs = source[cuts[peer] : cuts[peer + 1]]
                for part in theirs.split(piece) if theirs.numel() else ():
                    sends += (Wait(group.send([part], peer, tag).wait, traffic, watch, self.reduce_kind, span),)
        except RuntimeError as error:
            self._refuse(error)
        cut = [(start, min(start + piece, mine.numel())) for start in range(0, mine.numel(), piece)]
        # Pieces of one peer share a tag: gloo matches them in the order in which receives start.
        pending = [self._receive(source, stop - start, tag, span) for start, stop in cut[:2]]

        def finish() -> None:
            for index, (start, stop) in enumerate(cut):
                works, parts = pending[index]
                for work in works:
                    work.wait()
                if index + 2 < len(cut):
                    pending.append(self._receive(source, cut[index + 2][1] - cut[index + 2][0], tag, span))
                # Must be at this rank's position: another order of the sum would give other bits on other ranks.
                parts[self.rank] = mine[start:stop]
                average_in_order(parts, out[start:stop])
                pending[index] = ([], [])
            out[mine.numel() :].zero_()

        return Inflight((), sends, finish)

    def _receive(self, source: Tensor, numel: int, tag: int, span: int) -> tuple[list[Any], list[Tensor]]:
        received = torch.empty((self.size, numel) if self.size > 2 else (1, numel), dtype=source.dtype, device="cpu")
        parts = list(received.unbind()) if self.size > 2 else [received[0], received[0]]
        group, traffic, watch = self.group, self.traffic, self.watch
        try:
            works = [
                Wait(group.recv([parts[p]], p, tag).wait, traffic, watch, self.reduce_kind, span) for p in self._peers
            ]
        except RuntimeError as error:
            self._refuse(error)
        return works, parts


class CollectiveWire(GroupWire):
    """The backend's own collectives. Waiting blocks the current stream, never the host.

    They have no tags: ranks that gather different spans of one length get a mixture. Each agreement compares all gathers. And
    their order is that of the process group, so engines have one of their own: user code's collectives cannot come between.
    """

    ragged = False

    def open_groups(self) -> None:
        known, key = self.watcher.groups, "engines"
        if key not in known:
            # Agreements go through host memory: in the device's they would wait for all of its work.
            is_able = home_device(self.group).type == "cpu"
            backend = None if is_able else f"cpu:gloo,{dist.get_backend_config(self.group)}"
            with self.watch.operation("opening a process group"):
                self.barrier()
                known[key] = self._open(partial(dist.new_group, backend=backend))
        self.group = known[key]
        self.watch.interrupts.append(partial(interrupt, ref(self.group), self.device))

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        mark = self.watch.gathers & _HIGHEST
        answer = super().start_maximum([*values, mark, _HIGHEST - mark], at_end=at_end)

        def found() -> list[int]:
            *agreed, highest, complement = answer()
            if highest + complement != _HIGHEST:
                raise RankMismatchError(
                    f"ranks gathered different units, or in another order, until step {self.watch.step}: what they computed is "
                    "wrong. Run the same modules in the same order on every rank, and load a checkpoint"
                )
            return agreed

        return found

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        if own.numel() == 0 and not cuts:
            return DONE
        self.watch.gathers = (self.watch.gathers * 31 + tag + 1) & _HIGHEST
        self.traffic.moved(self.gather_kind, own.numel() * own.element_size() * (self.size - 1))
        if cuts:  # torch broadcasts each slice, all in one launch
            work = dist.all_gather(_ragged(full, cuts), own, group=self.group, async_op=True)
        else:
            work = _all_gather(full, own, group=self.group, async_op=True)
        return Inflight((self._wait_for(work, self.gather_kind, tag),))

    def all_to_all(self, sent: Tensor, received: Tensor, tag: int) -> Inflight:
        self.traffic.moved(self.reduce_kind, _others(sent, self.size))
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return Inflight((self._wait_for(work, self.reduce_kind, tag),))

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        if out.numel() == 0 and not cuts:
            return DONE
        if self.codec is not None and not cuts and fits(self.codec, out.numel(), source.dtype):
            return self.reduce_coded(source, out, self.codec, tag)
        sent = (source.numel() - out.numel()) * source.element_size() if cuts else _others(source, self.size)
        self.traffic.moved(self.reduce_kind, sent)
        received = out if out.dtype == source.dtype else torch.empty_like(out, dtype=source.dtype)
        scale = _divided_first(source, self.size)
        total = dist.ReduceOp.SUM
        if cuts:  # torch reduces to each owner, all in one launch
            begun = dist.reduce_scatter(received, _ragged(source, cuts), op=total, group=self.group, async_op=True)
        else:
            begun = _reduce_scatter(received, source, op=total, group=self.group, async_op=True)
        work = self._wait_for(begun, self.reduce_kind, tag)

        def finish() -> None:
            if received is not out:
                out.copy_(received)
            if scale != 1.0:
                out.mul_(scale)

        return Inflight((work,), (), finish)


def open_wire(device: torch.device, stall_s: float | None = None) -> Wire:
    """Return the wire of the default process group for buffers on `device`; a plain `Wire` for one rank.

    Args:
        device: of the buffers.
        stall_s: see `Wire.start`; None: unchanged.

    Raises:
        ConfigError: a launcher started several processes, and this one has no process group.
    """
    if check_ranks() == 1:
        return Wire()
    watcher_of(default_group(), stall_s)
    return P2PWire(device) if device.type == "cpu" else CollectiveWire(device)


def _wait_for_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _divided_first(source: Tensor, size: int) -> float:
    """Return the factor that turns a sum over `size` ranks into their average.

    Divides float16 values first: a sum in float16 overflows above 65,504, even if the average does not.
    """
    if source.dtype == torch.float16:
        source.mul_(1.0 / size)
        return 1.0
    return 1.0 / size


def _others(full: Tensor, size: int) -> int:
    return full.numel() * full.element_size() * (size - 1) // size


def _ragged(full: Tensor, cuts: Cuts) -> list[Tensor]:
    return [full[low:high] for low, high in pairwise(cuts)]
