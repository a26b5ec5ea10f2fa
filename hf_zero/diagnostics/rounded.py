"""Matrices that a model uses in float32, where they are gathered in the compute dtype: one warning, at the first forward.

Plain data parallel under autocast would not round them. The warning names the setting that keeps them in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.precision import dtype_name, dtype_of, patterns_of
from ..engine.engine import Engine
from ..engine.observer import Observer

_CALL = "_compiled_call_impl"
"""The method of an instance that `nn.Module.__call__` calls instead of the class's: an exception cannot leave the mode
entered, as hooks could.
"""

_LOWERED = frozenset(
    {
        "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
        "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmm_", "addmv", "addmv_", "addbmm", "baddbmm",
        "einsum", "chain_matmul", "multi_dot", "bilinear", "prelu", "scaled_dot_product_attention",
        "multi_head_attention_forward",
    }
)  # fmt: skip
"""Functions whose arguments autocast casts to its own type."""
_NEUTRAL = frozenset(
    {
        "__get__", "__set__", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
        "new_zeros", "new_ones", "new_full", "new_tensor",
    }
)  # fmt: skip
"""Functions that return a new tensor and read no value."""
_COPIES = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "clone", "contiguous", "detach", "cpu", "cuda"}
)
"""Functions that change no value unless they change the type."""


class Rounded(Observer):
    """Watches the first forward that builds a graph."""

    def attach(self, engine: Engine) -> None:
        self._model, dtype = engine.model, engine.precision.autocast_dtype
        self._outer: Callable[..., Any] | None = None
        spans = [span for unit in engine.units for span in unit.spans]
        cast = {
            param: span.name_of(index)
            for span in spans
            if span.compute_dtype != dtype_of(span.layout.spec.dtype)
            for index, param in enumerate(span.params)
        }
        if dtype is None or not cast:
            return
        self._before = self._model.__dict__[_CALL]
        self._outer = self._model.__dict__[_CALL] = partial(self._run, _Uses(cast, dtype, engine.context.device))

    def _run(self, uses: _Uses, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._before(*args, **kwargs)
        with uses:
            output = self._before(*args, **kwargs)
        self.detach()
        uses.warn()
        return output

    def detach(self) -> None:
        if self._outer is not None and self._model.__dict__.get(_CALL) is self._outer:
            self._model.__dict__[_CALL] = self._before
        self._outer = None


class _Uses(TorchFunctionMode):
    """Finds parameters whose rounded values reach a function that autocast leaves in float32.

    Args:
        cast: names of the parameters that are gathered in `dtype`.
    """

    def __init__(self, cast: Mapping[nn.Parameter, str], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._cast, self._dtype, self._device = cast, dtype, device
        self._found: dict[str, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        values = (*args, *(kwargs or {}).values())
        for value in chain(values, *(value for value in values if isinstance(value, (tuple, list)))):
            if isinstance(value, Tensor) and value.dtype == self._dtype:
                param: Any = value if isinstance(value, nn.Parameter) else value._base
                name = None if param is None else self._cast.get(param)
                if name is not None and name not in self._found and self._reads(func, param, output):
                    self._found[name] = getattr(func, "__name__", str(func))
        return output

    def _reads(self, func: Any, param: Tensor, output: Any) -> bool:
        """Return whether float32 values would give another result."""
        name = getattr(func, "__name__", "")
        if name in _LOWERED:
            return not torch.is_autocast_enabled(self._device.type)
        if not isinstance(output, Tensor) or name in _NEUTRAL or not output.is_floating_point():
            return False
        if output is param or output._base is param:  # a view
            return False
        return name not in _COPIES or output.dtype != self._dtype

    def warn(self) -> None:
        if not self._found:
            return
        first, function = next(iter(self._found.items()))
        shown = ", ".join(repr(pattern) for pattern in patterns_of(self._found)[:6])
        warnings.warn(
            f"{len(self._found)} weights are gathered in {dtype_name(self._dtype)}, but the model's forward uses them where "
            f"autocast leaves them in float32 (first: {first!r} in {function}()). Results differ from plain data parallel by "
            f"that rounding. To keep them in float32, set ZeroConfig(full_precision=({shown},))",
            stacklevel=4,
        )
