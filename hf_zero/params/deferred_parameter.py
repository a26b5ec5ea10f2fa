"""The class of closed parameters, whose values are split over the ranks (see `deferred`).

It intercepts every torch function, unless an entered `zero.Init` opens the parameter first. Functions of shape, dtype and
device return. All others raise: values need a collective, and user code may read them on one rank alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from ..engine.parameter import reads_no_values, source_of
from ..errors import StateError

_plain = torch._C.DisableTorchFunction

_ANSWERED = frozenset({"__repr__", "__format__", "untyped_storage"})
_LAYOUT = frozenset({"is_contiguous", "storage_offset", "stride"})
"""They describe the memory of the open parameter, as `zeros_like` and its siblings do."""
_CASTS = frozenset({"to", "half", "float", "double", "bfloat16", "cpu", "cuda", "type"})


class InitMode(TorchFunctionMode):
    """Passes every torch function to `zero.Init`, which opens its parameters. Functions that `Init` calls are plain."""

    def __init__(self, init: Any) -> None:
        super().__init__()
        self.init = init

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.init.call(func, args, kwargs or {})


def current_init() -> Any:
    """Return the outermost entered `zero.Init`, or None."""
    return next((mode.init for mode in _get_current_function_mode_stack() if isinstance(mode, InitMode)), None)


def needs_values(func: Any) -> bool:
    """Return whether a torch function reads or writes elements, or gives access to their memory."""
    name = getattr(func, "__name__", "")
    is_grad = name in ("__get__", "__set__") and _attribute(func) == "grad"
    return not (is_grad or name in _ANSWERED or reads_no_values(func))


def _attribute(func: Any) -> str:
    name: str = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


class DeferredParameter(nn.Parameter):
    """A closed parameter: torch functions that read or write its values raise `StateError`.

    Casts and moves return another closed parameter, which `param.data = …` accepts: `model.half()` converts each rank's part.
    `copy_` from a full value stores each rank's part.
    """

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> Any:
        """Return a plain parameter, because libraries call `type(p)(tensor)`."""
        return nn.Parameter(torch.empty(0, device="cpu") if data is None else data, requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if current_init() is None:
            _refuse(Tensor.__deepcopy__, self)
        if id(self) not in memo:
            memo[id(self)] = _of(self).copied(self)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "a parameter that was created under zero.Init() cannot be pickled: each rank has only a part of it. Shard the "
            "model and use engine.save()"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first: Any = args[0] if args else None
        is_first = isinstance(first, DeferredParameter)
        if is_first and name in _CASTS and options.get("memory_format") is None:
            return _of(first).cast(first, lambda value: func(value, *args[1:], **options))
        if is_first and name == "__set__" and _attribute(func) == "data" and isinstance(args[1], DeferredParameter):
            cast = _of(args[1])
            if cast.is_cast:
                _of(first).take(first, cast, args[1].shape, args[1].dtype)
                return None
        if is_first and name == "copy_" and type(args[1]) in (Tensor, nn.Parameter) and args[1].shape == first.shape:
            _of(first).put(first, args[1])
            return first
        if needs_values(func):
            _refuse(func, next(each for each in tree_leaves((args, options)) if isinstance(each, DeferredParameter)))
        with torch._C.DisableTorchFunctionSubclass():
            if is_first and name in ("__repr__", "__format__"):
                return f"Parameter(deferred, shape={tuple(first.shape)}, dtype={first.dtype})"
            if name == "untyped_storage":
                return torch.UntypedStorage(first.element_size(), device="meta")  # no elements, and no address
            if is_first and (name in _LAYOUT or name.endswith("_like")):
                if name not in _LAYOUT:
                    options.setdefault("device", first.device)
                args = (_of(first).meta_tensor(first), *args[1:])
            return func(*args, **options)


def _of(param: Any) -> Any:
    """Return the `Deferred` that has the values."""
    found = source_of(param)
    if found is None:
        raise StateError("a copy of a parameter that was created under zero.Init() has no values")
    return found


def is_new_parameter(func: Any, depth: int) -> bool:
    """Return whether a function is the `detach()` with which `nn.Parameter(p)` begins.

    Args:
        depth: frames between the caller and `nn.Parameter.__new__`.
    """
    code = sys._getframe(depth + 1).f_code
    return getattr(func, "__name__", "") == "detach" and code is nn.Parameter.__new__.__code__


def _refuse(func: Any, param: Any) -> Any:
    name, attribute = getattr(func, "__name__", str(func)), _attribute(func)
    access = {
        "__get__": f"reading .{attribute}",
        "__set__": f"assigning .{attribute}",
        "__deepcopy__": "copy.deepcopy()",
    }
    what = access.get(name, f"{name}()")
    if is_new_parameter(func, 2):
        what = "nn.Parameter(p)"
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(param.shape)
    raise StateError(
        f"{what} of a parameter of shape {shape} that was created under zero.Init(): its values are spread over the ranks "
        "until its model is sharded. Do this on every rank inside `with zero.Init():` (enter it again if it has ended), use "
        "zero.full_parameter or zero.GatheredParameters, or call zero.shard or accelerator.prepare first"
    )


def make_closed(param: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    with _plain():
        param.data = torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))
    param.__dict__.pop("__deepcopy__", None)
    param.__class__ = DeferredParameter


def copy_deferred(param: nn.Parameter) -> None:
    """Make copies of an open parameter deferred as well: copying a module does not register its parameters."""
    reference = weakref.ref(param)  # copied attributes must not keep the parameter alive

    def __deepcopy__(memo: dict[int, Any]) -> nn.Parameter:
        param: Any = reference()
        return DeferredParameter.__deepcopy__(param, memo)

    param.__dict__["__deepcopy__"] = __deepcopy__
