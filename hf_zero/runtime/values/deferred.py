"""Parameters whose values live in the ranks' slices before there is an engine: made by `zero.Init`, ended by `zero.shard`.

A born parameter is *closed* or *open*. Closed, each rank has `own`, its equal part of the row-major elements, and the
parameter is a `DeferredParameter`: torch functions that need its values raise. Its `.data` is one NaN expanded to the true
shape and type, for code that torch functions do not reach. Open, `.data` is whole, the same on every rank, and is the truth.
Opening is a collective, closing needs no communication: so whether a parameter is open must be the same on every rank, and
follows from the program alone. Closing takes a digest of the whole values, which ranks compare once, at the end.

A parameter may also be born *at rest*: its values stay in the files that it comes from, its `origin`, until something writes
to it or asks for `own`. Whether there is an origin follows from the program alone, too; whether `own` was asked for does not.
A slice that was computed may rest as well, in this rank's own file (`store`), until it is asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.agree import read
from ...comm.wire import SoloWire, wire_device
from ...errors import StateError, TierError
from ...tiers.array import DiskArray, OnDisk
from ...tiers.disk import Disk
from ...tiers.fingerprint import digest
from .deferred_parameter import DeferredParameter, opening_mode
from .ownership import OWNERS, adopt, release

_TAG = 1 << 20  # above every span's index
OWN = -1
_STORED_BYTES = 64 << 10  # smaller slices stay in memory
GUARDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def slice_bounds(numel: int, rank: int, size: int) -> tuple[int, int]:
    """The row-major elements [start, stop) of rank `rank`: equal slices, the last ones may be short or empty."""
    per_rank = -(-numel // size)
    return min(rank * per_rank, numel), min((rank + 1) * per_rank, numel)


def no_pickle() -> StateError:
    """To be raised where a deferred parameter, or what its model refers to, is pickled."""
    return StateError(
        "a parameter that was born under zero.Init() cannot be pickled: each rank has only a part of it. Save "
        "model.state_dict(), or shard the model and use engine.save()"
    )


def birth_of(param: Tensor) -> Birth | None:
    """How this parameter was born; None for any other, and once an engine holds it."""
    owner = OWNERS.get(param)
    return owner if isinstance(owner, Birth) else None


def born(
    shape: Sequence[int],
    dtype: torch.dtype,
    own: Tensor,
    wire: SoloWire,
    *,
    device: torch.device | str,
    requires_grad: bool = True,
) -> nn.Parameter:
    """A closed parameter of `shape`, whose values are the ranks' `own`: 1-D, the elements of `slice_bounds`.

    Raises:
        StateError: `own` is not this rank's part.
    """
    numel = torch.Size(shape).numel()
    low, high = slice_bounds(numel, wire.rank, wire.size)
    if own.dim() != 1 or own.numel() != high - low or own.dtype != dtype or own.device != torch.device(device):
        raise StateError(
            f"born(): expected a 1-D {dtype} tensor of {high - low} elements on {device} (rank {wire.rank} of "
            f"{wire.size}, shape {tuple(shape)}), found {own.dtype} {tuple(own.shape)} on {own.device}"
        )
    return _closed(Birth(wire, own.detach()), shape, requires_grad)


def born_at_rest(
    shape: Sequence[int],
    origin: OnDisk,
    wire: SoloWire,
    *,
    device: torch.device | str,
    requires_grad: bool = True,
) -> nn.Parameter:
    """A closed parameter of `shape` and of `origin`'s type, whose row-major elements are at rest in `origin`. The same on every
    rank, and each can read all of it."""
    return _closed(Birth(wire, origin=origin, device=torch.device(device)), shape, requires_grad)


def _closed(birth: Birth, shape: Sequence[int], requires_grad: bool) -> nn.Parameter:
    with torch._C.DisableTorchFunction():
        param = nn.Parameter(birth.new_sentinel(shape), requires_grad=requires_grad)
    adopt(param, birth)
    param.__class__ = DeferredParameter
    return param


def end_deferred(param: nn.Parameter) -> None:
    """An engine has the parameter's values from here on."""
    param.__class__ = nn.Parameter
    release(param)


