"""Enters autocast around every entry into the model.

An entry is a call of a module while no other module of the model runs in this thread: the model itself, or a part that user
code calls. The module's call is replaced (`_compiled_call_impl`, as `nn.Module.compile` does) instead of hooked: the engine's
own hooks then run under autocast too, an exception cannot leave it entered, and copies of the module do not have it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.precision import Precision

_CALL = "_compiled_call_impl"
"""The method of an instance that `nn.Module.__call__` calls instead of the class's."""


class Autocast:
    """Enters autocast at entries into a model, until `remove`.

    Args:
        hosts: modules whose forward uses a unit.
        cast: parameters that are gathered in the compute dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        hosts: Collection[nn.Module],
        cast: Collection[nn.Parameter],
    ) -> None:
        self._precision, self._device, self._here = precision, device, _Here()
        self._replaced: list[tuple[nn.Module, Any]] = []
        blocks = [host for host in hosts if host is not model]
        inside = {inner for host in blocks for inner in host.modules()}.difference(blocks)
        for module in model.modules():
            # Inside a block only modules whose parameters autocast would cast can be entries. Outside of blocks all modules
            # with parameters can: their inputs may be in the compute dtype.
            if module is model or any(param in cast or module not in inside for param in module.parameters()):
                self._replace(module)

    def _replace(self, module: nn.Module) -> None:
        before = module.__dict__.get(_CALL)
        plain = before if before is not None else partial(type(module)._call_impl, module)
        module.__dict__[_CALL] = partial(self._enter, plain)
        self._replaced.append((module, before))

    def _enter(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        here = self._here
        if here.is_inside or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        here.is_inside = True
        try:
            with self._precision.autocast(self._device):
                return plain(*args, **kwargs)
        finally:
            here.is_inside = False

    def remove(self) -> None:
        """Give the modules their own calls back."""
        for module, before in self._replaced:
            if before is None:
                module.__dict__.pop(_CALL, None)
            else:
                module.__dict__[_CALL] = before
        self._replaced.clear()


class _Here(threading.local):
    """Per thread, as autocast is: whether a call into the model is running."""

    is_inside = False
