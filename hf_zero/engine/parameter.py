"""The parameter class: access to values and gradients from outside the engine is an event.

A parameter's C++ `data` is a view of its span's buffer, always: only its class tells whether the buffer has memory.

* `ShardedParameter`: the values are readable. `data` and `grad` are Python properties over the C++ fields, so that
  reads and assignments by user code reach the observers. Operations cost as much as for `nn.Parameter`.
* its `released` subclass, outside the forwards of the parameter's unit: the buffer has no memory, or may lose it at any time.
  An observer gathers the unit around every operation that reads values; without such an observer the operation raises
  `StateError`. Reading a buffer without memory would crash the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import StateError

if TYPE_CHECKING:
    from ..tiers.array import OnDisk
    from .span import Span
    from .unit import Unit

_DATA: Any = torch._C.TensorBase.data
_GRAD: Any = torch._C.TensorBase.grad
_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad

_METADATA = frozenset(
    {
        "size", "dim", "numel", "ndimension", "element_size", "is_floating_point", "is_complex", "is_contiguous", "stride",
        "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "nelement", "is_inference",
        "storage_offset", "__hash__", "__len__", "is_signed", "get_device", "is_shared",
        "is_same_size", "is_conj", "is_neg", "dim_order", "has_names", "is_pinned", "retain_grad", "__dir__", "is_tensor",
        "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "new_empty",
        "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "can_cast", "promote_types", "result_type",
        "_has_compatible_shallow_copy_type", "_is_view",
    }
)  # fmt: skip
"""Functions of a tensor that read no values."""
_METADATA_FIELDS = frozenset(
    {
        "shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_leaf", "grad_fn", "is_sparse", "is_cuda",
        "is_cpu", "is_meta", "is_quantized", "names", "itemsize", "nbytes", "output_nr", "_version", "name",
        "retains_grad", "is_mkldnn", "is_nested", "is_xpu", "is_mps", "is_ipu", "is_hpu", "is_xla", "is_vulkan",
        "is_maia", "is_mtia", "is_sparse_csr", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_cdata",
        "volatile", "grad_dtype", "_grad_fn", "_python_dispatch",
    }
)  # fmt: skip
"""Properties of a tensor that read no values."""


class ValueSource(Protocol):
    """Provides the values of a parameter that was created without memory, until the parameter is sharded."""

    @property
    def files(self) -> OnDisk | None:
        """Return all elements if they are in files and need no copy, else None. May differ between ranks."""
        ...

    def memory(self, param: nn.Parameter) -> Tensor | None:
        """Return the full values, where another tensor may share their memory; else None."""
        ...

    def fill(self, param: nn.Parameter, target: Tensor, room: Tensor) -> None:
        """Write the full values to `target`. A collective.

        Args:
            room: 1-D memory that begins with `target`. All of it may be overwritten.
        """
        ...

    def end(self, param: nn.Parameter) -> None:
        """Make `param` a plain parameter: the engine has the values."""
        ...


def source_of(param: Tensor) -> ValueSource | None:
    """Return the source of a parameter's values before it is sharded; None if the parameter has them itself."""
    found: ValueSource | None = param.__dict__.get("_zero_source")
    return found


def set_source(param: Tensor, source: ValueSource | None) -> None:
    if source is None:
        param.__dict__.pop("_zero_source", None)
    else:
        param.__dict__["_zero_source"] = source


class Place:
    """Locates one parameter: its span, and its index there. Refers weakly: a graph holds parameters, and must hold no engine.

    Raises:
        StateError: (on reading `span` or `unit`) the engine was freed.
    """

    __slots__ = ("_span", "index")

    def __init__(self, span: Span, index: int) -> None:
        self._span, self.index = weakref.ref(span), index

    @property
    def span(self) -> Span:
        found = self._span()
        if found is None:
            raise StateError("a sharded parameter was used, and its engine is gone: keep a reference to the model")
        return found

    @property
    def unit(self) -> Unit:
        return self.span.unit


