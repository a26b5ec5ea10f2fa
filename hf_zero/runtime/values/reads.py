"""Parameters that are gathered when someone reads them.

Heads fused with their loss, tied reads and custom layers take another module's weight and never call that module:
`F.linear(hidden, model.lm_head.weight)`. `nn.Module.__getattr__` looks every parameter up in `module._parameters`; while a
unit is released, the dictionaries of its modules answer through `GatherOnRead`. Who has the parameter already
(`for p in model.parameters(): penalty += p.square().sum()`) comes by `ReleasedParameter`.
"""

from __future__ import annotations

import copy
import dis
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from ...errors import StateError

DESCRIPTIONS = frozenset(
    ("device", "dim", "dtype", "element_size", "is_floating_point", "ndim", "numel", "shape", "size")
)
"""Of a tensor, what is the same while its unit is released."""
_NEED_NO_VALUES = DESCRIPTIONS | frozenset(
    (
        "__delete__", "__dir__", "__get__", "__hash__", "__len__", "__set__", "_has_compatible_shallow_copy_type",
        "_is_view", "can_cast", "data_ptr", "empty_like", "full_like", "get_device", "has_names", "is_complex",
        "is_conj", "is_contiguous", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed",
        "is_tensor", "ndimension", "nelement", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_tensor", "new_zeros", "ones_like", "promote_types", "rand_like", "randint_like", "randn_like",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "result_type", "retain_grad",
        "storage", "storage_offset", "stride", "untyped_storage", "zeros_like",
    )
)  # fmt: skip
"""Torch functions that look at a tensor, and not at its elements; `__get__` is of attributes other than
`VALUE_ATTRIBUTES`."""
_WITHOUT_GRAPH = frozenset(
    ("__array__", "__bool__", "__float__", "__int__", "allclose", "data", "detach", "equal", "item", "numpy", "tolist")
)
"""Torch functions and attributes whose result has no gradient."""
VALUE_ATTRIBUTES = frozenset(("H", "T", "data", "imag", "mH", "mT", "real"))
P = TypeVar("P", bound=nn.Parameter)
AsTheyAre = torch._C.DisableTorchFunctionSubclass
"""Inside, released parameters are plain tensors: the engine's own looks at `.grad` and flags are no torch functions."""
_DIFFERENTIATES = "grad"  # `torch.autograd.grad`: parameters tell it where gradients go


class ParameterDict(dict[str, Any]):
    """`module._parameters` of a sharded model. A copy of it (deepcopy, pickle) is a plain dictionary.

    Args:
        module: whose parameters these are.
        read: called with the dictionary before an unsharded value is needed of a released unit.
    """

    __slots__ = ("module", "read")

    def __init__(self, module: nn.Module, read: Callable[[ParameterDict], None]) -> None:
        super().__init__(module._parameters)
        self.module = module
        self.read = read

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class GatherOnRead(ParameterDict):
    """The same while the unit is released: asks for it at each access by key. Iteration (`named_parameters`) does not ask.

    Instances change between the two classes, so that an access to a gathered parameter costs what it always does.
    """

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        param = dict.__getitem__(self, name)
        if param is not None:
            self.read(self)
        return param


class Lender(Protocol):
    """Who brings units in, see `lending.Loans`."""

    def lend(self, owners: Sequence[weakref.ref[Any]], *, graph: bool) -> None:
        """The parameters of these units have their values afterwards.

        Args:
            graph: what is made of them may come into a graph.
        """

    def is_masked(self, owner: weakref.ref[Any]) -> bool:
        """Whether parameters of this unit are `ReleasedParameter`."""

    def rehomed(self, old: int, new: int) -> None:
        """A unit's parameters are gathered in the storage of address (`_cdata`) `new` from here on."""


