"""User code replaces a parameter or a submodule (`module.weight = nn.Parameter(x)`, `load_state_dict(assign=True)`): an error.

The optimizer and the engine would keep the old parameters, and the new ones would silently never be trained or saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import Place, place_of
from ..errors import StateError


class Replaced(Observer):
    """Raises where a sharded parameter is replaced by another one, or a submodule by one without its parameters.

    The hooks are of all modules of the process, and must not keep the model alive.
    """

    def attach(self, engine: Engine) -> None:
        self._context = engine.context
        handles = (
            register_module_parameter_registration_hook(partial(_call, weakref.WeakMethod(self._set_parameter))),
            register_module_module_registration_hook(partial(_call, weakref.WeakMethod(self._set_module))),
        )
        self._removals = [weakref.finalize(self, handle.remove) for handle in handles]

    def detach(self) -> None:
        for remove in self._removals:
            remove()

    def _set_parameter(self, module: nn.Module, name: str, param: Tensor | None) -> None:
        old = module._parameters.get(name)
        if old is None or old is param:
            return
        place = place_of(old)
        if place is not None and self._has(module, place):
            _refuse(place, "another parameter")

    def _set_module(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        old = module._modules.get(name)
        if old is None or old is submodule:
            return
        kept = set() if submodule is None else set(submodule.parameters())
        for param in old.parameters():
            place = place_of(param)
            if param not in kept and place is not None and self._has(module, place):
                _refuse(place, "a submodule without it")

    def _has(self, module: nn.Module, place: Place) -> bool:
        """The module is a part of this engine's model, not one of user code that refers to parameters of it."""
        if place.span.context is not self._context:
            return False
        return any(each is module for each in self._context.model.modules())


def _call(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    found = method()
    if found is not None:
        found(*args)


def _refuse(place: Place, other: str) -> NoReturn:
    raise StateError(
        f"{place.span.name_of(place.index)!r} was replaced by {other}: the optimizer and the engine still have the old "
        "parameter. Write its values instead (param.data.copy_(values), load_state_dict without assign=True), or detach() "
        "the engine first"
    )
