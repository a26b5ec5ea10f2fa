"""Frozen parameters that a module deletes and registers again: the model keeps the objects that its engine has.

PEFT's LoRA on `nn.MultiheadAttention` does so in every forward, around merged weights, and whenever modules are listed. A
frozen parameter under the name of a frozen one is taken as `known.data = param`. Any other new parameter is the module's own,
as in PyTorch: no optimizer has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.instance import Patches
from ..engine.observer import Observer
from ..engine.parameter import place_of


class RegisteredAgain(Observer):
    """Replaces `register_parameter` of modules, which setting an attribute to a parameter calls, too."""

    def __init__(self) -> None:
        self._patches = Patches()

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Before the engine lists modules: the parameters that the model has now are those that it keeps."""
        modules = [*model.modules()]  # first: listing modules may register parameters again
        known = {module: {name: p for name, p in module._parameters.items() if p is not None} for module in modules}
        for module in modules:
            if known[module]:
                self._patches.method(module, "register_parameter", partial(partial, _register, known[module]))
        for module in modules:
            if hasattr(module, "_restore_weights"):  # PEFT calls it in `named_modules`, also on one rank alone
                inside = {each: known[each] for each in nn.Module.modules(module) if known.get(each)}
                self._patches.method(module, "_restore_weights", partial(partial, _restore, inside))
        params = {p for names in known.values() for p in names.values()}
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if any(p not in params and not p.requires_grad for p in group["params"]):  # of an earlier listing
                frozen = {_memory(p): p for p in params if not p.requires_grad}
                group["params"] = [p if p in params else frozen.get(_memory(p), p) for p in group["params"]]

    def refused(self) -> None:
        self._patches.take_off()

    def detach(self) -> None:
        self._patches.take_off()


def _restore(known: Mapping[nn.Module, Mapping[str, nn.Parameter]], stock: Callable[[], Any]) -> None:
    """Register the parameters that merged weights have replaced. It reads values, so it does nothing where all exist."""
    if any(module._parameters.get(name) is None for module, names in known.items() for name in names):
        stock()


def _register(
    known: Mapping[str, nn.Parameter], stock: Callable[..., Any], name: str, param: nn.Parameter | None
) -> None:
    before = known.get(name)
    stock(name, before if before is not None and param is not None and _takes(before, param) else param)


def _takes(known: nn.Parameter, param: nn.Parameter) -> bool:
    """Return whether a parameter that the engine has stands for one that is registered under its name; it has its values
    then.
    """
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