class Birth:
    """Where the values of one born parameter are. Keeps no reference to the parameter: the registry is weak.

    Args:
        store: where slices that are computed rest while the parameter is closed; None: in memory.
        skips_first: whether values that no function was given yet are closed without a digest.
    """

    def __init__(
        self,
        wire: SoloWire,
        own: Tensor | None = None,
        origin: OnDisk | None = None,
        device: torch.device | None = None,
        store: Disk | None = None,
        skips_first: bool = False,
    ) -> None:
        self.wire = wire
        self._skips_first = skips_first
        self._store = store
        self._stored: DiskArray | None = None
        """This rank's slice, where `_own` is None and it was computed; in memory where this rank has no room on disk."""
        self.is_open = own is None and origin is None
        self.origin = origin
        """All elements of the parameter, where they came from; None once it may have been written while it was open."""
        self.pins = 0  # `GatheredParameters` that need it open
        self.is_used = False
        """Whether a function was given it since it was registered. Before, its memory may never have been written."""
        self.print: int | None = None
        """Digest of the whole values that this rank saw when it closed the parameter. The slices fit each other only where it
        is the same on every rank. None: of values that were made in slices. `OWN`: after a write to this rank's slice."""
        self._own = own  # with an origin: None until it is asked for, then the truth
        self._device = device  # of what is read from the origin
        self._guard: Tensor | None = None
        self._shape: tuple[int, ...] = ()  # when it was closed last
        self._stride: tuple[int, ...] | None = None  # of a parameter that is not row-major in memory
        # A storage of the parameter that someone else still refers to: freeing our part frees nothing, and who holds it
        # may write. Kept, with its values, until no one does.
        self._alias: Tensor | None = None

    @property
    def own(self) -> Tensor:
        """1-D, this rank's elements. Only while closed."""
        if self._file() is not None:
            self._own = self.values()
            self._unstore()
        if self._own is None or self.is_open:
            raise StateError("a born parameter's slice was asked for while it is whole")
        self._follow_alias()
        return self._own

    @property
    def at_rest(self) -> bool:
        """Whether the values are in the origin alone. Closed."""
        return self._own is None and self._stored is None and self.origin is not None and not self.is_open

    @property
    def is_in_memory(self) -> bool:
        """Whether this rank's slice is in memory. Closed."""
        return self._own is not None

    @property
    def may_fail(self) -> bool:
        """Whether `values` may have to read a file, here or on another rank. The same on every rank."""
        return self.origin is not None or self._store is not None

    def values(self) -> Tensor:
        """`own`, to look at only: what is at rest stays there, and is read anew. While closed.

        Raises:
            TierError: it cannot be read.
        """
        if self._stored is not None and not self.is_open:
            self._follow_alias()
        file = self._file()
        if file is None:
            return self.own
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return file.read_into(torch.empty(file.numel(), dtype=file.dtype, device=self._device))

    def _file(self) -> OnDisk | None:
        """This rank's elements, where a file alone has them. None while open."""
        if self._own is not None or self.is_open:
            return None
        if self._stored is not None:
            return OnDisk(self._stored)
        return None if self.origin is None else self.origin[self._mine(self.origin.numel())]

    def _mine(self, numel: int) -> slice:
        """Which of so many elements are this rank's."""
        return slice(*slice_bounds(numel, self.wire.rank, self.wire.size))

    def slice_of(self, param: nn.Parameter) -> Tensor:
        """1-D, this rank's elements, in either state; may be a view."""
        if not self.is_open:
            return self.own
        with torch._C.DisableTorchFunction():
            return param.detach().reshape(-1)[self._mine(param.numel())]

    def new_sentinel(self, shape: Sequence[int]) -> Tensor:
        """What a closed parameter points at."""
        dtype, device = self._kind
        if self._guard is None or self._guard.dtype != dtype or self._guard.device != device:
            value = float("nan") if dtype in GUARDED else 0
            self._guard = torch.full((), value, dtype=dtype, device=device)
        self._shape = tuple(shape)
        return self._guard.expand(self._shape)

    @property
    def _kind(self) -> tuple[torch.dtype, torch.device]:
        """Type of the values, and where they are or will be read to."""
        if self._own is not None:
            return self._own.dtype, self._own.device
        values = self.origin if self._stored is None else self._stored
        if values is None or self._device is None:
            raise StateError("a born parameter has no slice yet")
        return values.dtype, self._device

    def check_guard(self, param: nn.Parameter, name: str = "") -> None:
        """Raise if the parameter was written to while it was closed, by code that torch functions do not reach."""
        guard = self._guard
        if guard is None or self.is_open:
            return
        with torch._C.DisableTorchFunction():
            is_replaced = param.untyped_storage().data_ptr() != guard.untyped_storage().data_ptr()
        if is_replaced or (guard.dtype in GUARDED and not bool(guard.isnan())):
            guard.fill_(float("nan") if guard.dtype in GUARDED else 0)
            what = f"parameter {name!r}" if name else f"a parameter of shape {tuple(param.shape)}"
            raise StateError(
                f"{what} was written to while it was released (its values live in the ranks' slices; what was written is "
                "lost). Write it inside `with zero.Init():` or zero.GatheredParameters, or with load_state_dict"
            )

    def stand_in(self, param: nn.Parameter) -> Tensor:
        """A meta tensor of the shape, type and strides that the parameter has when it is open."""
        return torch.empty_strided(param.shape, self._strides(param.shape), dtype=param.dtype, device="meta")

    def _strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._stride or tuple(torch.empty(tuple(shape), device="meta").stride())

    def copied(self, param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        """As `Owner`: closed, or at rest in the same files."""
        if opening_mode() is None:
            raise StateError(
                f"a parameter of shape {tuple(param.shape)} that was born under zero.Init() cannot be copied before its model "
                "is sharded: copy inside `with zero.Init():`, or build the second model there"
            )
        own = None if self.at_rest else self.slice_of(param).clone()
        origin = None if self.is_open else self.origin
        birth = Birth(self.wire, own, origin, param.device, self._store)
        if self.is_open:
            self._take_print(param.detach())
        birth.is_used, birth.print = self.is_used, self.print
        return _closed(birth, param.shape, param.requires_grad)

    def pickled(self, param: nn.Parameter) -> Any:
        raise no_pickle()

    # Between closed and open ------------------------------------------------------------------------------------------

    def open(self, param: nn.Parameter, fill: bool = True, whole: Tensor | None = None) -> None:
        """Whole values in `.data`: `whole`, or brought in by a collective; `fill=False`: only the memory, for who overwrites
        it."""
        if self.is_open:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.check_guard(param)
            shape, (dtype, device) = param.shape, self._kind
            if whole is not None:
                pass
            elif self.wire.size == 1 and self._stride is None and not self.may_fail:
                whole = self.own.view(shape)
            elif self._alias is None and self._stride is None and fill:
                whole = self.read(shape)
            else:
                fresh = partial(torch.empty_strided, shape, self._strides(shape), dtype=dtype, device=device)
                whole = fresh() if self._alias is None else self._alias
                if fill:  # also into an alias, which another rank may not have: every rank takes part
                    whole.copy_(self.read(shape))
            self._alias = None
            param.__class__ = nn.Parameter
            param.data = whole
        self.is_open = True

    def close(self, param: nn.Parameter, keep: bool = True) -> None:
        """This rank's slice of `.data`, and no more. `keep=False`: the values from before `open` instead."""
        if not self.is_open:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            whole = param.data
            keep = keep or (self._own is None and self._stored is None and self.origin is None)
            if keep:
                self._take_print(whole)
                self._cut(whole, stores=True)
                self.origin = None
                contiguous = whole.is_contiguous()
                # Only strides that a fresh tensor can have; others (overlapping) come back row-major.
                self._stride = None if contiguous else tuple(torch.empty_like(whole, device="meta").stride())
            self.is_open = False
            param.data = self.new_sentinel(whole.shape if keep else self._shape)
            param.__class__ = DeferredParameter
            if keep and (self.wire.size > 1 or self._stored is not None) and _holders(whole) > 1:
                self._alias = whole

    def _take_print(self, whole: Tensor) -> None:
        if self.wire.size > 1 and (self.is_used or not self._skips_first):
            self.print = digest(whole.reshape(-1))

    def note_write(self, what: str, *, overwrites: bool) -> None:
        """`what` was done to the slices of all ranks, in place of the whole."""
        before = None if overwrites else self.print
        self.print = zlib.crc32(f"{before} {what}".encode())

    def _cut(self, whole: Tensor, stores: bool) -> None:
        part = whole.reshape(-1)[self._mine(whole.numel())]
        if stores and self._put_away(part):
            return
        own = self._own
        if self.wire.size == 1:
            self._own = part
        elif own is not None and own.shape == part.shape and own.dtype == part.dtype and own.device == part.device:
            own.copy_(part)
        else:
            self._own = part.clone()

    def _put_away(self, part: Tensor) -> bool:
        """The slice into the store. False where there is none, or no room in it: it stays in memory."""
        store, stored = self._store, self._stored
        if store is None or part.nbytes < _STORED_BYTES:
            self._unstore()
            return False
        try:
            if stored is None or stored.numel != part.numel() or stored.dtype != part.dtype:
                self._unstore()
                self._stored = stored = DiskArray(store, part.numel(), part.dtype)
            OnDisk(stored).copy_(part)
        except TierError:
            self._unstore()
            return False
        self._own, self._device = None, part.device
        return True

    def settle(self) -> None:
        """What has come into memory goes back to where it rests. Closed, nobody holds `own`."""
        own = self._own
        if own is not None and self._alias is None and self._put_away(own):
            self.origin = None

    def _unstore(self) -> None:
        stored, self._stored = self._stored, None
        if stored is not None:
            stored.close()

    def __del__(self) -> None:
        self._unstore()

    @property
    def alias(self) -> Tensor | None:
        """Memory of the closed parameter to which user code may still refer."""
        return self._alias

    @property
    def has_alias(self) -> bool:
        return self._alias is not None

    def follow(self, param: nn.Parameter) -> None:
        """Take what was written through other tensors, before ranks are compared."""
        self.drop_alias()
        if self.is_open:
            self._take_print(param.detach())

    def drop_alias(self) -> None:
        if self._alias is not None:
            self._take_print(self._alias)
            self._follow_alias()
            self._alias = None

    def _follow_alias(self) -> None:
        if self._alias is not None and (self._own is not None or self._stored is not None):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._cut(self._alias, stores=self._stored is not None)

    def move(self, param: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `fn`, which may change type and device but no value's place, to the slice; the parameter's new `.data`."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.check_guard(param)
            device = self._only_moves(fn) if self.at_rest else None
            if device is not None:
                self._device = device
            else:
                self._own, self._alias = fn(self.own), None
            return self.new_sentinel(param.shape)

    def _only_moves(self, fn: Callable[[Tensor], Tensor]) -> torch.device | None:
        """Where `fn` takes a tensor of this type to; None if it does more than that."""
        dtype, device = self._kind
        sample = torch.arange(1, 4, device="cpu").to(dtype=dtype, device=device)
        moved = fn(sample.clone())
        return moved.device if moved.dtype == dtype and torch.equal(moved.to(device), sample) else None

    # Whole values -----------------------------------------------------------------------------------------------------

    def read(self, shape: Sequence[int], room: Tensor | None = None) -> Tensor:
        """The whole values as a tensor of `shape`; a collective. Only while closed.

        Args:
            room: 1-D, to whose first elements they go if it is of their type and large enough, else they go to new memory. What
                follows them there may be overwritten.
        """
        wire, numel = self.wire, torch.Size(shape).numel()
        per_rank = -(-numel // wire.size)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            dtype, device = self._kind
            if room is None or room.dtype != dtype or room.numel() < per_rank * wire.size:
                room = torch.empty(per_rank * wire.size, dtype=dtype, device=device)
            own = read(wire, self.values, may_fail=self.may_fail and wire.size > 1)
            if wire.size == 1:
                room[:numel].copy_(own)
                return room[:numel].view(tuple(shape))
            if own.numel() < per_rank:  # the last slices come padded to the length of the first
                own = torch.cat([own, own.new_zeros(per_rank - own.numel())])
            place, padded = wire_device(wire, own.device), room[: per_rank * wire.size]
            whole = padded if padded.device == place else torch.empty_like(padded, device=place)
            # As bytes: not every backend moves every type.
            wire.gather(whole.view(torch.uint8), own.to(place).view(torch.uint8), _TAG).close()
            if whole is not padded:
                padded.copy_(whole)
            return room[:numel].view(tuple(shape))

    def whole(self, param: nn.Parameter) -> Tensor:
        """The whole value, a new tensor; a collective, unless open."""
        if self.is_open:
            with torch._C.DisableTorchFunction():
                return param.detach().clone()
        self.check_guard(param)
        return self.read(param.shape)

    def put(self, param: nn.Parameter, value: Tensor) -> None:
        """A new whole value, of which this rank keeps its part; no communication."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if self.is_open:
                param.data.copy_(value)
                return
            self.check_guard(param)
            self._take_print(value.detach())
            self.own.copy_(value.detach().reshape(-1)[self._mine(param.numel())])

    def put_own(self, param: nn.Parameter, values: Tensor) -> None:
        """New values of this rank's elements, 1-D; no communication."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.print = OWN
            own = self.slice_of(param).copy_(values)
            if self.is_open and not param.is_contiguous():  # that was a copy
                whole = param.detach().reshape(-1)
                whole[self._mine(whole.numel())] = own
                param.data.copy_(whole.view(param.shape))


def free_aliases(births: Iterable[Birth]) -> list[Birth]:
    """Free the memory of closed parameters to which nothing but births refers; return the others of these births."""
    sharing: dict[int, list[Birth]] = {}
    for birth in births:
        if birth.alias is not None:
            sharing.setdefault(birth.alias.untyped_storage()._cdata, []).append(birth)
    kept = []
    for group in sharing.values():
        if group[0].alias is not None and _holders(group[0].alias) > len(group):
            kept += group
            continue
        for birth in group:
            birth.drop_alias()
    return kept


def _holders(tensor: Tensor) -> int:
    """How many tensors share this one's storage, itself included. Says what memory there is to free, nothing else."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
