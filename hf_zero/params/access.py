"""Values of sharded parameters one by one (`full_*`, `local_*`): the parameter, its gradient, its optimizer state.

They work alike for parameters of an engine, at every stage, tier and precision, and for those created under `zero.Init` that
no engine has yet (which have no gradient and no optimizer state).

`full_*` are collectives: every rank calls them with the same parameters in the same order. `local_*` do not communicate:
they see this rank's own elements of the parameter, row-major, 1-D, often none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.agree import read
from ..comm.wire import SoloWire
from ..core.layout import Extent, Slot
from ..engine.engine import Engine, engine_of
from ..engine.optimizer import Binding
from ..engine.parameter import Place, place_of
from ..engine.segments import Segment
from ..engine.span import Span
from ..errors import RankMismatchError, StateError
from ..tiers.array import OnDisk, fetch
from ..tiers.fingerprint import fingerprint
from .deferred import deferred_of


class _Holder(NamedTuple):
    """A parameter of a sharded model."""

    engine: Engine
    span: Span
    number: int

    @property
    def name(self) -> str:
        return self.span.name_of(self.number)

    @property
    def wire(self) -> SoloWire:
        return self.engine.context.wire

    @property
    def slot(self) -> Slot:
        return self.span.layout.slots[self.number]

    @property
    def part(self) -> Extent[Slot] | None:
        """This rank's elements. "Here" is the span's slice."""
        return self.span.part_of(self.number)

    @property
    def numel(self) -> int:
        """Return the number of elements that this rank has."""
        return 0 if self.part is None else self.part.numel

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's elements of a full value, 1-D."""
        flat = whole.detach().reshape(-1)
        return flat[:0] if self.part is None else flat[self.part.there]

    def here(self, values: Callable[[slice], Tensor], dtype: torch.dtype) -> Tensor:
        """This rank's elements, on the device."""
        device = self.span.device
        return torch.empty(0, dtype=dtype, device=device) if self.part is None else values(self.part.here).to(device)

    def assemble(self, values: Callable[[slice], Tensor], dtype: torch.dtype) -> Tensor:
        """Return a full value from what all ranks have of it. A collective.

        Args:
            values: returns elements of this rank's slice.
        """
        span, slot = self.span, self.slot
        mine = self.read(lambda: self.here(values, dtype))
        whole = torch.empty(slot.spec.numel, dtype=dtype, device=span.device)
        for rank, part in span.layout.owners(slot):
            piece = whole[part.there]
            if rank == span.rank:
                piece.copy_(mine)
            if span.layout.shards > 1:
                self.wire.broadcast(piece.view(torch.uint8), rank)
        return whole.view(slot.spec.shape)

    def read(self, values: Callable[[], Any]) -> Any:
        """`values()`, which fails on every rank if it fails on one. A collective where a rank uses a disk."""
        return read(self.wire, values, may_fail=self.span.context.storage.uses_disk)

    # Optimizer state --------------------------------------------------------------------------------------------------

    @property
    def binding(self) -> Binding | None:
        return next((each for each in self.engine.bindings if self.span in each.spans), None)

    @property
    def segment(self) -> Segment | None:
        """The segment that has this rank's elements."""
        return next((each for each in self.span.segments if self.number in each.members), None)

    def state(self, name: str) -> Any:
        """An entry of the optimizer's state of the segment; None if there is none."""
        binding, segment = self.binding, self.segment
        return None if binding is None or segment is None else binding.state_of(segment).get(name)

    def has_elements(self, value: Any) -> bool:
        """Return whether a state has one value per element of the segment."""
        segment = self.segment
        if not isinstance(value, (Tensor, OnDisk)) or segment is None:
            return False
        if segment.is_matrix and isinstance(value, Tensor):
            return tuple(value.shape) == self.slot.spec.shape
        return value.dim() == 1 and value.numel() == segment.numel

    def of_state(self, value: Tensor | OnDisk) -> Callable[[slice], Tensor]:
        """Return the slice's elements of a state with one value per element."""
        segment = self.segment
        start = 0 if segment is None else segment.start
        flat = value.reshape(-1) if isinstance(value, Tensor) else value[:]
        return lambda here: fetch(flat[here.start - start : here.stop - start])


def _holder(param: nn.Parameter, what: str, *, needs_gradient: bool = False) -> _Holder:
    """
    Raises:
        StateError: no engine has the parameter, or it is frozen and has no gradient.
    """
    if deferred_of(param) is not None:
        raise StateError(
            f"{what}: this parameter of shape {tuple(param.shape)} was created under zero.Init() and has neither gradient nor "
            "optimizer state before its model is sharded"
        )
    place: Place | None = place_of(param)
    engine = None if place is None else engine_of(place.unit.context.model)
    if place is None or engine is None:
        raise StateError(
            f"{what}: this parameter of shape {tuple(param.shape)} belongs to no sharded model (zero.shard, "
            "accelerator.prepare) and was not created under zero.Init(). Use it directly"
        )
    holder = _Holder(engine, place.span, place.index)
    if needs_gradient:
        if not place.span.trainable:
            raise StateError(f"{what}: {holder.name!r} is frozen. It has neither gradient nor optimizer state")
        engine.schedule.recover()
        place.unit.wait_for_step()
    return holder


