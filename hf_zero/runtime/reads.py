"""A module's parameters that are gathered when someone reads them.

Heads fused with their loss, tied reads and custom layers take another module's weight and never call that module:
`F.linear(hidden, model.lm_head.weight)`. `nn.Module.__getattr__` looks every parameter up in `module._parameters`; while a
unit is released, the dictionaries of its modules answer through `GatherOnRead`.
"""

from __future__ import annotations

import copy
import dis
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from torch import nn

DESCRIPTIONS = frozenset(
    ("device", "dim", "dtype", "element_size", "is_floating_point", "ndim", "numel", "shape", "size")
)
"""Of a tensor, what is the same while its unit is released."""


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


def put_on(modules: Iterable[nn.Module], read: Callable[[ParameterDict], None]) -> list[ParameterDict]:
    """Replace these modules' `_parameters`. Modules without parameters are left alone."""
    made = []
    for module in modules:
        if any(param is not None for param in module._parameters.values()):
            module.__dict__["_parameters"] = found = ParameterDict(module, read)
            made.append(found)
    return made


def take_off(dictionaries: Iterable[ParameterDict]) -> None:
    """Plain dictionaries again."""
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
        """Whether it is asked for its type, device or shape and for nothing else: `module.weight.dtype`.

        The attribute is then what the very next instruction loads, which takes the parameter off the stack: nobody else gets
        to see it. To be called from `read`.
        """
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
