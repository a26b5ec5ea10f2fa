"""The wires of several ranks, the only users of `torch.distributed`. Each knows the cheapest way its backend moves buffers.

* `PairWire`: CPU (gloo). gloo's reduce-scatter sends what an all-reduce sends, and its collectives run one at a time;
  point-to-point messages send each byte once, run at the same time, and let us sum **in rank order**, so that the
  result does not depend on the network and equals `((g0 + g1) + g2) / N` to the bit. Ranks of one machine read gathers and
  reduces out of each other's memory where they may (`direct`); the sums are the same.
* `CollectiveWire`: the backend's own collectives (NCCL).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from threading import Thread
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, RankMismatchError
from .codec import Codec, fits
from .direct import SPANS, Direct, Reader, open_direct
from .inflight import DONE, Inflight, Latch
from .stall import StallWatch
from .watch import Wait, Watch
from .wire import Cuts, SoloWire, average_in_order, land

PIECE_BYTES = 16 << 20
"""A reduce receives its peers' slices in pieces of at most this size; more than one piece is summed while waiting."""

_MEET_S = 10.0
"""For how long the first engine waits for the connections of the stall watch."""
_STEPS_APART = 4  # steps that messages are told apart by: ranks in touch are at most one apart
_INTERRUPT_TAG = (1 << 31) - 1
_TAGS_EACH, _TAGS_WRAP = 1 << 20, 2048  # an engine's own tags; gloo takes 32 bits
_GATHER_TAG, _REDUCE_TAG, _COLLECT_TAG, _TAGS = 0, 1, 2, 3


@dataclass
class _Shared:
    """What all wires over one default process group share.

    Attributes:
        stall: one per process: a rank may wait in one engine for another rank that is in the next one.
        reader: the thread that reads other ranks' memory.
        group: all ranks, for engines alone: their collectives do not mix with those of user code.
        parts: groups of some ranks, by all of them; this rank's own one of each kind.
    """

    stall: StallWatch
    reader: Reader | None = None
    group: dist.ProcessGroup | None = None
    parts: dict[str, dist.ProcessGroup] = field(default_factory=dict)


_SHARED: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()
"""By the default process group, which takes no attributes."""


