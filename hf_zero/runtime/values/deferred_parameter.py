"""Class of a parameter whose values are in the ranks' slices, before its model is sharded (`deferred.Birth`).

Every torch function that is given such a parameter arrives here, unless `zero.Init` is entered and opens the parameter first.
Functions of shape, type and device are answered. All others raise: the values would cost a collective, which user code may
call on one rank alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ...errors import StateError
from .ownership import OWNERS
from .reads import VALUE_ATTRIBUTES, AsTheyAre, MaskedParameter, attribute_set, name_of, needs_values, of_kind

_MEMORY = frozenset(("data_ptr", "storage", "untyped_storage"))
"""Need no elements, and give access to the memory that holds them."""
_WAS_BORN = (
    "that was born under zero.Init(): its values are spread over the ranks until its model is sharded. Do this on every rank "
    "inside `with zero.Init():` (enter it again if it has ended), use zero.full_parameter or zero.GatheredParameters, or call "
    "zero.shard or accelerator.prepare first"
)
_PRINTS = frozenset(("__format__", "__repr__"))
_LAYOUT = frozenset(("is_contiguous", "storage_offset", "stride"))
"""Answered for the memory that the parameter has when it is open; `zeros_like` and its siblings, too."""


class OpeningMode(TorchFunctionMode):
    """Opens deferred parameters as torch functions use them; `zero.Init` enters one."""


def opening_mode() -> OpeningMode | None:
    """The one that is entered, if any."""
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, OpeningMode)), None)


class Closed(Protocol):
    """Holds the values of a closed parameter."""

    is_open: bool

    def stand_in(self, param: nn.Parameter) -> Tensor:
        """A meta tensor of the shape, type and strides that the parameter has when it is open."""


def _closed_owner(param: Tensor) -> Closed | None:
    owner: Any = OWNERS.get(param)
    return None if isinstance(owner, weakref.ref) else owner


def uses_values(func: Callable[..., Any]) -> bool:
    """Whether a torch function reads or writes elements of its arguments, or gives access to their memory."""
    attribute = attribute_set(func)
    if attribute:
        return attribute in VALUE_ATTRIBUTES
    name = name_of(func)
    return name in _MEMORY or (name not in _PRINTS and needs_values(func))


def makes_parameter(func: Callable[..., Any], depth: int) -> bool:
    """Whether a torch function is the `detach()` with which `nn.Parameter(p)` begins.

    Args:
        depth: frames between the caller and `nn.Parameter.__new__`.
    """
    return name_of(func) == "detach" and sys._getframe(depth + 1).f_code is nn.Parameter.__new__.__code__


class AbsentStorage(torch.UntypedStorage):
    """Storage of a closed parameter: its size is that of what this rank holds in it; it has no elements and no address."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(f"elements or the address of the storage {_WAS_BORN}")

    __getitem__ = __setitem__ = clone = copy_ = cpu = cuda = data_ptr = fill_ = resize_ = tolist = _refuse


class DeferredParameter(MaskedParameter):
    """A closed parameter: torch functions that read or write its values raise `StateError`."""

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> Any:
        """A plain parameter: `type(p)(tensor)` is how libraries make another one of the same class."""
        return nn.Parameter(torch.empty(0, device=torch.get_default_device()) if data is None else data, requires_grad)

    @classmethod
    def is_masked(cls, param: nn.Parameter) -> bool:
        owner = _closed_owner(param)
        return owner is not None and not owner.is_open

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = name_of(func)
        first = args[0] if args else None
        if name == "untyped_storage":  # how large it is, is no value
            with AsTheyAre():
                return AbsentStorage(args[0].element_size(), device="meta")
        if uses_values(func):
            _refuse(func, next(of_kind(DeferredParameter, (args, options))))
        with AsTheyAre():
            if name in _PRINTS:
                return f"Parameter(born sharded, shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
            owner = _closed_owner(first) if isinstance(first, DeferredParameter) else None
            if owner is not None and (name in _LAYOUT or name.endswith("_like")):
                if name not in _LAYOUT:
                    options.setdefault("device", args[0].device)
                args = (owner.stand_in(args[0]), *args[1:])
            return func(*args, **options)


def _refuse(func: Callable[..., Any], param: nn.Parameter) -> NoReturn:
    attribute, name = attribute_set(func), name_of(func)
    what = f"reading .{name}" if name in VALUE_ATTRIBUTES else f"{name}()"
    if attribute:
        what = f"assigning .{attribute}"
    elif makes_parameter(func, 2):
        what = "nn.Parameter(p)"
    with AsTheyAre():
        shape = tuple(param.shape)
    raise StateError(f"{what} of a parameter of shape {shape} {_WAS_BORN}")
