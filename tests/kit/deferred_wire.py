"""What streams do to buffers, shown on a CPU: roads that move bytes at the last moment their contract permits, or at the first.

On a GPU a collective or a copy may read its source and write its destination at any moment between its issue and its `wait`
(the source: its `close`), and freed memory is handed out again at once. On a CPU bytes mostly move when they are asked for, so
a mistake there shows nothing. Here it does:

* `LAST`: the destination is NaN from the issue on and gets its values in `wait`. What is read too early is NaN.
* `FIRST`: the destination is overwritten within the issuing call, on every rank; what still needed its old values is wrong.

In both, real transfers go between copies of the buffers, made at the issue, and
* a source must be the same bytes until the transfer may no longer read it, its storage in place;
* nobody writes to a destination meanwhile, and its storage stays in place;
* transfers under way do not overlap;
* storages of gathered units stay in place and at their size;
* `finish` knows of transfers that nobody closed, and compares the order of collectives across ranks (NCCL has no tags).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero as zero
from tests.kit.transports import DONE, SMALL, CollectiveWire, Inflight, Link, Meter, Roads, Wire, open_wire

LOCAL = {"post", "posted", "background_wire", "send_to_rank_0"}
"""What a wire offers that is no collective of its own group."""


class Mode(Enum):
    LAST = "last"
    FIRST = "first"


LATE = {
    "late": (Mode.LAST, False, True),
    "early": (Mode.FIRST, False, True),
    "late collectives": (Mode.LAST, True, True),
    "early collectives": (Mode.FIRST, True, True),
    "late copies": (Mode.LAST, False, False),
    "early copies": (Mode.FIRST, False, False),
}
"""By the name that a row of tests/settings.py has: when bytes move, whether by collectives, whether device and host are one."""


class Hazard(AssertionError):
    """A buffer was touched while it was not this program's to touch."""


