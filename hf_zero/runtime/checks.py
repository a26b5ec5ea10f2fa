"""What `debug=True` looks at, and when: values that all ranks must have alike, the first that is not finite, the first updates.

Everything is local but for small exchanges where all ranks are in every step: at the end of a backward that reduces (the first
steps only), before the optimizer's step, and after it. So an error is raised on every rank, and before the step no weight has
been changed by it. Where nothing is found a run is the same to the bit as one without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.watch import Watch
from ..errors import NumericsError
from .buffers import Buffers
from .offload import Offload
from .reference import Reference, kind_in, kind_of
from .replicas import Replicas, ranks_text
from .saved_tensors import in_backward_of_any, nodes_of, tensors_in
from .values.flat_param import Flat
from .values.sharded import Sharded
from .values.unit import State, Unit

CLOSE, EVERY = 10, 10
"""Weights and buffers are compared in the first `CLOSE` steps, and in one of `EVERY` afterwards."""


_MOST = 32
"""Sightings that are kept: what follows the first is of use to nobody."""


@dataclass(frozen=True)
class Sighting:
    """Something that is not finite. Plain values: the ranks exchange it."""

    step: int
    phase: str
    what: str

    def __str__(self) -> str:
        return f"in {self.phase}: {self.what}"


@dataclass
class Sightings:
    """Of one rank, in the order in which they were made, since the last step. All that hooks on a graph hold."""

    watch: Watch
    seen: list[Sighting] = field(default_factory=list)
    used: int = 0
    """How many a backward has ended after: they go with the gradients."""

    def note(self, phase: str, what: str) -> None:
        if len(self.seen) < _MOST:
            self.seen.append(Sighting(self.watch.step, phase, what))

    def drop_used(self) -> None:
        """Gradients were cleared. What a forward has shown that waits for its backward stays."""
        del self.seen[: self.used]
        self.used = 0

    def clear(self) -> None:
        self.seen.clear()
        self.used = 0


class Checks:
    """Of one engine with `debug=True`.

    Args:
        hosts: units as they are now, with the modules that use them.

    Attributes:
        handles: of what was registered on the model.
    """

    def __init__(
        self,
        sharded: Sharded,
        buffers: Buffers,
        offload: Offload,
        hosts: Callable[[], Iterable[tuple[Unit, list[nn.Module]]]],
    ) -> None:
        self._sharded, self._offload, self._wire = sharded, offload, sharded.wire
        self.sightings = Sightings(self._wire.watch)
        self.reference = Reference(sharded)
        self._replicas = Replicas(sharded, buffers) if self._wire.size > 1 else None
        self._step = 0  # the one that is made
        self.handles = PassHooks(sharded.model, hosts, self.sightings, self._gathered, self._used).handles
        self._observe()

    @property
    def _is_due(self) -> bool:
        step = self._wire.watch.step
        return step < CLOSE or step % EVERY == 0

    def _observe(self) -> None:
        for unit in self._sharded.units:
            unit.observer = self._before_reduce

    # Passes -----------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Of the whole model, after buffers were sent. Without communication: ranks may run other numbers of forwards."""
        self._observe()  # units may have been cut anew
        if self._replicas is not None and self._is_due:
            self._replicas.before_forward(torch.is_grad_enabled())

    def _gathered(self, unit: Unit) -> None:
        if self._replicas is not None and self._is_due and torch.is_grad_enabled():
            self._replicas.gathered(unit)

    def _used(self, unit: Unit) -> None:
        if self._replicas is not None and self._is_due and torch.is_grad_enabled():
            self._replicas.used(unit)

    def _before_reduce(self, unit: Unit) -> None:
        look_at_local(unit, self.sightings)
        self.reference.before_reduce(unit)

    def after_backward(self, *, reduced: bool) -> None:
        """A collective with `reduced`: the ranks' gradients have been averaged."""
        if reduced and not self._sharded.config.step_in_backward:
            for what in self._bad_gradients():
                self.sightings.note("the reduction", what)
        self.sightings.used = len(self.sightings.seen)
        self.reference.after_backward(reduced=reduced)

    # The step ---------------------------------------------------------------------------------------------------------

    # Of a `step` that calls its base class's, which runs the hooks of both, the outer one alone is looked at.

    def before_step(self) -> None:
        """Before anything of the step is done. A collective.

        Raises:
            RankMismatchError: see `replicas`.
        """
        self._step = self._wire.watch.step
        if self._replicas is not None:
            self._offload.finish_step()  # the optimizer's state is read
            self._replicas.compare(self._step, *self._replicas.before_step(self._is_due))

    def before_update(self, optimizer: torch.optim.Optimizer, index: int, *, has_closure: bool) -> None:
        """Gradients are as the optimizer is to have them. A collective.

        Args:
            index: which of the model's optimizers it is.

        Raises:
            NumericsError: one is not finite; where that came from, on every rank.
        """
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor) and bool(found.sum()):  # gradients overflowed: it is left to the optimizer to pass
            self.reference.before_step(optimizer, index, "a loss scaler leaves this step out")
            return
        self._refuse(next(self._bad_gradients(index), None), self._why_gradient)
        why_not = "its closure makes the gradients inside the step" if has_closure else None
        self.reference.before_step(optimizer, index, why_not)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """All is updated, whole parameters are gathered again. A collective.

        Raises:
            NumericsError: a value is not finite; an update is not plain training's.
            RankMismatchError: whole parameters differ.
        """
        self._offload.finish_step()
        bad = next((what for unit in self._sharded.units for what in bad_masters(unit)), None)
        self._refuse(bad, partial(_why_update, optimizer))
        self.reference.after_step()
        if self._replicas is not None and self._is_due:
            self._replicas.compare(self._step, self._replicas.after_step())
        self.sightings.clear()

    def _bad_gradients(self, optimizer: int | None = None) -> Iterator[str]:
        return (what for unit in self._sharded.units for what in bad_gradients(unit, optimizer))

    def _refuse(self, mine: str | None, why: Callable[[Sequence[Sequence[Sighting]]], str]) -> None:
        told = self._wire.exchange((mine, self.sightings.seen[:2] if mine is not None or self.sightings.seen else []))
        bad = [(rank, what) for rank, (what, _) in enumerate(told) if what is not None]
        if bad:
            self.sightings.clear()
            raise NumericsError(
                f"step {self._step}, on rank {bad[0][0]}: {bad[0][1]}. {why([seen for _, seen in told])}"
            )

    def _why_gradient(self, everyone: Sequence[Sequence[Sighting]]) -> str:
        own = [[each for each in seen if each.phase != "the reduction"] for seen in everyone]
        if any(own):
            return f"No weight was changed. {_first_of(own)}"
        if any(everyone):
            dtype = self._sharded.precision.reduce_dtype
            return (
                f"No weight was changed. What every rank gave was finite: the sum overflowed in {dtype} (a wider reduce_dtype, "
                "or a loss scaler), or bytes were changed on their way"
            )
        return (
            "No weight was changed. It was finite after the reduction: clipping, unscaling, or what else the program "
            "does with gradients before the step, made it"
        )


