"""Names that engines of DeepSpeed and FSDP have and a sharded model lacks: the AttributeError names what to write."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from ..engine.engine import Engine
from ..engine.observer import Observer

_SHARED = {
    "backward": "write loss.backward()",
    "step": "write optimizer.step() and optimizer.zero_grad()",
    "save_checkpoint": "write engine.save(folder)",
    "load_checkpoint": "write engine.load(folder)",
    "save_16bit_model": "write engine.save(folder, save_optimizer=False)",
    "get_global_grad_norm": "engine.clip_grad_norm_(max_norm) returns the norm",
    "set_gradient_accumulation_boundary": "use engine.no_sync() around all micro-batches but the last",
    "is_gradient_accumulation_boundary": "use engine.no_sync() around all micro-batches but the last",
}
_OF_MODELS = {
    **_SHARED,
    "module": "hf_zero wraps no model, use the model itself",
    "set_requires_gradient_sync": "use model.no_sync() around all micro-batches but the last",
}
_OF_ENGINES = {
    **_SHARED,
    "module": "write engine.model, which is the model that zero.shard received",
    **{name: f"write model.{name}()" for name in ("train", "eval", "parameters", "named_parameters", "state_dict")},
}
_USERS: Counter[type[nn.Module]] = Counter()
"""The number of sharded models by class, for classes whose `__getattr__` is replaced."""
_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Those models. Other models of their classes get no advice."""


class Names(Observer):
    """Replaces `__getattr__` of the model's class, until no model of that class is sharded.

    Python looks `__getattr__` up on the class only, after an ordinary look-up failed: names that a model has are found.
    """

    def attach(self, engine: Engine) -> None:
        model = engine.model
        _USERS[type(model)] += 1
        if _USERS[type(model)] == 1:
            _advise(type(model))
        _MODELS.add(model)
        self._model = weakref.ref(model)
        self._remove = weakref.finalize(model, _restore, type(model))

    def detach(self) -> None:
        model = self._model()
        if model is not None:
            _MODELS.discard(model)
        self._remove()


def _advise(cls: type[nn.Module]) -> None:
    stock = cls.__getattr__

    def lookup(self: nn.Module, name: str) -> Any:
        try:
            return stock(self, name)
        except AttributeError as error:
            if name in _OF_MODELS and self in _MODELS:
                raise _error(self, name, _OF_MODELS) from error
            raise

    lookup._hf_zero_before = vars(cls).get("__getattr__")  # type: ignore[attr-defined]
    type.__setattr__(cls, "__getattr__", lookup)


def _restore(cls: type[nn.Module]) -> None:
    _USERS[cls] -= 1
    if _USERS[cls]:
        return
    del _USERS[cls]
    before = vars(cls)["__getattr__"]._hf_zero_before
    if before is None:
        type.__delattr__(cls, "__getattr__")
    else:
        type.__setattr__(cls, "__getattr__", before)


def _error(owner: object, name: str, advice: dict[str, str]) -> AttributeError:
    message = f"'{type(owner).__name__}' object has no attribute '{name}'"
    if name in advice:
        message += f": {advice[name]} (hf_zero's docs/migration.md)"
    return AttributeError(message)


class EngineNames:
    """A base of `zero.Engine`."""

    if not TYPE_CHECKING:  # mypy would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            raise _error(self, name, _OF_ENGINES)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("an Engine cannot be called. Write model(...), with the model that zero.shard received")
