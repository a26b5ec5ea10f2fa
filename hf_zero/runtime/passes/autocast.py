"""The type that a model computes in: autocast around every entry; a model evaluated in another type than it is trained in.

An entry is a call of a module with parameters while no other of the same model is under way in this thread: docs/DESIGN.md,
"Precision".

Modules are told by their call, as `nn.Module.compile` does it, and not by hooks: one Python call where nothing is to be done,
an exception cannot lose the way out, and copies of the module do not have it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...core.precision import Precision, dtype_name, dtype_of, patterns_of
from ..values.sharded import Sharded
from ..values.unit import Unit

_CALL = "_compiled_call_impl"  # what nn.Module's __call__ goes to, where an instance has it


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What autocast casts to its own type, by the name of the function.
_LOWERED = _words(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc matmul __matmul__ __rmatmul__ "
    "mm bmm mv addmm addmm_ addmv addmv_ addbmm baddbmm einsum chain_matmul multi_dot bilinear prelu "
    "scaled_dot_product_attention multi_head_attention_forward"
)
# What answers with a new tensor and reads no value.
_NEUTRAL = _words(
    "__get__ __set__ empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full "
    "new_tensor"
)
# What changes no value, where it changes no type.
_COPIES = _words("to type type_as float half bfloat16 double clone contiguous detach cpu cuda")


class Autocast:
    """Of one engine, from now until `remove`.

    Args:
        hosts: modules whose forward uses a unit's parameters.

    Attributes:
        cast: what is gathered in the compute dtype, by name.
    """

    def __init__(self, sharded: Sharded, hosts: Collection[nn.Module]) -> None:
        self._precision, self._device = sharded.precision, sharded.device
        self.cast = {
            param: sharded.names[param][0]
            for flat in sharded.flats
            if flat.compute_dtype != dtype_of(flat.span.spec.dtype)
            for param in flat.params
        }
        self._here = _Here()
        self._told: list[tuple[nn.Module, Any]] = []
        self._uses = Uses(self.cast, self._precision, self._device) if self.cast else None
        self._tell(sharded.model, hosts)

    def _tell(self, model: nn.Module, hosts: Collection[nn.Module]) -> None:
        """Every module that may be an entry. Inside a host (a block), where most modules are, these are the ones whose parts
        autocast would cast; further out, all that have parameters: what they are given may be of the compute dtype."""
        blocks = [host for host in hosts if host is not model]
        inside = {inner for host in blocks for inner in host.modules()}.difference(blocks)
        for module in model.modules():
            mine = module.parameters()
            if module is not model and not any(param in self.cast or module not in inside for param in mine):
                continue
            before = module.__dict__.get(_CALL)
            plain = before if before is not None else partial(type(module)._call_impl, module)
            enter = self._enter_root if module is model else self._enter
            module.__dict__[_CALL] = partial(enter, plain)
            self._told.append((module, before))

    def remove(self) -> None:
        for module, before in self._told:
            if before is None:
                module.__dict__.pop(_CALL, None)
            else:
                module.__dict__[_CALL] = before
        self._told.clear()

    def _enter(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a block, which is no entry
            return plain(*args, **kwargs)
        here = self._here
        if here.inside:
            return plain(*args, **kwargs)
        here.inside = True
        try:
            with self._precision.autocast(self._device):
                return plain(*args, **kwargs)
        finally:
            here.inside = False

    def _enter_root(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        uses = self._uses
        if uses is None or self._here.inside or not torch.is_grad_enabled():
            return self._enter(plain, *args, **kwargs)
        with uses:
            output = self._enter(plain, *args, **kwargs)
        self._uses = None
        uses.tell()
        return output


class _Here(threading.local):
    """Autocast is the thread's; so is being inside."""

    inside = False


class Uses(TorchFunctionMode):
    """Watches one forward for matrices that are used where autocast would have left them in float32. They have been rounded to
    the compute dtype, which plain data parallel does not do: said once, with the setting that mends it."""

    def __init__(self, cast: Mapping[nn.Parameter, str], precision: Precision, device: torch.device) -> None:
        super().__init__()
        self._cast, self._device = cast, device
        self._dtype = precision.autocast_dtype or torch.float32
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
        """Whether the result would be another one with the values in float32."""
        name = getattr(func, "__name__", "")
        if name in _LOWERED:
            return not torch.is_autocast_enabled(self._device.type)
        if not isinstance(output, Tensor) or name in _NEUTRAL or not output.is_floating_point():
            return False
        if output is param or output._base is param:  # a view
            return False
        return name not in _COPIES or output.dtype != self._dtype

    def tell(self) -> None:
        if not self._found:
            return
        first, function = next(iter(self._found.items()))
        patterns = patterns_of(self._found)
        shown = ", ".join(repr(pattern) for pattern in patterns[:6])
        warnings.warn(
            f"{len(self._found)} weights are gathered in {dtype_name(self._dtype)}, and the model's forward uses them where "
            f"autocast would have left them in float32 ({first!r} in {function}(), the first): results differ from plain data "
            f"parallel's by that rounding. To keep them: ZeroConfig(full_precision=({shown},))",
            stacklevel=4,
        )


# Another type for a while ------------------------------------------------------------------------------------------


@contextmanager
def shown_in(
    model: nn.Module, dtype: torch.dtype, units: Sequence[Unit] = (), quiesce: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Inside, everything of `model` that is floating is of this type, as after `model.to(dtype)`. For forwards without a graph.

    `module.to(dtype)` would round what is trained. Here a unit that is gathered shows its parameters cast, one unit at a time;
    where whole parameters stay (stages 0 to 2), and in a model that is not sharded, all of them are shown as cast copies.

    Args:
        units: of a sharded model; without them the model is a plain one, whole on this rank.
        quiesce: returns when nothing is gathered. A collective where that is one.
    """
    quiesce()
    flats = [flat for unit in units for flat in unit.flats]
    before = [flat.shown_dtype for flat in flats]
    owned = {param for flat in flats for param in flat.params}
    plain = [(param, param.data) for param in model.parameters() if param not in owned and param.is_floating_point()]
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    try:
        for flat in flats:
            flat.show_in(dtype)
        for param, data in plain:
            param.data = data.to(dtype)
        for table, buffers in tables:
            table.update({name: _cast(buffer, dtype) for name, buffer in buffers.items()})
        yield
    finally:
        try:
            quiesce()
        finally:
            for flat, earlier in zip(flats, before):
                flat.show_in(earlier)
            for param, data in plain:
                param.data = data
            for table, buffers in tables:
                table.update(buffers)


def _cast(buffer: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return buffer.to(dtype) if buffer is not None and buffer.is_floating_point() else buffer
