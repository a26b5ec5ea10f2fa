"""One stretch of this rank's slice of a span, at rest in one tier: master, gradient, optimizer state.

A slice is one shard, or a few where the plan splits it between tiers. The optimizer's groups hold the shards' masters.

* `DEVICE`: `master` is the values, `master.grad` the gradient, `optimizer.state[master]` the state: plain torch.
* `HOST`: the same in host memory. The gradient comes down the link as it is reduced; `host_step` runs the optimizer.
* `DISK`: master and element-wise state are records of a file; `master` is one NaN expanded to the length, so that groups, hooks
  and gradient scalers have a parameter to look at. The gradient rests in host memory.

A host gradient is float32, or of the compute dtype while that loses nothing. It may have a `coefficient` that clipping
asked for: a factor that the step applies on its way, so that clipping does not touch memory.

On several ranks what a master shows between a backward and the optimizer's own step is a `gradients.Slice`, whose norms are
those over all ranks. Code of this package asks for `grad` or `device_grad`, which are never one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..comm.inflight import Inflight
from ..errors import ZeroError
from ..tiers.array import OnDisk, Values, fetch
from ..tiers.fingerprint import sample
from ..tiers.pool import Storage
from ..tiers.records import Records
from ..tiers.tier import Tier
from .gradients import Keeper
from .slices import Slice

MASTER = "master"
"""The field of a record that holds the master."""

B = TypeVar("B", Tensor, None)
Fields = tuple[tuple[str, torch.dtype], ...]
"""Element-wise states of an optimizer group: name, type."""


class Shard:
    """See the module's text.

    Args:
        start: its first element in the slice.
        values: 1-D, the initial values.
        alias: memory of the values that rests in `tier` already and is to be the master itself.
        travels: masters themselves go to the device, being of the type that is used there.
        fields: element-wise states of the optimizer group, for which a record on disk has room.
    """

    def __init__(
        self,
        storage: Storage,
        start: int,
        values: Tensor,
        tier: Tier,
        *,
        trainable: bool,
        travels: bool = True,
        alias: Tensor | None = None,
        fields: Fields = (),
    ) -> None:
        self.storage = storage
        self.start = start
        self.numel = values.numel()
        self.dtype = values.dtype
        self.tier = tier
        self.aliased = alias is not None
        """The master is the memory of the parameters' slice: what is written to it needs no publishing."""
        self.records: Records | None = None
        self.live = False
        """The records hold the optimizer's state; False before the first step."""
        self.coefficient: Tensor | None = None
        self._fields = fields
        self._travels = travels
        self._grad: Tensor | None = None  # on the host, for all tiers but DEVICE
        self._buffer: Tensor | None = None  # memory of `_grad`, kept from step to step
        self._counted_bytes = 0  # of the gradient on the device, in the ledger
        self._move: Inflight | None = None
        self._landing: Tensor | None = None
        self.shown: Slice | None = None
        """What the master shows for its gradient, kept from step to step."""
        self._alone = 0
        self._offered: Tensor | None = None  # what the master shows of a gradient that does not rest on the device
        data = values if alias is None else alias
        if tier is Tier.DISK:
            self.records = self._make_records()
            self.records.values(MASTER).copy_(values)
            data = self._placeholder()
        elif alias is None:
            data = self._memory(tier).copy_(values)
        self.seen: tuple[int, int] | None = None
        """The master's version counter, and a sample of it, as of `note`."""
        # `.data` gives the master a version counter of its own. With the one of the memory that it is an alias of, gathers
        # into that memory would count as writes to the optimizer's tensors once the master rests elsewhere.
        self.master = nn.Parameter(data.data, requires_grad=trainable)
        self.note()

    def _memory(self, tier: Tier) -> Tensor:
        if tier is Tier.DEVICE:
            return torch.empty(self.numel, dtype=self.dtype, device=self.storage.device)
        return self.storage.link.empty(self.numel, self.dtype, self._travels)

    def _placeholder(self) -> Tensor:
        return torch.full((), float("nan"), dtype=self.dtype).expand(self.numel)

    def _make_records(self) -> Records:
        block = min(self.storage.sizes.slab_numel, self.numel)
        return Records(self.storage.disk, self.numel, block, ((MASTER, self.dtype), *self._fields))

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def fields(self) -> Fields:
        return self._fields

    def reserve(self, fields: Fields) -> None:
        """Room on disk for an optimizer's states; those of another one are forgotten."""
        if fields == self._fields:
            return
        self._fields = fields
        if self.records is not None:
            old, self.records = self.records, self._make_records()
            self.records.values(MASTER).copy_(old.values(MASTER).read())
            old.close()
            self.live = False

    # Values -----------------------------------------------------------------------------------------------------------

    @property
    def values(self) -> Values:
        """The master's, 1-D: a tensor where it rests in memory."""
        return self.master.detach() if self.records is None else self.records.values(MASTER)

    @property
    def is_offloaded(self) -> bool:
        return self.tier is not Tier.DEVICE

    def note(self) -> None:
        """The master is as it should be: what changes from now on is somebody else's doing."""
        if self.records is not None or not self.master.requires_grad:
            self.seen = None
            return
        # An alias also has what is written to parameters.
        self.seen = self.master._version, 0 if self.aliased else sample(self.master)

    def edited(self, closely: bool = True) -> str:
        """How the master was written since `note`: empty, `counted` (by torch), or `sampled`: values differ."""
        if self.seen is None:
            return ""
        if self.master._version != self.seen[0]:
            return "counted"
        return "sampled" if closely and not self.aliased and sample(self.master) != self.seen[1] else ""

    def entries(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state of this shard: 1-D values by name, and what is one value for all."""
        out = {str(key): value for key, value in optimizer.state.get(self.master, {}).items()}
        if self.records is not None and self.live:
            out |= {name: self.records.values(name) for name, _ in self._fields}
        return out

    def room(self, state: str) -> OnDisk | None:
        """Where an element-wise state rests on disk; None in memory."""
        return self.records.values(state) if self.records is not None and state in dict(self._fields) else None

    def put(self, optimizer: torch.optim.Optimizer, entries: dict[str, Any]) -> None:
        """Replace the optimizer's state; values come from anywhere and rest where the shard does.

        What is in its `room` already is given as such.
        """
        names = {name for name, _ in self._fields} if self.records is not None else set()
        kept: dict[str, Any] = {}
        for key, value in entries.items():
            if key in names and self.records is not None:
                if isinstance(value, Tensor):
                    self.records.values(key).copy_(value)
            elif isinstance(value, Tensor):
                kept[key] = value.to(self._home(optimizer, value))
            else:
                kept[key] = value
        self.live = bool(names) and names <= entries.keys()
        if kept:
            optimizer.state[self.master] = kept
        else:
            optimizer.state.pop(self.master, None)

    def _home(self, optimizer: torch.optim.Optimizer, value: Tensor) -> torch.device:
        """Where a tensor of the state is needed. A step count is so on the device only where a kernel there reads it."""
        if value.dim():
            return self.master.device
        if self.tier is not Tier.DEVICE:
            return torch.device("cpu")
        groups = (group for group in optimizer.param_groups if any(p is self.master for p in group["params"]))
        on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        return self.master.device if on_device else value.device

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.pop(self.master, None)
        self.live = False

    # The gradient -----------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor | None:
        """As it is kept; `coefficient` is still to be applied."""
        if self.tier is Tier.DEVICE:
            return self.device_grad
        self.land()
        return self._grad

    @property
    def device_grad(self) -> Tensor | None:
        """On the device: the gradient itself, whatever the master shows for it."""
        grad = self.master.grad
        return grad.at_rest if type(grad) is Slice else grad

    @device_grad.setter
    def device_grad(self, grad: Tensor | None) -> None:
        nbytes = 0 if grad is None else grad.nbytes
        if nbytes != self._counted_bytes:
            self.storage.ledger.device.now["gradients"] += nbytes - self._counted_bytes
            self._counted_bytes = nbytes
        self.master.grad, self._offered = grad, None
        if self.shown is not None:
            self.shown.local = None

    def use_bucket(self, grad: Tensor) -> None:
        """As `device_grad = grad`, of memory that the span's bucket has and the ledger counts as that."""
        self.device_grad = None
        self.master.grad = grad

    @property
    def has_grad(self) -> bool:
        """Whether there is one, here or on its way."""
        if self.tier is Tier.DEVICE:
            return self.master.grad is not None
        return self._grad is not None or self._landing is not None

    def whole_grad(self) -> Tensor | None:
        """In the master's type, with the coefficient applied; to read and to write."""
        grad = self.grad
        if grad is None or self.tier is Tier.DEVICE:
            return grad
        if grad.dtype != self.dtype:
            grad = self._widen(grad)
        if self.coefficient is not None:
            grad.mul_(self.coefficient.to(grad.dtype))
            self.coefficient = None
        return grad

    def some_grad(self) -> Tensor:
        """`whole_grad`; zeros, from now on, where there was none."""
        grad = self.whole_grad()
        if grad is None:
            if self.tier is Tier.DEVICE:
                self.device_grad = grad = torch.zeros_like(self.master)
            else:
                grad = self._room(self.dtype).zero_()
                self._set(grad)
        return grad

    def add(self, piece: Tensor) -> None:
        """One reduce's result, 1-D on the device; the memory may be used again at once (in stream order)."""
        if self.tier is Tier.DEVICE:
            grad = self.device_grad
            if grad is None:
                self.device_grad = piece.to(self.dtype, copy=True)
            else:
                grad.add_(piece)
            return
        self.land()
        link = self.storage.link
        keeps = piece.dtype == self.dtype or not (self.storage.wide or self._is_wide())
        if self._grad is None and keeps:
            self._grad = self._room(piece.dtype)
            self._move = link.down(piece, self._grad)
            if self._move.ready:
                self.land()
            return
        self._landing = self.storage.scratch(piece.numel(), piece.dtype)
        self._move = link.down(piece, self._landing)
        self.storage.land(self)

    def land(self) -> None:
        """What is on its way is in `grad` afterwards."""
        move, self._move = self._move, None
        if move is not None:
            move.close()
            self.show_grad()
        landing, self._landing = self._landing, None
        if landing is None:
            return
        if self._grad is None:
            self._set(self._room(self.dtype).copy_(landing))
        else:
            grad = self._grad if self._grad.dtype == self.dtype else self._widen(self._grad)
            if self.coefficient is not None:
                grad.mul_(self.coefficient.to(grad.dtype))
                self.coefficient = None
            grad.add_(landing)
        self.storage.give_back(landing)

    def scale(self, coefficient: Tensor) -> None:
        """Multiply the gradient, at once or on its way through the step."""
        grad = self.grad
        if grad is None:
            return
        if self.tier is Tier.DEVICE or self.storage.wide:
            grad.mul_(coefficient.to(device=grad.device, dtype=grad.dtype))
            return
        if self.coefficient is not None:
            self.whole_grad()
        self.coefficient = coefficient.to("cpu", self.dtype)

    def follow_grad(self) -> bool:
        """Carry out what was done to the master's `.grad` since it was shown: None clears the gradient, a tensor replaces it.

        Only a gradient that does not rest on the device: there the master's `.grad` is the gradient.
        """
        offered, now = self._offered, self.master.grad
        if self.tier is Tier.DEVICE or now is offered:
            return False
        if now is None:
            self.drop_grad()
        elif isinstance(now, Slice) and now.owner is self:  # `p.grad = p.grad.detach()`
            self.master.grad = offered
            return False
        else:
            grad = self.some_grad()
            grad.copy_(now.plain() if isinstance(now, Slice) else now.detach())
            self.master.grad = self._offered = offered if type(offered) is Slice else grad
        return True

    def drop_grad(self) -> None:
        self.storage.ledger.device.now["gradients"] -= self._counted_bytes
        self._counted_bytes = 0
        self.master.grad = self._offered = None
        if self.shown is not None:
            self.shown.local = None
            if sys.getrefcount(self.shown) > self._alone:  # somebody keeps it: it is no later step's gradient
                self.shown = None
        if self._move is not None or self._landing is not None:
            self.land()
        self._grad = self.coefficient = None

    def release_buffer(self) -> None:
        """The gradient's memory goes, too."""
        self.drop_grad()
        buffer = self._buffer
        self._keep(None)
        if buffer is not None and self.storage.transient:
            self.storage.give_back(buffer)

    def claim(self) -> tuple[Tensor, Tensor | None, Inflight | None] | None:
        """The gradient for a step that is made elsewhere, its coefficient, and what to wait for; None if there is none.

        It stays this shard's until `drop_grad`, but its memory is not written before that step is over.
        """
        if self._landing is not None or self.storage.wide:
            self.land()
        move, self._move = self._move, None
        return None if self._grad is None else (self._grad, self.coefficient, move)

    def hide_grad(self) -> None:
        """Around the optimizer's own step, which is for what rests on the device."""
        if self.tier is not Tier.DEVICE:
            self.master.grad = self._offered = None

    def show_slice(self, keeper: Keeper, place: int) -> None:
        """On several ranks, after a backward: the master shows a stand-in for its gradient, if there is one.

        Args:
            place: of the span among all ranks' spans, if this is the first of the span's shards; else -1.
        """
        on_device = self.tier is Tier.DEVICE
        grad = self.master.grad if on_device else None
        if type(grad) is Slice:
            grad = grad.at_rest
        # With `step_in_backward` what is offloaded is used up already.
        has = grad is not None if on_device else self.has_grad and not self.storage.transient
        shown = self.shown
        if not has:
            if shown is not None:
                shown.local = None
            return
        if shown is None or shown.device != self.master.device or shown.keeper is not keeper:
            shown = self.shown = Slice(keeper, self.master.detach(), weakref.ref(self))
            del shown
            self._alone = sys.getrefcount(self.shown)
            shown = self.shown
        shown.local, shown.place = grad, place
        if self.master.grad is not shown:
            self.master.grad = shown
        if not on_device:
            self._offered = shown

    def hide_slice(self) -> None:
        """Before the optimizer's own step: what rests on the device shows the gradient itself."""
        grad = self.master.grad
        if type(grad) is Slice and self.tier is Tier.DEVICE:
            self.master.grad = grad.at_rest
            if self.shown is not None:
                self.shown.local = None

    def show_grad(self) -> None:
        """For loss scalers and whoever looks at the groups' gradients, once it has arrived."""
        if self.shown is not None and self.master.grad is self.shown:
            return
        if (
            self._move is None
            and self._grad is not None
            and self.tier is not Tier.DEVICE
            and self._grad.dtype == self.dtype
        ):
            self.master.grad = self._offered = self._grad

    @property
    def grad_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.untyped_storage().nbytes()

    def _is_wide(self) -> bool:
        return self._buffer is not None and self._buffer.dtype == self.dtype

    def _room(self, dtype: torch.dtype) -> Tensor:
        if self._buffer is None or self._buffer.dtype != dtype:
            new = self.storage.scratch if self.storage.transient else self.storage.link.empty
            return self._keep(new(self.numel, dtype))
        return self._buffer

    def _keep(self, buffer: B) -> B:
        """The memory of a host gradient. Where it is lent by the pool, that has it in the ledger."""
        if not self.storage.transient:
            self.storage.ledger.host.add("gradients", (0 if buffer is None else buffer.nbytes) - self.grad_bytes)
        self._buffer = buffer
        return buffer

    def _widen(self, grad: Tensor) -> Tensor:
        wide = self._room(self.dtype).copy_(grad)
        self._set(wide)
        if self.storage.transient:
            self.storage.give_back(grad)
        return wide

    def _set(self, grad: Tensor) -> None:
        self._grad = grad
        self.show_grad()

    # Between tiers ----------------------------------------------------------------------------------------------------

    def move(self, tier: Tier, optimizer: torch.optim.Optimizer | None, alias: Tensor | None = None) -> None:
        """Everything of this shard rests in `tier` afterwards, the same to the bit. The master stays the same object.

        Args:
            alias: memory in `tier` that has the master's values already.

        Raises:
            TierError, ConfigError: a tier failed or has no room; everything is where it was.
        """
        if tier is self.tier:
            return
        grad = self.whole_grad()
        values = fetch(self.values)
        entries = (
            {}
            if optimizer is None
            else {k: fetch(v) if isinstance(v, OnDisk) else v for k, v in self.entries(optimizer).items()}
        )
        records: Records | None = None
        if tier is Tier.DISK:
            records = self._written(values, entries)
            entries |= {name: records.values(name) for name, _ in self._fields if name in entries}
            data = self._placeholder()
        else:
            data = self._memory(tier).copy_(values) if alias is None else alias
        # What may fail is done.
        self.device_grad = None
        old, self.records = self.records, records
        self.tier = tier
        self.aliased = alias is not None
        self.master.data = data
        if optimizer is not None:
            self.put(optimizer, entries)
        self._grad = None
        if grad is not None:
            if tier is Tier.DEVICE:
                self.device_grad = grad.to(self.storage.device)
                self._keep(None)
            elif grad is not self._buffer:
                self._set(self._room(self.dtype).copy_(grad))
            else:
                self._set(grad)
        elif tier is Tier.DEVICE:
            self._keep(None)
        if old is not None:
            old.close()
        self.note()

    def _written(self, values: Tensor, entries: dict[str, Any]) -> Records:
        records = self._make_records()
        try:
            records.values(MASTER).copy_(values)
            for name, _ in self._fields:
                if name in entries:
                    records.values(name).copy_(entries[name])
        except ZeroError:
            records.close()
            raise
        return records

    def rest_on(self, alias: Tensor | None) -> None:
        """The master is `alias`, memory of its tier that has its values already; None: memory of its own from now on."""
        if alias is not None:
            self.master.data = alias
        elif self.aliased:
            self.master.data = self._memory(self.tier).copy_(self.master.detach())
        self.aliased = alias is not None
        self.note()

    def close(self) -> None:
        """Give everything back."""
        self.release_buffer()
        if self.records is not None:
            self.records.close()
            self.records = None


def is_elementwise(key: str, value: Any, numel: int) -> bool:
    """Whether an optimizer's state entry has one value per element of a 1-D parameter."""
    return isinstance(value, (Tensor, OnDisk)) and key != "step" and value.dim() > 0 and value.numel() == numel


def cut(shards: Sequence[Shard], start: int, numel: int) -> list[tuple[Shard, int, int]]:
    """The shards that hold elements [start, start + numel) of the slice, each with its own first element and count there."""
    out = []
    for shard in shards:
        low, high = max(start, shard.start), min(start + numel, shard.stop)
        if low < high:
            out.append((shard, low - shard.start, high - low))
    return out


def assembled(
    shards: Sequence[Shard], of: Callable[[Shard], Values | None], start: int, numel: int, device: torch.device
) -> Tensor | None:
    """Elements [start, start + numel) of the slice on `device`, a view where that is possible; None where no shard has any."""
    parts = [(of(shard), at, count) for shard, at, count in cut(shards, start, numel)]
    if not parts:
        some = next((values for shard in shards if (values := of(shard)) is not None), None)
        return None if some is None else torch.empty(0, dtype=some.dtype, device=device)
    if all(values is None for values, _, _ in parts):
        return None
    if len(parts) == 1 and isinstance(parts[0][0], Tensor):
        values, at, count = parts[0]
        if isinstance(values, Tensor):
            return values[at : at + count].to(device)
    sample = next(values for values, _, _ in parts if values is not None)
    out = torch.zeros(numel, dtype=sample.dtype, device=device)
    done = 0
    for values, at, count in parts:
        if values is not None:
            out[done : done + count].copy_(fetch(values[at : at + count]))
        done += count
    return out
