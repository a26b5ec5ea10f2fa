"""A torch optimizer over the segments of this rank: the same object, the same `param_groups` dicts.

Only `group["params"]` is replaced, by a few long tensors (`segments`). Schedulers, hooks and wrappers that hold the
optimizer keep working. `step` is replaced on the instance: around it, gradients are completed before and parameters are
gathered after.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import LayoutError, StallError
from .context import Context
from .optimizer_state import elementwise_of, put_states
from .segment_states import SegmentStates
from .segments import Segment, first_segments, runs_of, split
from .span import Span

Groups = list[list[nn.Parameter]]
"""By optimizer group, the model's parameters."""


class Binding:
    """One optimizer of one model.

    Args:
        index: which of the model's optimizers it is.
        originals: by group, the model's parameters.

    Attributes:
        segments: by group, what the group holds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int, originals: Groups, context: Context) -> None:
        self.optimizer, self.index, self.originals, self._context = optimizer, index, originals, context
        self.segments: list[list[Segment]] = [[] for _ in originals]
        self.spans: list[Span] = []
        self.is_stepping = False
        self._empty: dict[int, nn.Parameter] = {}

    @property
    def group_of(self) -> dict[nn.Parameter, int]:
        return {param: number for number, params in enumerate(self.originals) for param in params}

    def show_segments(self) -> None:
        """The groups hold what `segments` says."""
        for number, (group, mine) in enumerate(zip(self.optimizer.param_groups, self.segments)):
            group["params"] = [segment.tensor for segment in mine] or [self.empty_of(number)]

    def empty_of(self, group: int) -> nn.Parameter:
        """Return what a group holds of which this rank has no elements: a tensor without any, which takes flags."""
        if group not in self._empty:
            self._empty[group] = nn.Parameter(torch.empty(0, device=self._context.device))
        return self._empty[group]

    def state_of(self, segment: Segment) -> dict[str, Any]:
        found: dict[str, Any] = dict.get(self.optimizer.state, segment.tensor, {})
        return found

    def put_state(self, segment: Segment, entries: dict[str, Any]) -> None:
        """Replace the state of a segment; an empty one is removed."""
        if entries:
            dict.__setitem__(self.optimizer.state, segment.tensor, entries)
        else:
            dict.pop(self.optimizer.state, segment.tensor, None)

    def split(self, span: Span) -> None:
        """Split the segments of a span of this optimizer so that in each all parameters have a gradient, or none."""
        for group in self.segments:
            for segment in [each for each in group if each.span is span]:
                self.divide(segment, span.bucket.present.__getitem__)

    def divide(self, segment: Segment, key: Callable[[int], object]) -> list[Segment]:
        """Split a segment so that in each part all members have the same `key`. Returns the parts."""
        runs = runs_of(segment, key)
        if len(runs) < 2:
            return [segment]
        pieces = split(segment, runs, dict.pop(self.optimizer.state, segment.tensor, {}))
        parts = [new for new, _ in pieces]
        for new, entries in pieces:
            self.put_state(new, entries)
            new.show_grad()
        for owner in (next(group for group in self.segments if segment in group), segment.span.segments):
            at = owner.index(segment)
            owner[at : at + 1] = parts
        self.show_segments()
        return parts

    # Life -------------------------------------------------------------------------------------------------------------

    def guard_state(self, settle: Callable[[], None]) -> None:
        """Let access to `optimizer.state` wait for `settle`. User code may have assigned another dictionary since."""
        if not isinstance(self.optimizer.state, SegmentStates):
            self.optimizer.state = SegmentStates(self.optimizer.state, settle)

    def take_state(self) -> None:
        """Give the segments the state that the optimizer has of the model's parameters, if any."""
        before: Any = self.optimizer.state
        known = {param for params in self.originals for param in params}
        saved = {param: entries for param, entries in before.items() if param in known}
        self.optimizer.state = defaultdict(dict, {key: each for key, each in before.items() if key not in known})
        for span in self.spans:
            put_states(self, span, saved, elementwise_of(self, saved))


