"""Stretches of a slice that rest in host memory or on disk, and the table of all kinds; see `state_shard`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.inflight import Inflight, together
from ...errors import StateError
from ...tiers.array import DiskArray, OnDisk, OnDone, Source, Values, is_array
from ...tiers.pool import Storage
from ...tiers.tier import Tier, padded
from .disk_gradient import DiskGradient
from .masters import RAW_GRAD
from .reads import AsTheyAre
from .stand_in import Slice
from .state_shard import GRADIENT, MASTER, B, Claim, Shard, is_elementwise


class HostShard(Shard):
    """In host memory. The gradient is float32, or of the compute dtype while that loses nothing."""

    tier = Tier.HOST
    is_offloaded = True

    def __init__(self, storage: Storage, start: int, numel: int, dtype: torch.dtype, travels: bool = True) -> None:
        super().__init__(storage, start, numel, dtype, travels)
        self._grad: Tensor | None = None
        self._buffer: Tensor | None = None  # memory of `_grad`, kept from step to step
        self._move: Inflight | None = None
        self._landing: Tensor | None = None
        self._is_viewed = False  # wholes show parts of the gradient: it is scaled at once

    def _hold(self, values: Tensor) -> Tensor:
        return self.storage.link.empty(self.numel, self.dtype, self._travels).copy_(values)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _home(self, optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str, value: Values) -> torch.device:
        return self._device

    @property
    def grad(self) -> Tensor | None:
        self.land()
        return self._grad

    @property
    def has_grad(self) -> bool:
        return self._grad is not None or self._landing is not None

    def whole_grad(self) -> Tensor | None:
        grad = self.grad
        if grad is None:
            return None
        if grad.dtype != self.dtype:
            grad = self._widen(grad)
        self._apply_coefficient(grad)
        return grad

    def _apply_coefficient(self, grad: Tensor) -> None:
        if self.coefficient is not None:
            grad.mul_(self.coefficient.to(grad.dtype))
            self.coefficient = None

    def _new_grad(self, grad: Tensor | None) -> Tensor:
        new = self._room(self.dtype)
        self._grad = new.zero_() if grad is None else new.copy_(grad)
        self.show_grad()
        return new

    def _take_grad(self, former: Shard, grad: Tensor | None) -> None:
        if type(former) is not HostShard:
            super()._take_grad(former, grad)
            return
        self._grad, self._buffer = grad, former._buffer
        former._grad = former._buffer = None
        self.show_grad()

    def add(self, piece: Tensor) -> None:
        self.land()
        link = self.storage.link
        is_wide = self.storage.wide or (self._buffer is not None and self._buffer.dtype == self.dtype)
        keeps = piece.dtype == self.dtype or not is_wide
        if self._grad is None and keeps:
            self._grad = self._room(piece.dtype)
            self._move = link.down(piece, self._grad)
            if self._move.ready:
                self.land()
            return
        self._landing = self.storage.scratch(piece.numel(), piece.dtype)
        self._move = link.down(piece, self._landing)
        self.storage.land(self)

    def advance(self) -> None:
        """Nothing begins before it has landed."""

    def land(self) -> None:
        move, self._move = self._move, None
        if move is not None:
            move.close()
            self.show_grad()
        landing, self._landing = self._landing, None
        if landing is None:
            return
        if self._grad is None:
            self._new_grad(landing)
        else:
            grad = self._grad if self._grad.dtype == self.dtype else self._widen(self._grad)
            self._apply_coefficient(grad)
            grad.add_(landing)
        self.storage.give_back(landing)

    def scale(self, coefficient: Tensor) -> None:
        grad = self.grad
        if grad is None:
            return
        if self.storage.wide or self._is_viewed:
            grad.mul_(coefficient.to(device=grad.device, dtype=grad.dtype))
            return
        if self.coefficient is not None:
            self.whole_grad()
        # A copy: it is applied in the step, and who clips may use one tensor for one gradient after another.
        self.coefficient = coefficient.to("cpu", self.dtype, copy=True)

    def follow_grad(self) -> bool:
        with AsTheyAre():
            offered, now = self._offered, self.master.grad
        if now is offered:
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
        super().drop_grad()
        if self._move is not None or self._landing is not None:
            self.land()
        self._grad = self.coefficient = None
        self._is_viewed = False

    def grad_of_wholes(self) -> Tensor | None:
        grad = self._grad
        if grad is None or grad.dtype != self.dtype or self._move is not None or self.storage.transient:
            return None
        self._apply_coefficient(grad)
        self._is_viewed = True
        return grad

    def release_buffer(self) -> None:
        self.drop_grad()
        buffer = self._buffer
        self._keep(None)
        if buffer is not None and self.storage.transient:
            self.storage.give_back(buffer)

    def claim(self) -> Claim | None:
        if self._landing is not None or self.storage.wide:
            self.land()
        move, self._move = self._move, None
        return None if self._grad is None else (self._grad, self.coefficient, move)

    @property
    def grad_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.untyped_storage().nbytes()

    def hide_slice(self) -> None:
        """The optimizer's own step does not look here."""

    def hide_grad(self) -> None:
        RAW_GRAD.__set__(self.master, None)
        self._offered = None

    def show_grad(self) -> None:
        with AsTheyAre():
            if self.shown is not None and self.master.grad is self.shown:
                return
            if self._move is None and self._grad is not None and self._grad.dtype == self.dtype:
                self.master.grad = self._offered = self._grad

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
        wide = self._new_grad(grad)
        if self.storage.transient:
            self.storage.give_back(grad)
        return wide


