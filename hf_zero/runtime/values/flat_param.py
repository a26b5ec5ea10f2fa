"""One span's parameters on this rank: what they show, what was written to them, what the optimizer has of them.

A gathered parameter's `.data` is its view of the span's buffer (`span_values`); a released one's is its guard, see `Guards`.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.wire import SoloWire
from ...core.layout import Span
from ...core.precision import dtype_of
from ...errors import StateError
from ...plan.costs import Placement
from ...tiers.fingerprint import digest
from .bucket import Common
from .reads import AsTheyAre, Lender, plain_class, released_class
from .span_values import SpanValues
from .state_shard import Shard, assembled, is_elementwise


class Guards:
    """One NaN per parameter of a span; a released parameter's `.data` is its guard expanded to the true shape.

    Code that torch functions do not reach (see `reads.ReleasedParameter`) reads NaN, and 0 in types that have none.

    Attributes:
        addresses: of what is shown, then its strides.
        shown: by parameter, its guard expanded, in the type that it is gathered in: a change of a parameter's type would cut it
            off from the graphs that it is part of (`autograd.grad` finds a parameter by its AccumulateGrad node).
    """

    def __init__(self, span: Span, device: torch.device, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or dtype_of(span.spec.compute_dtype)
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        values = torch.full((len(span.slots),), value, dtype=dtype, device=device)
        self.shown = [guard.expand(slot.spec.shape) for guard, slot in zip(values.unbind(), span.slots)]
        self.addresses: list[Any] = [*map(Tensor.data_ptr, self.shown), *map(Tensor.stride, self.shown)]


class Edits:
    """What programs have written to whole parameters of one engine, as torch counts writes, or by `param.data = x`.

    Attributes:
        found: by parameter, the digest of its values after the last write. A write that is seen twice changes nothing.
        mark: a number of 31 bits that depends on `found` alone.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.mark = 0

    def note(self, flat: Flat, index: int, values: Tensor) -> None:
        if flat.span.shards == 1:
            return
        with AsTheyAre():
            found = digest(values.detach().contiguous().view(-1))
        name = flat.span.slots[index].spec.name
        self.mark = (self.mark + _mark(name, found) - _mark(name, self.found.get(name))) & 0x7FFFFFFF
        self.found[name] = found


def _mark(name: str, found: int | None) -> int:
    return 0 if found is None else zlib.crc32(f"{name} {found}".encode())


