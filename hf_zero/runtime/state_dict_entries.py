"""Entries of a state dict that are not the parameters' own memory: copies, which cannot be written, and meta tensors.

In PyTorch `model.state_dict()["x"].copy_(v)` writes the parameter. A copy would take that write and lose it, so it raises.
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
from .values.reads import needs_values

SHARE = 8
"""Ranks other than 0 keep a state dict's values where these are at most this part of the host memory that is free."""
_MOVES = ("cpu", "to")


class Entry(Tensor):
    """An entry of a state dict: values on rank 0; on other ranks a meta tensor, with values for code that computes with it.

    Programs use a state dict on every rank (moving averages, target networks: `twin.load_state_dict(model.state_dict())`).

    Attributes:
        held: the values of a meta tensor; None where host memory has no room for them on every rank.
        is_copy: the parameter has other memory: writes to this one raise. Views of it are entries, too.
        is_moved: the model computes on another device than the CPU: `.cpu()` of a parameter would be a copy there.

    Raises:
        StateError: elements are asked for and there are none (`item`, `cpu`, arithmetic with a tensor that has some); a copy
            is written.
    """

    held: Tensor | None
    is_copy: bool
    is_moved: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if not needs_values(func):
                return func(*args, **given[1])
            mine = [each for each in tree_leaves(given) if isinstance(each, Entry)]
            name = getattr(func, "__name__", str(func))
            has_values = all(each.held is not None or not each.is_meta for each in mine)
            if has_values:
                args, kwargs = tree_map_only(Entry, _values, given)
            copies = [each for each in mine if each.is_copy]
            with _Guard(name, copies) if copies else nullcontext():
                try:
                    result = func(*args, **(kwargs or {}))
                except StateError:
                    raise
                except (RuntimeError, TypeError) as error:
                    if has_values:
                        raise
                    _refuse_without_values(name, mine, error)
            if name in _MOVES and mine[0].is_moved and isinstance(result, Tensor):
                return result.clone() if _shares(result, mine) else result
            if hasattr(result, "setflags") and not result.flags.owndata and copies:
                result.setflags(write=False)  # a NumPy array over an entry
            return tree_map_only(Tensor, lambda made: _marked(made, mine), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """The caller's own: it can be written."""
        if not self.is_meta:
            return copy.deepcopy(_plain(self), memo)
        return entry(torch.empty_like(self), copy.deepcopy(self.held, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:  # a file or another process has a plain tensor
        return (_plain(self) if self.held is None else self.held).__reduce_ex__(protocol)


def entry(like: Tensor, held: Tensor | None = None, *, is_copy: bool = False, is_moved: bool = False) -> Entry:
    """
    Args:
        like: values, or a meta tensor.
        held: values of the same shape and type, where `like` is a meta tensor.
    """
    with torch._C.DisableTorchFunctionSubclass():
        made = like.as_subclass(Entry)
    made.held, made.is_copy, made.is_moved = held, is_copy, is_moved
    return made


def with_own_storage(view: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own.

    Parameters of a span share a storage. Code that saves finds tied weights by their storage: accelerate would keep one
    parameter of a span, and `torch.save` of one entry would write the whole span.
    """
    if not view.numel():
        return view
    try:
        return torch.from_dlpack(view)
    except (BufferError, RuntimeError, ValueError):  # a type that DLPack does not have
        return view


class _Guard(TorchDispatchMode):
    """Refuses operations that write to these entries' memory, in whatever way they were called."""

    def __init__(self, name: str, copies: Sequence[Entry]) -> None:
        super().__init__()
        self._name, self._copies = name, copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_lists: list[Tensor] = []
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors = [each for each in tree_leaves(written) if isinstance(each, Tensor)]
            if any(_shares(each, self._copies) for each in tensors):
                raise StateError(
                    f"{self._name}() writes to an entry of state_dict(), which is a copy of the model's values here: the model "
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


def _values(value: Entry) -> Tensor:
    return value.as_subclass(Tensor) if value.held is None else value.held


def _memory(value: Tensor) -> int | None:
    return value.untyped_storage()._cdata if value.layout == torch.strided else None


def _shares(value: Tensor, entries: Iterable[Entry]) -> bool:
    memory = _memory(value)
    return any(memory == _memory(each) or (each.held is not None and memory == _memory(each.held)) for each in entries)


def _marked(made: Tensor, mine: Sequence[Entry]) -> Tensor:
    """A view of an entry is one, too; so is a meta tensor that was made of one without values."""
    of = next((each for each in mine if _shares(made, (each,))), None)
    if of is not None:
        return entry(made, is_copy=of.is_copy, is_moved=of.is_moved)
    return entry(made) if made.is_meta else made


def _refuse_without_values(name: str, mine: Sequence[Entry], error: Exception) -> NoReturn:
    shapes = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in mine)
    raise StateError(
        f"{name} of a value of state_dict(): every rank but 0 has its shape and type alone ({shapes}), since the model's "
        f"values on every rank take more than 1/{SHARE} of the host memory that is free. Compute with it on rank 0, or make "
        "the state dict and what reads it inside `with zero.unsharded(model):`, where all ranks have all values on the device"
    ) from error
