"""One stretch of this rank's slice of a span, at rest in one tier: master, gradient, optimizer state.

A slice is one shard, or a few where the plan splits it between tiers. The optimizer's groups hold the shards' masters.

* `Shard`, on the device: `master` is the values, `master.grad` the gradient, `optimizer.state[master]` the state: plain torch.
* `HostShard`: the same in host memory. The gradient comes down the link as it is reduced; `host_step` runs the optimizer.
* `DiskShard`: values, gradient and element-wise states are arrays in this rank's file; `master` is one NaN expanded to the
  length, so that groups, hooks and gradient scalers have a parameter to look at.

`Shard.move` makes the one of another tier, with the same master. The last two, each of which is the one before with what is
otherwise there, and `SHARDS`, which has the class of each tier, are in `offloaded_shard`.

On several ranks, and where the gradient is on disk, a master shows a `stand_in.Slice` between a backward and the optimizer's
own step. Code of this package asks for `grad` or `device_grad`, which are never one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ...comm.inflight import Inflight
from ...core.layout import Extent, S
from ...errors import ZeroError
from ...tiers.array import DiskArray, OnDisk, Values, fetch
from ...tiers.fingerprint import sample
from ...tiers.pool import Storage
from ...tiers.tier import Tier
from .masters import RAW_GRAD, classes, dressed
from .reads import AsTheyAre
from .stand_in import Keeper, Slice

MASTER = "master"
"""What the values themselves are called among a shard's arrays on disk, and in checkpoints."""

GRADIENT = ".gradient"
"""What a gradient on disk is called in what a step reads."""

B = TypeVar("B", Tensor, None)
Claim = tuple[Values, Tensor | None, Inflight | None]
"""A gradient for a step: its values, a factor they are still to be multiplied by, and what to wait for before."""


