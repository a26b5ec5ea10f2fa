"""Entries of a state dict that are copies of parameters, and refuse writes.

In PyTorch `model.state_dict()["x"].copy_(v)` writes the parameter. A copy would silently lose that write, so writing to a
`StateDictEntry` raises. Entries without values (meta tensors, on ranks without enough memory) raise when values are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError

_MOVES = frozenset({"cpu", "to"})


class StateDictEntry(Tensor):
    """A copy of a parameter's values, or a meta tensor of its shape and dtype. Views of an entry are entries, too.

    Attributes:
        is_moved: the parameter is not on the CPU. `.cpu()` of the parameter would copy, so `.cpu()` of the entry does, too.

    Raises:
        StateError: the entry is written, or has no values where values are needed.
    """

    is_moved: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            mine = [each for each in tree_leaves((args, kwargs)) if isinstance(each, StateDictEntry)]
            name = getattr(func, "__name__", str(func))
            if name == "detach" and not mine[0].requires_grad:
                return mine[0]  # tied parameters stay one object
            with nullcontext() if name == "__get__" else _Guard(name, mine):  # a property writes nothing
                try:
                    result = func(*args, **kwargs)
                except StateError:
                    raise
                except (RuntimeError, TypeError) as error:
                    if not any(each.is_meta for each in mine):
                        raise
                    _refuse_without_values(name, mine, error)
            if name in _MOVES and mine[0].is_moved and isinstance(result, Tensor):
                return result.clone() if _shares(result, mine) else result
            if hasattr(result, "setflags") and not result.flags.owndata:
                result.setflags(write=False)  # a NumPy array over an entry
            return tree_map_only(Tensor, lambda made: _marked(made, mine), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain copy, which can be written; a copy without values stays an entry."""
        return state_dict_entry(torch.empty_like(self)) if self.is_meta else copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        return _plain(self).__reduce_ex__(protocol)


def state_dict_entry(values: Tensor, *, is_moved: bool = False) -> StateDictEntry:
    """Return an entry over the memory of `values`, or over a meta tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        made = values.as_subclass(StateDictEntry)
    made.is_moved = is_moved
    return made


def with_own_storage(view: Tensor) -> Tensor:
    """Return the same memory as a tensor with a storage of its own.

    Parameters of a span share a storage, by which code that saves finds tied weights: accelerate would keep one parameter of
    a span, and `torch.save` of one entry would write the whole span.
    """
    if not view.numel():
        return view
    try:
        return torch.from_dlpack(view)
    except (BufferError, RuntimeError, ValueError):  # a dtype that DLPack does not have
        return view


class _Guard(TorchDispatchMode):
    """Refuse operations that write to the memory of these entries, however they are called."""

    def __init__(self, name: str, entries: Sequence[StateDictEntry]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._entries = name, entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_lists: list[Tensor] = []
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors = [each for each in tree_leaves(written) if isinstance(each, Tensor)]
            if any(_shares(each, self._entries) for each in tensors):
                raise StateError(
                    f"{self._name}() writes to an entry of state_dict(), which is a copy of the model's values: the model "
                    "would not see the write. Write the parameter itself, inside `with zero.GatheredParameters(param, "
                    "modifier_rank=0):` or by load_state_dict(). For a tensor of your own call clone() on the entry"
                )
            if isinstance(written, (list, tuple)):
                in_lists += [each for each in tensors if not each.is_inference()]
        result = func(*args, **kwargs)
        # Below a dispatch mode, torch's foreach kernels count no write of the tensors in their lists.
        torch.autograd.graph.increment_version(in_lists)
        return result


def _plain(value: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def _memory(value: Tensor) -> int | None:
    return value.untyped_storage()._cdata if value.layout == torch.strided else None


def _shares(value: Tensor, entries: Iterable[StateDictEntry]) -> bool:
    memory = _memory(value)
    return any(memory == _memory(each) for each in entries)


def _marked(made: Tensor, mine: Sequence[StateDictEntry]) -> Tensor:
    """Return views of entries, and meta tensors that were computed from one, as entries."""
    of = next((each for each in mine if _shares(made, (each,))), None)
    if of is not None:
        return state_dict_entry(made, is_moved=of.is_moved)
    return state_dict_entry(made) if made.is_meta else made


def _refuse_without_values(name: str, mine: Sequence[StateDictEntry], error: Exception) -> NoReturn:
    shapes = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in mine)
    raise StateError(
        f"{name}() needs values of state_dict(): every rank but 0 has its shape and type alone ({shapes}), because its host "
        "memory has no room for the model's values. Compute on rank 0, or make the state dict and read it inside `with "
        "zero.unsharded(model):`, where all ranks have all values on the device"
    ) from error