class GroupWire(SoloWire):
    """What both real wires share: small synchronous exchanges over the default group, or another.

    Attributes:
        gather_kind, reduce_kind: of `traffic`, under which gathers and reduces count.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, lane: str = "") -> None:
        super().__init__()
        home: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        self.device = device
        self.group: dist.ProcessGroup = group or home
        self.rank, self.size = self.group.rank(), self.group.size()
        self.gather_kind, self.reduce_kind = "gather", "reduce"
        self.watch = Watch(partial(_interrupt, ref(self.group), device))
        self._shared = _shared(home, device)
        self._shared.stall.join(self.watch, lane)

    def among(self, groups: Sequence[Sequence[int]]) -> GroupWire:
        """Of the ranks that stand with this one in one of `groups`, for the same engine: counters and watch are these.

        What breaks a wait among all breaks one among some. A collective. Groups that were opened before are used again: an
        engine's messages have its number.
        """
        known, key = self._shared.parts, str(groups)
        if key not in known:
            with self.watch.doing("opening process groups"):
                self.barrier()
                known[key], _ = self._open(dist.new_subgroups_by_enumeration, [list(ranks) for ranks in groups])
        part = type(self)(self.device, known[key])
        self.watch.interrupts += part.watch.interrupts
        part.traffic, part.watch, part.codec = self.traffic, self.watch, self.codec
        part.take_number()  # after the watch: the group may be another engine's too, and the number tells messages apart
        return part

    def swap(self, sent: Tensor, landing: Tensor, tag: int) -> Inflight:
        """Of `sent` (1-D, `size` equal parts) each rank gets its part; `landing` has what came from each, in rank order.

        In place of a reduce: counted as one. `sent` must stay unchanged until closed.
        """
        raise NotImplementedError

    def gather_coded(self, full: Tensor, own: Tensor, codec: Codec, tag: int) -> Inflight:
        numel, nbytes = own.numel(), codec.nbytes(own.numel())
        sent = torch.empty(nbytes, dtype=torch.uint8, device=own.device)
        codec.encode(own, sent, numel)
        landing = torch.empty(self.size * nbytes, dtype=torch.uint8, device=own.device)
        move = self.gather(landing, sent, tag)

        def finish() -> None:
            move.close()
            for rank, part in enumerate(landing.split(nbytes)):
                codec.decode(part, full[rank * numel : (rank + 1) * numel])

        return Inflight((), (), finish)

    def reduce_coded(self, source: Tensor, out: Tensor, codec: Codec, tag: int) -> Inflight:
        """As `reduce`, in a narrower format; `source` may be written again at once.

        Every rank is sent its slice of the codes, all to all, and sums what is decoded in float32, in rank order: one rounding
        per rank and element on the way, none in the sum. Who keeps a slice uses the decoded values of its own, as the others
        do. "ZeRO++" (arXiv 2306.10209), section 3.3: the same exchange, where a ring would round at every hop.
        """
        numel, nbytes = out.numel(), codec.nbytes(out.numel())
        sent = torch.empty(self.size * nbytes, dtype=torch.uint8, device=source.device)
        for rank, part in enumerate(sent.split(nbytes)):
            codec.encode(source[rank * numel : (rank + 1) * numel], part, numel)
        landing = torch.empty_like(sent)
        move = self.swap(sent, landing, tag)

        def finish() -> None:
            move.close()
            for rank, part in enumerate(landing.split(nbytes)):
                codec.decode(part, out, add=rank > 0)
            out.mul_(1.0 / self.size)

        return Inflight((), (), finish)

    def take_number(self) -> None:
        """The engine has its number: what tells its messages apart follows."""

    def _wait_for(self, work: Any, kind: str, tag: int = -1) -> Wait:
        return Wait(work.wait, self.traffic, self.watch, kind, tag)

    def _call(self, call: Callable[..., object], *arguments: Any) -> None:
        """Make a synchronous call that waits for other ranks."""
        Wait(partial(call, *arguments), self.traffic, self.watch, "other", -1).wait()

    def _open(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Open process groups in another thread: torch waits there for other ranks, and nothing can break that."""
        over, found, failed = Latch(), [], []

        def run() -> None:
            try:
                found.append(call(*arguments))
            except Exception as error:
                failed.append(error)
            finally:
                over.set()

        Thread(target=run, name="hf_zero opens a group", daemon=True).start()
        self.watch.interrupts.append(over.set)
        try:
            self._call(over.wait)
        finally:
            self.watch.interrupts.remove(over.set)
        if found:
            return found[0]
        raise failed[0] if failed else self.watch.error()

    def sum_scalar(self, value: Tensor) -> Tensor:
        self.traffic.moved("scalar", value.nbytes * (self.size - 1))
        parts = [torch.empty_like(value) for _ in range(self.size)]
        self._wait_for(dist.all_gather(parts, value, group=self.group, async_op=True), "scalar").wait()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def max_scalar(self, value: Tensor) -> Tensor:
        self.traffic.moved("scalar", value.nbytes * (self.size - 1))
        value = value.clone()
        self._wait_for(dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group, async_op=True), "scalar").wait()
        return value

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        # In host memory where the group can: on a GPU the answer would be waited for behind all of forward.
        found = torch.tensor(values, dtype=torch.int32, device=home_device())
        self.traffic.moved("agree", found.numel() * 4 * (self.size - 1))
        work = self._wait_for(dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group, async_op=True), "agree")

        def answer() -> list[int]:
            work.wait()
            return found.tolist()

        return answer

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.traffic.moved("other", tensor.numel() * tensor.element_size())
        self._call(dist.broadcast, tensor, source, self.group)

    def _message(self, begin: Callable[[list[Tensor], int, int], Any], values: Tensor, peer: int, tag: int) -> None:
        """One message, ended."""
        try:
            work = begin([values], peer, tag)
        except RuntimeError as error:
            self._refuse(error)
        self._wait_for(work, "other").wait()

    def _refuse(self, error: RuntimeError) -> NoReturn:
        """A message could not even be begun: the connection has broken before. As `Wait.wait` does.

        Who begins messages catches by itself: a call in between for each would be one for each message of a step.
        """
        explained = self.watch.explained(error)
        if explained is error:
            raise error
        raise explained from error

    def carry(self, values: Tensor | None, landing: Tensor, source: int, tag: int = 0) -> None:
        tag = tag * _TAGS + _COLLECT_TAG
        if source == 0 or self.rank not in (0, source):
            if self.rank == source and values is not None:
                landing.copy_(values)
            return
        if self.rank == source:
            if values is not None and values.numel():
                self.traffic.moved("other", values.numel() * values.element_size())
                self._message(self.group.send, values.to(self.device), 0, tag)
        elif landing.numel():
            arrived = landing if landing.device == self.device else torch.empty_like(landing, device=self.device)
            self._message(self.group.recv, arrived, source, tag)
            if arrived is not landing:
                landing.copy_(arrived)

    def side(self) -> SoloWire:
        with self.watch.doing("opening a process group"):
            self.barrier()
            group = self._open(partial(dist.new_group, backend="gloo"))
        beside = PairWire(torch.device("cpu"), group, lane=f"beside {self.watch.engine}")
        beside.watch.engine = self.watch.engine
        return beside

    def exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, values, value, self.group)
        return values

    def barrier(self) -> None:
        self._call(dist.barrier, self.group)

    def start(self, stall_s: float) -> None:
        shared, stall = self._shared, self._shared.stall
        stall.stall_s = stall_s
        stall.engines += 1
        self.watch.engine = self.exchange(stall.engines)[0]
        if shared.group is None:
            faults = [fault for fault in self.exchange(stall.meet(_MEET_S)) if fault is not None]
            if faults:
                stall.fault = faults[0]  # one rank alone without a watch would look like one that has ended
                if self.rank == 0:
                    warnings.warn(
                        f"no rank is watched for stalls: {faults[0]}",
                        stacklevel=3,  # who called zero.shard
                    )
            with self.watch.doing("opening a process group"):
                shared.group = self._open(partial(dist.new_group, timeout=_timeout_of(self.group, self.device)))
        self.group = shared.group
        self.watch.interrupts.append(partial(_interrupt, ref(self.group), self.device))
        self.take_number()

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        # A ring all-reduce sends 2 (N-1)/N of the buffer.
        self.traffic.moved(self.reduce_kind, 2 * _others(source, self.size))
        scale = _divided_first(source, self.size)
        work = self._wait_for(dist.all_reduce(source, group=self.group, async_op=True), self.reduce_kind)

        return Inflight((work,), (), lambda: land(source, out, scale))

    def collect(self, own: Tensor, full: Tensor | None, tag: int, cuts: Cuts = ()) -> None:
        numel = own.numel()
        if numel == 0 and not cuts:
            return
        cuts = cuts or range(0, numel * (self.size + 1), numel)
        if self.rank == 0 and full is None:
            raise RankMismatchError("rank 0 must pass a buffer to collect into")
        for rank in range(self.size):  # whoever has nothing sends nothing: both sides go by the same `cuts`
            landing = own if full is None else full[cuts[rank] : cuts[rank + 1]]
            self.carry(own if rank == self.rank else None, landing, rank, tag)