class Flat(SpanValues):
    """One span on this rank: its values and gradients in the base classes, its parameters here."""

    def __init__(self, span: Span, params: Sequence[nn.Parameter], common: Common, placement: Placement) -> None:
        super().__init__(span, params, common, placement)
        self.pinned: set[int] = set()
        """Parameters (places in `params`) that `GatheredParameters` has made whole: they stay so."""
        self.shown_dtype: torch.dtype | None = None
        """Another type in which parameters are shown, see `show_in`."""
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}
        """By place in `params`: the copy in `shown_dtype` that a parameter shows, and what it was made of."""
        self._base = -1
        self._addresses: list[Any] = []
        size = self.full.element_size()
        self._distances = [slot.offset * size if slot.spec.numel else None for slot in self.span.slots]
        """Bytes from the start of `full`; None: a tensor without elements has no address."""
        self.watched: list[tuple[int, int]] = []
        """Stretches of the slice that are compared at every release, see `carrying`."""
        self.watched_digests: list[int] = []
        """Of these, as they were gathered; empty where they are compared with masters on the device."""
        self.looks: Sequence[int] = ()
        self.looks_always: set[int] = set()
        """Parameters (places in `params`) that are compared with what was gathered; in every step. See `writes`."""
        self.looked: dict[int, int] = {}
        """Digests of these, while they are gathered."""
        self.edits: Edits | None = None
        self._versions = [param._version for param in self.params]
        self.guards = Guards(span, self.device)
        self._plain: list[Any] = [plain_class(param) for param in self.params]
        self._lender: Lender | None = None
        self._released: list[Any] = list(self._plain)
        """By parameter, its class while it is released, see `mask`."""

    def point(self, targets: Sequence[Tensor]) -> None:
        """Parameters show these: `guards.shown`, and are released, or values."""
        classes = self._released if targets is self.guards.shown else self._plain
        for index, (param, target, kind) in enumerate(zip(self.params, targets, classes)):
            if index not in self.pinned:
                param.__class__ = self._plain[index]
                param.data = target
                param.__class__ = kind
        if self.casts:
            self.casts = {index: cast for index, cast in self.casts.items() if index in self.pinned}

    def show(self, index: int, target: Tensor) -> None:
        """One parameter shows these values; whoever calls has pinned it or takes them away again."""
        param = self.params[index]
        param.__class__ = self._plain[index]
        param.data = target
        self.casts.pop(index, None)

    def unshow(self, index: int, *, gathered: bool) -> None:
        """One parameter is what it would be without that."""
        self.show(index, (self.views if gathered else self.guards.shown)[index])
        if gathered:
            self.cast(index)
        self._versions[index] = self.params[index]._version  # what was written in place so far is known
        if not gathered:
            self.params[index].__class__ = self._released[index]

    def mask(self, lender: Lender, owner: weakref.ref[Any], *, released: bool) -> None:
        """Reads of released parameters are told to `lender`, which knows the unit by `owner`.

        Args:
            released: whether they are now.
        """
        self._lender = lender
        made = {kind: released_class(kind, lender, owner) for kind in dict.fromkeys(self._plain)}
        self._released = [made[kind] for kind in self._plain]
        if released:
            self.set_masked(True)

    def set_masked(self, masked: bool) -> None:
        """Whether reads of its parameters are told."""
        classes = self._released if masked else self._plain
        for index, (param, kind) in enumerate(zip(self.params, classes)):
            if index not in self.pinned:
                param.__class__ = kind

    def show_in(self, dtype: torch.dtype | None) -> None:
        """Between passes: in this type from now on; None: as they are gathered.

        Parameters that a context around this one has pinned are shown in it, too, and as that context had them afterwards.
        """
        for index, (_, shown) in [*self.casts.items()]:
            self.show(index, shown)
        self.shown_dtype = dtype if self.compute_dtype.is_floating_point else None
        if self.keeps:
            self.point(self.views)
            self.cast_shown()
        else:
            self.guards = Guards(self.span, self.device, self.shown_dtype)
            self.point(self.guards.shown)
        for index in self.pinned:
            self.cast(index)

    @property
    def shows_exactly(self) -> bool:
        """Gathered parameters have the masters' values, in the parameters' own types."""
        own = dtype_of(self.span.spec.dtype)
        return self.keeps and self.codec is None and own == self.compute_dtype

    def cast_shown(self) -> None:
        """Gathered parameters show copies in `shown_dtype`."""
        for index in range(len(self.params)):
            if index not in self.pinned:
                self.cast(index)

    @torch.no_grad()
    def cast(self, index: int) -> None:
        """One parameter shows a copy in `shown_dtype`, if there is one, of the values that it shows."""
        shown = self.params[index].data
        if self.shown_dtype is not None and shown.dtype != self.shown_dtype:
            copy = shown.to(self.shown_dtype)
            self.show(index, copy)
            self.casts[index] = copy, shown

    @property
    def has_replaced_casts(self) -> bool:
        """Whether a parameter that should show a copy of `cast` was given other `.data`."""
        return any(self.params[index].data_ptr() != copy.data_ptr() for index, (copy, _) in self.casts.items())

    @torch.no_grad()
    def merge_casts(self) -> list[int]:
        """What was written to the copies of `cast` goes into what they were made of; other elements keep their digits.

        Returns:
            Parameters (places in `params`) that were written.

        Raises:
            StateError: `.data` of another shape.
        """
        written = []
        for index, (copy, shown) in self.casts.items():
            value = self.params[index].data
            if value.data_ptr() != copy.data_ptr() or value.stride() != copy.stride() or value.dtype != copy.dtype:
                self.params[index].data = copy
                if value.shape != copy.shape:
                    raise StateError(
                        f"parameter {self.span.slots[index].spec.name!r} was given `.data` of {tuple(value.shape)} in an "
                        f"evaluation in {self.shown_dtype}, expected {tuple(copy.shape)}: a sharded parameter keeps its shape"
                    )
            differs = value != shown.to(value.dtype)
            if bool(differs.any()):
                shown.copy_(torch.where(differs, value.to(shown.dtype), shown))
                copy.copy_(shown)
                written.append(index)
        return written

    @property
    def addresses(self) -> list[Any]:
        """Of `views`; behind them their strides."""
        base = self.full.data_ptr()  # moves with each resize of the storage to 0 and back
        if base != self._base:
            self._base = base
            self._addresses = [0 if at is None else base + at for at in self._distances]
            self._addresses += map(Tensor.stride, self.views)
        return self._addresses

    def moved(self, addresses: list[Any]) -> list[int]:
        """Parameters (places in `params`) whose `.data` is not at these any more."""
        # With strides: `p.data = p.data.t()` stays at its address.
        now = [*map(Tensor.data_ptr, self.params), *map(Tensor.stride, self.params)]
        if now == addresses:
            return []
        count = len(self.params)
        differs = {at % count for at, (a, b) in enumerate(zip(now, addresses)) if a != b}
        return [i for i in sorted(differs) if i not in self.pinned and i not in self.casts and self.params[i].numel()]

    @property
    def was_written(self) -> bool:
        """Whether `counted` has something to tell."""
        return any(param._version != version for param, version in zip(self.params, self._versions))

    def counted(self) -> list[int]:
        """Parameters (places in `params`) that were written in place since the last call, as torch counts it."""
        versions = self._versions
        for index, param in enumerate(self.params):
            if param._version != versions[index]:
                break
        else:
            return []
        before, self._versions = versions, [param._version for param in self.params]
        return [i for i, (a, b) in enumerate(zip(before, self._versions)) if a != b and i not in self.pinned]

    @torch.no_grad()
    def leave_storage(self) -> None:
        old, addresses = self._full_storage, self.addresses
        replaced = self.moved(addresses)  # what these show is what the program gave them, wherever that lies
        super().leave_storage()
        for index, (param, address) in enumerate(zip(self.params, addresses)):
            if param.data_ptr() == address and index not in replaced:
                self.show(index, self.views[index])
        if self._lender is not None:
            self._lender.rehomed(old._cdata, self._full_storage._cdata)

    # Optimizer state --------------------------------------------------------------------------------------------------

    def state_names(self, optimizer: torch.optim.Optimizer) -> dict[str, bool]:
        """The optimizer's states of this span, and whether each has one value per element."""
        names: dict[str, bool] = {}
        for shard in self.shards:
            for key, value in shard.entries(optimizer).items():
                names[key] = is_elementwise(key, value, shard.numel)
        return names

    def state(self, optimizer: torch.optim.Optimizer, name: str) -> Any:
        """One of them: 1-D over the slice, on the span's device (a view where it rests there in one piece), or one value."""

        def of(shard: Shard) -> Any:
            return shard.entries(optimizer).get(name)

        if self.state_names(optimizer).get(name):
            return assembled(self.shards, of, 0, self.span.slice_numel, self.device)
        return next((value for shard in self.shards if (value := of(shard)) is not None), None)

    def put_state(self, optimizer: torch.optim.Optimizer, entries: dict[str, Any]) -> None:
        """Replace all of them, from values over the whole slice."""
        numel = self.span.slice_numel
        for shard in self.shards:
            shard.put(
                optimizer,
                shard.master,
                {
                    key: (value if len(self.shards) == 1 else value[shard.start : shard.stop].clone())
                    if is_elementwise(key, value, numel)
                    else value.clone()
                    if isinstance(value, Tensor)
                    else value
                    for key, value in entries.items()
                },
            )