class Region:
    """Memory of a tensor, as it is at an issue."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.storage = tensor.untyped_storage()
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self.storage_address, self.storage_nbytes = self.storage.data_ptr(), self.storage.nbytes()

    @property
    def in_place(self) -> bool:
        return (self.storage.data_ptr(), self.storage.nbytes()) == (self.storage_address, self.storage_nbytes)

    def overlaps(self, other: Region) -> bool:
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes

    def equals(self, copy: Tensor) -> bool:
        return torch.equal(_bytes(self.tensor), _bytes(copy))


class Transfer:
    """One transfer between its issue and its `close`.

    Args:
        sources: what must stay as it is.
        targets: with what arrives in each, once `arrive` has returned.
        frees_source: the source's memory may be given back at once, and may come back at the same address: not looked at.
    """

    def __init__(
        self,
        watch: Watch,
        what: str,
        sources: Sequence[Tensor],
        targets: Sequence[tuple[Tensor, Tensor]],
        frees_source: bool = False,
    ) -> None:
        self.watch, self.what = watch, what
        self.move = DONE
        """The real one, between copies."""
        looked_at = () if frees_source else sources
        self.sources = [(Region(tensor), tensor.detach().clone()) for tensor in looked_at if tensor.numel()]
        self.targets = [(Region(target), arriving) for target, arriving in targets if target.numel()]
        self.landed = False

    def begin(self, move: Inflight) -> None:
        self.move = move
        if self.watch.mode is Mode.FIRST:
            self.move.wait()
        for region, arriving in self.targets:
            if self.watch.mode is Mode.FIRST:
                region.tensor.copy_(arriving)
            else:
                poison(region.tensor)
        self.before = [region.tensor.clone() for region, _ in self.targets]

    def check(self) -> None:
        """The storages are where they were."""
        for region, _ in self.sources:
            if not region.in_place:
                self.watch.fail(f"{self.what}: the memory it reads was given back or moved")
        if not self.landed:
            for region, _ in self.targets:
                if not region.in_place:
                    self.watch.fail(f"{self.what}: the memory it writes was given back or moved")

    def land(self) -> None:
        """The end that `wait` shows."""
        with self.watch.lock:
            if self.landed:
                return
            self.check()
            for (region, _), before in zip(self.targets, self.before):
                if not region.equals(before):
                    self.watch.fail(f"{self.what}: its destination was written before it had arrived")
            if self.watch.mode is Mode.LAST:
                self.move.wait()
                for region, arriving in self.targets:
                    region.tensor.copy_(arriving)
            self.landed = True

    def over(self) -> None:
        """The end that `close` shows."""
        self.move.close()
        with self.watch.lock:
            self.check()
            for region, copy in self.sources:
                if not region.equals(copy):
                    self.watch.fail(f"{self.what}: its source was written while it could still be read")
            self.watch.under_way.remove(self)

    def inflight(self, closes_with_wait: bool = False) -> Inflight:
        ends = (_Work(self.land),), (_Work(self.over),)
        # Whether it is over is known to nobody: who asks must be ready to wait.
        return Inflight((*ends[0], *ends[1])) if closes_with_wait else Inflight(*ends)


class _Work:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class Watch:
    """One rank's instruments.

    Args:
        one_memory: what is in host memory is stepped over where it is; else it comes up for that, as on a GPU.

    Attributes:
        log: kind and tag of each collective, in the order of issue.
        under_way: transfers that nobody has closed.
        faults: what was found. Raised where it is found, too.
    """

    def __init__(self, mode: Mode, collective: bool = False, one_memory: bool = True) -> None:
        self.mode = mode
        self.one_memory = one_memory
        self.lock = threading.RLock()
        self.log: list[tuple[str, int]] = []
        self.under_way: list[Transfer] = []
        self.faults: list[str] = []
        self._engines: list[zero.Engine] = []
        self._collective = collective
        self.roads = Roads(
            lambda device: DeferredWire(self.open_plain_wire(device), self),  # type: ignore[arg-type,return-value]
            lambda device, meter: DeferredLink(device, meter, self),
        )

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of `zero.shard`, with blocks of which tiny models have several."""
        return replace(self.roads, sizes=SMALL).given

    def open_plain_wire(self, device: torch.device) -> Wire:
        wire = open_wire(device)
        return CollectiveWire(device) if wire.size > 1 and self._collective else wire

    def watch(self, engine: zero.Engine) -> None:
        """From here on the engine's gathered units are looked at, too."""
        self._engines.append(engine)

    def fail(self, what: str) -> None:
        self.faults.append(what)
        raise Hazard(what)

    def note(self, kind: str, tag: int) -> None:
        self.log.append((kind, tag))

    def check(self) -> None:
        """Nothing that is on its way or gathered has been given back or moved."""
        with self.lock:
            for transfer in list(self.under_way):
                transfer.check()
            for unit in (unit for engine in self._engines for unit in engine.units):
                if unit.state.value != "SHARDED" and any(
                    span.full.untyped_storage().nbytes() < span.full_bytes for span in unit.spans
                ):
                    self.fail(f"unit {unit.name!r} is {unit.state.value}, and its memory was given back")

    def begin(self, transfer: Transfer, issue: Callable[[], Inflight] = lambda: DONE) -> Transfer:
        """Issue it."""
        with self.lock:
            self.check()
            for other in self.under_way:
                reads, writes = _regions(transfer)
                read, written = _regions(other)
                if any(a.overlaps(b) for a in reads for b in written if not other.landed):
                    self.fail(f"{transfer.what} reads what {other.what} has not brought yet")
                if any(a.overlaps(b) for a in writes for b in written if not other.landed):
                    self.fail(f"{transfer.what} writes where {other.what} is still writing")
                if any(a.overlaps(b) for a in writes for b in read):
                    self.fail(f"{transfer.what} writes what {other.what} may still be reading")
            self.under_way.append(transfer)
        move = issue()
        with self.lock:
            transfer.begin(move)
        return transfer

    def drop(self) -> None:
        """After a hazard: the real transfers end."""
        for transfer in self.under_way:
            transfer.move.close()
        self.under_way.clear()

    def finish(self) -> list[str]:
        """After the last step, everything closed: what is wrong, on any rank, `under_way` and the order of issue included."""
        out = list(self.faults)
        out += [f"nobody closed {transfer.what}" for transfer in self.under_way]
        if dist.is_initialized():
            logs: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(logs, self.log)
            for rank, log in enumerate(logs):
                at = next((i for i, (a, b) in enumerate(zip(log, logs[0])) if a != b), min(len(log), len(logs[0])))
                if log != logs[0]:
                    theirs, first = log[at : at + 3], logs[0][at : at + 3]
                    out.append(f"collective {at}: rank {rank} issued {theirs}, rank 0 issued {first}")
        return out