def name_of(func: Any) -> str:
    """A torch function's; of an attribute that gives elements or a view of them the attribute's, else `__get__`."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "data")
        name = name if name in VALUE_ATTRIBUTES else "__get__"
    return name


def needs_values(func: Any) -> bool:
    return name_of(func) not in _NEED_NO_VALUES


def attribute_set(func: Any) -> str:
    """The attribute that a setter sets; empty of any other torch function."""
    is_setter = getattr(func, "__name__", "") == "__set__"
    return getattr(func.__self__, "__name__", "") if is_setter else ""


class MaskedParameter(nn.Parameter):
    """A parameter whose values are elsewhere. Only the class of the object changes, there and back.

    Attributes:
        plain: the class of such a parameter when it has its values.
    """

    plain: ClassVar[type[nn.Parameter]] = nn.Parameter

    @classmethod
    def is_masked(cls, param: nn.Parameter) -> bool:
        """Whether the values of a parameter of this class are still elsewhere."""
        raise NotImplementedError


class ReleasedParameter(MaskedParameter):
    """A parameter while its unit is released: a torch function that needs its values has the unit gathered first.

    Only the class of the object changes, there and back, so that a gathered parameter costs what it always does. Code that
    torch functions do not reach reads the guard. One subclass per unit and class of parameter, see `released_class`. A unit
    that was gathered for a look between passes keeps it, so that who makes a graph next is noticed.
    """

    lender: ClassVar[Lender]
    owner: ClassVar[weakref.ref[Any]]

    @classmethod
    def is_masked(cls, param: nn.Parameter) -> bool:
        return cls.lender.is_masked(cls.owner)

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "__repr__":
            with AsTheyAre():
                return f"Parameter(released: it has values in a forward, shape={tuple(args[0].shape)})"
        if name != _DIFFERENTIATES:
            if name in _NEED_NO_VALUES:
                with AsTheyAre():
                    return func(*args, **kwargs)
            wanted: dict[Lender, list[weakref.ref[Any]]] = {}
            for param in of_kind(ReleasedParameter, (args, kwargs)):
                owners = wanted.setdefault(type(param).lender, [])
                if type(param).owner not in owners:
                    owners.append(type(param).owner)
            if name == "detach" and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
                with AsTheyAre():
                    shape = tuple(args[0].shape)
                raise StateError(
                    f"nn.Parameter(p) of a sharded model's parameter (of shape {shape}) would share its memory, which is "
                    "given back after each use: take a copy, nn.Parameter(p.detach().clone())"
                )
            for lender, owners in wanted.items():
                lender.lend(owners, graph=torch.is_grad_enabled() and name not in _WITHOUT_GRAPH)
        # Not `AsTheyAre`: what runs in there must not lose its torch functions.
        unmasked = Unmasked(of_kind(ReleasedParameter, (args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:
            unmasked.end()


def released_class(kind: type[nn.Parameter], lender: Lender, owner: weakref.ref[Any]) -> type[ReleasedParameter]:
    """What parameters of this class are while their unit is released.

    Args:
        owner: what `lender` knows the unit by. Weakly: a graph may keep a parameter, and with it its class.
    """
    bases = (ReleasedParameter,) if kind is nn.Parameter else (ReleasedParameter, kind)
    members = {"__module__": kind.__module__, "lender": lender, "owner": owner, "plain": kind}
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(members))


def plain_class(param: nn.Parameter) -> type[nn.Parameter]:
    """What its class is, or would be if it were not released."""
    kind = type(param)
    return kind.plain if issubclass(kind, MaskedParameter) else kind


def of_kind(kind: type[P], values: Any) -> Iterator[P]:
    """In the arguments of a torch function, in their order."""
    if isinstance(values, kind):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from of_kind(kind, each)
    elif isinstance(values, dict):
        yield from of_kind(kind, list(values.values()))


class Unmasked:
    """Masked parameters that are plain ones until `end`: what reads them asks for nothing."""

    def __init__(self, params: Iterable[Any]) -> None:
        self._kinds = [(param, type(param)) for param in params if isinstance(param, MaskedParameter)]
        for param, kind in self._kinds:
            param.__class__ = kind.plain  # type: ignore[assignment]

    def end(self) -> None:
        for param, kind in self._kinds:
            if type(param) is kind.plain and kind.is_masked(param):
                param.__class__ = kind


def put_on(modules: Iterable[nn.Module], read: Callable[[ParameterDict], None]) -> list[ParameterDict]:
    """Replace these modules' `_parameters`."""
    made = []
    for module in modules:
        module.__dict__["_parameters"] = found = ParameterDict(module, read)
        made.append(found)
    return made


def take_off(dictionaries: Iterable[ParameterDict]) -> None:
    for each in dictionaries:
        if each.module.__dict__.get("_parameters") is each:
            each.module.__dict__["_parameters"] = dict(each)


def is_read_by_itself(module: nn.Module) -> bool:
    """Whether the code that reads a parameter just now is the module's own forward. To be called from `read`."""
    frame = sys._getframe(1)
    for _ in range(4):  # read, __getitem__, nn.Module.__getattr__
        if frame.f_back is None:
            return False
        frame = frame.f_back
        code = frame.f_code
        if code.co_name.startswith(("forward", "_forward", "_conv_forward")) and code.co_varnames[:1] == ("self",):
            return frame.f_locals.get("self") is module
    return False


class Readers:
    """What the code that reads a parameter does with it, as its bytecode says. Remembers what it has found."""

    def __init__(self) -> None:
        self._found: dict[tuple[CodeType, int], bool] = {}

    def want_no_values(self) -> bool:
        """Whether it is asked for its type, device or shape and for nothing else: `module.weight.dtype`. The attribute is then
        what the very next instruction loads, which takes the parameter off the stack. To be called from `read`."""
        lookup = sys._getframe(3)  # read, __getitem__, nn.Module.__getattr__, the reader
        reader = lookup.f_back
        if lookup.f_code is not nn.Module.__getattr__.__code__ or reader is None:
            return False
        place = reader.f_code, reader.f_lasti
        found = self._found.get(place)
        if found is None:
            found = self._found[place] = _loads_description(*place)
        return found


def _loads_description(code: CodeType, offset: int) -> bool:
    """Whether what follows the instruction at `offset` loads one of `DESCRIPTIONS`."""
    for each in dis.get_instructions(code):
        if each.offset > offset and each.opname != "EXTENDED_ARG":
            return each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in DESCRIPTIONS
    return False
