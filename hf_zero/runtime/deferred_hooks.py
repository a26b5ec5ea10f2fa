"""What the modules of a born model do until it is sharded: refuse to run, move slices, give and take whole state.

They look at the parameters when they are called, so that a hook that was copied along with its module, or outlived its
model's birth, does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.wire import SoloWire
from ..errors import StateError
from .deferred import Birth, birth_of, no_pickle, opening_mode
from .instance_methods import RESIZE, strip, wrapped
from .state_dict import StateDictHooks


class DeferredHooks(StateDictHooks):
    """Of all modules that were seen in one `zero.Init`.

    Args:
        inside: makes the context in which whole-parameter methods can run again.
    """

    def __init__(self, inside: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._inside = inside

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredHooks:
        """Copies of a born module have the same ones."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A born model's pickle comes to its hooks before its parameters."""
        raise no_pickle()

    def put_on(self, module: nn.Module) -> None:
        """Once a module, where it or one inside it has born parameters."""
        if _is_deferred(module.__dict__.get("_apply")) or all(birth_of(param) is None for param in module.parameters()):
            return
        module.register_forward_pre_hook(self._refuse_forward)
        self.register(module)
        module.__dict__["_apply"] = partial(self._apply, module)
        if hasattr(type(module), RESIZE):
            module.__dict__[RESIZE] = partial(self._resize, module)

    def _resize(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._inside():
            return getattr(type(module), RESIZE)(module, *args, **kwargs)

    def _refuse_forward(self, module: nn.Module, args: Any) -> None:
        if opening_mode() is not None:
            return  # parameters open as they are used
        for name, param in module._parameters.items():
            if param is not None and self.wire_of(param) is not None:
                raise StateError(
                    f"{type(module).__name__}.{name} (shape {tuple(param.shape)}) was born sharded and has no whole values "
                    "here: call zero.shard(model, …), accelerator.prepare(model) or hand the model to a Trainer before "
                    "running it"
                )

    def _apply(self, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`.to()`, `.half()`, `.cpu()` and the like, on the slices of closed parameters."""

        def moved(tensor: Tensor) -> Tensor:
            birth = birth_of(tensor)
            if birth is None or birth.is_open or not isinstance(tensor, nn.Parameter):
                return fn(tensor)
            return birth.move(tensor, fn)

        kind: Any = type(module)
        applied: nn.Module = kind._apply(module, moved, recurse)
        return applied

    # State dicts ----------------------------------------------------------------------------------------------------

    def wire_of(self, param: nn.Parameter) -> SoloWire | None:
        birth = birth_of(param)
        return None if birth is None or birth.is_open else birth.wire

    def gather(self, param: nn.Parameter, wire: SoloWire, first: bool) -> Mapping[nn.Parameter, Tensor]:
        birth = _birth(param)
        with wire.watch.doing("state_dict()") if first else nullcontext(), torch._C.DisableTorchFunction():
            if first:
                self.agree_on_room(wire)
            whole = birth.read(param.shape)
            return {param: self.given(whole.cpu() if wire.rank == 0 or self.everywhere else whole.to("meta"), wire)}

    def open(self, param: nn.Parameter) -> Tensor:
        _birth(param).open(param, fill=False)
        return param.data

    def close(self, param: nn.Parameter, landing: Tensor) -> None:
        _birth(param).close(param)

    def before_load(self) -> None:
        """Each is opened as its module is reached."""

    def after_load(self) -> None:
        """Each is closed as its module is left."""


def _birth(param: nn.Parameter) -> Birth:
    birth = birth_of(param)
    if birth is None:
        raise StateError("a born parameter was sharded while its state dict was made or loaded")
    return birth


def _is_deferred(value: Any) -> bool:
    return any(isinstance(getattr(each, "__self__", None), DeferredHooks) for each in wrapped(value))


def take_off(model: nn.Module) -> None:
    """The model is not born any more."""
    strip(model, _is_deferred)