class PairWire(GroupWire):
    """Point-to-point messages on gloo. The tag names the span, so that a message can only meet its own counterpart.

    Attributes:
        is_direct: gathers and reduces do without, where ranks can read each other's memory.
    """

    is_direct = True

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, lane: str = "") -> None:
        super().__init__(device, group, lane)
        self._first_tag = 0
        self._direct: Direct | None = None
        self._asked: Wait | None = None
        """Of the last `start_maximum`, until its answer is there. A receive that is let go of would block its connection."""
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    def take_number(self) -> None:
        self._first_tag = self.watch.engine % _TAGS_WRAP * _TAGS_EACH
        if self.is_direct:
            self._direct = open_direct(self, _reader)

    def start_maximum(self, values: Sequence[int], *, at_end: bool = False) -> Callable[[], list[int]]:
        # No all-reduce: where ranks have diverged two of different lengths would meet, and gloo would abort the process. The
        # tag has no step in it: the values tell that ranks have made different numbers of steps.
        before, self._asked = self._asked, None
        if before is not None:  # an exception has left it unanswered
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

    @property
    def is_read_directly(self) -> bool:
        """Whether gathers and reduces are read out of the other ranks' memory. The same on all ranks."""
        return self._direct is not None

    def _message_tag(self, tag: int, kind: int) -> int:
        """What only this engine's message of this span, kind and step has.

        Over one group a rank may be ahead in one of two engines; and one that has made another number of steps must not be
        given what belongs to this one.
        """
        return self._first_tag + (tag * _STEPS_APART + self.watch.step % _STEPS_APART) * _TAGS + kind

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        numel = own.numel()
        if numel == 0 and not cuts:
            return DONE
        cuts = cuts or range(0, numel * (self.size + 1), numel)
        self.traffic.moved(self.gather_kind, numel * own.element_size() * (self.size - 1))
        place = full[cuts[self.rank] : cuts[self.rank + 1]]
        # No message brings this rank's own slice: without the copy it would stay what the memory held.
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        group, traffic, watch, kind = self.group, self.traffic, self.watch, self.gather_kind
        try:
            if self._direct is not None and tag < SPANS:
                return self._direct.gather(full, own, tag, cuts, kind)
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

    def swap(self, sent: Tensor, landing: Tensor, tag: int) -> Inflight:
        self.traffic.moved(self.reduce_kind, _others(sent, self.size))
        out, into = list(sent.chunk(self.size)), list(landing.chunk(self.size))
        into[self.rank].copy_(out[self.rank])
        group = self.group
        try:
            if self._direct is not None and tag < SPANS:
                return self._direct.swap(sent, landing, tag, self.reduce_kind)
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
            if self._direct is not None and tag < SPANS:
                return self._direct.reduce(source, out, tag, cuts, self.reduce_kind)
            span, tag = tag, self._message_tag(tag, _REDUCE_TAG)
            for peer in self._peers:
                for part in _pieces(source[cuts[peer] : cuts[peer + 1]], piece):
                    sends += (Wait(group.send([part], peer, tag).wait, traffic, watch, self.reduce_kind, span),)
        except RuntimeError as error:
            self._refuse(error)
        cut = [(start, min(start + piece, mine.numel())) for start in range(0, mine.numel(), piece)]
        # Pieces of one peer have one tag: gloo gives them out in the order in which receives are begun, here that of the cuts.
        pending = [self._receive(source, stop - start, tag, span) for start, stop in cut[:2]]

        def finish() -> None:
            for index, (start, stop) in enumerate(cut):
                works, parts = pending[index]
                for work in works:
                    work.wait()
                if index + 2 < len(cut):
                    pending.append(self._receive(source, cut[index + 2][1] - cut[index + 2][0], tag, span))
                # In its place among the others, not first or last: sums in another order are other bits on other ranks.
                parts[self.rank] = mine[start:stop]
                average_in_order(parts, out[start:stop])
                pending[index] = ([], [])
            out[mine.numel() :].zero_()

        return Inflight((), sends, finish)

    def _receive(self, source: Tensor, numel: int, tag: int, span: int) -> tuple[list[Any], list[Tensor]]:
        landing = torch.empty((self.size, numel) if self.size > 2 else (1, numel), dtype=source.dtype, device="cpu")
        parts = list(landing.unbind()) if self.size > 2 else [landing[0], landing[0]]
        group, traffic, watch = self.group, self.traffic, self.watch
        try:
            works = [
                Wait(group.recv([parts[p]], p, tag).wait, traffic, watch, self.reduce_kind, span) for p in self._peers
            ]
        except RuntimeError as error:
            self._refuse(error)
        return works, parts


