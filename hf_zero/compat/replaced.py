"""User code replaces a parameter or a submodule (`module.weight = nn.Parameter(x)`, `load_state_dict(assign=True)`): an error.

The optimizer and the engine would keep the old parameters, and the new ones would silently never be trained or saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import Place, place_of
from ..errors import StateError


class Replaced(Observer):
    """Raises where a sharded parameter is replaced by another one, or a submodule by one without its parameters."""

    def attach(self, engine: Engine) -> None:
        # Hooks of all modules of the process: they do not hold the engine.
        self._handles = [
            register_module_parameter_registration_hook(_Hook(engine, _set_parameter)),
            register_module_module_registration_hook(_Hook(engine, _set_module)),
        ]
        for handle in self._handles:
            _remove_hooks_of_freed_engines(handle)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Hook:
    """A hook that does nothing once its engine is gone.

    Must not be removed when the engine is freed: torch may be iterating over its hooks, whose dict must not change then.
    """

    def __init__(self, engine: Engine, check: Callable[..., None]) -> None:
        self.engine = weakref.ref(engine)
        self._check = check

    def __call__(self, module: nn.Module, name: str, value: Any) -> None:
        if self.engine() is not None:
            self._check(module, name, value)


def _remove_hooks_of_freed_engines(handle: RemovableHandle) -> None:
    hooks: Any = handle.hooks_dict_ref()
    for key, hook in [*hooks.items()]:
        if isinstance(hook, _Hook) and hook.engine() is None:
            del hooks[key]


def _set_parameter(module: nn.Module, name: str, param: Tensor | None) -> None:
    old = module._parameters.get(name)
    if old is None or old is param:
        return
    place = place_of(old)
    if place is not None and _is_part(module, place):
        _refuse(place, "another parameter")


def _set_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    old = module._modules.get(name)
    if old is None or any(each is submodule for each in old.modules()):  # PEFT unwraps a layer: nothing takes its place
        return
    kept = set() if submodule is None else set(submodule.parameters())
    for param in old.parameters():
        place = place_of(param)
        if param not in kept and place is not None and _is_part(module, place):
            _refuse(place, "a submodule without it")


def _is_part(module: nn.Module, place: Place) -> bool:
    """The module is a part of the engine's model, not one of user code that refers to parameters of it."""
    return any(each is module for each in place.span.context.model.modules())


def _refuse(place: Place, other: str) -> NoReturn:
    raise StateError(
        f"{place.span.name_of(place.index)!r} was replaced by {other}: the optimizer and the engine still have the old "
        "parameter. Write its values instead (param.data.copy_(values), load_state_dict without assign=True), or detach() "
        "the engine first"
    )
