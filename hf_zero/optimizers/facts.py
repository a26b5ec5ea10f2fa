"""Facts about an optimizer's class that only a step on a few elements shows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from .twin import Twin, is_elementwise

_NUMEL = 7


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, bool] | None:
    """Return the states after a step, and whether each has one value per element; None where that cannot be tried."""
    found: dict[str, bool] = {}
    with suppress(Exception), torch.no_grad():  # whatever a user's optimizer raises
        twin = Twin(optimizer, fuse=False)
        for group in range(len(optimizer.param_groups)):
            entries = twin.step(group, torch.zeros(_NUMEL, device="cpu"), torch.ones(_NUMEL, device="cpu"), {})
            found.update({str(key): is_elementwise(key, value, _NUMEL) for key, value in entries.items()})
        return found
    return None


def options_added(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the options that a step adds to its group; none where that cannot be tried."""
    found: set[str] = set()
    with suppress(Exception), torch.no_grad():
        for number, group in enumerate(optimizer.param_groups):
            twin = Twin(optimizer, fuse=False)
            twin.step(number, torch.zeros(_NUMEL, device="cpu"), torch.ones(_NUMEL, device="cpu"), {})
            found |= twin.option_names - set(group)
    return found


def refusal_of(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], others: Mapping[str, Any]) -> str | None:
    """Return why the optimizer's class refuses the options `others`; None where it takes them, or refuses `options`, too."""
    if others == options:
        return None
    known = inspect.signature(type(optimizer)).parameters

    def refused(given: Mapping[str, Any]) -> str | None:
        build: Any = type(optimizer)
        chosen = {key: value for key, value in given.items() if key in known}
        try:
            build([nn.Parameter(torch.zeros(1, device="cpu"))], **chosen)
        except Exception as error:  # a constructor refuses with whatever its author chose
            return f"{type(error).__name__}: {error}"
        return None

    reason = refused(others)
    return reason if reason is None or refused(options) is None else None
