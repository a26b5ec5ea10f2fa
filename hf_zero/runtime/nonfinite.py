"""The first value of a step that is not finite, on this rank: where a forward or a backward made it. For `debug=True`.

Forward hooks on the hosts of units look at what comes out; prehooks on the autograd nodes that made a host's inputs look at
gradients when the host's backward is over (as the schedule's own, see there); a unit is asked for its gradients before they
leave for their owners. All of it is looked at in the order in which it is computed, so what is seen first came first. Nothing
is raised here: a loss scaler skips steps that have overflowed, and what does not get into a gradient changes no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.watch import Watch
from .flat_param import Flat
from .saved_tensors import in_backward_of_any, nodes_of, tensors_in
from .unit import State, Unit

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


def kind_of(tensor: Tensor) -> str | None:
    """`NaN` or `inf`, where one is in the tensor; None where all is finite, or nobody can look."""
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
    return next((kind for each in tensors if isinstance(each, Tensor) and (kind := kind_of(each))), None)


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
