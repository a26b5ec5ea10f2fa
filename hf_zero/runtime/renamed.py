"""Names that DeepSpeed's and FSDP's engines have and ours lack: the AttributeError names the replacement."""

from __future__ import annotations

import builtins
import re
import sys
import weakref
from collections import Counter
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

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
OF_MODELS = {
    **_SHARED,
    "module": "hf_zero wraps no model: use the model itself",
    "set_requires_gradient_sync": "use model.no_sync() around all micro-batches but the last",
}
OF_ENGINES = {
    **_SHARED,
    "module": "write engine.model, which is the model that zero.shard received",
    **{name: f"write model.{name}()" for name in ("train", "eval", "parameters", "named_parameters", "state_dict")},
}

_USERS: Counter[type[nn.Module]] = Counter()
"""How many sharded models there are, by class, for those classes whose `__getattr__` is replaced."""
_MODELS: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""Those models, by `id`: other models of their classes get no advice."""


class ModelNames:
    """Replaces `__getattr__` of a sharded model's class, until no model of that class is sharded.

    Python looks `__getattr__` up on the class only. It runs after an ordinary look-up failed: names that a model has are found.
    """

    def __init__(self, model: nn.Module) -> None:
        cls = type(model)
        if not _USERS[cls]:
            _explain(cls)
        _USERS[cls] += 1
        _MODELS[id(model)] = model
        self.remove = weakref.finalize(model, _restore, cls, id(model))


def _explain(cls: type[nn.Module]) -> None:
    stock: Any = cls.__getattr__
    if getattr(stock, "__code__", None) is nn.Module.__getattr__.__code__:
        # The same code, so that it costs nothing and `values.reads` knows it; only the error that it raises is another.
        names = {"__builtins__": builtins, "AttributeError": _explained}
        lookup: Any = FunctionType(stock.__code__, names, stock.__name__)
    else:

        def lookup(self: nn.Module, name: str) -> Any:
            try:
                return stock(self, name)
            except AttributeError as error:
                if name in OF_MODELS:
                    raise _explained(f"'{type(self).__name__}' object has no attribute '{name}'") from error
                raise

    lookup._hf_zero_before = vars(cls).get("__getattr__")
    type.__setattr__(cls, "__getattr__", lookup)


def _restore(cls: type[nn.Module], model: int) -> None:
    _MODELS.pop(model, None)
    _USERS[cls] -= 1
    if _USERS[cls]:
        return
    del _USERS[cls]
    before = vars(cls)["__getattr__"]._hf_zero_before
    if before is None:
        del cls.__getattr__
    else:
        type.__setattr__(cls, "__getattr__", before)


def _explained(message: str) -> AttributeError:
    """Called by `__getattr__` itself, whose `self` is the model."""
    is_sharded = id(sys._getframe(1).f_locals.get("self")) in _MODELS
    found = re.search(r"attribute '(\w+)'$", message) if is_sharded else None
    advice = OF_MODELS.get(found[1]) if found is not None else None
    return AttributeError(message if advice is None else f"{message}: {advice} (hf_zero's docs/migration.md)")


class EngineNames:
    """Base of `Engine`."""

    if not TYPE_CHECKING:  # where it is seen, mypy accepts every name

        def __getattr__(self, name: str) -> NoReturn:
            advice = OF_ENGINES.get(name)
            message = f"'{type(self).__name__}' object has no attribute '{name}'"
            raise AttributeError(message if advice is None else f"{message}: {advice} (hf_zero's docs/migration.md)")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("an Engine cannot be called: write model(...), with the model that zero.shard received")
