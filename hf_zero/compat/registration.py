"""Checks parameters and submodules that user code replaces, or deletes and registers again.

Replacing a sharded parameter (`module.weight = nn.Parameter(x)`, `load_state_dict(assign=True)`), or a submodule that has one,
is an error: the optimizer and the engine would keep the old parameters, and the new ones would silently never be trained or
saved.

A frozen parameter registered under the name of a frozen one is handled as `known.data = param`: the model keeps the objects of
its engine. PEFT's LoRA on `nn.MultiheadAttention` registers such parameters in every forward, around merged weights, and
whenever modules are listed. Any other new parameter is the module's own, as in PyTorch: no optimizer updates it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from ..core.patching import Patches
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import Place, place_of
from ..errors import StateError

Known = Mapping[str, nn.Parameter]
"""The parameters that a module had when its model was sharded."""


class Registration(Observer):
    """Checks all registrations in the modules of one model."""

    def __init__(self) -> None:
        self._patches, self._handles = Patches(), list[RemovableHandle]()
        self._known: dict[nn.Module, Known] = {}

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Record the model's parameters before the engine lists modules, so that the model keeps them."""
        modules = [*model.modules()]  # first: listing modules may register parameters again
        self._known = {module: {n: p for n, p in module._parameters.items() if p is not None} for module in modules}
        # Hooks of all modules of the process: they do not hold the engine.
        self._handles = [register_module_parameter_registration_hook(_Hook(self, Registration._set_parameter))]
        for module in modules:
            if hasattr(module, "_restore_weights"):  # PEFT calls it in `named_modules`, also on one rank alone
                inside = {each: self._known[each] for each in nn.Module.modules(module) if self._known.get(each)}
                self._patches.method(module, "_restore_weights", partial(partial, _restore, inside))
        params = {p for names in self._known.values() for p in names.values()}
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if any(p not in params and not p.requires_grad for p in group["params"]):  # of an earlier listing
                frozen = {_memory(p): p for p in params if not p.requires_grad}
                group["params"] = [p if p in params else frozen.get(_memory(p), p) for p in group["params"]]

    def attach(self, engine: Engine) -> None:
        self._handles.append(register_module_module_registration_hook(_Hook(self, Registration._set_module)))
        for handle in self._handles:
            _remove_hooks_of_freed_engines(handle)

    def refused(self) -> None:
        self.detach()

    def detach(self) -> None:
        self._patches.restore()
        for handle in self._handles:
            handle.remove()

    def _set_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        known = self._known.get(module, {}).get(name)
        if known is not None and _takes(known, param):
            return known
        old = module._parameters.get(name)
        place = None if old is None or old is param else place_of(old)
        if place is not None and _is_part(module, place):
            _refuse(place, "another parameter")
        return None

    def _set_module(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        old = module._modules.get(name)
        if old is None or any(each is submodule for each in old.modules()):  # the second: PEFT unwraps a layer
            return
        kept = set() if submodule is None else set(submodule.parameters())
        for param in old.parameters():
            place = place_of(param)
            if param not in kept and place is not None and _is_part(module, place):
                _refuse(place, "a submodule without it")


class _Hook:
    """A hook that does nothing once its observer, and with it the engine, is freed.

    Must not be removed when the engine is freed: torch may be iterating over the dict of its hooks.
    """

    def __init__(self, observer: Registration, method: Callable[..., Any]) -> None:
        self.observer, self._method = weakref.ref(observer), method

    def __call__(self, module: nn.Module, name: str, value: Any) -> Any:
        observer = self.observer()
        return None if observer is None else self._method(observer, module, name, value)


def _remove_hooks_of_freed_engines(handle: RemovableHandle) -> None:
    hooks: Any = handle.hooks_dict_ref()
    for key, hook in [*hooks.items()]:
        if isinstance(hook, _Hook) and hook.observer() is None:
            del hooks[key]


def _restore(known: Mapping[nn.Module, Known], stock: Callable[[], Any]) -> None:
    """Register the parameters that merged weights have replaced. Skipped if all exist, because it reads values."""
    if any(module._parameters.get(name) is None for module, names in known.items() for name in names):
        stock()


def _takes(known: nn.Parameter, param: nn.Parameter) -> bool:
    """Return whether the engine's parameter replaces one that is registered under its name; if so, it gets the values."""
    if param is known or _memory(param) == _memory(known):
        return True
    is_foreign = place_of(known) is None or place_of(param) is not None  # the second: tied from now on
    if is_foreign or known.requires_grad or param.requires_grad or param.shape != known.shape:
        return False
    known.data = param.data
    return True


def _memory(param: Tensor) -> tuple[object, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return param.data_ptr() or id(param), param.shape, param.stride(), param.dtype


def _is_part(module: nn.Module, place: Place) -> bool:
    """Return whether a module is part of the engine's model, not one of user code that refers to its parameters."""
    return any(each is module for each in place.span.context.model.modules())


def _refuse(place: Place, other: str) -> NoReturn:
    raise StateError(
        f"{place.span.name_of(place.index)!r} was replaced by {other}: the optimizer and the engine still have the old "
        "parameter. Write its values instead (param.data.copy_(values), load_state_dict without assign=True), or detach() "
        "the engine first"
    )
