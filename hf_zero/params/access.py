"""Values of sharded parameters one by one (`full_*`, `local_*`): the parameter, its gradient, its optimizer states.

They work alike for parameters of an engine, at every stage and precision, and for those born under `zero.Init` that no
engine has yet (which have no gradient and no optimizer state).

`full_*` are collectives: every rank calls them with the same parameters in the same order. `local_*` do not communicate:
they see this rank's own elements of the parameter, row-major, 1-D, often none.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..comm.agree import read
from ..comm.wire import SoloWire
from ..errors import RankMismatchError, StateError
from ..runtime.engine import Engine, engine_of
from ..runtime.values.deferred import Birth
from ..runtime.values.ownership import owner_of
from ..runtime.values.sharded import Of, Place, Sharded, gradient_of, master_of, state_of
from ..tiers.array import OnDisk, in_memory
from ..tiers.fingerprint import fingerprint

Quantity = Literal["parameter", "gradient", "optimizer_state"]


class HeldParameter(NamedTuple):
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
        self.engine.training.settle(self.place.unit.flats)


def holder_of(param: nn.Parameter) -> HeldParameter | Birth | None:
    """Who has the parameter's values; None for a plain one."""
    owner = owner_of(param)
    if not isinstance(owner, Sharded):
        return owner if isinstance(owner, Birth) else None
    engine = engine_of(owner.model)
    if engine is None:
        raise StateError(f"the model of {owner.places[param].slot.spec.name!r} is not sharded any more")
    return HeldParameter(owner.places[param], engine)


def _checked_holder(param: nn.Parameter, quantity: Quantity, what: str) -> HeldParameter | Birth:
    """Who has the values; one that has such a quantity, or the error that says why not."""
    holder = holder_of(param)
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
        if isinstance(holder, Birth):
            return holder.whole(param) if whole else holder.slice_of(param).clone()
        place, engine = holder
        of: Of = master_of
        match quantity:
            case "parameter":
                holder.settle()
            case "gradient":
                if whole:
                    engine.training.flush([place.flat])
                if not place.flat.is_reduced or not place.flat.present[place.at]:
                    return None
                of = gradient_of
            case "optimizer_state":
                optimizer = engine.sharded.optimizer_of(place.flat)
                value, sliced = place.state(optimizer, name)
                if place.flat.wholes is not None:
                    value = read(
                        holder.wire, partial(in_memory, value), may_fail=whole and place.flat.storage.uses_disk
                    )
                if whole and place.is_owned:
                    value = place.owners(value)
                if value is None:
                    return None
                if not sliced:
                    if not isinstance(value, Tensor):
                        value = torch.tensor(value, device="cpu")
                    value = value.detach().clone()
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
        if isinstance(holder, Birth):
            if whole:
                holder.put(param, value)
            else:
                _fit(holder.slice_of(param).numel(), value, what)
                holder.put_own(param, value.detach())
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
                place.unit.drop_parts()
                place.write(master_of, part)
                if whole:
                    place.written()
                else:
                    place.flat.refresh()
            case "gradient":
                if whole:
                    engine.training.flush([place.flat])
                give = partial(engine.training.give_grad, place.flat, place.at, partial(place.write, gradient_of, part))
                read(holder.wire, give, may_fail=whole and place.flat.storage.uses_disk)
            case "optimizer_state":
                _set_state(holder, name, part)


def _set_state(held: HeldParameter, name: str, part: Tensor) -> None:
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

    A parameter that had none has one from then on, and the next step updates it.

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