def bind(optimizers: Sequence[torch.optim.Optimizer], context: Context, originals: Sequence[Groups]) -> list[Binding]:
    """Give each optimizer the segments of its parameters, and its state of them."""
    bindings = [
        Binding(optimizer, number, list(groups), context)
        for number, (optimizer, groups) in enumerate(zip(optimizers, originals))
    ]
    owner: dict[nn.Parameter, tuple[int, int]] = {
        param: (binding.index, group) for binding in bindings for param, group in binding.group_of.items()
    }
    for unit in context.units:
        for span in unit.spans:
            where = [owner.get(param) for param in span.params]
            span.segments = first_segments(span, where)
            for number in dict.fromkeys(each[0] for each in where if each is not None):
                bindings[number].spans.append(span)
            for segment in span.segments:
                found = where[segment.members[0]]
                if found is not None:
                    bindings[found[0]].segments[found[1]].append(segment)
    for binding in bindings:
        binding.take_state()
        binding.show_segments()
    return bindings


def originals_of(optimizers: Sequence[torch.optim.Optimizer], names: dict[nn.Parameter, list[str]]) -> list[Groups]:
    """By optimizer and group, the model's parameters.

    Raises:
        LayoutError: an optimizer has a parameter that the model does not have, or two optimizers have the same one.
    """
    seen: dict[nn.Parameter, int] = {}
    out: list[Groups] = []
    for number, optimizer in enumerate(optimizers):
        groups: Groups = []
        for at, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param not in names:
                    raise LayoutError(
                        f"group {at} of {type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} that the "
                        "model does not have. Build the optimizer over model.parameters()"
                    )
                if seen.setdefault(param, number) != number:
                    raise LayoutError(f"{names[param][0]!r} is in two optimizers. Each parameter belongs to one")
            groups.append(list(group["params"]))
        out.append(groups)
    return out


class StepWrapper:
    """`optimizer.step` on the instance: `before`, the optimizer's own step, `after`.

    An exception after the step began to write leaves values of two steps: `failed` is called then.
    """

    def __init__(
        self,
        binding: Binding,
        before: Callable[[Binding], None],
        after: Callable[[Binding], None],
        failed: Callable[[Binding, str], None],
    ) -> None:
        self._optimizer = optimizer = binding.optimizer
        self._had = optimizer.__dict__.get("step")
        inner = optimizer.step

        def evaluate(closure: Callable[[], Any]) -> Any:
            binding.is_stepping = False  # it runs a backward, outside of the step
            try:
                loss = closure()
            finally:
                binding.is_stepping = True
            before(binding)
            return loss

        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if binding.is_stepping:  # a class's step that calls the instance's
                return inner(*args, **kwargs)
            before(binding)
            args, kwargs = _with_closure(args, kwargs, evaluate)
            tensors = [segment.tensor for group in binding.segments for segment in group]
            versions = [tensor._version for tensor in tensors]
            binding.is_stepping = True
            try:
                result = inner(*args, **kwargs)
                after(binding)
            except BaseException as error:
                written = [tensor._version for tensor in tensors] != versions
                if written and not isinstance(error, StallError):
                    failed(binding, f"{type(error).__name__}: {error}")
                raise
            finally:
                binding.is_stepping = False
            return result

        # A bound method: torch's schedulers wrap `step.__func__`.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        if self._had is None:
            self._optimizer.__dict__.pop("step", None)
        else:
            self._optimizer.step = self._had  # type: ignore[method-assign]


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], evaluate: Callable[[Callable[[], Any]], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A step's arguments, where `evaluate` runs the closure among them."""
    if args and callable(args[0]):
        return (partial(evaluate, args[0]), *args[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": partial(evaluate, kwargs["closure"])}
    return args, kwargs