def _why_update(optimizer: torch.optim.Optimizer, everyone: Sequence[Sequence[Sighting]]) -> str:
    if any(everyone):
        return f"{_first_of(everyone)}. Weights have it now: go on from the last checkpoint"
    name = type(optimizer).__name__
    return (
        f"Its gradient was finite: the step of {name} made it (lr, eps, an overflowed state). Weights have it now: go on "
        "from the last checkpoint"
    )


def _first_of(everyone: Sequence[Sequence[Sighting]]) -> str:
    """Where each rank has seen it first."""
    parts = [f"rank {rank} {seen[0]}" for rank, seen in enumerate(everyone) if seen]
    clean = [rank for rank, seen in enumerate(everyone) if not seen]
    others = f"; on {ranks_text(clean)} all was finite until gradients were averaged" if clean else ""
    return f"First seen on {'; on '.join(parts)}{others}"


# What is not finite on this rank ----------------------------------------------------------------------------------


class PassHooks:
    """Look at one model's forwards and backwards.

    Args:
        hosts: units with the modules that use them.
        before, after: told of a unit's forward in a pass, while it is there.
    """

    def __init__(
        self,
        model: nn.Module,
        hosts: Callable[[], Iterable[tuple[Unit, list[nn.Module]]]],
        sightings: Sightings,
        before: Callable[[Unit], None],
        after: Callable[[Unit], None],
    ) -> None:
        self._hosts, self._sightings = hosts, sightings
        self._before, self._after = before, after
        self.handles: list[Any] = []
        for number, (_, modules) in enumerate(hosts()):
            for module in modules:
                self._hook(module, partial(self._pre_forward, number), partial(self._post_forward, number))
        self._hook(model, self._root_pre_forward, self._root_post_forward)

    def _hook(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self.handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _unit(self, number: int) -> Unit:
        """Units are replaced where they are cut anew; their places stay."""
        return [unit for unit, _ in self._hosts()][number]

    def _pre_forward(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward_of_any():
            return
        unit = self._unit(number)
        self._before(unit)
        if torch.is_grad_enabled():
            what = f"a gradient that the backward of unit {unit.name!r} has made for its inputs is"
            self._follow(tensors_in((args, kwargs)), what)

    def _post_forward(self, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward_of_any():
            return
        unit = self._unit(number)
        kind = kind_in(tensors_in(output))
        if kind is not None:
            cause = self._cause(unit, (args, kwargs))
            self._sightings.note(_forward(), f"the output of unit {unit.name!r} is {kind}{cause}")
        self._after(unit)

    @staticmethod
    def _cause(unit: Unit, inputs: Any) -> str:
        kind = kind_in(tensors_in(inputs))
        if kind is not None:
            return f", as its inputs are ({kind})"
        if unit.state is State.GATHERED:
            for flat in unit.flats:
                for slot, view in zip(flat.span.slots, flat.views):
                    kind = kind_of(view)
                    if kind is not None:
                        return f", as its parameter {slot.spec.name!r} is ({kind})"
        return ", of finite inputs and parameters"

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        kind = None if in_backward_of_any() else kind_in(tensors_in((args, kwargs)))
        if kind is not None:
            self._sightings.note(_forward(), f"the model's inputs (this rank's batch) have {kind}")

    def _root_post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward_of_any():
            return
        tensors = tensors_in(output)
        kind = kind_in(tensors)
        if kind is not None:
            self._sightings.note(_forward(), f"the model's output (its loss, where it has one) is {kind}")
        if torch.is_grad_enabled():
            self._follow(tensors, "the gradient that backward begins with, at the model's output, is")

    def _follow(self, tensors: list[Tensor], what: str) -> None:
        hook = partial(_look_at_gradients, self._sightings, what)
        for node in nodes_of(tensors):
            node.register_prehook(hook)


def _forward() -> str:
    return "forward" if torch.is_grad_enabled() else "a forward without a graph"


def _look_at_gradients(sightings: Sightings, what: str, grads: tuple[Tensor | None, ...]) -> None:
    kind = kind_in(grads)
    if kind is not None:
        sightings.note("backward", f"{what} {kind}")


def look_at_local(unit: Unit, sightings: Sightings) -> None:
    """This rank's own gradients of the unit, before they are reduced."""
    for flat in unit.trained:
        for index, slot in enumerate(flat.span.slots):
            kind = kind_in(flat.local_parts(index))
            if kind is not None:
                what = f"this rank's own gradient of {slot.spec.name!r} of unit {unit.name!r} is {kind}"
                sightings.note("backward", what)
                return


def bad_gradients(unit: Unit, optimizer: int | None = None) -> Iterator[str]:
    """Reduced gradients on this rank, as the step is to have them.

    Args:
        optimizer: of the spans of one of the model's optimizers; None: of all.
    """
    for flat in unit.trained:
        if optimizer not in (None, flat.span.optimizer):
            continue
        for shard in flat.shards if flat.span.is_updated else ():
            grad = shard.grad
            kind = None if grad is None else kind_of(grad)
            if grad is not None and kind is not None:
                yield f"the gradient of {_first(flat, shard.start, grad)} of unit {unit.name!r} is {kind}"
            elif grad is not None and shard.coefficient is not None and kind_of(shard.coefficient):
                yield f"what clipping multiplies the gradient of {flat.span.spec.name!r} with is not finite"


def bad_masters(unit: Unit) -> Iterator[str]:
    """Values after a step, of shards in memory."""
    for flat in unit.trained:
        for shard in flat.shards if flat.span.is_updated else ():
            values = shard.values
            kind = kind_of(values) if isinstance(values, Tensor) else None
            if isinstance(values, Tensor) and kind is not None:
                yield f"{_first(flat, shard.start, values)} of unit {unit.name!r} is {kind}"


def _first(flat: Flat, start: int, values: Tensor) -> str:
    """The parameter that the first element which is not finite belongs to."""
    at = flat.span.bounds(flat.rank)[0] + start + int((~values.isfinite()).nonzero()[0, 0])
    slots = [slot for slot in flat.span.slots if slot.offset <= at]
    return repr((slots or flat.span.slots)[-1].spec.name)
