"""Broadcasts rank 0's buffers as DistributedDataParallel does, but only those that differ between ranks.

DDP sends all buffers of rank 0 before a forward, if the previous forward built a graph outside `no_sync`. A buffer that all
ranks change alike needs no message. So each rank keeps a sum of digests of its buffers, which the ranks compare at the end of
each backward that reduces. If the sums differ, the ranks exchange digests, and the buffers that differ are `live` from then
on: rank 0's values are sent before forwards, all in one message. Batch norms are live from the start.

Digests are computed of buffers that were written. Torch does not count writes through `buffer.data` or by quantization
observers, so backwards 1, 2, 4, … and every 64th compute the digests of all buffers. The second write makes a buffer live
even if ranks write alike, because a digest waits for the device.

A forward without gradients at stages 0 to 2, and any forward inside `zero.unsharded`, may run on one rank alone. It takes
rank 0's values from a message that was sent at the end of the last backward, or when the context began.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..core.precision import dtype_name
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..tiers.fingerprint import fingerprint

Signature = tuple[tuple[int, ...], str]
"""Shape and dtype."""
Fingerprints = dict[str, tuple[Signature, list[int]]]
"""The signature and a digest of each buffer, under its name."""
_ALIGN = 16
"""The bytes of every buffer in a message begin at a multiple of this."""
_EVERY = 64
_MOST = 0x7FFFFFFF


class Buffers(Observer):
    """Finds buffers that ranks change differently, and sends rank 0's."""

    def attach(self, engine: Engine) -> None:
        self._engine, self._context, self._wire = engine, engine.context, engine.context.wire
        self._model = engine.model
        # Dicts, not tensors: user code replaces buffers, and creates them in the first forward.
        self._dicts = [module._buffers for module in self._model.modules()]
        self._live: dict[str, Signature] = {}
        """In the order of their messages; the same on every rank."""
        self._slots: list[tuple[dict[str, Tensor | None], str]] = []
        self._skipped: set[tuple[int, str]] = set()
        """Places of live buffers."""
        self._own: set[str] = set()
        """Buffers whose shape or dtype differs between ranks: each rank keeps its own."""
        self._fingerprints: Fingerprints = {}
        self._sum = 0
        self._written: set[str] = set()
        """Buffers that were written once, by all ranks alike."""
        self._next: set[str] = set()
        """Buffers that become live once the ranks have compared their sums."""
        self._backwards = 0
        self._is_due = True
        """Rank 0 sends before the next forward that all ranks run; the same on every rank."""
        self._takes = True
        """The last forward of this rank built a graph outside `no_sync`: the next one has rank 0's values."""
        self._ready: tuple[Tensor, list[tuple[Tensor | None, int]]] | None = None
        """Rank 0's values for forwards of one rank, with this rank's buffers and their versions when they were sent."""
        self._is_watched = self._wire.size > 1 and self._start()
        self._seen = self._versions()

    # The start --------------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Give every rank the values of rank 0. Returns False where no rank has a buffer. A collective."""
        everyone: list[Fingerprints] = self._wire.exchange(_fingerprints(self._named()))
        if not any(everyone):
            return False
        alike = self._alike(everyone)
        wrong = [name for name in alike if any(theirs[name] != everyone[0][name] for theirs in everyone)]
        if wrong:
            warnings.warn(
                f"{len(wrong)} of {len(alike)} buffers differ between ranks, {wrong[0]!r} first; rank 0's values are used "
                "(seed every rank alike before building the model to avoid this)",
                stacklevel=6,
            )
            self._make_live(wrong, alike)
            self._take(self._message())
            self._live.clear()
        norms = {
            name for name, module in self._model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)
        }
        self._make_live([name for name in alike if name.rpartition(".")[0] in norms], alike)
        self._fingerprints = _fingerprints(self._watched())
        self._sum = _sum(self._fingerprints)
        return True

    def _named(self) -> dict[str, Tensor]:
        """Return buffers that can be sent."""
        return {
            name: buffer
            for name, buffer in self._model.named_buffers()
            if buffer.layout == torch.strided and not (buffer.is_meta or buffer.is_quantized or buffer.is_nested)
        }

    def _watched(self) -> dict[str, Tensor]:
        """Return buffers that are compared, not sent."""
        return {
            name: buffer
            for name, buffer in self._named().items()
            if name not in self._live and name not in self._own
        }  # fmt: skip

    def _alike(self, everyone: Sequence[Fingerprints]) -> dict[str, Signature]:
        """Return the buffers that have one shape and dtype on all ranks, in rank 0's order; warns once of all others."""
        signs = {name: sign for name, (sign, _) in everyone[0].items()}
        names = dict.fromkeys([*signs, *(name for theirs in everyone for name in theirs)])
        own = [
            name
            for name in names
            if any(name not in theirs or theirs[name][0] != signs.get(name) for theirs in everyone)
        ]
        if own:
            self._own.update(own)
            warnings.warn(
                f"{len(own)} buffers are not of one shape and type on all ranks, {own[0]!r} first: each rank keeps its own",
                stacklevel=7,
            )
        return {name: sign for name, sign in signs.items() if name not in self._own}

    # What changes -----------------------------------------------------------------------------------------------------

    def _versions(self) -> list[tuple[Tensor, int]]:
        """Return every buffer that is not live, with its version, without a Python call per buffer."""
        skipped = self._skipped
        return [
            (buffer, -1 if buffer.is_inference() else buffer._version)
            for of in self._dicts
            if of
            for name, buffer in of.items()
            if buffer is not None and (id(of), name) not in skipped
        ]

    def values_for_max(self) -> list[int]:
        if not self._is_watched:
            return []
        self._backwards += 1
        reshaped = [
            name
            for (of, key), (name, sign) in zip(self._slots, self._live.items())
            if (buffer := of.get(key)) is not None and _signature(buffer) != sign
        ]
        if reshaped:  # live again with the new signature, once the ranks have compared it
            self._make_live((), {}, without=reshaped)
            self._written.update(reshaped)
        now, seen = self._versions(), self._seen
        if len(now) != len(seen) or any(a is not b or v != w for (a, v), (b, w) in zip(now, seen)):
            before = {id(buffer): version for buffer, version in seen}
            self._compare({id(buffer) for buffer, version in now if before.get(id(buffer)) != version})
            self._seen = now
        elif not self._backwards & (self._backwards - 1) or self._backwards % _EVERY == 0:
            self._compare(set())
        # Must include `_next`: one rank may have found a second write that others have not, with equal values.
        mark = self._sum if not self._next else (self._sum + zlib.crc32(repr(sorted(self._next)).encode())) & _MOST
        return [mark, _MOST - mark]

    def _compare(self, written: set[int]) -> None:
        """Compute digests of all buffers.

        Args:
            written: `id` of the buffers that were written according to their version counters.
        """
        watched, before = self._watched(), self._fingerprints
        self._fingerprints = _fingerprints(watched)
        for name, buffer in watched.items():
            is_counted = id(buffer) in written
            if not is_counted and self._fingerprints[name] == before.get(name):
                continue
            # Nothing reports the next write of a buffer whose writes torch does not count.
            if name in self._written or (name in before and not is_counted):
                self._next.add(name)
            self._written.add(name)
        self._sum = _sum(self._fingerprints)

    def check_max_values(self, highest: list[int]) -> None:
        if highest and highest[0] != _MOST - highest[1]:
            self._resolve()
        elif self._next:  # the sums are equal: all ranks have the same names here
            self._make_live(sorted(self._next), {name: self._fingerprints[name][0] for name in self._next})
            self._forget_live()

    def _resolve(self) -> None:
        """Find the buffers that ranks have changed differently. A collective."""
        answers: list[tuple[Fingerprints, set[str]]] = self._wire.exchange((self._fingerprints, self._next))
        everyone = [prints for prints, _ in answers]
        wanted = set[str]().union(*(names for _, names in answers))
        alike = self._alike(everyone)
        wrong = [name for name in alike if any(theirs[name] != everyone[0][name] for theirs in everyone)]
        again = [name for name in alike if name in wanted and name not in wrong]
        self._make_live(wrong + again, alike, without=self._own)
        self._forget_live()

    def _forget_live(self) -> None:
        """Stop comparing live buffers."""
        self._next.clear()
        self._backwards = 0
        kept = {
            name: each for name, each in self._fingerprints.items() if name not in self._live and name not in self._own
        }
        self._fingerprints, self._seen = kept, self._versions()
        self._sum = _sum(kept)

    def _make_live(self, names: Sequence[str], signs: Mapping[str, Signature], without: Collection[str] = ()) -> None:
        kept = {name: sign for name, sign in self._live.items() if name not in without}
        self._live = kept | {name: signs[name] for name in names}
        self._ready = None
        modules = dict(self._model.named_modules())
        self._slots = []
        for name in self._live:
            owner, _, key = name.rpartition(".")
            self._slots.append((modules[owner]._buffers, key))
        self._skipped = {(id(of), key) for of, key in self._slots}

    # Passes -----------------------------------------------------------------------------------------------------------

    @property
    def _may_run_alone(self) -> bool:
        return self._context.is_unsharded or not (self._context.reshards or torch.is_grad_enabled())

    def before_forward(self, args: Any, kwargs: Any) -> None:
        """Send rank 0's buffers where they are due, or take those that were sent. A collective in the first case."""
        if not self._live or self._context.keeps_buffers:
            return
        if self._may_run_alone:
            if self._takes and self._ready is not None:
                self._take(*self._ready)
            return
        self._ready = None
        if self._is_due:
            message = self._message()
            if self._takes:
                self._take(message)

    def after_forward(self, output: Any) -> None:
        if self._is_watched and not self._context.keeps_buffers:
            self._takes = self._engine.schedule.sync and torch.is_grad_enabled()
            if not self._may_run_alone:
                self._is_due = self._takes

    def after_backward(self) -> None:
        if self._live and self._engine.schedule.sync and not self._context.reshards:
            self._make_ready()

    def before_unsharded(self) -> None:
        if self._live:
            self._make_ready()

    # Messages ---------------------------------------------------------------------------------------------------------

    def _make_ready(self) -> None:
        """Send rank 0's buffers for forwards of one rank. A collective where they are due."""
        if self._is_due and self._ready is None and not self._context.keeps_buffers:
            now = [of.get(key) for of, key in self._slots]
            self._ready = self._message(), [(buffer, _version(buffer)) for buffer in now]

    def _starts(self) -> list[int]:
        sizes = (-(-_nbytes(sign) // _ALIGN) * _ALIGN for sign in self._live.values())
        return list(accumulate(sizes, initial=0))

    @torch.no_grad()
    def _message(self) -> Tensor:
        """Return rank 0's live buffers as bytes, then a flag each: the buffer has the agreed signature. A collective."""
        *starts, end = self._starts()
        device = self._wire.device or self._context.device
        message = torch.zeros(end + len(starts), dtype=torch.uint8, device=device)
        if self._wire.rank == 0:
            message[end:].fill_(True)
            for at, ((of, key), sign, start) in enumerate(zip(self._slots, self._live.values(), starts)):
                buffer = of.get(key)
                if buffer is not None and _signature(buffer) == sign:
                    message[start : start + _nbytes(sign)].copy_(_bytes(buffer))
                else:  # not by a tensor of all flags: a copy of host memory would wait for the device
                    message[end + at].fill_(False)
        self._wire.broadcast(message)
        return message

    @torch.no_grad()
    def _take(self, message: Tensor, known: Sequence[tuple[Tensor | None, int]] = ()) -> None:
        """Give this rank's buffers the values of a message.

        Args:
            known: buffers and versions when the message was sent: what this rank has written since stays.
        """
        if self._wire.rank == 0:
            return
        *starts, end = self._starts()
        flags = message[end:].bool()
        for at, ((of, key), sign) in enumerate(zip(self._slots, self._live.values())):
            buffer = of.get(key)
            if buffer is None or _signature(buffer) != sign:
                continue
            if known and (buffer is not known[at][0] or _version(buffer) != known[at][1]):
                continue
            value = message[starts[at] : starts[at] + _nbytes(sign)].view(buffer.dtype).view(buffer.shape)
            # Selects on the device: reading the flag would wait for it.
            value = torch.where(flags[at], value, buffer.to(value.device))
            if buffer.is_inference():
                of[key] = value.to(buffer.device)
                continue
            # A graph may hold the buffer (two forwards, one backward). As under DDP, autograd must not count this write.
            with torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)


def _sum(prints: Fingerprints) -> int:
    return sum(zlib.crc32(f"{name} {each}".encode()) for name, each in prints.items()) & _MOST


def _fingerprints(buffers: Mapping[str, Tensor]) -> Fingerprints:
    """Return signatures and digests of these buffers, with one wait for the device."""
    prints = [fingerprint(_bytes(buffer)) for buffer in buffers.values()]
    values: list[Any] = torch.stack(prints).tolist() if prints else []
    return {name: (_signature(buffer), value) for (name, buffer), value in zip(buffers.items(), values)}


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _signature(buffer: Tensor) -> Signature:
    return tuple(buffer.shape), dtype_name(buffer.dtype)


def _nbytes(sign: Signature) -> int:
    shape, dtype = sign
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _bytes(buffer: Tensor) -> Tensor:
    """Return the values as 1-D uint8."""
    plain = torch.view_as_real(buffer.detach().resolve_conj()) if buffer.is_complex() else buffer.detach()
    return plain.contiguous().reshape(-1).view(torch.uint8)
