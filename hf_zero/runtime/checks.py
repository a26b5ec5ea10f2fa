"""What `debug=True` looks at, and when: values that all ranks must have alike, the first that is not finite, the first updates.

Everything is local but for small exchanges where all ranks are in every step: at the end of a backward that reduces (the first
steps only), before the optimizer's step, and after it. So an error is raised on every rank, and before the step no weight has
been changed by it. Where nothing is found a run is the same to the bit as one without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from ..errors import NumericsError
from .buffers import Buffers
from .nonfinite import PassHooks, Sighting, Sightings, bad_gradients, bad_masters, look_at_local
from .offload import Offload
from .reference import Reference
from .replicas import Replicas, ranks_text
from .sharded import Sharded
from .unit import Unit

CLOSE, EVERY = 10, 10
"""Weights and buffers are compared in the first `CLOSE` steps, and in one of `EVERY` afterwards."""


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
        self._sightings = Sightings(self._wire.watch)
        self._reference = Reference(sharded)
        self._replicas = Replicas(sharded, buffers) if self._wire.size > 1 else None
        self._step = 0  # the one that is made
        self._depth = 0  # a `step` that calls its base class's runs the hooks of both
        self._in_closure = False  # forwards belong to the step
        self._optimizer: torch.optim.Optimizer | None = None  # whose step it is
        self.handles = PassHooks(sharded.model, hosts, self._sightings, self._gathered, self._used).handles
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
        if not self._in_closure:
            self._depth = 0  # a step that raised is over
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
        look_at_local(unit, self._sightings)
        self._reference.before_reduce(unit)

    def after_backward(self, *, reduced: bool) -> None:
        """A collective with `reduced`: the ranks' gradients have been averaged."""
        if reduced and not self._sharded.config.step_in_backward:
            for what in self._bad_gradients():
                self._sightings.note("the reduction", what)
        self._sightings.used = len(self._sightings.seen)
        self._reference.after_backward(reduced=reduced)

    def broke_off(self) -> None:
        """A backward raised, and its gradients are gone."""
        self._reference.broke_off()

    def cleared(self) -> None:
        """Gradients were forgotten."""
        self._sightings.drop_used()

    # The step ---------------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Before anything of the step is done. A collective.

        Raises:
            RankMismatchError: see `replicas`.
        """
        if self._depth:
            self._depth += 1
            return
        self._step = self._wire.watch.step
        if self._replicas is not None:
            self._offload.finish_step()  # the optimizer's state is read
            self._replicas.compare(self._step, *self._replicas.before_step(self._is_due))
        self._depth = 1

    def before_update(self, optimizer: torch.optim.Optimizer, index: int, *, has_closure: bool) -> None:
        """Gradients are as the optimizer is to have them. A collective.

        Args:
            index: which of the model's optimizers it is.

        Raises:
            NumericsError: one is not finite; where that came from, on every rank.
        """
        if self._depth != 1:
            return
        self._in_closure, self._optimizer = has_closure, optimizer
        if self._skips():
            self._reference.before_step(optimizer, index, "a loss scaler leaves this step out")
            return
        self._depth = 0  # if it raises, there was no step
        self._refuse(next(self._bad_gradients(index), None), self._why_gradient)
        self._depth = 1
        why_not = "its closure makes the gradients inside the step" if has_closure else None
        self._reference.before_step(optimizer, index, why_not)

    def after_step(self) -> None:
        """All is updated, whole parameters are gathered again. A collective.

        Raises:
            NumericsError: a value is not finite; an update is not plain training's.
            RankMismatchError: whole parameters differ.
        """
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self._in_closure = False
        self._offload.finish_step()
        bad = next((what for unit in self._sharded.units for what in bad_masters(unit)), None)
        self._refuse(bad, self._why_update)
        self._reference.after_step()
        if self._replicas is not None and self._is_due:
            self._replicas.compare(self._step, self._replicas.after_step())
        self._sightings.clear()

    def _bad_gradients(self, optimizer: int | None = None) -> Iterator[str]:
        return (what for unit in self._sharded.units for what in bad_gradients(unit, optimizer))

    def _skips(self) -> bool:
        """A loss scaler has left it to the optimizer to pass this step, since gradients have overflowed."""
        found = getattr(self._optimizer, "found_inf", None)
        return isinstance(found, torch.Tensor) and bool(found.sum())

    def _refuse(self, mine: str | None, why: Callable[[Sequence[Sequence[Sighting]]], str]) -> None:
        told = self._wire.exchange((mine, self._sightings.seen[:2] if mine is not None or self._sightings.seen else []))
        bad = [(rank, what) for rank, (what, _) in enumerate(told) if what is not None]
        if bad:
            self._sightings.clear()
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

    def _why_update(self, everyone: Sequence[Sequence[Sighting]]) -> str:
        if any(everyone):
            return f"{_first_of(everyone)}. Weights have it now: go on from the last checkpoint"
        name = type(self._optimizer).__name__
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