class DeferredWire:
    """A wire whose gathers and reduces move data when `Watch.mode` says; everything else is the wire's own, and noted."""

    def __init__(self, wire: Wire, watch: Watch) -> None:
        self._wire, self._watch = wire, watch
        self._closes_with_wait = isinstance(wire, CollectiveWire)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wire, name)
        if name.startswith("_") or name in LOCAL or not callable(found):
            return found

        def noted(*args: Any, **options: Any) -> Any:
            self._watch.note(name, -1)
            return found(*args, **options)

        return noted

    @property
    def codec(self) -> Any:
        return self._wire.codec

    @codec.setter
    def codec(self, codec: Any) -> None:
        self._wire.codec = codec

    def subgroup(self, groups: Sequence[Sequence[int]]) -> DeferredWire:
        return DeferredWire(self._wire.subgroup(groups), self._watch)  # type: ignore[attr-defined]

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
        self._watch.check()
        if self._wire.size == 1 or (own.numel() == 0 and not cuts):
            return self._wire.gather(full, own, tag, cuts)
        watch = self._watch
        low = cuts[self._wire.rank] if cuts else self._wire.rank * own.numel()
        values = own.detach().clone()
        everything = torch.empty_like(full)
        if own.untyped_storage().data_ptr() == full.untyped_storage().data_ptr():  # in its place already
            parts = [(full[:low], everything[:low]), (full[low + own.numel() :], everything[low + own.numel() :])]
        else:
            parts = [(full, everything)]

        def issue() -> Inflight:
            self._meet("gather", tag)
            return self._wire.gather(everything, values, tag, cuts)

        transfer = Transfer(watch, f"the gather of span {tag}", [own], parts)
        return watch.begin(transfer, issue).inflight(self._closes_with_wait)

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
        return self._reduce("reduce", source, out, tag, cuts)

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        return self._reduce("average", source, out, tag)

    def _reduce(self, kind: str, source: Tensor, out: Tensor, tag: int, *cuts: Sequence[int]) -> Inflight:
        self._watch.check()
        real = getattr(self._wire, kind)
        if self._wire.size == 1 or (out.numel() == 0 and not any(cuts)):
            return real(source, out, tag, *cuts)
        mean = torch.empty_like(out)

        def issue() -> Inflight:
            self._meet(kind, tag)
            return real(source.detach().clone(), mean, tag, *cuts)

        transfer = Transfer(self._watch, f"the {kind} of span {tag}", [source], [(out, mean)])
        return self._watch.begin(transfer, issue).inflight(self._closes_with_wait)

    def _meet(self, kind: str, tag: int) -> None:
        """Note it. Where transfers end at once, who issues something else is told here, and no rank waits for ever."""
        self._watch.note(kind, tag)
        if self._watch.mode is Mode.FIRST:
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, (kind, tag))
            if len(set(found)) > 1:
                self._watch.fail(f"collective {len(self._watch.log) - 1}: by rank {found}")


class DeferredLink(Link):
    """The link of a CPU device, with copies that are under way until they are waited for."""

    def __init__(self, device: torch.device, meter: Meter, watch: Watch) -> None:
        super().__init__(device, meter)
        self.shares_memory = watch.one_memory
        self._watch = watch

    def copy_to_host(self, source: Tensor, target: Tensor) -> Inflight:
        return self._copy_later("down", source, target, super().copy_to_host)

    def copy_to_device(self, source: Tensor, target: Tensor, after: Any = None) -> Inflight:
        return self._copy_later("up", source, target, super().copy_to_device)

    def _copy_later(self, kind: str, source: Tensor, target: Tensor, real: Callable[[Tensor, Tensor], Inflight]) -> Any:
        arriving = torch.empty_like(target)
        real(source, arriving).close()  # counts, and refuses what does not fit
        if not target.numel():
            return DONE
        what = f"the copy {kind} of {source.numel()} x {source.dtype}"
        transfer = Transfer(self._watch, what, [source], [(target, arriving)], frees_source=kind == "down")
        # Down there is one end only: the host stands still until the bytes are there.
        return self._watch.begin(transfer).inflight(closes_with_wait=kind == "down")


def poison(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(0xA5)


def _regions(transfer: Transfer) -> tuple[list[Region], list[Region]]:
    return [region for region, _ in transfer.sources], [region for region, _ in transfer.targets]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