class Shard:
    """One stretch of a slice, see above; this class itself in the device's memory, where torch's own step is for it. Made by
    `offloaded_shard.new_shard`, `DiskShard.over` and `move`.

    Args:
        start: its first element in the slice.
        travels: masters themselves go to the device, being of the type that is used there.

    Attributes:
        master: the optimizer's parameter, 1-D. The same object in whatever tier the shard rests.
        aliased: the master is the memory of the parameters' slice: what is written to it needs no publishing.
        home: of an alias, the address of that memory.
        seen: the master's version counter, and a sample of it, as of `note`; None where it is not watched.
        shown: what the master shows for its gradient, kept from step to step.
        coefficient: a factor for the gradient that clipping asked for and the step applies on its way, so that clipping does
            not touch memory.
    """

    tier: ClassVar[Tier] = Tier.DEVICE
    is_offloaded: ClassVar[bool] = False
    is_paged: ClassVar[bool] = False
    """The gradient is brought into memory while it is used."""
    master: nn.Parameter

    def __init__(self, storage: Storage, start: int, numel: int, dtype: torch.dtype, travels: bool = True) -> None:
        self.storage = storage
        self.start = start
        self.numel = numel
        self.dtype = dtype
        self.aliased = False
        self.home = 0
        self.seen: tuple[int, int] | None = None
        self.shown: Slice | None = None
        self.coefficient: Tensor | None = None
        self._travels = travels
        self._heard = classes(storage)[Tier.DEVICE]
        self._counted_bytes = 0  # of the gradient on the device, in the ledger
        self._references = 0  # to `shown`, while nobody but this shard and the master keep it
        self._offered: Tensor | None = None  # what the master shows of a gradient that does not rest on the device

    @property
    def stop(self) -> int:
        return self.start + self.numel

    # Values -----------------------------------------------------------------------------------------------------------

    @property
    def values(self) -> Values:
        """The master's, 1-D: a tensor where it rests in memory."""
        return self.plain

    @property
    def plain(self) -> Tensor:
        """The master as it is, without waiting for a step under way; on disk NaN."""
        with AsTheyAre():
            return self.master.detach()

    def dress(self, param: nn.Parameter) -> None:
        """The master, or a part of it that groups hold, is of the class for this tier."""
        dressed(param, self.tier, self.storage)

    def _hold(self, values: Tensor) -> Tensor:
        """Memory in this tier with these values; what the master is to be."""
        return torch.empty(self.numel, dtype=self.dtype, device=self._device).copy_(values)

    def _arrays(self) -> list[DiskArray]:
        return []

    @property
    def disk_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    @property
    def gradient_bytes(self) -> int:
        """What a gradient takes on disk."""
        return 0

    @property
    def in_files(self) -> bool:
        """The values are in the model's own files."""
        return False

    def note(self) -> None:
        """The master is as it should be: what changes from now on is somebody else's doing."""
        if not self.master.requires_grad:
            self.seen = None
            return
        # An alias also has what is written to parameters.
        values = 0 if self.aliased else sample(self.plain)
        self.seen = self.master._version, values

    def edited(self, closely: bool = True) -> str:
        """How the master was written since `note`: empty, `counted` (by torch), or `sampled`: values differ. An alias that has
        left its `home` is not asked for here."""
        if self.seen is None:
            return ""
        if self.master._version != self.seen[0]:
            return "counted"
        return "sampled" if closely and not self.aliased and sample(self.plain) != self.seen[1] else ""

    def rest_on(self, alias: Tensor | None) -> None:
        """The master is `alias`, memory of its tier that has its values already; None: memory of its own from now on."""
        with AsTheyAre():
            if alias is not None:
                self.master.data, self.home = alias, alias.data_ptr()
            elif self.aliased:
                self.master.data = self._hold(self.master.detach())
        self.aliased = alias is not None
        self.note()

    def close(self) -> None:
        self.release_buffer()
        self._close_arrays()

    def _close_arrays(self) -> None:
        for array in self._arrays():
            array.close()

    # The optimizer's state, of the master or of wholes: parameters of true shape, parts of the master (`whole_optimizer`) --

    def entries(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state of the master: 1-D values by name, and what is one value for all."""
        return {str(key): value for key, value in optimizer.state.get(self.master, {}).items()}

    def follow_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step: what a program has done to `optimizer.state` holds for what rests elsewhere, too."""

    def new_state(self, param: nn.Parameter, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Values:
        """Room in this tier for a tensor of `param`'s state, its content undefined; to be given to `put`."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def put(self, optimizer: torch.optim.Optimizer, param: nn.Parameter, entries: Mapping[str, Any]) -> None:
        """Replace the optimizer's state; values come from anywhere and rest where the shard does, what rests there already is
        not copied. Nothing is left of a state that has no entries.

        Args:
            param: the master, or a whole.

        Raises:
            TierError: there is no room.
        """
        _set_state(optimizer, param, self._at_rest(optimizer, param, entries))

    def _at_rest(
        self, optimizer: torch.optim.Optimizer, param: nn.Parameter, entries: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state in this tier, as the optimizer is to have it; what it had before may be given up."""
        return {
            key: fetch(value).to(self._home(optimizer, param, key, value))
            if isinstance(value, (Tensor, OnDisk))
            else value
            for key, value in entries.items()
        }

    @property
    def _device(self) -> torch.device:
        return self.storage.device

    def _home(self, optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str, value: Values) -> torch.device:
        """Where a tensor of the state is needed. A step count is so on the device only where a kernel there reads it."""
        if value.dim() if param is self.master else key != "step":
            return self._device
        groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
        # Looked for only where groups differ: a search through all parameters for each of them grows with their square.
        if len(groups) < len(optimizer.param_groups):
            groups = [group for group in groups if any(p is param for p in group["params"])]
        return self._device if groups else value.device

    # The gradient -----------------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor | None:
        """As it is kept; `coefficient` is still to be applied."""
        return self.device_grad

    @property
    def device_grad(self) -> Tensor | None:
        """What the master has for its gradient, never a stand-in. On the device that is the gradient itself."""
        grad = self.master.grad
        return grad.at_rest if type(grad) is Slice else grad

    @device_grad.setter
    def device_grad(self, grad: Tensor | None) -> None:
        nbytes = 0 if grad is None else grad.nbytes
        if nbytes != self._counted_bytes:
            self.storage.ledger.device.now["gradients"] += nbytes - self._counted_bytes
            self._counted_bytes = nbytes
        if self.is_offloaded:
            RAW_GRAD.__set__(self.master, grad)
        else:
            self.master.__class__ = nn.Parameter  # what is assigned here is not user code's
            self.master.grad = grad
        self._offered = None
        if self.shown is not None:
            self.shown.local = None

    def use_bucket(self, grad: Tensor) -> None:
        """As `device_grad = grad`, of memory that the span's bucket has and the ledger counts as that."""
        self.device_grad = None
        self.master.grad = grad

    @property
    def has_grad(self) -> bool:
        """Whether there is one, here or on its way."""
        return self.master.grad is not None

    def whole_grad(self) -> Tensor | None:
        """In the master's type, with the coefficient applied; to read and to write."""
        return self.device_grad

    def grad_to_read(self) -> Tensor | None:
        """With the coefficient applied, in any type."""
        return self.grad if self.coefficient is None else self.whole_grad()

    @property
    def grad_version(self) -> int:
        """Another number after every write to the gradient."""
        grad = self.grad
        return 0 if grad is None else grad._version

    def number(self, key: Hashable, of: Callable[[Tensor], Tensor]) -> Tensor | None:
        """`of` the gradient; None where there is none.

        Args:
            key: names what `of` computes, so that it is known of gradients on disk without reading them back.

        Raises:
            TierError: a gradient cannot be read from disk.
        """
        grad = self.grad_to_read()
        return None if grad is None else of(grad)

    def _new_grad(self, grad: Tensor | None) -> Tensor:
        """From now on the gradient is a copy of this, in the master's type; None: zeros."""
        self.device_grad = new = torch.zeros_like(self.master) if grad is None else grad.to(self._device)
        return new

    def some_grad(self) -> Tensor:
        """`whole_grad`; zeros, from now on, where there was none."""
        grad = self.whole_grad()
        return self._new_grad(None) if grad is None else grad

    def zero_grad(self) -> None:
        """Set the gradient to zeros; there is one."""
        self.some_grad().zero_()

    def add(self, piece: Tensor) -> None:
        """One reduce's result, 1-D on the device; the memory may be used again at once (in stream order)."""
        grad = self.device_grad
        if grad is None:
            self.device_grad = piece.to(self.dtype, copy=True)
        else:
            grad.add_(piece)

    def land(self) -> None:
        """What is on its way is in `grad` afterwards. On the device pieces are added at once, in stream order."""

    def scale(self, coefficient: Tensor) -> None:
        """Multiply the gradient, at once or on its way through the step."""
        grad = self.device_grad
        if grad is not None:
            grad.mul_(coefficient.to(device=grad.device, dtype=grad.dtype))

    def give_grad(self, whole: nn.Parameter, grad: Tensor | None, *, is_step: bool) -> None:
        """A whole shows this gradient; outside the optimizer's own step, user code that clears it is heard."""
        if self.is_offloaded:
            RAW_GRAD.__set__(whole, grad)
            return
        whole.__class__ = nn.Parameter
        whole.grad = grad
        if grad is not None and not is_step:
            whole.__class__ = self._heard

    def grad_of_wholes(self) -> Tensor | None:
        """What wholes may show parts of as their gradients; None while there is none in the master's type."""
        return self.device_grad

    def follow_grad(self) -> bool:
        """Carry out what was done to the master's `.grad` since it was shown: None clears the gradient, a tensor replaces it.

        Returns:
            Whether anything was done. Never on the device: there the master's `.grad` is the gradient.
        """
        return False

    def drop_grad(self) -> None:
        self.storage.ledger.device.now["gradients"] -= self._counted_bytes
        self._counted_bytes = 0
        if self.is_offloaded:
            RAW_GRAD.__set__(self.master, None)
        else:
            self.master.__class__ = nn.Parameter  # what is assigned here is not user code's
            self.master.grad = None
        self._offered = None
        if self.shown is not None:
            self.shown.local = None
            if sys.getrefcount(self.shown) > self._references:  # somebody keeps it: it is no later step's gradient
                self.shown = None

    def release_buffer(self) -> None:
        """The gradient's memory goes, too."""
        self.drop_grad()

    def claim(self) -> Claim | None:
        """The gradient for a step that is made elsewhere, if there is one. It stays this shard's until `drop_grad`, but its
        memory is not written before that step is over."""
        return None

    @property
    def grad_bytes(self) -> int:
        """Host memory that is kept for it."""
        return 0

    # What the master shows for it -------------------------------------------------------------------------------------

    def show_slice(self, keeper: Keeper, place: int, optimizer: int) -> None:
        """On several ranks, after a backward: the master shows a stand-in for its gradient, if there is one.

        Args:
            place: of the span among all ranks' spans, if this is the first of the span's shards; else -1.
            optimizer: which of the model's optimizers has the span.
        """
        # In one method for all tiers: a call more for every shard of every step would be felt.
        local = None if self.is_offloaded else self.master.grad
        if type(local) is Slice:
            local = local.at_rest
        # With `step_in_backward` what is offloaded is used up already.
        has = self.has_grad and not self.storage.transient if self.is_offloaded else local is not None
        shown = self.shown
        if not has:
            if shown is not None:
                shown.local = None
            return
        if shown is None or shown.device != self.master.device or shown.keeper is not keeper:
            shown = self.shown = Slice(keeper, self.plain, weakref.ref(self))
            del shown  # or the count below would have this name, and a held stand-in would never be seen
            self._references = sys.getrefcount(self.shown)
            shown = self.shown
        shown.local, shown.place, shown.optimizer = local, place, optimizer
        if self.is_offloaded:
            if self.master.grad is not shown:
                RAW_GRAD.__set__(self.master, shown)
            self._offered = shown
        else:
            self.master.__class__ = nn.Parameter
            self.master.grad = shown
            self.master.__class__ = self._heard

    def hide_slice(self) -> None:
        """Before the optimizer's own step: what rests on the device shows the gradient itself, and is a plain parameter."""
        self.master.__class__ = nn.Parameter
        grad = self.master.grad
        if type(grad) is Slice:
            self.master.grad = grad.at_rest
            if self.shown is not None:
                self.shown.local = None

    def hide_grad(self) -> None:
        """Around the optimizer's own step, which is for what rests on the device."""

    def show_grad(self) -> None:
        """For loss scalers and whoever looks at the groups' gradients, once it has arrived. On the device the master has it."""

    # Between tiers ----------------------------------------------------------------------------------------------------

    def move(
        self,
        kind: type[Shard],
        optimizer: torch.optim.Optimizer | None,
        alias: Tensor | None = None,
        wholes: Iterable[nn.Parameter] = (),
    ) -> Shard:
        """The shard in `kind`'s tier, with everything of this one, the same to the bit, and the same master. This one is over.

        Args:
            alias: memory in that tier that has the master's values already.
            wholes: whose states are here.

        Raises:
            TierError, ConfigError: a tier failed or has no room; everything is where it was.
        """
        if kind.tier is self.tier:
            return self
        grad, values = self.whole_grad(), fetch(self.values)
        states: dict[nn.Parameter, dict[str, Any]] = {}
        moved = kind(self.storage, self.start, self.numel, self.dtype, self._travels)
        moved.master = self.master
        try:
            data = moved._hold(values) if alias is None else alias
            if optimizer is not None:
                for param in (self.master, *wholes):
                    states[param] = moved._at_rest(optimizer, param, optimizer.state.get(param, {}))
        except ZeroError:
            moved._close_arrays()
            raise
        # What may fail is done.
        self.device_grad = None
        with AsTheyAre():
            self.master.data = data
        moved.dress(self.master)
        moved.aliased = alias is not None
        moved.home = data.data_ptr() if alias is not None else 0
        if self.shown is not None:
            moved.shown, moved._references = self.shown, self._references
            moved.shown.shard = weakref.ref(moved)
        if optimizer is not None:
            for param, state in states.items():
                _set_state(optimizer, param, state)
        moved._take_grad(self, grad)
        self._close_arrays()
        moved.note()
        return moved

    def _take_grad(self, former: Shard, grad: Tensor | None) -> None:
        """`grad`, whole, of the shard that this one comes from."""
        if grad is not None:
            self._new_grad(grad)
        former._keep(None)

    def _keep(self, buffer: B) -> B:
        """The memory of a gradient in host memory is this from now on."""
        return buffer


def _set_state(optimizer: torch.optim.Optimizer, param: nn.Parameter, state: dict[str, Any]) -> None:
    if state:
        optimizer.state[param] = state
    else:
        optimizer.state.pop(param, None)


def is_elementwise(key: str, value: Any, numel: int) -> bool:
    """Whether an optimizer's state entry has one value per element of a 1-D parameter."""
    return isinstance(value, (Tensor, OnDisk)) and key != "step" and value.dim() > 0 and value.numel() == numel


def extents(parts: Iterable[Extent[S]], shards: Sequence[Shard]) -> Iterator[tuple[Shard, Extent[S]]]:
    """Elements of `parts`, as `Span.overlaps` has them, that these shards have. "Here" is the shard."""
    for part in parts:
        for shard in shards:
            piece = part.cut(shard.start, shard.stop)
            if piece is not None:
                yield shard, piece.moved(-shard.start)


def assembled(
    shards: Sequence[Shard], of: Callable[[Shard], Values | None], start: int, numel: int, device: torch.device
) -> Tensor | None:
    """Elements [start, start + numel) of the slice on `device`, a view where that is possible; None where no shard has any."""
    parts = [(of(shard), piece) for shard, piece in extents([Extent(None, 0, start, numel)], shards)]
    held: Iterable[Values | None] = [values for values, _ in parts] if parts else map(of, shards)
    some = next((values for values in held if values is not None), None)
    if some is None:
        return None
    if len(parts) == 1 and isinstance(some, Tensor):
        return some[parts[0][1].here].to(device)
    out = torch.zeros(numel if parts else 0, dtype=some.dtype, device=device)
    for values, piece in parts:
        if values is not None:
            out[piece.there].copy_(fetch(values[piece.here]))
    return out
