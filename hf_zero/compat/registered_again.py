"""Frozen parameters that a module deletes and registers again: the model keeps the objects that its engine has.

PEFT's LoRA on `nn.MultiheadAttention` does so in every forward, around merged weights. A frozen parameter under the name of a
frozen one is taken as `known.data = param`. Any other new parameter is the module's own, as in PyTorch: no optimizer has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.instance import Patches
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of


class RegisteredAgain(Observer):
    """Replaces `register_parameter` of modules, which setting an attribute to a parameter calls, too."""

    def attach(self, engine: Engine) -> None:
        self._patches = Patches()
        for module in [*engine.model.modules()]:  # listing modules may register parameters again
            known = {name: param for name, param in module._parameters.items() if param is not None}
            if any(place_of(param) is not None for param in known.values()):
                self._patches.method(module, "register_parameter", partial(partial, _register, known))

    def detach(self) -> None:
        self._patches.take_off()


def _register(
    known: Mapping[str, nn.Parameter], stock: Callable[..., Any], name: str, param: nn.Parameter | None
) -> None:
    before = known.get(name)
    stock(name, before if before is not None and param is not None and _takes(before, param) else param)


def _takes(known: nn.Parameter, param: nn.Parameter) -> bool:
    """Whether a parameter that the engine has stands for one that is registered under its name; it has its values then."""
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
