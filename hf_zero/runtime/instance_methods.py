"""Methods of a sharded model and of its optimizer that are not their classes': put on these instances, and taken off."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, LayoutError
from .unit import Unit

_RESIZE = "resize_token_embeddings"


def override(target: object, name: str, method: Callable[..., Any]) -> None:
    """Replace a method on this one instance; the class and other instances stay as they are."""
    target.__dict__[name] = method


def after_own_methods(optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> None:
    """`call` after every method that this optimizer has and torch's base class has not: `eval`, `train`, `first_step`, …"""
    for name in dir(type(optimizer)):
        if name.startswith("_") or hasattr(torch.optim.Optimizer, name) or name in optimizer.__dict__:
            continue
        method = getattr(type(optimizer), name)
        if inspect.isfunction(method):
            override(optimizer, name, partial(_then, partial(method, optimizer), call))


def _then(method: Callable[..., Any], call: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    try:
        return method(*args, **kwargs)
    finally:
        call()


def put_on(model: nn.Module, units: Sequence[Unit], zero_grad: Callable[..., None]) -> None:
    """What would go past the units does so no more: `zero_grad` is theirs, moves, casts and resizes are refused."""
    override(model, "zero_grad", zero_grad)
    override(model, "_apply", partial(_apply, model, units, model._apply))
    for module in model.modules():
        if hasattr(type(module), _RESIZE):
            override(module, _RESIZE, _refuse_resize)


def take_off(model: nn.Module) -> None:
    for name in ("zero_grad", "_apply"):
        model.__dict__.pop(name, None)
    for module in model.modules():
        module.__dict__.pop(_RESIZE, None)


def take_off_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for name in ("zero_grad", "state_dict", "load_state_dict"):
        optimizer.__dict__.pop(name, None)


def _apply(
    model: nn.Module,
    units: Sequence[Unit],
    plain: Callable[..., nn.Module],
    fn: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    """`.to()`, `.half()`, `.cpu()` and the like: only what leaves every parameter as it is."""
    for unit in units:
        for flat in unit.flats:
            probe = torch.zeros((), dtype=flat.compute_dtype, device=flat.device)
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise LayoutError(
                    f"a sharded model cannot be moved or cast (from {probe.dtype} on {probe.device} to {moved.dtype} on "
                    f"{moved.device}): do it before it is sharded, or call engine.detach() first"
                )
    move_buffers(model, fn)
    return model


def move_buffers(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)


def _refuse_resize(*args: Any, **kwargs: Any) -> Any:
    raise ConfigError(
        f"{_RESIZE}() on a sharded model would replace parameters behind the engine's back: resize before the model is "
        "sharded (inside `with zero.Init():` if it was born there), or call engine.detach() first"
    )
