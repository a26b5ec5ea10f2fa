"""`debug=True`: NaN and infinity raise before the optimizer steps, with the place where each rank saw them first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.engine import Engine
from ..engine.graph import backward_id, nodes_of, tensors_in
from ..engine.observer import Observer
from ..engine.span import Span
from ..engine.unit import State, Unit
from ..errors import NumericsError
from .differences import ranks_text

_MOST = 32
"""Sightings that are kept: those after the first explain nothing."""


Sightings = list[tuple[str, str]]
"""Values that were not finite on one rank since the last step, in order: the phase, and the place."""


class Finite(Observer):
    """Looks for values that are not finite, and refuses a step over them.

    Looking is local. In `before_step` and `after_step` the ranks exchange what they saw, so the error is the same on all.
    """

    def attach(self, engine: Engine) -> None:
        self._engine, self._context, self._wire = engine, engine.context, engine.context.wire
        self.sightings: Sightings = []
        """Hooks on the graph hold this list and nothing else."""
        self._used = 0
        """The number of sightings that the backwards that ended account for: they go with the gradients."""
        self._step = 0
        self._handles: list[Any] = []
        for unit in engine.units:
            for host in unit.hosts:
                before, after = partial(self._before_unit, unit), partial(self._after_unit, unit)
                self._handles.append(host.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(host.register_forward_hook(after, with_kwargs=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    # Forward ----------------------------------------------------------------------------------------------------------

    def before_forward(self, args: Any, kwargs: Any) -> None:
        kind = kind_in(tensors_in((args, kwargs)))
        if kind is not None:
            _note(self.sightings, _forward(), f"the model's inputs (this rank's batch) have {kind}")

    def after_forward(self, output: Any) -> None:
        tensors = tensors_in(output)
        kind = kind_in(tensors)
        if kind is not None:
            _note(self.sightings, _forward(), f"the model's output (its loss, where it has one) is {kind}")
        if torch.is_grad_enabled():
            self._follow(tensors, "the gradient that backward begins with, at the model's output, is")

    def _before_unit(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        if backward_id() < 0 and torch.is_grad_enabled():
            what = f"a gradient that the backward of unit {unit.name!r} has made for its inputs is"
            self._follow(tensors_in((args, kwargs)), what)

    def _after_unit(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if backward_id() >= 0:
            return
        kind = kind_in(tensors_in(output))
        if kind is not None:
            cause = _cause(unit, (args, kwargs))
            _note(self.sightings, _forward(), f"the output of unit {unit.name!r} is {kind}{cause}")

    def _follow(self, tensors: list[Tensor], what: str) -> None:
        hook = partial(_look_at_gradients, self.sightings, what)
        for node in nodes_of(tensors, 0):
            node.register_prehook(hook)

    # Backward ---------------------------------------------------------------------------------------------------------

    def before_reduce(self, unit: Unit) -> None:
        for span in unit.trained:
            for index in range(len(span.params)):
                local = span.bucket.local(index)
                kind = None if local is None else kind_of(local)
                if kind is not None:
                    what = f"this rank's own gradient of {span.name_of(index)!r} of unit {unit.name!r} is {kind}"
                    _note(self.sightings, "backward", what)
                    return

    def after_backward(self) -> None:
        if not self._context.config.step_in_backward:
            for what in self._bad_gradients(self._engine.trained):
                _note(self.sightings, "the reduction", what)
        self._used = len(self.sightings)

    def after_zero_grad(self) -> None:
        del self.sightings[: self._used]  # what a forward showed whose backward is to come stays
        self._used = 0

    # Step -------------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that the optimizer gets. A collective.

        Raises:
            NumericsError: one is not finite; says where that came from.
        """
        self._step = self._wire.watch.step
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and bool(
            found_inf.sum()
        ):  # a loss scaler's: the optimizer leaves this step out
            return
        spans = [span for each in self._engine.bindings if each.optimizer is optimizer for span in each.spans]
        bad = self._bad_gradients(span for span in spans if span.trainable)
        self._refuse(next(bad, None), self._why_gradient)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the values that the optimizer wrote. A collective.

        Raises:
            NumericsError: one is not finite.
        """
        self._engine.wait_for_host_steps()
        bad = next(_bad(((span, 0, span.master) for span in self._engine.trained), ""), None)
        self._refuse(bad, partial(_why_update, optimizer))
        self._clear()

    def _clear(self) -> None:
        self.sightings.clear()
        self._used = 0

    @staticmethod
    def _bad_gradients(spans: Iterable[Span]) -> Iterator[str]:
        for span in spans:
            yield from _bad(((span, *part) for part in span.bucket.parts()), "the gradient of ")

    def _refuse(self, mine: str | None, why: Callable[[Sequence[Sightings]], str]) -> None:
        told = self._wire.exchange((mine, self.sightings[:2]))
        for rank, (what, _) in enumerate(told):
            if what is not None:
                self._clear()
                raise NumericsError(f"step {self._step}, on rank {rank}: {what}. {why([seen for _, seen in told])}")

    def _why_gradient(self, everyone: Sequence[Sightings]) -> str:
        own = [[each for each in seen if each[0] != "the reduction"] for seen in everyone]
        if any(own):
            return f"No weight was changed. {_first_of(own)}"
        if any(everyone):
            dtype = self._context.precision.reduce_dtype
            return (
                f"No weight was changed. What every rank gave was finite: the sum overflowed in {dtype} (a wider reduce_dtype, "
                "or a loss scaler), or bytes were changed on their way"
            )
        return (
            "No weight was changed. It was finite after the reduction: clipping, unscaling, or what else the program "
            "does with gradients before the step, made it"
        )


def _why_update(optimizer: torch.optim.Optimizer, everyone: Sequence[Sightings]) -> str:
    if any(everyone):
        return f"{_first_of(everyone)}. Weights have it now: resume from the last checkpoint"
    name = type(optimizer).__name__
    return (
        f"Its gradient was finite: the step of {name} made it (lr, eps, an overflowed state). Weights have it now: resume "
        "from the last checkpoint"
    )


def _first_of(everyone: Sequence[Sightings]) -> str:
    """Return the place where each rank saw it first."""
    parts = ["rank {} in {}: {}".format(rank, *seen[0]) for rank, seen in enumerate(everyone) if seen]
    clean = [rank for rank, seen in enumerate(everyone) if not seen]
    others = f"; on {ranks_text(clean)} all was finite until gradients were averaged" if clean else ""
    return f"First seen on {'; on '.join(parts)}{others}"


def _cause(unit: Unit, inputs: Any) -> str:
    kind = kind_in(tensors_in(inputs))
    if kind is not None:
        return f", as its inputs are ({kind})"
    if unit.state is State.GATHERED:
        for span in unit.spans:
            for index in range(len(span.params)):
                kind = kind_of(span.view(index))
                if kind is not None:
                    return f", as its parameter {span.name_of(index)!r} is ({kind})"
    return ", of finite inputs and parameters"


def _forward() -> str:
    return "forward" if torch.is_grad_enabled() else "a forward without a graph"


def _note(sightings: Sightings, phase: str, what: str) -> None:
    if len(sightings) < _MOST:
        sightings.append((phase, what))


def _look_at_gradients(sightings: Sightings, what: str, grads: tuple[Tensor | None, ...]) -> None:
    kind = kind_in(grads)
    if kind is not None:
        _note(sightings, "backward", f"{what} {kind}")


def _bad(parts: Iterable[tuple[Span, int, Any]], what: str) -> Iterator[str]:
    """Yield parts of this rank's slices that are not finite; values on disk are not read."""
    for span, start, values in parts:
        kind = kind_of(values) if isinstance(values, Tensor) else None
        if kind is None:
            continue
        at = span.layout.bounds(span.rank)[0] + start + int((~values.isfinite()).nonzero()[0, 0])
        index = max((number for number, slot in enumerate(span.layout.slots) if slot.offset <= at), default=0)
        yield f"{what}{span.name_of(index)!r} of unit {span.unit.name!r} is {kind}"


def kind_of(tensor: Tensor) -> str | None:
    """Return `NaN` or `inf` where one is in the tensor; None where all is finite, or the tensor cannot be read."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        return None  # inside `torch.func`, or of `is_grads_batched=True`: there is no one value
    with torch.no_grad():
        values = tensor.detach()
        if values.layout is torch.sparse_coo:
            values = values.coalesce().values()
        elif values.is_nested:  # `nn.TransformerEncoder` evaluates padded batches as such
            values = values.values()
        if values.layout is not torch.strided or bool(values.isfinite().all()):
            return None
        return "NaN" if bool(values.isnan().any()) else "inf"


def kind_in(tensors: Iterable[Any]) -> str | None:
    """Return `kind_of` of the first tensor that has one."""
    return next((kind for each in tensors if isinstance(each, Tensor) and (kind := kind_of(each))), None)
