"""Whole values of sharded parameters for a while (`GatheredParameters`), and one by one (`full_*`, `local_*`).

They work alike for parameters of an engine, at every stage and precision, and for those born under `zero.Init` that no
engine has yet (which have no gradient and no optimizer state).

`full_*` are collectives: every rank calls them with the same parameters in the same order. `local_*` do not communicate:
they see this rank's own elements of the parameter, row-major, 1-D, often none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..comm.agree import read
from ..comm.wire import SoloWire
from ..core.precision import dtype_of
from ..errors import ConfigError, RankMismatchError, StateError
from ..runtime.deferred import Birth
from ..runtime.engine import Engine, engine_of
from ..runtime.ownership import owner_of
from ..runtime.sharded import Of, Place, Sharded, gradient_of, master_of, state_of
from ..tiers.array import OnDisk, in_memory
from ..tiers.fingerprint import fingerprint

Quantity = Literal["parameter", "gradient", "optimizer_state"]


class _Held(NamedTuple):
    """A parameter of a sharded model."""

    place: Place
    engine: Engine

    @property
    def name(self) -> str:
        return self.place.slot.spec.name

    @property
    def wire(self) -> SoloWire:
        return self.place.unit.wire

    def settle(self) -> None:
        """The master has what was written to the parameter."""
        self.engine.settle(self.place.unit.flats)


def _holder(param: nn.Parameter) -> _Held | Birth | None:
    """Who has the parameter's values; None for a plain one."""
    owner = owner_of(param)
    if not isinstance(owner, Sharded):
        return owner if isinstance(owner, Birth) else None
    engine = engine_of(owner.model)
    if engine is None:
        raise StateError(f"the model of {owner.places[param].slot.spec.name!r} is not sharded any more")
    return _Held(owner.places[param], engine)


def _checked_holder(param: nn.Parameter, quantity: Quantity, what: str) -> _Held | Birth:
    """Who has the values; one that has such a quantity, or the error that says why not."""
    holder = _holder(param)
    if holder is None:
        raise StateError(
            f"{what}: this parameter of shape {tuple(param.shape)} belongs to no sharded model (zero.shard, "
            "accelerator.prepare) and was not born under zero.Init(); use it directly"
        )
    if quantity == "parameter":
        return holder
    if isinstance(holder, Birth):
        raise StateError(
            f"{what}: this parameter of shape {tuple(param.shape)} was born under zero.Init() and has neither gradient nor "
            "optimizer state before its model is sharded"
        )
    if not holder.place.flat.span.trainable:
        raise StateError(f"{what}: {holder.name!r} is frozen: it has neither gradient nor optimizer state")
    holder.engine.finish_step()
    return holder


@torch.no_grad()
def _get(param: nn.Parameter, quantity: Quantity, whole: bool, name: str = "") -> Tensor | None:
    what = f"{'full' if whole else 'local'}_{quantity}"
    holder = _checked_holder(param, quantity, what)
    with holder.wire.watch.doing(f"{what}()"):
        return _read(holder, param, quantity, whole, name)


def _read(holder: _Held | Birth, param: nn.Parameter, quantity: Quantity, whole: bool, name: str) -> Tensor | None:
    if isinstance(holder, Birth):
        return holder.whole(param) if whole else holder.slice_of(param).clone()
    place, engine = holder
    of: Of = master_of
    match quantity:
        case "parameter":
            holder.settle()
        case "gradient":
            if whole:
                engine.flush([place.flat] if place.flat.span.trainable else [])
            if not place.flat.grads():
                return None
            of = gradient_of
        case "optimizer_state":
            optimizer = engine.sharded.optimizer_of(place.flat)
            value, sliced = place.state(optimizer, name)
            if place.flat.wholes is not None:
                value = read(holder.wire, partial(in_memory, value), may_fail=whole and place.flat.storage.uses_disk)
            if whole and place.is_owned:
                value = place.owners(value)
            if value is None:
                return None
            if not sliced:
                value = torch.as_tensor(value).detach().clone()
                return value.view(-1) if place.flat.wholes is not None and value.dim() and not whole else value
            of = state_of(optimizer, name)
    return place.whole(of) if whole else place.local(of).clone()


@torch.no_grad()
def _set(param: nn.Parameter, quantity: Quantity, whole: bool, value: Tensor, name: str = "") -> None:
    """A whole value is a collective: it is compared over the ranks, and what the engine derives from it follows."""
    what = f"set_{'full' if whole else 'local'}_{quantity}"
    holder = _checked_holder(param, quantity, what)
    with holder.wire.watch.doing(f"{what}()"):
        if whole:
            _same_everywhere(param, value, holder.wire, what)
        _write(holder, param, quantity, whole, value, name, what)