class CollectiveWire(GroupWire):
    """The backend's own collectives; waiting makes the current stream wait, never the host."""

    ragged = False

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, lane: str = "") -> None:
        super().__init__(device, group, lane)
        # torch 2.13 renames these two; the old names remain for older releases.
        self._all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter: Callable[..., Any] = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )

    def sum_scalar(self, value: Tensor) -> Tensor:
        # Gathered and summed here, so that every rank adds in the same order; a few launches, whatever the number of ranks.
        self.traffic.moved("scalar", value.nbytes * (self.size - 1))
        parts = value.new_empty((self.size, *value.shape))
        self._wait_for(
            self._all_gather(parts.view(-1), value.reshape(-1), group=self.group, async_op=True), "scalar"
        ).wait()
        return parts.sum(0, dtype=torch.float64 if value.is_floating_point() else value.dtype).to(value.dtype)

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        if own.numel() == 0 and not cuts:
            return DONE
        self.traffic.moved(self.gather_kind, own.numel() * own.element_size() * (self.size - 1))
        if cuts:  # torch makes a broadcast of each slice, all in one launch
            work = dist.all_gather(_ragged(full, cuts), own, group=self.group, async_op=True)
        else:
            work = self._all_gather(full, own, group=self.group, async_op=True)
        return Inflight((self._wait_for(work, self.gather_kind, tag),))

    def swap(self, sent: Tensor, landing: Tensor, tag: int) -> Inflight:
        self.traffic.moved(self.reduce_kind, _others(sent, self.size))
        work = dist.all_to_all_single(landing, sent, group=self.group, async_op=True)
        return Inflight((self._wait_for(work, self.reduce_kind, tag),))

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        if out.numel() == 0 and not cuts:
            return DONE
        if self.codec is not None and not cuts and fits(self.codec, out.numel(), source.dtype):
            return self.reduce_coded(source, out, self.codec, tag)
        sent = (source.numel() - out.numel()) * source.element_size() if cuts else _others(source, self.size)
        self.traffic.moved(self.reduce_kind, sent)
        landing = out if out.dtype == source.dtype else torch.empty_like(out, dtype=source.dtype)
        scale = _divided_first(source, self.size)
        total = dist.ReduceOp.SUM
        if cuts:  # a reduce to each owner, all in one launch
            begun = dist.reduce_scatter(landing, _ragged(source, cuts), op=total, group=self.group, async_op=True)
        else:
            begun = self._reduce_scatter(landing, source, op=total, group=self.group, async_op=True)
        work = self._wait_for(begun, self.reduce_kind, tag)

        def finish() -> None:
            if landing is not out:
                out.copy_(landing)
            if scale != 1.0:
                out.mul_(scale)

        return Inflight((work,), (), finish)