class ShardedParameter(nn.Parameter):
    """A parameter of a sharded model whose values are readable."""

    _zero_place: Place

    @property
    def data(self) -> Tensor:
        values = raw_data(self)
        for event in self._zero_place.span.events.data_read:
            event(self, values)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        place = self._zero_place
        place.span.assign(place.index, values)
        for event in place.span.events.data_assigned:
            event(self, values)

    def set_(self, *source: Any, **named: Any) -> Any:
        """Assign `data`: the parameter stays a view of its span."""
        # torch does not call `__torch_function__` of the source, which may be a released parameter.
        given: list[Any] = [each.detach() if isinstance(each, Tensor) else each for each in source]
        named = {name: each.detach() if isinstance(each, Tensor) else each for name, each in named.items()}
        self.data = torch.empty(0, dtype=self.dtype, device=self.device).set_(*given, **named)
        return self

    @property
    def grad(self) -> Tensor | None:
        raw = raw_grad(self)
        for event in self._zero_place.span.events.grad_read:
            return event(self, raw)
        return raw

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        for event in self._zero_place.span.events.grad_assigned:
            if event(self, value):
                return
        set_raw_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _set_requires_grad(self, trains: bool) -> None:
        was = _REQUIRES_GRAD.__get__(self)
        _REQUIRES_GRAD.__set__(self, trains)
        if trains != was:
            for event in self._zero_place.span.events.requires_grad_set:
                event(self)

    # The C++ getter: a read must cost no more than for `nn.Parameter`.
    requires_grad = property(_REQUIRES_GRAD.__get__, _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self._set_requires_grad(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy as a plain parameter with full values. A collective where ranks share the values out."""
        if id(self) not in memo:
            copied = self._zero_place.span.events.param_copied
            values = copied[0](self) if copied else self.detach().clone()
            memo[id(self)] = Tensor._make_subclass(original_class(self), values, self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        place = self._zero_place
        if not place.unit.allows_reads:
            raise StateError(
                f"parameter {place.span.name_of(place.index)!r} was pickled, and its values are sharded over the ranks. Pickle "
                "copy.deepcopy(param), made on every rank, or do it inside zero.GatheredParameters"
            )
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


@cache
def _classes(kind: type[Any]) -> tuple[type[Any], type[Any]]:
    """Return the readable and the released class for parameters that were of class `kind`.

    Subclasses keep their name: libraries that quantize recognise theirs by it.
    """
    name: str = "ShardedParameter" if kind is nn.Parameter else kind.__name__
    readable = ShardedParameter if kind is nn.Parameter else type(name, (ShardedParameter, kind), {})

    def __torch_function__(
        cls: type[Any], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not reads_no_values(func):
            return _read(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    body = {"__torch_function__": classmethod(__torch_function__), "__module__": __name__, "_zero_released": True}
    released = type(name, (readable,), body)
    return readable, released


def reads_no_values(func: Any) -> bool:
    """Return whether a function of a tensor needs its shape, type and flags only."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _METADATA_FIELDS
    if name in ("__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "") in (
            "requires_grad",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
        )
    return name in _METADATA


def _released_in(value: Any) -> Iterable[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        if getattr(type(value), "_zero_released", False):
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _released_in(each)
    elif isinstance(value, dict):
        yield from _released_in(tuple(value.values()))


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of a tensor that reads parameters whose values are sharded.

    Raises:
        StateError: no observer gathers the units.
    """
    params = list(_released_in((args, kwargs)))

    def run() -> Any:
        # The plain class, and not DisableTorchFunctionSubclass: user code that runs inside keeps its torch functions.
        set_released(params, False)
        try:
            return func(*args, **kwargs)
        finally:
            for param in params:
                place = place_of(param)
                if place is not None and not place.unit.allows_reads:
                    set_released((param,), True)

    if getattr(func, "__name__", "") == "grad":  # torch.autograd.grad reads no values of its inputs
        return run()
    read: Callable[[], Any] = run
    places = [place for param in params if (place := place_of(param)) is not None]
    for events in dict.fromkeys(place.span.events for place in places):
        if not events.sharded_read:
            place = next(place for place in places if place.span.events is events)
            raise StateError(
                f"{getattr(func, '__name__', func)} read {place.span.name_of(place.index)!r}, whose values are sharded over "
                "the ranks. Read it inside zero.GatheredParameters([param]), or in the model's forward"
            )
        units = list(dict.fromkeys(place.unit for place in places if place.span.events is events))
        read = partial(events.sharded_read[0], units, func, read)
    return read()


# The engine's own access ----------------------------------------------------------------------------------------------


def make_sharded(param: nn.Parameter, place: Place) -> None:
    """Make `param` a `ShardedParameter` that lies at `place`."""
    kind: Any = original_class(param)
    param._zero_place, param._zero_class = place, kind  # type: ignore[attr-defined]
    param.__class__ = _classes(kind)[0]


def original_class(param: nn.Parameter) -> type[Any]:
    """Return the class that a parameter had before it was sharded."""
    created = nn.Parameter if source_of(param) is not None else type(param)
    kind: type[Any] = param.__dict__.get("_zero_class", created)
    return kind


def make_plain(param: nn.Parameter) -> None:
    """Make `param` a plain parameter again."""
    param.__class__ = param.__dict__.pop("_zero_class")
    del param.__dict__["_zero_place"]


def set_released(params: Iterable[nn.Parameter], released: bool) -> None:
    """Give these parameters the released class, or the readable one."""
    for param in params:
        kind: Any = param._zero_class  # type: ignore[attr-defined]
        param.__class__ = _classes(kind)[released]


def place_of(param: Tensor) -> Place | None:
    """Return where a parameter lies; None if no engine has it."""
    found: Place | None = param.__dict__.get("_zero_place")
    return found


def raw_data(param: Tensor) -> Tensor:
    """Return the C++ `data`, without an event. Not for released parameters."""
    out: Tensor = _DATA.__get__(param)
    return out


def set_raw_data(param: Tensor, values: Tensor) -> None:
    _DATA.__set__(param, values)


def raw_grad(param: Tensor) -> Tensor | None:
    """Return the C++ `grad`: this rank's own gradient, not reduced."""
    if getattr(type(param), "_zero_released", False):
        with torch._C.DisableTorchFunctionSubclass():
            out: Tensor | None = _GRAD.__get__(param)
            return out
    out = _GRAD.__get__(param)
    return out


put_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""As `set_raw_grad`, of a tensor that is never released."""


def set_raw_grad(param: Tensor, grad: Tensor | None) -> None:
    if getattr(type(param), "_zero_released", False):
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(param, grad)
    else:
        _GRAD.__set__(param, grad)


def has_raw_grads(params: Iterable[nn.Parameter]) -> bool:
    """Return whether any of these parameters has a C++ gradient."""
    get = _GRAD.__get__
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:  # noqa: SIM110 -- called for every unit of every backward
            if get(param) is not None:
                return True
    return False


def take_raw_grads(params: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Return the C++ gradients of these parameters, which have none afterwards."""
    # Must run before anything is sent: a later backward would accumulate in place into memory that is being sent.
    get, put = _GRAD.__get__, _GRAD.__set__
    with torch._C.DisableTorchFunctionSubclass():
        found = list(map(get, params))
        for param, grad in zip(params, found):
            if grad is not None:
                put(param, None)
    return found