def sent(
    wire: SoloWire, own: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int = 0
) -> Tensor:
    """A tensor of rank `source`, which passes it as `own`, on every rank. A collective."""
    landing = torch.empty(tuple(shape), dtype=dtype, device=device)
    if own is not None:
        landing.copy_(own)
    if landing.numel():
        wire.broadcast(landing.view(-1).view(torch.uint8), source)
    return landing


def joined(flat: Flat, wire: SoloWire, own: Tensor, *, everywhere: bool = False) -> Tensor:
    """A collective. All ranks' slices of a span, 1-D: on CPU on rank 0 (`everywhere`: on all), on the meta device elsewhere.

    Args:
        own: this rank's slice, on the span's device.
    """
    here = everywhere or wire.rank == 0
    if flat.span.shards == 1:
        return own.detach().cpu() if here else own.to("meta")
    if everywhere:
        whole = torch.empty(flat.span.numel, dtype=own.dtype, device=own.device)
        wire.gather(whole, own.detach(), flat.span.index, flat.span.cuts).close()
        return whole.cpu()
    whole = torch.empty(flat.span.numel, dtype=own.dtype, device="cpu" if here else "meta")
    wire.collect(own.detach(), whole if here else None, flat.span.index, flat.span.cuts)
    return whole


def slice_of(
    flat: Flat, values: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """This rank's slice of a span, 1-D, from whole values by parameter; zeros where there is none. What `joined` undoes."""
    out = torch.zeros(flat.span.slice_numel, dtype=dtype, device=device)
    value_of = {id(slot): value for slot, value in zip(flat.span.slots, values)}
    for part in flat.span.overlaps(flat.rank):
        value = value_of[id(part.source)]
        if value is not None:
            out[part.here].copy_(value.reshape(-1)[part.there])
    return out
