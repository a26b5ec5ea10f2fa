"""Probe an optimizer's class by a step on a few elements."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from .optimizer_copy import OptimizerCopy, is_elementwise, untouched
from .trials import inner_optimizers

_NUMEL = 7


class StepProbe(NamedTuple):
    """The states that a step creates, whether each has one value per element, and the options that it adds."""

    states: dict[str, bool]
    options: set[str]


def probe_step(optimizer: torch.optim.Optimizer) -> StepProbe | None:
    """Return the states and options that a step creates; None if a step cannot be tried."""
    made = StepProbe({}, set())
    if inner_optimizers(optimizer):  # their steps would update the model itself
        return None
    with suppress(Exception), untouched(optimizer), torch.no_grad():  # user code may raise anything
        for number, group in enumerate(optimizer.param_groups):
            clone = OptimizerCopy(optimizer, fuse=False)
            entries = clone.step(number, torch.zeros(_NUMEL, device="cpu"), torch.ones(_NUMEL, device="cpu"), {})
            made.states.update({str(key): is_elementwise(key, value, _NUMEL) for key, value in entries.items()})
            made.options.update(clone.option_names - set(group))
        return made
    return None


def state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the number of state values per parameter element: the maximum over optimizers, 2 if unknown."""
    found = [probe_step(optimizer) for optimizer in optimizers]
    return max((2 if made is None else sum(made.states.values()) for made in found), default=0)


def refusal_of(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], others: Mapping[str, Any]) -> str | None:
    """Return why the optimizer's class refuses `others`; None if it accepts them or refuses `options` as well."""
    if others == options:
        return None
    known = inspect.signature(type(optimizer)).parameters

    def refused(given: Mapping[str, Any]) -> str | None:
        build: Any = type(optimizer)
        chosen = {key: value for key, value in given.items() if key in known}
        try:
            build([nn.Parameter(torch.zeros(1, device="cpu"))], **chosen)
        except Exception as error:  # constructors may raise anything
            return f"{type(error).__name__}: {error}"
        return None

    reason = refused(others)
    return reason if reason is None or refused(options) is None else None
