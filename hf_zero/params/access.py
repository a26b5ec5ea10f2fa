"""Read and write one sharded parameter, its gradient or its optimizer state (`full_*`, `local_*`).

They work the same at every stage, tier and precision, and for parameters created under `zero.Init` that no engine has yet
(without gradients and optimizer state).

`full_*` are collectives: every rank calls them with the same parameters in the same order. `local_*` do not communicate:
they access this rank's elements of the parameter, row-major, 1-D, often none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agreement import read_on_all_ranks
from ..comm.wire import Wire
from ..core.lazy_grad import DistributedGrad
from ..engine.engine import engine_of
from ..engine.parameter import Place, place_of
from ..errors import RankMismatchError, StateError
from ..tiers.array import OnDisk, fetch
from ..tiers.fingerprint import fingerprint
from .deferred import deferred_of


class _Parameter:
    """Gets and sets the master values of one parameter of a sharded model.

    Args:
        what: the public function, for error messages.

    Raises:
        StateError: no engine has the parameter.
    """

    def __init__(self, param: nn.Parameter, what: str) -> None:
        place: Place | None = place_of(param)
        engine = None if place is None else engine_of(place.unit.context.model)
        if place is None or engine is None:
            raise StateError(
                f"{what}: this parameter of shape {tuple(param.shape)} belongs to no sharded model. Call zero.shard or "
                "accelerator.prepare first, or use it directly"
            )
        self.param, self.what, self.engine = param, what, engine
        self.span, self.number = place.span, place.index
        self.slot = self.span.layout.slots[self.number]
        self.part = self.span.part_of(self.number)  # this rank's elements, in the span's slice
        self.wire: Wire = engine.context.wire
        self.dtype: torch.dtype = self.span.master_dtype

    @torch.no_grad()
    def get(self, *, local: bool) -> Tensor | None:
        """Return a copy: this rank's elements, or the full value, a collective. None if no value exists."""
        if local:
            return self.own()
        with self.wire.watch.operation(f"{self.what}()"):
            return self.whole()

    @torch.no_grad()
    def set(self, value: Tensor, *, local: bool) -> None:
        """Write this rank's elements, or a full value, a collective."""
        value = _plain(value)
        if local:
            _check_numel(0 if self.part is None else self.part.numel, value, self.what)
            reasons = [self.put(value)]
        else:
            with self.wire.watch.operation(f"{self.what}()"):
                _check_equal(self.param, value, self.wire, self.what)
                self.prepare()
                flat = value.reshape(-1)
                mine = flat[:0] if self.part is None else flat[self.part.source_slice]
                reasons = self.wire.exchange(self.read(lambda: self.put(mine)))
                self.follow()
        for reason in filter(None, reasons):
            raise StateError(reason)

    # Overridden by gradients and states -------------------------------------------------------------------------------

    def own(self) -> Tensor | None:
        return self.here(self.values, self.dtype).clone() if self.exists() else None

    def whole(self) -> Tensor | None:
        self.prepare()
        return self.assemble(self.values, self.dtype) if self.exists() else None

    def prepare(self) -> None:
        """Make full values current. A collective."""

    def exists(self) -> bool:
        for event in self.engine.events.master_read:  # the master has what user code wrote to parameters
            event(self.span)
        return True

    def values(self, here: slice) -> Tensor:
        """Return elements of this rank's slice."""
        return self.span.values(here.start, here.stop - here.start)

    def put(self, mine: Tensor) -> str | None:
        """Write this rank's elements. Returns the reason if it cannot."""
        span = self.span
        self.engine.context.refuse_unsharded(self.what)
        if span.unit.is_pinned:
            return f"{self.what} was called inside zero.GatheredParameters, whose values would be old. Call it after"
        self.exists()
        span.unit.release()  # before the write: earlier writes of user code to full parameters must not replace it
        if self.part is not None:
            span.write(self.part.start, mine.to(self.dtype))
        # Where the master is the parameter's memory, observers would take this write for one of user code.
        for event in self.engine.events.writes_dropped:
            event(span.unit)
        return None

    def follow(self) -> None:
        """Update full parameters after a full write. A collective."""
        if not self.engine.context.reshards:
            self.engine.refresh([self.span])

    # Communication ----------------------------------------------------------------------------------------------------

    def here(self, values: Callable[[slice], Tensor], dtype: torch.dtype) -> Tensor:
        """Return this rank's elements, on the device."""
        device = self.span.device
        return (
            torch.empty(0, dtype=dtype, device=device) if self.part is None else values(self.part.as_slice).to(device)
        )

    def assemble(self, values: Callable[[slice], Tensor], dtype: torch.dtype) -> Tensor:
        """Assemble a full value from the elements of all ranks. A collective."""
        span, slot = self.span, self.slot
        mine = self.read(lambda: self.here(values, dtype))
        whole = torch.empty(slot.spec.numel, dtype=dtype, device=span.device)
        for rank, part in span.layout.owners(slot):
            piece = whole[part.source_slice]
            if rank == span.rank:
                piece.copy_(mine)
            if span.layout.shards > 1:
                self.wire.broadcast(piece.view(torch.uint8), rank)
        return whole.view(slot.spec.shape)

    def read(self, values: Callable[[], Any]) -> Any:
        """Return `values()`; if it fails on one rank, raise on all. A collective where a rank uses a disk."""
        return read_on_all_ranks(self.wire, values, may_fail=self.span.context.storage.uses_disk)


