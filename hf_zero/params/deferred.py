"""Parameters created under `zero.Init`: each rank keeps its part of the values until the model is sharded.

A deferred parameter is *closed* or *open*. While it is closed, each rank has an equal part of the row-major elements (`local`),
and the parameter is a `DeferredParameter` whose `data` is one NaN, expanded to the true shape. While it is open, `data` is full
and equal on all ranks. Opening is a collective, closing is local: user code alone decides when, the same on every rank.

`local` is in memory, in this rank's own file (`store`), or in the files that the values come from (`files`): these are read,
not copied, until something is written. Closing takes a digest of the full values: the ranks compare them later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..comm.agreement import read_on_all_ranks
from ..comm.wire import Wire
from ..engine.parameter import set_source, source_of
from ..errors import StateError, TierError
from ..tiers.array import DiskArray, OnDisk, Values, fetch
from ..tiers.disk import Disk
from ..tiers.fingerprint import digest
from .deferred_parameter import copy_deferred, make_closed

_TAG = 1 << 16  # above every span's index, and below the highest that a wire takes
_STORED_BYTES = 64 << 10  # smaller parts stay in memory
WRITTEN_LOCALLY = -1
"""The digest after `put_local`: one rank wrote its part alone."""
_plain = torch._C.DisableTorchFunction


def slice_bounds(numel: int, rank: int, size: int) -> tuple[int, int]:
    """Return the row-major elements [start, stop) of rank `rank`: equal parts, the last ones may be short or empty."""
    per_rank = -(-numel // size)
    return min(rank * per_rank, numel), min((rank + 1) * per_rank, numel)


def deferred_of(param: Tensor) -> Deferred | None:
    """Return the `Deferred` of a parameter; None if it is not deferred or an engine has it."""
    source = source_of(param)
    return source if isinstance(source, Deferred) else None


class Deferred:
    """Owns the values of one deferred parameter, as a source for the engine. Keeps no reference to the parameter.

    Args:
        local: this rank's elements, 1-D. None: the parameter is open.
        files: all elements, in their original files.
        store: the disk for computed parts; None: keep them in memory.

    Attributes:
        label: its name in error messages. `digest`: that of the full values when this rank last had them.
        is_used: a function has used it. Before, its memory may be uninitialized.
        is_cast: a cast of a closed parameter created it.
        session: of the `Init` that labelled it.
        pins: `GatheredParameters` that need it open.
    """

    def __init__(
        self,
        wire: Wire,
        local: Values | None = None,
        *,
        device: torch.device | None = None,
        files: OnDisk | None = None,
        store: Disk | None = None,
    ) -> None:
        self.wire, self._files, self._store = wire, files, store
        self.local = local if files is None else files[self._mine(files.numel())]
        self.is_open = self.local is None
        self.device = device or (local.device if local is not None else torch.device("cpu"))
        self.label = "a parameter"
        self.digest: int | None = None
        self.is_used, self.is_cast, self.pins = False, False, 0
        self.session: object = None
        self._kind: tuple[torch.Size, torch.dtype] | None = None  # shape and dtype before `open`
        self._may_fail = files is not None or store is not None  # to read; the same on every rank
        self._stored: DiskArray | None = None
        self._strides: tuple[int, ...] | None = None  # of a parameter that is not row-major
        self._alias: Tensor | None = None
        """Full memory of the closed parameter that user code still refers to, and may write."""

    def _mine(self, numel: int) -> slice:
        return slice(*slice_bounds(numel, self.wire.rank, self.wire.size))

    @property
    def files(self) -> OnDisk | None:
        """All elements in their original files; None once memory may hold newer ones."""
        return None if self.is_open else self._files  # user code may write an open parameter

    # Values -----------------------------------------------------------------------------------------------------------

    def values(self) -> Tensor:
        """Return this rank's elements while closed, 1-D, on the device; maybe `local` itself.

        Raises:
            TierError: they cannot be read.
        """
        self._follow()
        if self.local is None:
            raise StateError("the part of a parameter was asked for while it is open")
        return fetch(self.local).to(self.device)

    def slice_of(self, param: nn.Parameter) -> Tensor:
        """Return this rank's elements, open or closed."""
        with _plain():
            return param.detach().reshape(-1)[self._mine(param.numel())] if self.is_open else self.values()

    @torch.no_grad()
    def full(self, shape: Sequence[int], room: Tensor | None = None) -> Tensor:
        """Return the full values while closed. A collective.

        Args:
            room: 1-D scratch memory, used if it is large enough and has the dtype.
        """
        wire, numel = self.wire, torch.Size(shape).numel()
        per_rank = -(-numel // wire.size)
        with _plain():
            local = read_on_all_ranks(wire, self.values, may_fail=self._may_fail and wire.size > 1)
            if room is None or room.dtype != local.dtype or room.numel() < per_rank * wire.size:
                room = torch.empty(per_rank * wire.size, dtype=local.dtype, device=self.device)
            if wire.size == 1:
                room[:numel].copy_(local)
                return room[:numel].view(tuple(shape))
            if local.numel() < per_rank:
                local = torch.cat([local, local.new_zeros(per_rank - local.numel())])
            where, padded = wire.device or self.device, room[: per_rank * wire.size]
            whole = padded if padded.device == where else torch.empty_like(padded, device=where)
            # As bytes: not every backend supports every dtype.
            wire.gather(whole.view(torch.uint8), local.to(where).view(torch.uint8), _TAG).close()
            if whole is not padded:
                padded.copy_(whole)
            return room[:numel].view(tuple(shape))

    @torch.no_grad()
    def put(self, param: nn.Parameter, value: Tensor) -> None:
        """Set the full values; this rank keeps its part. No communication."""
        with _plain():
            if self.is_open:
                param.data.copy_(value)
            else:
                value, self._alias = value.detach().to(device=self.device, dtype=param.dtype), None
                self._keep(value, value.reshape(-1)[self._mine(value.numel())].clone())

    @torch.no_grad()
    def put_local(self, param: nn.Parameter, values: Tensor) -> None:
        """Set this rank's elements and close the parameter, whose full values are outdated. No communication.

        Raises:
            StateError: `GatheredParameters` needs it open.
        """
        if self.pins:
            raise StateError(
                "set_local_parameter was called inside zero.GatheredParameters, whose values would be old. Call it after"
            )
        self.close(param)
        with _plain():
            self.local, self._files = self._put_away(self.values().clone().copy_(values)), None
        self._alias, self.digest = None, WRITTEN_LOCALLY

    # Open and close ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def open(self, param: nn.Parameter, *, fill: bool = True) -> None:
        """Give the parameter full values. A collective.

        Args:
            fill: False: allocate memory only, for code that overwrites it.
        """
        if self.is_open:
            return
        with _plain():
            shape, dtype = param.shape, param.dtype
            whole: Tensor | None
            if self.wire.size == 1 and isinstance(self.local, Tensor) and self._strides is None:
                whole = self.values().view(shape)
            else:
                whole = self._alias
                if whole is None:
                    strides = self._strides or torch.empty(shape, device="meta").stride()
                    whole = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
                if fill:  # even an alias: other ranks may have none, and this is a collective
                    whole.copy_(self.full(shape))
            param.__class__ = nn.Parameter
            param.data = whole
            copy_deferred(param)
        self._alias, self.is_open, self._kind = None, True, (shape, dtype)

    @torch.no_grad()
    def close(self, param: nn.Parameter, *, keep: bool = True) -> None:
        """Keep only this rank's part of the full values.

        Args:
            keep: False: discard changes since `open`.
        """
        if not self.is_open:
            return
        with _plain():
            whole = param.data
            if keep or self.local is None:
                part = whole.reshape(-1)[self._mine(whole.numel())]
                self._keep(whole, part if self.wire.size == 1 else part.clone())
                self._strides = _kept_strides(whole)
                self.device = whole.device
            self.is_open = False
            shape, dtype = (whole.shape, whole.dtype) if keep or self._kind is None else self._kind
            make_closed(param, shape, dtype, self.device)
            shares = self.wire.size > 1 or isinstance(self.local, OnDisk)
            if keep and shares and _holders(whole) > 1:
                self._alias = whole

    def _keep(self, whole: Tensor, part: Tensor) -> None:
        self.local, self._files = self._put_away(part), None
        if self.wire.size > 1:
            self.digest = digest(whole.reshape(-1))

    def _put_away(self, part: Tensor) -> Values:
        """Store the part of a closed parameter: on disk if possible, else in memory."""
        if self._store is None or part.nbytes < _STORED_BYTES:
            return part
        self._unstore()
        try:
            self._stored = DiskArray(self._store, part.numel(), part.dtype)
            return OnDisk(self._stored).copy_(part)
        except TierError:
            self._unstore()
            return part

    def _unstore(self) -> None:
        stored, self._stored = self._stored, None
        if stored is not None:
            stored.close()

    def __del__(self) -> None:
        self._unstore()

    @property
    def has_alias(self) -> bool:
        """Return whether user code refers to full memory of the closed parameter. Copies its writes first."""
        self._follow()
        if self._alias is not None and _holders(self._alias) < 2:
            self._alias = None
        return self._alias is not None

    @torch.no_grad()
    def _follow(self) -> None:
        alias = self._alias
        if alias is not None and digest(alias.reshape(-1)) != self.digest:
            self._keep(alias, alias.reshape(-1)[self._mine(alias.numel())].clone())

    def follow(self, param: nn.Parameter) -> None:
        """Copy writes through aliases, before ranks compare digests."""
        self._follow()
        if self.is_open and self.wire.size > 1:
            with _plain():
                self.digest = digest(param.detach().reshape(-1))

    @torch.no_grad()
    def cast(self, param: nn.Parameter, change: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """Return a closed parameter whose part is `change(part)`. Unchanged values stay in their files."""
        self._follow()
        with _plain():
            like = change(torch.empty(0, dtype=param.dtype, device=self.device))
            stays = isinstance(self.local, OnDisk) and like.dtype == param.dtype
            made = Deferred(self.wire, self.local if stays else change(self.values()), device=like.device)
        made.is_cast, made.is_used, made.digest, made._strides = True, self.is_used, self.digest, self._strides
        return closed_parameter(made, param.shape, like.dtype, False)

    def take(self, param: nn.Parameter, cast: Deferred, shape: torch.Size, dtype: torch.dtype) -> None:
        """Take the values of a cast of this parameter or another one."""
        if cast.local is not self.local and cast.local is not None:
            self.local, self._files = self._put_away(fetch(cast.local)), None
        self._alias, self.device = None, cast.device
        self.is_used, self.digest, self._strides = cast.is_used, cast.digest, cast._strides
        make_closed(param, shape, dtype, self.device)

    def copied(self, param: nn.Parameter) -> nn.Parameter:
        """Return a closed copy, or one in the same files."""
        self.follow(param)
        files = self.files
        local = self.slice_of(param).clone() if files is None else None
        made = Deferred(self.wire, local, device=self.device, files=files, store=self._store)
        made._may_fail = self._may_fail
        made.label, made.is_used, made.digest = f"a parameter of shape {tuple(param.shape)}", self.is_used, self.digest
        with _plain():
            made._strides = _kept_strides(param.data) if self.is_open else self._strides
        return closed_parameter(made, param.shape, param.dtype, param.requires_grad)

    # Source for an engine ---------------------------------------------------------------------------------------------

    def memory(self, param: nn.Parameter) -> Tensor | None:
        """Return the full values if another tensor may share their memory, else None."""
        if self.is_open:
            with _plain():
                return param.detach()
        return self.local if self.wire.size == 1 and isinstance(self.local, Tensor) else self._alias

    def fill(self, param: nn.Parameter, target: Tensor, room: Tensor) -> None:
        """Write the full values to `target`, the beginning of `room`. A collective."""
        values = param.detach() if self.is_open else self.full(target.shape, room)
        if values.data_ptr() != target.data_ptr():
            target.copy_(values)

    def end(self, param: nn.Parameter) -> None:
        """Free the values: an engine has them."""
        param.__class__ = nn.Parameter
        param.__dict__.pop("__deepcopy__", None)
        set_source(param, None)
        self._unstore()

    def meta_tensor(self, param: nn.Parameter) -> Tensor:
        """Return a meta tensor of the shape, dtype and strides that the parameter has when it is open."""
        strides = self._strides or torch.empty(param.shape, device="meta").stride()
        return torch.empty_strided(param.shape, strides, dtype=param.dtype, device="meta")


def closed_parameter(deferred: Deferred, shape: Sequence[int], dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    """Return a new closed parameter over the values of `deferred`."""
    with _plain():
        param = nn.Parameter(torch.empty(0, dtype=dtype, device=deferred.device), requires_grad=requires_grad)
        make_closed(param, shape, dtype, deferred.device)
    set_source(param, deferred)
    return param


def _kept_strides(whole: Tensor) -> tuple[int, ...] | None:
    """Return the strides that copies of a tensor have; None if it is row-major."""
    return None if whole.is_contiguous() else tuple(torch.empty_like(whole, device="meta").stride())


def _holders(tensor: Tensor) -> int:
    """Return the number of tensors that share this one's storage, itself included."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
