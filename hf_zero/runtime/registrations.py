"""Parameters that modules delete and register again: the model keeps the objects that its engine has.

PEFT's LoRA on `nn.MultiheadAttention` does so in every forward, which merges the adapter into the base weight, and whenever
the model's modules are listed. A frozen parameter under the name of a frozen one is taken as `known.data = param`, and one with
the same memory as the known one itself: torch registers the known one. Any other is the module's, as in plain PyTorch.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .values.ownership import owner_of
from .values.reads import AsTheyAre


class Registrations:
    """The parameters of one model by module and name. They stay the same objects until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())  # first: listing modules may register parameters again
        self._known: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = weakref.WeakKeyDictionary(
            {module: {name: p for name, p in module._parameters.items() if p is not None} for module in modules}
        )
        hook: Any = partial(_registered, weakref.ref(self))  # torch's type leaves out what a hook may return
        handle = register_module_parameter_registration_hook(hook)
        self._end = weakref.finalize(self, handle.remove)

    def remove(self) -> None:
        """Later registrations are plain ones."""
        self._end()

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


def _registered(
    reference: weakref.ref[Registrations], module: nn.Module, name: str, param: nn.Parameter | None
) -> nn.Parameter | None:
    registrations = reference()
    return None if registrations is None else registrations.registered(module, name, param)


def same_frozen(names: dict[nn.Parameter, str], param: nn.Parameter) -> nn.Parameter | None:
    """The frozen parameter of a model that has the memory of `param`, which was registered before it."""
    if param.requires_grad:
        return None
    return next((each for each in names if not each.requires_grad and _place(each) == _place(param)), None)