class DiskShard(HostShard):
    """Values, gradient and element-wise states in this rank's file.

    A step reads, updates and writes `Sizes.slab_numel` elements of every array at a time. A state takes space when the
    optimizer has made it, the gradient when there is one. With `step_in_backward` the gradient is not stored: it stays in
    host memory, as a `HostShard`'s, until it is used.
    """

    tier = Tier.DISK
    is_paged = True

    def __init__(self, storage: Storage, start: int, numel: int, dtype: torch.dtype, travels: bool = True) -> None:
        super().__init__(storage, start, numel, dtype, travels)
        self._gradient = None if storage.transient or not numel else DiskGradient(storage, numel, dtype)
        self._array: DiskArray | None = None
        self._states: dict[nn.Parameter, dict[str, OnDisk]] = {}
        self._new: dict[nn.Parameter, dict[str, OnDisk]] = {}  # that the optimizer does not have yet

    @staticmethod
    def over(storage: Storage, array: DiskArray) -> DiskShard:
        """A frozen shard whose values are in `array` already, and serve as the parameters' slice, too."""
        shard = DiskShard(storage, 0, array.numel, array.dtype)
        shard._array = array
        shard.aliased = True
        shard.master = nn.Parameter(shard._placeholder(), requires_grad=False)
        return shard

    def _hold(self, values: Tensor) -> Tensor:
        self._array = DiskArray(self.storage.disk, self.numel, self.dtype)
        OnDisk(self._array).copy_(values)
        return self._placeholder()

    def _placeholder(self) -> Tensor:
        value = float("nan") if self.dtype.is_floating_point else 0
        return torch.full((), value, dtype=self.dtype, device="cpu").expand(self.numel)

    @property
    def array(self) -> DiskArray:
        if self._array is None:
            raise StateError("the values of a shard on disk were asked for before it had any")
        return self._array

    @property
    def values(self) -> Values:
        return OnDisk(self.array)

    def _arrays(self) -> list[DiskArray]:
        values = [] if self._array is None else [self._array]
        states = [*self._states.values(), *self._new.values()]
        return [*values, *(_array(shaped) for arrays in states for shaped in arrays.values())]

    def _close_arrays(self) -> None:
        if self._gradient is not None:
            self._gradient.close()
        super()._close_arrays()

    @property
    def in_files(self) -> bool:
        return self.array.base is not None

    def note(self) -> None:
        """Nobody but this package can write to what is on disk."""

    def rest_on(self, alias: Tensor | None) -> None:
        """What was read from the array rests elsewhere now."""
        self.aliased = False

    # The gradient -----------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor | None:
        return super().grad if self._gradient is None else self._gradient.look()

    @property
    def has_grad(self) -> bool:
        return super().has_grad if self._gradient is None else self._gradient.is_there

    @property
    def grad_version(self) -> int:
        return super().grad_version if self._gradient is None else self._gradient.version

    def number(self, key: Hashable, of: Callable[[Tensor], Tensor]) -> Tensor | None:
        if self._gradient is None or self.coefficient is not None:
            return super().number(key, of)
        self.storage.gradient_numbers[key] = of
        known = self._gradient.number(key)
        return super().number(key, of) if known is None else known

    def whole_grad(self) -> Tensor | None:
        if self._gradient is None:
            return super().whole_grad()
        grad = self._gradient.look(writes=True)
        if grad is not None:
            self._apply_coefficient(grad)
        return grad

    def _new_grad(self, grad: Tensor | None) -> Tensor:
        if self._gradient is None:
            return super()._new_grad(grad)
        self._gradient.fill(grad)
        self.show_grad()
        return self.some_grad()

    def _take_grad(self, former: Shard, grad: Tensor | None) -> None:
        Shard._take_grad(self, former, grad)

    def zero_grad(self) -> None:
        if self._gradient is None:
            super().zero_grad()
        else:  # not read for it
            self.coefficient = None
            self._gradient.fill(None)

    def add(self, piece: Tensor) -> None:
        if self._gradient is None:
            super().add(piece)
            return
        if self.coefficient is not None:
            self.whole_grad()
        self._gradient.add(piece)

    def land(self) -> None:
        if self._gradient is None:
            super().land()
        else:
            self._gradient.land()

    def scale(self, coefficient: Tensor) -> None:
        if self._gradient is None:
            super().scale(coefficient)
        elif self.has_grad:
            if self.coefficient is not None:
                self.whole_grad()
            self.coefficient = coefficient.to("cpu", self.dtype, copy=True)

    def follow_grad(self) -> bool:
        is_changed = super().follow_grad()
        if is_changed and self._gradient is not None and type(self._offered) is not Slice:
            self.hide_grad()  # groups show a stand-in or nothing: a tensor would keep all of it in memory
        return is_changed

    def drop_grad(self) -> None:
        super().drop_grad()
        if self._gradient is not None:
            self._gradient.drop()

    def grad_of_wholes(self) -> Tensor | None:
        return super().grad_of_wholes() if self._gradient is None else None

    def claim(self) -> Claim | None:
        if self._gradient is None:
            return super().claim()
        found = self._gradient.claim()
        return None if found is None else (found, self.coefficient, None)

    def show_grad(self) -> None:
        if self._gradient is None:
            super().show_grad()
        elif self.shown is not None and self.has_grad:
            with AsTheyAre():
                self.master.grad = self._offered = self.shown

    @property
    def gradient_bytes(self) -> int:
        """On disk."""
        return 0 if self._gradient is None else sum(array.nbytes for array in self._gradient.arrays)

    # The optimizer's state: each array of numbers is one on disk, whatever its shape; single values are in host memory -------

    def follow_states(self, optimizer: torch.optim.Optimizer) -> None:
        entries = self.entries(optimizer)
        names = [key for key, value in entries.items() if self._is_stored(self.master, key, value)]
        known = self._states.get(self.master, {})
        if names != [*known] or not all(isinstance(entries[name], OnDisk) for name in names):
            self.put(optimizer, self.master, entries)

    def _is_stored(self, param: nn.Parameter, key: str, value: Any) -> bool:
        if param is self.master:
            return is_elementwise(key, value, self.numel)
        return is_array(value) and bool(value.numel())

    def new_state(self, param: nn.Parameter, name: str, dtype: torch.dtype, shape: Sequence[int]) -> OnDisk:
        for states in (self._states, self._new):
            found = states.get(param, {}).get(name)
            if found is not None and (found.dtype, found.shape) == (dtype, torch.Size(shape)):
                return found
        new = self._new.setdefault(param, {})
        if name in new:
            _array(new.pop(name)).close()
        new[name] = OnDisk(DiskArray(self.storage.disk, math.prod(shape), dtype), shape=shape)
        return new[name]

    def _at_rest(
        self, optimizer: torch.optim.Optimizer, param: nn.Parameter, entries: Mapping[str, Any]
    ) -> dict[str, Any]:
        names = [key for key, value in entries.items() if self._is_stored(param, key, value)]
        for name in names:
            value = entries[name]
            room = self.new_state(param, name, value.dtype, value.shape)
            if not (isinstance(value, OnDisk) and value.source is room.source):
                room.copy_(value)
        rest = {key: value for key, value in entries.items() if key not in names}
        return super()._at_rest(optimizer, param, rest) | self.keep_states(param, names)

    def keep_states(self, param: nn.Parameter, names: Iterable[str]) -> dict[str, OnDisk]:
        """The optimizer has these arrays of its state, which have been written, and no others."""
        old, new = self._states.pop(param, {}), self._new.pop(param, {})
        kept = {name: new[name] if name in new else old[name] for name in names}
        for shaped in (*old.values(), *new.values()):
            if all(shaped is not each for each in kept.values()):
                _array(shaped).close()
        if kept:
            self._states[param] = kept
        return kept

    # Slabs: what a step reads and writes at a time --------------------------------------------------------------------

    @property
    def slabs(self) -> range:
        return range(0, self.numel, self.storage.sizes.slab_numel)

    def slab_bytes(self, grad: OnDisk | None) -> int:
        """Host memory for a slab of values, states and the gradient if it is on disk, each from a page's start."""
        return sum(padded(nbytes) for _, _, nbytes in self._parts(0, grad))

    def _parts(self, start: int, grad: OnDisk | None) -> list[tuple[str, Source, int]]:
        """Of the slab from element `start` on: name, array and bytes."""
        numel = min(self.storage.sizes.slab_numel, self.numel - start)
        states = self._states.get(self.master, {})
        arrays: dict[str, Source] = {MASTER: self.array, **{name: state.source for name, state in states.items()}}
        if grad is not None:
            arrays[GRADIENT] = grad.source
        return [(name, array, numel * array.dtype.itemsize) for name, array in arrays.items()]

    def views(self, start: int, memory: Tensor, grad: OnDisk | None) -> dict[str, Tensor]:
        """Values (`MASTER`), states and the gradient (`GRADIENT`) in memory that holds the slab from element `start` on."""
        out, at = {}, 0
        for name, array, nbytes in self._parts(start, grad):
            out[name] = memory[at : at + nbytes].view(array.dtype)
            at += padded(nbytes)
        return out

    def read(self, start: int, memory: Tensor, grad: OnDisk | None, on_done: OnDone = None) -> Inflight:
        """The slab from element `start` on into `memory`: uint8, of `slab_bytes`."""
        views = self.views(start, memory, grad)
        return together([a.read(start, views[name], on_done) for name, a, _ in self._parts(start, grad)])

    def write(self, start: int, parts: dict[str, Tensor], on_done: OnDone = None) -> Inflight:
        """Values (`MASTER`) and states from element `start` on, which must not change until waited for.

        States that are new are the optimizer's from `keep_states` on.

        Raises:
            TierError: there is no room for a new one.
        """
        whole = (self.numel,)
        arrays: dict[str, Source] = {
            name: self.array if name == MASTER else self.new_state(self.master, name, part.dtype, whole).source
            for name, part in parts.items()
        }
        return together([arrays[name].write(start, part, on_done) for name, part in parts.items()])


def _array(values: OnDisk) -> DiskArray:
    array = values.source
    if not isinstance(array, DiskArray):
        raise StateError("a state rests in a file that is not this rank's")
    return array


SHARDS: dict[Tier, type[Shard]] = {Tier.DEVICE: Shard, Tier.HOST: HostShard, Tier.DISK: DiskShard}


def new_shard(
    storage: Storage,
    start: int,
    values: Tensor,
    tier: Tier,
    *,
    trainable: bool,
    travels: bool = True,
    alias: Tensor | None = None,
) -> Shard:
    """A shard in `tier` with these values.

    Args:
        start, travels: see `Shard`.
        alias: memory of the values that rests in `tier` already and is to be the master itself.
    """
    shard = SHARDS[tier](storage, start, values.numel(), values.dtype, travels)
    data = shard._hold(values) if alias is None else alias
    shard.aliased, shard.home = alias is not None, 0 if alias is None else alias.data_ptr()
    # `.data` gives the master a version counter of its own. With the one of the memory that it is an alias of, gathers
    # into that memory would count as writes to the optimizer's tensors once the master rests elsewhere.
    shard.master = nn.Parameter(data.data, requires_grad=trainable)
    shard.dress(shard.master)
    shard.note()
    return shard