class _Trained(_Parameter):
    """Gets and sets the gradient or optimizer state of a parameter.

    Raises:
        StateError: no engine has the parameter, or it is frozen.
    """

    def __init__(self, param: nn.Parameter, what: str) -> None:
        super().__init__(param, what)
        if not self.span.trainable:
            name = self.span.name_of(self.number)
            raise StateError(f"{what}: {name!r} is frozen. It has neither gradient nor optimizer state")
        self.engine.schedule.recover()
        self.span.unit.wait_for_step()

    def follow(self) -> None:
        """Do nothing: full parameters do not change."""


class _Gradient(_Trained):
    def prepare(self) -> None:
        self.engine.schedule.flush()

    def exists(self) -> bool:
        bucket = self.span.bucket
        bucket.wait_for_offload()
        return bucket.grad is not None and bucket.present[self.number]

    def values(self, here: slice) -> Tensor:
        return self.span.bucket.read(here)

    def put(self, mine: Tensor) -> None:
        bucket = self.span.bucket
        bucket.write(slice(0, 0) if self.part is None else self.part.as_slice, mine.to(self.dtype))
        if not bucket.present[self.number]:
            bucket.present[self.number] = bucket.had_local[self.number] = True
            self.engine.fit_segments(self.span)
        for segment in self.span.segments:
            segment.show_grad()


class _State(_Trained):
    """One state of the optimizer, such as `exp_avg`: a value per element, or one value."""

    def __init__(self, param: nn.Parameter, what: str, name: str) -> None:
        super().__init__(param, what)
        self.name = name
        self.binding = next((each for each in self.engine.bindings if param in each.group_of), None)
        self.segment = next((each for each in self.span.segments if self.number in each.members), None)
        self.value: Any = None
        if self.binding is not None and self.segment is not None:
            self.value = self.binding.state_of(self.segment).get(name)

    def has_elements(self) -> bool:
        """Return whether the state has one value per element of the segment."""
        value, segment = self.value, self.segment
        if not isinstance(value, (Tensor, OnDisk)) or segment is None:
            return False
        if segment.is_matrix and isinstance(value, Tensor):
            return tuple(value.shape) == self.slot.spec.shape
        return value.dim() == 1 and value.numel() == segment.numel

    def values(self, here: slice) -> Tensor:
        start = 0 if self.segment is None else self.segment.start
        flat = self.value.reshape(-1) if isinstance(self.value, Tensor) else self.value[:]
        return fetch(flat[here.start - start : here.stop - start])

    def own(self) -> Tensor | None:
        if self.has_elements():
            return self.here(self.values, self.value.dtype).clone()
        found = _single(self.value)
        if found is None and self.part is None and self.binding is not None and self.binding.optimizer.state:
            return torch.empty(0, dtype=self.dtype, device=self.span.device)
        return found

    def whole(self) -> Tensor | None:
        has_elements = self.has_elements()
        sent: Any = self.read(lambda: self.value.dtype if has_elements else _on_cpu(self.value))
        if self.span.layout.shards > 1:
            owner = next((rank for rank, _ in self.span.layout.owners(self.slot)), 0)
            sent = self.wire.exchange(sent)[owner]
        if not isinstance(sent, torch.dtype):
            return _single(sent)
        return self.assemble(self.values if has_elements else lambda _: torch.empty(0, dtype=sent, device="cpu"), sent)

    def put(self, mine: Tensor) -> str | None:
        if self.segment is None or self.part is None:
            return None
        if self.value is None:
            name = self.span.name_of(self.number)
            return f"the optimizer has no state {self.name!r} of {name!r}: run a step first, or load one with load_state_dict"
        if not self.has_elements():
            return f"optimizer state {self.name!r} is one value for several parameters and cannot be set for one"
        if self.segment.is_matrix:
            self.value.copy_(mine.view(self.value.shape))
        else:
            start = self.segment.start
            self.value[self.part.start - start : self.part.stop - start].copy_(mine)
        return None


def _on_cpu(value: Any) -> Any:
    value = fetch(value) if isinstance(value, OnDisk) else value
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _single(value: Any) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return None if value is None else value.detach().clone()
    return torch.as_tensor(_on_cpu(value), device="cpu")