def _write(
    holder: _Held | Birth, param: nn.Parameter, quantity: Quantity, whole: bool, value: Tensor, name: str, what: str
) -> None:
    if isinstance(holder, Birth):
        if whole:
            holder.put(param, value)
        else:
            own = holder.slice_of(param)
            _fit(own.numel(), value, what)
            own.copy_(value.detach())
        return
    place, engine = holder
    if quantity == "parameter":
        engine.sharded.refuse_unsharded(what)
    if not whole:
        _fit(place.own_numel, value, what)
    part = place.own_part(value) if whole else value.detach()
    match quantity:
        case "parameter":
            holder.settle()
            if whole or not place.unit.policy.keep_full:
                place.unit.release()  # before the write: what a release finds in the whole values counts
            place.unit.close()
            place.write(master_of, part)
            if whole:
                place.written()
            else:
                place.flat.refresh()
        case "gradient":
            if whole:
                engine.flush([place.flat] if place.flat.span.trainable else [])
            place.flat.some_grad(place.unit.wire)
            place.write(gradient_of, part)
            if whole:
                engine.gradients_written()
        case "optimizer_state":
            _set_state(holder, name, part)


def _set_state(held: _Held, name: str, part: Tensor) -> None:
    optimizer = held.engine.sharded.optimizer_of(held.place.flat)
    value, sliced = held.place.state(optimizer, name)
    if held.place.flat.wholes is not None:
        if held.place.is_owned and held.place.slot.spec.numel and not held.place.own_numel:
            return  # another rank's
        if not isinstance(value, (Tensor, OnDisk)) or tuple(value.shape) != held.place.slot.spec.shape:
            raise StateError(
                f"the optimizer has no state {name!r} with one value per element of {held.name!r}: found "
                f"{tuple(value.shape) if isinstance(value, (Tensor, OnDisk)) else value!r}"
            )
        value.copy_(part.view(value.shape))
        return
    if value is None:
        raise StateError(
            f"the optimizer has no state {name!r} of {held.name!r}: run a step first, or load one with load_state_dict"
        )
    if not sliced:
        raise StateError(f"optimizer state {name!r} is one value for several parameters and cannot be set for one")
    held.place.write(state_of(optimizer, name), part)


def _fit(own_numel: int, value: Tensor, what: str) -> None:
    if tuple(value.shape) != (own_numel,):
        raise StateError(f"{what}: this rank owns {own_numel} elements, found a value of shape {tuple(value.shape)}")


def _same_everywhere(param: nn.Parameter, value: Tensor, wire: SoloWire, what: str) -> None:
    answers = wire.exchange((tuple(value.shape), fingerprint(value.detach()).tolist()))
    if any(shape != tuple(param.shape) for shape, _ in answers):
        raise StateError(f"{what}: expected shape {tuple(param.shape)} on every rank, found {[s for s, _ in answers]}")
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise RankMismatchError(
                f"{what}: rank {rank} passes another value than rank 0; pass the same one everywhere"
            )


# One value at a time ------------------------------------------------------------------------------------------------


def full_parameter(param: nn.Parameter) -> Tensor:
    """A parameter's whole value on every rank, a new tensor; of an engine, the master's (float32). A collective."""
    return cast(Tensor, _get(param, "parameter", whole=True))