_LAUNCHED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which torchrun, accelerate and the MPI launchers pass the number of processes that they start."""


def rank_count() -> tuple[int, str]:
    """Return the number of ranks, and where it comes from: the default process group, else the launcher's variable."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), ""
    for name in _LAUNCHED:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 1:
            return int(value), name
    return 1, ""


def open_wire(device: torch.device, stall_s: float | None = None) -> SoloWire:
    """The wire of the default process group for buffers on `device`; `SoloWire` where there is none.

    Args:
        stall_s: see `SoloWire.start`; None: as before.

    Raises:
        ConfigError: the launcher started several processes, and this one has no process group.
    """
    ranks, variable = rank_count()
    if variable:
        raise ConfigError(
            f"{variable} is {ranks}, but no process group is open: every rank would train a model of its own. Call "
            "torch.distributed.init_process_group() first, or build the Accelerator or TrainingArguments first (on CPU ranks "
            f"with cpu=True or use_cpu=True). To run each process alone, unset {variable}"
        )
    if ranks == 1:
        return SoloWire()
    _shared(dist.distributed_c10d._get_default_group(), device, stall_s)
    return PairWire(device) if device.type == "cpu" else CollectiveWire(device)


def _shared(home: dist.ProcessGroup, device: torch.device, stall_s: float | None = None) -> _Shared:
    found = _SHARED.get(home)
    if found is None:
        store: Any = dist.distributed_c10d._get_default_store()
        server = store
        while hasattr(server, "underlying_store"):  # under the prefixes
            server = server.underlying_store
        endpoint = (server.host, server.port) if isinstance(server, dist.TCPStore) else None
        interrupt = partial(_interrupt, ref(home), device)
        stall = StallWatch(home, store, endpoint, dist.get_rank(), dist.get_world_size(), interrupt, stall_s)
        found = _SHARED[home] = _Shared(stall)
    elif stall_s is not None:
        found.stall.stall_s = stall_s
    return found


def _reader() -> Reader:
    home: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    shared = _SHARED[home]
    if shared.reader is None:
        shared.reader = Reader(home)
    return shared.reader


def _interrupt(of: ref[dist.ProcessGroup], device: torch.device) -> None:
    """Break every wait over a group, in whichever thread."""
    group = of()
    if group is None:
        return
    if device.type != "cpu":
        group.abort()
        return
    # gloo has no abort, but a receive that runs out of time closes all connections of its group. One from a rank whose
    # connection is closed already fails at once, and closes no other.
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], peer, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))


def home_device() -> torch.device:
    """Where buffers must be for the default process group to move them: CPU if its backend can."""
    if dist.is_available() and dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()
        if torch.device("cpu") not in group._device_types:
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the limit that user code has set for a group's collectives; None: torch's default."""
    found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def _wait_for_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _divided_first(source: Tensor, size: int) -> float:
    """What is left to multiply a sum over `size` ranks by, to have their average.

    float16 ends at 65,504: a sum that the backend makes in it may overflow where the average is fine, so it is divided first.
    Where this library sums, it does so in float32.
    """
    if source.dtype == torch.float16:
        source.mul_(1.0 / size)
        return 1.0
    return 1.0 / size


def _others(full: Tensor, size: int) -> int:
    return full.numel() * full.element_size() * (size - 1) // size


def _ragged(full: Tensor, cuts: Cuts) -> list[Tensor]:
    return [full[low:high] for low, high in pairwise(cuts)]


def _pieces(tensor: Tensor, numel: int) -> list[Tensor]:
    if tensor.numel() == 0:
        return []
    if tensor.numel() <= numel:
        return [tensor]
    return list(tensor.split(numel))
