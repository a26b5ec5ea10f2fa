"""A torch optimizer over the segments of this rank: the same object, the same `param_groups` dicts.

Only `group["params"]` is replaced, by a few long tensors (`segments`). Schedulers, hooks and wrappers that hold the
optimizer keep working. `step` is replaced on the instance: around it, gradients are completed before and parameters are
gathered after.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LayoutError, StallError
from ..tiers.tier import Tier
from .context import Context
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
        found: dict[str, Any] = self.optimizer.state.get(segment.tensor, {})
        return found

    def split(self, span: Span) -> None:
        """Split the segments of a span of this optimizer so that in each all parameters have a gradient, or none."""
        state = self.optimizer.state
        for group in self.segments:
            for segment in [each for each in group if each.span is span]:
                runs = runs_of(segment, span.bucket.present.__getitem__)
                if len(runs) < 2:
                    continue
                pieces = split(segment, runs, state.pop(segment.tensor, {}))
                for new, entries in pieces:
                    if entries:
                        state[new.tensor] = entries
                at = group.index(segment)
                group[at : at + 1] = [new for new, _ in pieces]
                at = span.segments.index(segment)
                span.segments[at : at + 1] = [new for new, _ in pieces]
        self.show_segments()

    # Life -------------------------------------------------------------------------------------------------------------

    def take_state(self) -> None:
        """Give the segments the state that the optimizer has of the model's parameters, if any."""
        before: Any = self.optimizer.state
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for group in self.segments:
            for segment in group:
                entries = [before.get(segment.span.params[index], {}) for index in segment.members]
                if any(entries):
                    state[segment.tensor] = _joined(segment, entries)
        known = {param for params in self.originals for param in params}
        for key, entry in before.items():  # what is no parameter of the model
            if key not in known:
                state[key] = entry
        self.optimizer.state = state


def _joined(segment: Segment, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a segment from the states of its whole parameters."""
    out: dict[str, Any] = {}
    span, layout = segment.span, segment.span.layout
    for name in dict.fromkeys(name for each in entries for name in each):
        values = [each.get(name) for each in entries]
        sample = next(value for value in values if value is not None)
        slots = [layout.slots[index] for index in segment.members]
        if not isinstance(sample, Tensor) or sample.shape != slots[0].spec.shape or name == "step":
            out[name] = sample.clone() if isinstance(sample, Tensor) else sample
            continue
        if segment.is_matrix:
            out[name] = sample
            continue
        joined = torch.zeros(segment.numel, dtype=sample.dtype, device=segment.span.device)
        for index, value in zip(segment.members, values):
            part = segment.span.part_of(index)
            if part is not None and value is not None:
                start = part.start - segment.start
                joined[start : start + part.numel].copy_(value.reshape(-1)[part.there])
        out[name] = joined if span.tier is Tier.DEVICE else span.context.storage_tier(span.tier).store(joined)
    return out


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

        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if binding.is_stepping:  # a class's step that calls the instance's
                return inner(*args, **kwargs)
            before(binding)
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