def _plain(value: Any) -> Tensor:
    """Return a tensor with memory: lazy gradients have none."""
    value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    return value.clone() if isinstance(value, DistributedGrad) else value


def _check_numel(numel: int, value: Tensor, what: str) -> None:
    if tuple(value.shape) != (numel,):
        raise StateError(f"{what}: this rank owns {numel} elements, found a value of shape {tuple(value.shape)}")


def _check_equal(param: nn.Parameter, value: Tensor, wire: Wire, what: str) -> None:
    answers = wire.exchange((tuple(value.shape), fingerprint(value).tolist()))
    if any(shape != tuple(param.shape) for shape, _ in answers):
        raise StateError(f"{what}: expected shape {tuple(param.shape)} on every rank, found {[s for s, _ in answers]}")
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise RankMismatchError(
                f"{what}: rank {rank} passes another value than rank 0. Pass the same one everywhere"
            )


# Parameters -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def full_parameter(param: nn.Parameter) -> Tensor:
    """Return a parameter's full value on every rank, a new tensor: the master's, float32. A collective."""
    deferred = deferred_of(param)
    if deferred is not None:
        return deferred.full(param.shape) if not deferred.is_open else param.detach().clone()
    value: Any = _Parameter(param, "full_parameter").get(local=False)
    return value


@torch.no_grad()
def local_parameter(param: nn.Parameter) -> Tensor:
    """Return this rank's elements of a parameter, a copy: the master's, float32."""
    deferred = deferred_of(param)
    if deferred is not None:
        return deferred.slice_of(param).clone()
    value: Any = _Parameter(param, "local_parameter").get(local=True)
    return value


@torch.no_grad()
def set_full_parameter(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter's full value, the same on every rank. A collective.

    Raises:
        StateError: a wrong shape.
        RankMismatchError: ranks pass different values.
    """
    what = "set_full_parameter"
    deferred = deferred_of(param)
    if deferred is None:
        return _Parameter(param, what).set(value, local=False)
    value = _plain(value)
    _check_equal(param, value, deferred.wire, what)
    return deferred.put(param, value)


@torch.no_grad()
def set_local_parameter(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of a parameter.

    At stages 0 to 2, which keep full parameters, call `engine.refresh()` afterwards, a collective.
    """
    what = "set_local_parameter"
    deferred = deferred_of(param)
    if deferred is None:
        return _Parameter(param, what).set(value, local=True)
    value = _plain(value)
    _check_numel(deferred.slice_of(param).numel(), value, what)
    return deferred.put_local(param, value)


# Gradients ------------------------------------------------------------------------------------------------------------


def full_gradient(param: nn.Parameter) -> Tensor | None:
    """Return the full averaged gradient on every rank, in the master's dtype; None if there is none. A collective.

    Gradients that `no_sync` left on this rank are reduced first. Under a loss scaler it is scaled until `unscale_`.
    """
    return _Gradient(param, "full_gradient").get(local=False)


def local_gradient(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the averaged gradient, a copy; None if none has been reduced yet."""
    return _Gradient(param, "local_gradient").get(local=True)


def set_full_gradient(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter's averaged gradient, the same on every rank. A collective.

    The next step then updates the parameter, even if it had no gradient before.

    Raises:
        StateError: a wrong shape; a frozen parameter.
        RankMismatchError: ranks pass different values.
    """
    _Gradient(param, "set_full_gradient").set(value, local=False)


def set_local_gradient(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of the averaged gradient.

    Every rank must do so in the same step if there is no gradient yet.
    """
    _Gradient(param, "set_local_gradient").set(value, local=True)


# Optimizer state ------------------------------------------------------------------------------------------------------


def full_optimizer_state(param: nn.Parameter, name: str) -> Tensor | None:
    """Return one full state (`exp_avg`, `momentum_buffer`, …) on every rank; None if there is none. A collective.

    A state of one value (`step`) is a 0-dim tensor.
    """
    return _State(param, "full_optimizer_state", name).get(local=False)


def local_optimizer_state(param: nn.Parameter, name: str) -> Tensor | None:
    """Return this rank's elements of one optimizer state, a copy; None if there is none."""
    return _State(param, "local_optimizer_state", name).get(local=True)


def set_full_optimizer_state(param: nn.Parameter, name: str, value: Tensor) -> None:
    """Set one full optimizer state of a parameter, the same on every rank. A collective.

    Raises:
        StateError: a wrong shape; the optimizer has no such state yet, or has it as one value for several parameters.
        RankMismatchError: ranks pass different values.
    """
    _State(param, "set_full_optimizer_state", name).set(value, local=False)


def set_local_optimizer_state(param: nn.Parameter, name: str, value: Tensor) -> None:
    """Write this rank's elements of one optimizer state."""
    _State(param, "set_local_optimizer_state", name).set(value, local=True)
