"""Replace methods and attributes of instances, and restore them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

_MISSING: Any = object()
Attributes = list[tuple[Any, str, Any]]


class PatchedMethod:
    """The replacement of one instance's method. A copy of the instance calls its class's method instead."""

    def __init__(self, target: Any, name: str, method: Callable[..., Any], stock: Any) -> None:
        update_wrapper(self, stock, updated=())
        self._target, self._name, self._method = weakref.ref(target), name, method

    @property
    def __signature__(self) -> inspect.Signature:
        """The replaced method's signature, with `self`, which `inspect` drops: accelerate inspects that of `zero_grad`."""
        found = inspect.signature(vars(self)["__wrapped__"])
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        return found.replace(parameters=[first, *found.parameters.values()])

    def __call__(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        if instance is self._target():
            return self._method(*args, **kwargs)
        return getattr(type(instance), self._name)(instance, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedMethod:
        return self


class Patches:
    """Replaces methods of instances, until `restore`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def method(self, target: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method of an instance.

        Args:
            target: the instance.
            name: of the method.
            make: called with the instance's bound method; returns the replacement, without `self`.
        """
        own = target.__dict__
        before = own.get(name, _MISSING)
        stock = getattr(target, name, _nothing)
        own[name] = MethodType(PatchedMethod(target, name, make(stock), stock), target)
        self._undo.append(partial(_put_back, own, name, own[name], before))

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for a method that the class does not have."""


def _put_back(own: dict[str, Any], name: str, method: Any, before: Any) -> None:
    """Restore the attribute as before `method`, unless user code has replaced `method` since."""
    if own.get(name) is not method:
        return
    if before is _MISSING:
        del own[name]
    else:
        own[name] = before


@contextmanager
def patched(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of modules, classes or single instances inside; restore them afterwards.

    Args:
        attributes: (owner, name, value) each. On an instance, the value hides the class's and no other instance changes.
    """
    before = []
    try:
        for owner, name, value in attributes:
            before.append((owner, name, vars(owner).get(name, _MISSING)))
            _set(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is _MISSING:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = value  # not setattr: nn.Module would register parameters and modules