def set_full_parameter(param: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a new value, the same on every rank. A collective.

    Raises:
        StateError: another shape.
        RankMismatchError: ranks that pass different values.
    """
    _set(param, "parameter", True, value)


def full_gradient(param: nn.Parameter) -> Tensor | None:
    """The averaged gradient, whole, on every rank, in the master's type; None where there is none. A collective.

    Gradients that `no_sync` left on this rank are reduced first. Under a loss scaler it is the scaled one until `unscale_`.
    """
    return _get(param, "gradient", whole=True)


def set_full_gradient(param: nn.Parameter, value: Tensor) -> None:
    """Give a parameter another averaged gradient, the same on every rank. A collective.

    Parameters of the same span that had none get zeros.

    Raises:
        StateError: another shape; a frozen parameter.
        RankMismatchError: ranks that pass different values.
    """
    _set(param, "gradient", True, value)


def full_optimizer_state(param: nn.Parameter, name: str) -> Tensor | None:
    """One state (`exp_avg`, `momentum_buffer`, …), whole, on every rank; None where there is none. A collective.

    States that are one number (`step`) come as a 0-dim tensor.
    """
    return _get(param, "optimizer_state", True, name)


def set_full_optimizer_state(param: nn.Parameter, name: str, value: Tensor) -> None:
    """Give a parameter another optimizer state, the same on every rank. A collective.

    Raises:
        StateError: another shape; the optimizer has no such state yet, or has it as one number for several parameters.
        RankMismatchError: ranks that pass different values.
    """
    _set(param, "optimizer_state", True, value, name)


def local_parameter(param: nn.Parameter) -> Tensor:
    """This rank's elements of a parameter, a copy; of an engine, the master's (float32)."""
    return cast(Tensor, _get(param, "parameter", whole=False))


def set_local_parameter(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of a parameter.

    Where the stage keeps whole parameters (0 to 2) they follow with `engine.refresh()`, a collective.
    """
    _set(param, "parameter", False, value)


def local_gradient(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of the averaged gradient, a copy; None where none has been reduced yet."""
    return _get(param, "gradient", whole=False)


def set_local_gradient(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of the averaged gradient.

    Every rank must do so in the same step where there is no gradient yet.
    """
    _set(param, "gradient", False, value)


def local_optimizer_state(param: nn.Parameter, name: str) -> Tensor | None:
    """This rank's elements of one optimizer state, a copy; None where there is none."""
    return _get(param, "optimizer_state", False, name)


def set_local_optimizer_state(param: nn.Parameter, name: str, value: Tensor) -> None:
    """Write this rank's elements of one optimizer state."""
    _set(param, "optimizer_state", False, value, name)


# For a while --------------------------------------------------------------------------------------------------------


class GatheredParameters:
    """`with zero.GatheredParameters(params, modifier_rank=0):` whole values in `param.data` inside, on every rank.

    In the parameters' own types, from the masters. A collective at entry and exit. Contexts inside one another are fine: the
    outer one decides for the parameters that it has. Plain parameters are left alone.

    Args:
        params: a parameter, several, or a module for all of its own.
        modifier_rank: whose edits are kept, on every rank. None: nobody may edit.
        enabled: False to do nothing.

    Raises:
        StateError: at exit, on every rank: a parameter was edited without `modifier_rank`, or has another shape or type. All
            values are then as they were, as after any exception inside.
    """

    def __init__(
        self,
        params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        found: Iterable[nn.Parameter]
        match params:
            case nn.Module():
                found = params.parameters()
            case nn.Parameter():
                found = [params]
            case _:
                found = params
        self._params = list({id(param): param for param in found}.values()) if enabled else []
        self._modifier_rank = modifier_rank
        self._gathered: list[_Gathered] = []
        self._shared: list[tuple[nn.Parameter, SoloWire]] = []
        """Whole by `unsharded`, on every rank: `modifier_rank`'s values are everybody's at the end."""

    def __enter__(self) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                for param in self._params:
                    holder = _holder(param)
                    if holder is not None and not _is_gathered(holder):
                        self._check_rank(holder.wire)
                        with holder.wire.watch.doing("GatheredParameters"):
                            self._gathered.append(_Gathered(param, holder))
                    elif isinstance(holder, _Held) and holder.engine.sharded.is_unsharded:
                        self._shared.append((param, holder.wire))
            except BaseException:
                self._discard()
                raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            shared, self._shared = self._shared, []
            if kind is None and self._modifier_rank is not None:
                for param, wire in shared:
                    param.data = param.data.contiguous()
                    wire.broadcast(param.data.view(-1).view(torch.uint8), self._modifier_rank)
            if kind is not None or not self._gathered:
                self._discard()
                return
            try:
                self._keep_edits()
            finally:
                self._discard()

    def _check_rank(self, wire: SoloWire) -> None:
        rank = self._modifier_rank
        if rank is not None and not 0 <= rank < wire.size:
            raise ConfigError(f"modifier_rank must be None or one of 0 to {wire.size - 1}, found {rank}")

    def _discard(self) -> None:
        for gathered in self._gathered:
            gathered.discard()
        self._gathered.clear()

    def _keep_edits(self) -> None:
        wire = max((gathered.holder.wire for gathered in self._gathered), key=lambda w: w.size)
        with wire.watch.doing("GatheredParameters"):
            everyone: list[list[str]] = wire.exchange([gathered.edit() for gathered in self._gathered])
        allowed = self._modifier_rank
        for rank, edits in enumerate(everyone):
            for gathered, edit in zip(self._gathered, edits):
                if edit and (allowed is None or (rank == allowed and edit != _VALUES)):
                    advice = (
                        "pass modifier_rank to keep one rank's edits"
                        if allowed is None
                        else "edit values in place only"
                    )
                    raise StateError(
                        f"{gathered.name} was edited inside GatheredParameters on rank {rank} ({edit}); the edit is "
                        f"discarded: {advice}"
                    )
        if allowed is None:
            return
        written: dict[int, Place] = {}
        for gathered, edit in zip(self._gathered, everyone[allowed]):
            if edit:
                gathered.keep(allowed)
                if isinstance(gathered.holder, _Held):
                    written[id(gathered.holder.place.unit)] = gathered.holder.place
        for place in written.values():
            place.written()


_VALUES = "other values"


class _Gathered:
    """One parameter that a `GatheredParameters` has made whole."""

    def __init__(self, param: nn.Parameter, holder: _Held | Birth) -> None:
        self.param = param
        self.holder = holder
        self.done = False
        if isinstance(holder, Birth):
            self.name = f"a parameter of shape {tuple(param.shape)}"
            holder.close(param)  # the values to come back to, if it is open just now
            whole = holder.whole(param)
            holder.open(param, whole=whole)
            holder.pins += 1
        else:
            self.name = f"parameter {holder.name!r}"
            holder.settle()
            place = holder.place
            whole = place.whole(master_of).to(dtype_of(place.slot.spec.dtype))
            place.flat.pinned.add(place.at)
            place.flat.show(place.at, whole)
        self._shape, self._dtype = whole.shape, whole.dtype
        self._print = fingerprint(whole)

    def edit(self) -> str:
        """How this rank's value differs from what was gathered; empty if it does not."""
        value = self.param.data
        if value.shape != self._shape or value.dtype != self._dtype:
            return f"{value.dtype} {tuple(value.shape)} instead of {self._dtype} {tuple(self._shape)}"
        return "" if torch.equal(fingerprint(value), self._print) else _VALUES

    def keep(self, rank: int) -> None:
        """Rank `rank`'s value, on every rank; a collective."""
        holder = self.holder
        if self.param.data.shape == self._shape and self.param.data.dtype == self._dtype:
            value = self.param.data.contiguous()
        else:
            value = torch.empty(self._shape, dtype=self._dtype, device=self.param.device)
        if holder.wire.size > 1:
            holder.wire.broadcast(value.view(-1).view(torch.uint8), rank)
        if isinstance(holder, Birth):
            self.param.data = value
            holder.pins -= 1
            holder.close(self.param)
            self.done = True
            return
        place = holder.place
        place.unit.release()
        place.unit.close()
        master, new = place.local(master_of), place.own_part(value)
        # An element that was left alone keeps what its own type cannot show.
        place.write(master_of, torch.where(new == master.to(new.dtype), master, new.to(master.dtype)))

    def discard(self) -> None:
        """Back to what the parameter was, with what has been kept."""
        if self.done:
            return
        self.done = True
        holder = self.holder
        if isinstance(holder, Birth):
            holder.pins -= 1
            holder.close(self.param, keep=False)
            return
        unit, flat, index = holder.place
        flat.pinned.discard(index)
        flat.unshow(index, gathered=unit.policy.keep_full or unit.state.name == "GATHERED")


@contextmanager
def unsharded(model: nn.Module, *, in_compute_dtype: bool = False) -> Iterator[None]:
    """`with zero.unsharded(model):` all weights are whole inside, on every rank: forwards and `generate` gather nothing.

    For phases of generation, averages of weights, `merge_and_unload`, whatever reads `named_parameters()`. Gathered once,
    from the masters. What is written to parameters inside counts from then on, as anywhere between steps and also after an
    exception: the same edit on every rank. `state_dict()`, saving and the accessors inside see it. Backwards, optimizer steps
    and loads are refused. In a context of the same model nothing more happens, and `GatheredParameters` inside gathers
    nothing. A model without an engine is left alone. A collective at its beginning and its end.

    Args:
        in_compute_dtype: weights as forwards use them, under bf16 and fp16 half the memory and no cast in each forward: for
            generation. False: in their own types, as they are saved.

    Raises:
        OutOfMemoryError: on every rank, at the beginning: how much is missing where.
        StateError: the model was born under zero.Init and has no engine yet; what was written has another shape, or belongs to
            values that stay in the model's own files.
        RankMismatchError: at the end, on every rank: the ranks have made different edits.
    """
    engine = engine_of(model)
    if engine is None:
        if any(isinstance(owner_of(param), Birth) for param in model.parameters()):
            raise StateError(
                "zero.unsharded: the model was born under zero.Init and is not sharded yet: shard it first, or use "
                "zero.GatheredParameters(model)"
            )
        yield
        return
    with engine.unsharded(in_compute_dtype=in_compute_dtype):
        yield


def _is_gathered(holder: _Held | Birth) -> bool:
    if isinstance(holder, Birth):
        return holder.pins > 0
    return holder.engine.sharded.is_unsharded or holder.place.at in holder.place.flat.pinned