# Parameters -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def full_parameter(param: nn.Parameter) -> Tensor:
    """Return a parameter's full value on every rank, a new tensor: the master's, float32. A collective."""
    deferred = deferred_of(param)
    if deferred is not None:
        return deferred.full(param.shape) if not deferred.is_open else param.detach().clone()
    holder = _holder(param, "full_parameter")
    with holder.wire.watch.doing("full_parameter()"):
        _settle(holder)
        return holder.assemble(lambda here: holder.span.values(here.start, here.stop - here.start), _master(holder))


@torch.no_grad()
def local_parameter(param: nn.Parameter) -> Tensor:
    """Return this rank's elements of a parameter, a copy: the master's, float32."""
    deferred = deferred_of(param)
    if deferred is not None:
        return deferred.slice_of(param).clone()
    holder = _holder(param, "local_parameter")
    _settle(holder)
    return holder.here(lambda here: holder.span.values(here.start, here.stop - here.start), _master(holder)).clone()


@torch.no_grad()
def set_full_parameter(param: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a new value, the same on every rank. A collective.

    Raises:
        StateError: another shape.
        RankMismatchError: ranks pass different values.
    """
    what = "set_full_parameter"
    deferred = deferred_of(param)
    if deferred is not None:
        _same_everywhere(param, value, deferred.wire, what)
        deferred.put(param, value)
        return
    holder = _holder(param, what)
    with holder.wire.watch.doing(f"{what}()"):
        _same_everywhere(param, value, holder.wire, what)
        holder.engine.context.refuse_unsharded(what)
        _write(holder, holder.mine(value), what)
        if not holder.engine.context.frees:
            holder.engine.refresh([holder.span])


@torch.no_grad()
def set_local_parameter(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of a parameter.

    Where the stage keeps full parameters (0 to 2) they follow with `engine.refresh()`, a collective.
    """
    what = "set_local_parameter"
    deferred = deferred_of(param)
    if deferred is not None:
        _fit(deferred.slice_of(param).numel(), value, what)
        deferred.put_own(param, value.detach())
        return
    holder = _holder(param, what)
    holder.engine.context.refuse_unsharded(what)
    _fit(holder.numel, value, what)
    _write(holder, value.detach(), what)


def _write(holder: _Holder, mine: Tensor, what: str) -> None:
    span = holder.span
    if span.unit.is_held:
        raise StateError(f"{what} was called inside zero.GatheredParameters, whose values would be old. Call it after")
    _settle(holder)
    span.unit.release()  # before the write: what user code wrote to full parameters until now is older
    if holder.part is not None:
        span.write(holder.part.start, mine.to(span.master_dtype))


def _settle(holder: _Holder) -> None:
    """The master has what user code wrote to parameters."""
    for event in holder.engine.events.master_read:
        event(holder.span)


def _master(holder: _Holder) -> torch.dtype:
    return holder.span.master_dtype


# Gradients ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def full_gradient(param: nn.Parameter) -> Tensor | None:
    """Return the full averaged gradient on every rank, in the master's dtype; None if there is none. A collective.

    Gradients that `no_sync` left on this rank are reduced first. Under a loss scaler it is scaled until `unscale_`.
    """
    holder = _holder(param, "full_gradient", needs_gradient=True)
    with holder.wire.watch.doing("full_gradient()"):
        holder.engine.schedule.flush()
        if not _has_gradient(holder):
            return None
        return holder.assemble(holder.span.bucket.read, _master(holder))


@torch.no_grad()
def local_gradient(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the averaged gradient, a copy; None if none has been reduced yet."""
    holder = _holder(param, "local_gradient", needs_gradient=True)
    return holder.here(holder.span.bucket.read, _master(holder)).clone() if _has_gradient(holder) else None


@torch.no_grad()
def set_full_gradient(param: nn.Parameter, value: Tensor) -> None:
    """Give a parameter another averaged gradient, the same on every rank. A collective.

    A parameter that had none has one from then on, and the next step updates it.

    Raises:
        StateError: another shape; a frozen parameter.
        RankMismatchError: ranks pass different values.
    """
    what = "set_full_gradient"
    holder = _holder(param, what, needs_gradient=True)
    with holder.wire.watch.doing(f"{what}()"):
        _same_everywhere(param, value, holder.wire, what)
        holder.engine.schedule.flush()
        holder.read(partial(_write_gradient, holder, holder.mine(value)))


@torch.no_grad()
def set_local_gradient(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of the averaged gradient.

    Every rank must do so in the same step if there is no gradient yet.
    """
    what = "set_local_gradient"
    holder = _holder(param, what, needs_gradient=True)
    _fit(holder.numel, value, what)
    _write_gradient(holder, value.detach())


def _has_gradient(holder: _Holder) -> bool:
    bucket = holder.span.bucket
    bucket.land()
    return bucket.grad is not None and bucket.present[holder.number]


def _write_gradient(holder: _Holder, mine: Tensor) -> None:
    bucket = holder.span.bucket
    bucket.write(slice(0, 0) if holder.part is None else holder.part.here, mine.to(holder.span.master_dtype))
    if not bucket.present[holder.number]:
        bucket.present[holder.number] = bucket.arrived[holder.number] = True
        holder.engine.fit_segments(holder.span)
    for segment in holder.span.segments:
        segment.show_grad()


# Optimizer state ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def full_optimizer_state(param: nn.Parameter, name: str) -> Tensor | None:
    """Return one full state (`exp_avg`, `momentum_buffer`, …) on every rank; None if there is none. A collective.

    A state that is one value (`step`) is a tensor without dimensions.
    """
    holder = _holder(param, "full_optimizer_state", needs_gradient=True)
    with holder.wire.watch.doing("full_optimizer_state()"):
        value = holder.state(name)
        owners = [rank for rank, _ in holder.span.layout.owners(holder.slot)] or [0]
        has_elements = holder.has_elements(value)
        told: Any = holder.read(lambda: value.dtype if has_elements else _on_cpu(value))
        if holder.span.layout.shards > 1:
            told = holder.wire.exchange(told)[owners[0]]
        if not isinstance(told, torch.dtype):
            return _single(holder, told)
        own = holder.of_state(value) if has_elements else lambda here: torch.empty(0, dtype=told, device="cpu")
        return holder.assemble(own, told)


@torch.no_grad()
def local_optimizer_state(param: nn.Parameter, name: str) -> Tensor | None:
    """Return this rank's elements of one optimizer state, a copy; None if there is none."""
    holder = _holder(param, "local_optimizer_state", needs_gradient=True)
    value = holder.state(name)
    if not holder.has_elements(value):
        found = _single(holder, value)
        if found is None and not holder.numel and holder.binding is not None and holder.binding.optimizer.state:
            return torch.empty(0, dtype=_master(holder), device=holder.span.device)
        return found
    return holder.here(holder.of_state(value), value.dtype).clone()


def _on_cpu(value: Any) -> Any:
    value = fetch(value) if isinstance(value, OnDisk) else value
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _single(holder: _Holder, value: Any) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return None if value is None else value.detach().clone()
    return torch.as_tensor(_on_cpu(value), device="cpu")


@torch.no_grad()
def set_full_optimizer_state(param: nn.Parameter, name: str, value: Tensor) -> None:
    """Give a parameter another optimizer state, the same on every rank. A collective.

    Raises:
        StateError: another shape; the optimizer has no such state yet, or has it as one value for several parameters.
        RankMismatchError: ranks pass different values.
    """
    what = "set_full_optimizer_state"
    holder = _holder(param, what, needs_gradient=True)
    with holder.wire.watch.doing(f"{what}()"):
        _same_everywhere(param, value, holder.wire, what)
        refused = holder.wire.exchange(holder.read(lambda: _write_state(holder, name, holder.mine(value))))
        for reason in filter(None, refused):
            raise StateError(reason)


@torch.no_grad()
def set_local_optimizer_state(param: nn.Parameter, name: str, value: Tensor) -> None:
    """Write this rank's elements of one optimizer state."""
    what = "set_local_optimizer_state"
    holder = _holder(param, what, needs_gradient=True)
    _fit(holder.numel, value, what)
    refused = _write_state(holder, name, value.detach())
    if refused is not None:
        raise StateError(refused)


def _write_state(holder: _Holder, name: str, mine: Tensor) -> str | None:
    """Write this rank's elements. Returns why it cannot; None on a rank without elements."""
    value, segment, part = holder.state(name), holder.segment, holder.part
    if segment is None or part is None:
        return None
    if value is None:
        return f"the optimizer has no state {name!r} of {holder.name!r}: run a step first, or load one with load_state_dict"
    if not holder.has_elements(value):
        return f"optimizer state {name!r} is one value for several parameters and cannot be set for one"
    if segment.is_matrix:
        value.copy_(mine.view(value.shape))
    else:
        value[part.start - segment.start : part.stop - segment.start].copy_(mine)
    return None


# Checks ---------------------------------------------------------------------------------------------------------------


def _fit(numel: int, value: Tensor, what: str) -> None:
    if tuple(value.shape) != (numel,):
        raise StateError(f"{what}: this rank owns {numel} elements, found a value of shape {tuple(value.shape)}")


def _same_everywhere(param: nn.Parameter, value: Tensor, wire: SoloWire, what: str) -> None:
    answers = wire.exchange((tuple(value.shape), fingerprint(value.detach()).tolist()))
    if any(shape != tuple(param.shape) for shape, _ in answers):
        raise StateError(f"{what}: expected shape {tuple(param.shape)} on every rank, found {[s for s, _ in answers]}")
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise RankMismatchError(
                f"{what}: rank {rank} passes another value than rank 0. Pass the same one everywhere"
            )
