"""`optimizer.state` while an optimizer is bound: what belongs to this rank's slices, and refusals for who asks for more."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from ...errors import StateError

_DISTRIBUTED_CHECKPOINT = "torch.distributed.checkpoint.state_dict"


class SliceStates(defaultdict[Any, dict[str, Any]]):
    """States by master, the tensors of `optimizer.param_groups`.

    The model's own parameters have no entry. `state[param]` of a plain `defaultdict` would make an empty one, and what a
    program then does to it (a mask over momentum, a reset) would be lost without a word.

    Args:
        names: of the parameters that are refused.
    """

    def __init__(self, states: Mapping[Any, dict[str, Any]], names: Mapping[nn.Parameter, str]) -> None:
        super().__init__(dict, states)
        self._names = names

    def __bool__(self) -> bool:
        # Every function of that module that takes an optimizer begins with `if optim.state:`.
        if sys._getframe(1).f_globals.get("__name__") == _DISTRIBUTED_CHECKPOINT:
            raise StateError(
                f"{_DISTRIBUTED_CHECKPOINT} cannot read or write the optimizer of a sharded model: it looks for the model's "
                "parameters in optimizer.param_groups, which has this rank's slices. Use engine.save(folder) and "
                "engine.load(folder), or optimizer.state_dict() and load_state_dict() on every rank, or "
                "zero.full_optimizer_state(param, key). get_model_state_dict and set_model_state_dict work"
            )
        return len(self) > 0

    def __missing__(self, key: Any) -> dict[str, Any]:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def _check(self, key: object) -> None:
        name = self._names.get(key) if isinstance(key, nn.Parameter) else None
        if name is None:
            return
        raise StateError(
            f"optimizer.state was asked for parameter {name!r}: the optimizer has this rank's slices, the tensors of "
            "optimizer.param_groups, and their states. On every rank, read a parameter's state by "
            "zero.full_optimizer_state(param, key) and write it by zero.set_full_optimizer_state(param, key, value)"
        )

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def _settled(name: str) -> Any:
    """`SliceStates`' method of this name, once nothing is under way."""
    plain = getattr(SliceStates, name)

    def method(self: SteppedStates, *args: Any, **entries: Any) -> Any:
        self._settle()
        return plain(self, *args, **entries)

    return method


class SteppedStates(SliceStates):
    """States that a thread updates behind `optimizer.step()`: who looks at them, or clears them, waits for it.

    Args:
        settle: waits; it returns at once where nothing is under way, and in that thread. Both are methods, held weakly.
        forget: on disk there is more of the states than here.
    """

    def __init__(
        self,
        states: Mapping[Any, dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        settle: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        super().__init__(states, names)
        self._settle_of, self._forget_of = WeakMethod(settle), WeakMethod(forget)

    def _settle(self) -> None:
        settle = self._settle_of()
        if settle is not None:
            settle()

    def clear(self) -> None:
        self._settle()
        super().clear()
        forget = self._forget_of()
        if forget is not None:
            forget()

    __getitem__, __setitem__, __delitem__, __iter__, __len__, __contains__ = map(
        _settled, ("__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__")
    )
    get, keys, items, values, pop, popitem, setdefault, update = map(
        _settled, ("get", "keys", "items", "values", "pop", "popitem", "setdefault", "update")
    )


def restore_types(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """After torch's `load_state_dict`, which casts counts and masks to the parameters' type and copies a text item by item."""
    flat = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entries in state_dict["state"].items():
        state = optimizer.state[flat[number]]
        for key, value in entries.items():
            if isinstance(value, str):
                state[key] = value
            elif isinstance(value, Tensor) and key != "step" and not value.dtype.is_floating_point:
                state[key] = value.to(flat[number].device)
