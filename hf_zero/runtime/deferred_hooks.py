"""What the modules of a born model do until it is sharded: refuse to run, move slices, give and take whole state.

Every module that holds born parameters itself gets the same hooks; they look at the parameters when called, so that a
hook that was copied along with its module, or outlived its model's birth, does nothing.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..comm.wire import wire_device
from ..errors import RankMismatchError, StateError
from .deferred import INSIDE, Birth, birth_of

_RESIZE = "resize_token_embeddings"
_GUARDS: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""Module -> the handles of its hooks."""


def births_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Birth]]:
    """The born parameters that `module` holds itself."""
    for name, param in module._parameters.items():
        birth = birth_of(param) if param is not None else None
        if param is not None and birth is not None:
            yield name, param, birth


def guard(module: nn.Module, inside: Callable[[], Any]) -> None:
    """Put the hooks on a module, once. `inside` makes the context in which whole-parameter methods can run again."""
    if module in _GUARDS:
        return
    if any(True for _ in births_in(module)):
        _GUARDS[module] = [
            module.register_forward_pre_hook(_refuse_forward),
            module.register_state_dict_post_hook(_give_state),
            module.register_load_state_dict_pre_hook(_before_load),
            module.register_load_state_dict_post_hook(_after_load),
        ]
        module.__dict__["_apply"] = partial(_apply, module)
    if hasattr(type(module), _RESIZE) and any(birth_of(param) is not None for param in module.parameters()):
        _GUARDS.setdefault(module, [])
        module.__dict__[_RESIZE] = partial(_run_inside, module, inside, _RESIZE)


def unguard(model: nn.Module) -> None:
    for module in model.modules():
        handles = _GUARDS.pop(module, None)
        if handles is not None:
            for handle in handles:
                handle.remove()
            for name in ("_apply", _RESIZE):
                module.__dict__.pop(name, None)


def _run_inside(module: nn.Module, inside: Callable[[], Any], name: str, *args: Any, **kwargs: Any) -> Any:
    with inside():
        return getattr(type(module), name)(module, *args, **kwargs)


def _refuse_forward(module: nn.Module, args: Any) -> None:
    if INSIDE:
        return  # parameters open as they are used
    for name, param, birth in births_in(module):
        if not birth.is_open:
            raise StateError(
                f"{type(module).__name__}.{name} (shape {tuple(param.shape)}) was born sharded and has no whole values "
                "here: call zero.shard(model, …), accelerator.prepare(model) or hand the model to a Trainer before "
                "running it"
            )


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`.to()`, `.half()`, `.cpu()` and the like, on the slices of closed parameters."""

    def moved(tensor: Tensor) -> Tensor:
        birth = birth_of(tensor)
        if birth is None or birth.is_open or not isinstance(tensor, nn.Parameter):
            return fn(tensor)
        return birth.move(tensor, fn)

    kind: Any = type(module)
    applied: nn.Module = kind._apply(module, moved, recurse)
    return applied


# State dicts ----------------------------------------------------------------------------------------------------------


class _Tied:
    """Values by parameter in the state dict that is being made: tied parameters are one tensor object in it."""

    def __init__(self) -> None:
        self._state: weakref.ref[OrderedDict[str, Any]] | None = None
        self._values: dict[int, Tensor] = {}

    def values_in(self, state: OrderedDict[str, Any]) -> dict[int, Tensor]:
        if self._state is None or self._state() is not state:
            self._state, self._values = weakref.ref(state), {}
        return self._values


_TIED = _Tied()


def _give_state(module: nn.Module, state: OrderedDict[str, Any], prefix: str, metadata: Any) -> None:
    """A collective: whole CPU tensors on rank 0, meta tensors of the same shapes elsewhere."""
    for name, param, birth in births_in(module):
        if birth.is_open or prefix + name not in state:
            continue
        values = _TIED.values_in(state)
        if id(param) not in values:
            with torch._C.DisableTorchFunction():
                whole = birth.read(param.shape)
                values[id(param)] = whole.cpu() if birth.wire.rank == 0 else whole.to("meta")
        state[prefix + name] = values[id(param)]


def _before_load(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Make room: torch copies the values into the parameters, `_after_load` takes this rank's part of them."""
    found = [(name, param, birth) for name, param, birth in births_in(module) if not birth.is_open]
    if not found:
        return
    if metadata.get("assign_to_params_buffers", False):
        raise StateError("load_state_dict(assign=True) would replace born parameters: load without assign")
    wire = found[0][2].wire
    values = {name: state.get(prefix + name) for name, _, _ in found}
    mine = [None if not isinstance(value, Tensor) else value.is_meta for value in values.values()]
    everyone: list[list[bool | None]] = wire.exchange(mine)
    for (name, param, birth), here in zip(found, zip(*everyone)):
        value = values[name]
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(param.shape):
            continue  # torch reports what is missing or of another shape
        if here[0] is not False or (any(here) and not all(here[1:])):
            raise RankMismatchError(
                f"load_state_dict: {prefix + name!r} must have values on every rank, or values on rank 0 and meta tensors "
                f"on all others (what state_dict() returned); found {['value', 'meta'][bool(here[0])]} on rank 0 and "
                f"others on {sum(1 for answer in here if answer)} ranks"
            )
        if any(here):
            landing = torch.empty(param.shape, dtype=param.dtype, device=wire_device(wire, param.device))
            if wire.rank == 0:
                landing.copy_(value)
            wire.broadcast(landing)
            state[prefix + name] = landing
        birth.open(param, fill=False)


def _after_load(module: nn.Module, incompatible: Any) -> None:
    for _, param, birth in births_in(module):
        if birth.is_open and not birth.pins:
            birth.close(param)
