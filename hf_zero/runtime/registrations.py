"""Parameters that modules delete and register again: the model keeps the objects that its engine has.

PEFT's LoRA on `nn.MultiheadAttention` does so in every forward, which merges the adapter into the base weight, and whenever
the model's modules are listed. A frozen parameter under the name of a frozen one is taken as `known.data = param`, and one with
the same memory as the known one itself: torch registers the known one. Any other is the module's, as in plain PyTorch.
"""

from __future__ import annotations

import weakref
from functools import partial

from torch import Tensor, nn

from .values.ownership import owner_of
from .values.reads import AsTheyAre


class Registrations:
    """The parameters of one model by module and name. They stay the same objects until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())  # first: listing modules may register parameters again
        self._known: dict[nn.Module, dict[str, nn.Parameter]] = {
            module: {name: param for name, param in module._parameters.items() if param is not None}
            for module in modules
            if any(param is not None for param in module._parameters.values()) and not _is_kept(module)
        }
        for module in self._known:
            module.__dict__["register_parameter"] = partial(_register, weakref.ref(self), weakref.ref(module))

    def remove(self) -> None:
        """Later registrations are plain ones."""
        for module in self._known:
            module.__dict__.pop("register_parameter", None)
        self._known = {}

    def registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        """What the module gets in place of `param`; None: `param` itself."""
        known = self._known.get(module, {}).get(name)
        if known is None or param is None:
            return None
        if param is known or _place(param) == _place(known):
            return known
        owner = owner_of(param)
        if owner is not None and owner is owner_of(known):  # tied from now on
            return None
        with AsTheyAre():
            is_trained, has_shape = known.requires_grad or param.requires_grad, param.shape == known.shape
        if is_trained or not has_shape:
            return None
        known.data = param.data
        return known


def _place(param: Tensor) -> tuple[object, ...]:
    """Where its elements lie."""
    with AsTheyAre():
        return param.data_ptr(), param.shape, param.stride(), param.dtype


def _is_kept(module: nn.Module) -> bool:
    """Whether another engine keeps this module's parameters."""
    method = module.__dict__.get("register_parameter")
    return isinstance(method, partial) and method.func is _register and method.args[0]() is not None


def _register(
    registrations: weakref.ref[Registrations],
    module: weakref.ref[nn.Module],
    name: str,
    param: nn.Parameter | None,
) -> None:
    """`register_parameter` of a module, which setting an attribute to a parameter calls too."""
    known, target = registrations(), module()
    if target is not None:
        kept = None if known is None else known.registered(target, name, param)
        type(target).register_parameter(target, name, param if kept is None else kept)


def same_frozen(names: dict[nn.Parameter, str], param: nn.Parameter) -> nn.Parameter | None:
    """The frozen parameter of a model that has the memory of `param`, which was registered before it."""
    if param.requires_grad:
        return None
    return next((each for each in names if not each.requires_grad and _place(each) == _place(param)), None)
