"""Buffers as DistributedDataParallel has them: rank 0's at the start, and rank 0's again in training, of those that change.

DDP sends every buffer before a forward of any kind, if the forward before that one was to be differentiated and synchronised
(it was not under `no_grad`, nor inside `no_sync`). How ranks find those that change: docs/DESIGN.md, "Buffers".

Forwards that a rank may run alone (without gradients at stages 0 to 2, any inside `zero.unsharded`) send nothing. Rank 0's
buffers were sent at the end of the last backward, or where the context began, and wait on each rank until then.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.wire import SoloWire
from ..core.precision import dtype_name
from ..tiers.fingerprint import fingerprint
from .saved_tensors import in_backward_of_any

Sign = tuple[tuple[int, ...], str]
"""Shape and type."""
_ALIGN = 16  # every buffer's bytes begin at a multiple of this
_EVERY = 64
"""Fingerprints are compared in backwards 1, 2, 4, … since the ranks last agreed, and in every so many."""


class Buffers:
    """Of one model, which is on its device. A collective to make.

    Attributes:
        watched: there are other ranks, and some buffer on some rank.
    """

    def __init__(self, model: nn.Module, wire: SoloWire) -> None:
        self._model, self._wire = model, wire
        # Dicts and not tensors: a buffer may be assigned anew, or be made in the first forward.
        # The dicts themselves are kept: `_skip` knows them by `id`.
        self._dicts = [module._buffers for module in model.modules()]
        self._live: dict[str, Sign] = {}
        """Those that change, in the order in which they are sent; the same on every rank."""
        self._slots: list[tuple[dict[str, Tensor | None], str]] = []
        """Where these are."""
        self._passed: set[str] = set()
        """Changed once, and were alike."""
        self._skip: set[tuple[int, str]] = set()  # slots that are not looked at: they are live
        self._due = True
        """The next forward of all ranks sends; the same on every rank."""
        self._takes = True
        """As DDP has it, the next forward of this rank has rank 0's: its last one was to be differentiated and synchronised."""
        self._ready: tuple[Tensor, list[tuple[Tensor | None, int]]] | None = None
        """What rank 0 sent for forwards that a rank runs alone, and this rank's buffers and their versions then."""
        self._apart = False
        self.watched = False
        if wire.size > 1:
            self._start()
        self._seen = self._now()
        self._bits = self._bits_now()
        self._uncounted: set[str] = set()
        """Changed on this rank though no version moved, since the ranks last agreed."""
        self._backwards = 0  # since then

    # The start ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Every buffer becomes rank 0's; warns with the first that was not."""
        known = {
            name for name, module in self._model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)
        }
        mine = self._named()
        everyone = self._wire.exchange(self.prints(mine))
        self.watched = any(everyone)
        alike = self._alike(everyone)
        wrong = [name for name in alike if any(theirs[name] != everyone[0][name] for theirs in everyone)]
        if wrong:
            warnings.warn(
                f"{len(wrong)} of {len(alike)} buffers differ between ranks, {wrong[0]!r} first; rank 0's values are used "
                "(seed every rank alike before building the model to avoid this)",
                stacklevel=5,
            )
            self._make_live(wrong, alike)
            self._take(self._message())
            self._live.clear()
        self._make_live([name for name in alike if name.rpartition(".")[0] in known], alike)

    def _named(self) -> dict[str, Tensor]:
        """Those that can be sent."""
        return {
            name: buffer
            for name, buffer in self._model.named_buffers()
            if buffer.layout == torch.strided and not (buffer.is_meta or buffer.is_quantized or buffer.is_nested)
        }

    @property
    def are_sent(self) -> bool:
        """In a forward that has begun: rank 0's were sent before it, as far as it is known that they change."""
        sent = self._due and self._takes and not self._apart
        return self.watched and sent and not in_backward_of_any() and not self.changed()

    def prints(self, buffers: Mapping[str, Tensor] | None = None) -> dict[str, tuple[Sign, list[int]]]:
        """Names, signs and fingerprints of these buffers, or of all."""
        buffers = self._named() if buffers is None else buffers
        prints = [fingerprint(_bytes(buffer)) for buffer in buffers.values()]
        values: list[Any] = torch.stack(prints).tolist() if prints else []
        return {name: (_sign(buffer), value) for (name, buffer), value in zip(buffers.items(), values)}

    def _alike(self, everyone: Sequence[Mapping[str, tuple[Sign, list[int]]]]) -> dict[str, Sign]:
        """Buffers that every rank has in the same shape and type, in rank 0's order; says which are not, once."""
        signs = {name: sign for name, (sign, _) in everyone[0].items()}
        others = [name for theirs in everyone for name in theirs]
        apart = [
            name
            for name in dict.fromkeys([*signs, *others])
            if any(name not in theirs or theirs[name][0] != signs.get(name) for theirs in everyone)
        ]
        new = [name for name in apart if name not in self._passed]
        if new:
            self._passed.update(new)
            warnings.warn(
                f"{len(new)} buffers are not of one shape and type on all ranks, {new[0]!r} first: each rank keeps its own",
                stacklevel=6,
            )
        return {name: sign for name, sign in signs.items() if name not in set(apart)}

    # What changes ---------------------------------------------------------------------------------------------------

    def _now(self) -> list[tuple[Tensor, int]]:
        """Every buffer that is not live, and its version. No Python call per buffer."""
        skip = self._skip
        return [
            (buffer, -1 if buffer.is_inference() else buffer._version)  # without a call for each
            for of in self._dicts
            if of
            for name, buffer in of.items()
            if buffer is not None and (id(of), name) not in skip
        ]

    def changed(self) -> bool:
        """Whether this rank has one that changed since the ranks last agreed and is not sent yet."""
        if not self.watched:
            return False
        now, seen = self._now(), self._seen
        return len(now) != len(seen) or bool([1 for (a, v), (b, w) in zip(now, seen) if a is not b or v != w])

    def ask(self) -> bool:
        """`changed`, at the end of a backward that syncs; in some of them it looks for writes that torch has not counted."""
        if not self.watched:
            return False
        self._backwards += 1
        changed = self.changed()
        if changed or not self._backwards & (self._backwards - 1) or self._backwards % _EVERY == 0:
            self._look()
        return changed or bool(self._uncounted)

    def _bits_now(self) -> dict[str, tuple[Tensor, int, list[int]]]:
        """Every buffer that is not live: the tensor, its version, and the fingerprint of its bytes."""
        if not self.watched:
            return {}
        versions = {id(buffer): version for buffer, version in self._now()}
        rest = {name: buffer for name, buffer in self._named().items() if id(buffer) in versions}
        prints = self.prints(rest)
        return {name: (buffer, versions[id(buffer)], prints[name][1]) for name, buffer in rest.items()}

    def _look(self) -> None:
        before, self._bits = self._bits, self._bits_now()
        for name, (buffer, version, bits) in self._bits.items():
            was = before.get(name)
            if was is not None and was[0] is buffer and was[1] == version and was[2] != bits:
                self._uncounted.add(name)

    def agree(self, changed: bool) -> None:
        """After a backward that syncs. A collective where `changed`.

        Args:
            changed: whether `ask()` on any rank.
        """
        if not changed:
            return
        before = {id(buffer): version for buffer, version in self._seen}
        self._seen = self._now()
        moved = {id(buffer) for buffer, version in self._seen if before.get(id(buffer)) != version}
        mine_moved = [name for name, buffer in self._named().items() if id(buffer) in moved]
        said = self._wire.exchange((mine_moved, [*self._uncounted]))
        uncounted = {name for _, theirs in said for name in theirs}
        names = uncounted.union(*(theirs for theirs, _ in said))
        mine = {name: buffer for name, buffer in self._named().items() if name in names}
        everyone = self._wire.exchange(self.prints(mine))
        alike = self._alike(everyone)
        equal = {name for name in alike if all(theirs[name] == everyone[0][name] for theirs in everyone)}
        again = self._passed | uncounted  # nothing tells of the next write of an uncounted one
        self._make_live([name for name in alike if name not in equal or name in again], alike)
        self._passed |= equal
        self._seen = self._now()
        self._uncounted.clear()
        self._backwards = 0

    def _make_live(self, names: Sequence[str], signs: Mapping[str, Sign]) -> None:
        self._live |= {name: signs[name] for name in names}
        self._ready = None
        modules = dict(self._model.named_modules())
        self._slots = []
        for name in self._live:
            owner, _, key = name.rpartition(".")
            self._slots.append((modules[owner]._buffers, key))
        self._skip = {(id(of), key) for of, key in self._slots}

    # Forwards -------------------------------------------------------------------------------------------------------

    def before_forward(self, *, alone: bool) -> None:
        """Of the whole model. A collective where buffers change, and are due, unless `alone`.

        Args:
            alone: a rank may run this forward without the others.
        """
        if self._apart or not self._live or in_backward_of_any():
            return
        if alone:
            if self._takes and self._ready is not None:
                self._take(*self._ready)
            return
        self._ready = None
        if not self._due:
            return
        # In evaluation programs tend to run one rank alone.
        with nullcontext() if torch.is_grad_enabled() else self._wire.watch.doing("a forward, for rank 0's buffers"):
            message = self._message()
        if self._takes:
            self._take(message)

    def after_forward(self, sync: bool, *, alone: bool) -> None:
        """Args:
        sync: not inside `no_sync`.
        alone: as for `before_forward`.
        """
        if not self._apart and not in_backward_of_any():
            self._takes = sync and torch.is_grad_enabled()
            if not alone:
                self._due = self._takes

    def make_ready(self) -> None:
        """Send rank 0's buffers for forwards that a rank runs alone. A collective where buffers change, and are due."""
        if self._due and self._live and self._ready is None and not self._apart:
            now = [of.get(key) for of, key in self._slots]
            self._ready = self._message(), [(buffer, _version(buffer)) for buffer in now]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Forwards inside are as those of `ddp.module`, which DDP does not know of: any rank may run them alone."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    @torch.no_grad()
    def _message(self) -> Tensor:
        """Rank 0's live buffers on every rank: each from a multiple of 16 bytes on, and whether it has the agreed sign."""
        buffers = [of.get(key) for of, key in self._slots]
        fits = [b is not None and _sign(b) == sign for b, sign in zip(buffers, self._live.values())]
        sizes = [_nbytes(sign) for sign in self._live.values()]
        *starts, end = accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0)
        device = getattr(self._wire, "device", torch.device("cpu"))
        message = torch.zeros(end + len(sizes), dtype=torch.uint8, device=device)
        if self._wire.rank == 0:
            message[end:].copy_(torch.tensor(fits, dtype=torch.uint8, device="cpu"))
            for buffer, start, size, good in zip(buffers, starts, sizes, fits):
                if buffer is not None and good:
                    message[start : start + size].copy_(_bytes(buffer))
        self._wire.broadcast(message)
        return message

    @torch.no_grad()
    def _take(self, message: Tensor, known: Sequence[tuple[Tensor | None, int]] = ()) -> None:
        """This rank's buffers become rank 0's.

        Args:
            known: buffers and versions as they were when rank 0 sent: those that this rank has changed since stay.
        """
        if self._wire.rank == 0:
            return
        sizes = [_nbytes(sign) for sign in self._live.values()]
        *starts, end = accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0)
        theirs = message[end:].tolist()
        for at, ((of, key), sign) in enumerate(zip(self._slots, self._live.values())):
            buffer, start, size = of.get(key), starts[at], sizes[at]
            if buffer is None or _sign(buffer) != sign or not theirs[at]:
                continue
            if known and (buffer is not known[at][0] or _version(buffer) != known[at][1]):
                continue
            value = message[start : start + size].view(buffer.dtype).view(buffer.shape)
            if buffer.is_inference():
                of[key] = value.clone()
                continue
            # A graph may hold this buffer (two forwards, one backward); as in DDP this is no write that it must hear of.
            with torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _sign(buffer: Tensor) -> Sign:
    return tuple(buffer.shape), dtype_name(buffer.dtype)


def _nbytes(sign: Sign) -> int:
    shape, dtype = sign
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _bytes(buffer: Tensor) -> Tensor:
    """Its values as 1-D uint8."""
    plain = torch.view_as_real(buffer.detach().resolve_conj()) if buffer.is_complex() else buffer.detach()
    return plain.contiguous().reshape(-1).view(torch.uint8)
