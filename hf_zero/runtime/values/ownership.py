"""Who has a parameter's values: the parameter itself, a deferred `Birth`, or a sharded model. One has one owner at most.

A parameter whose values are elsewhere shows NaN: it is copied and pickled by its owner.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import ConfigError, LayoutError, StateError
from .reads import AsTheyAre

_COPY, _PICKLE = "__deepcopy__", "__reduce_ex__"


class Owner(Protocol):
    def copied(self, param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        """What `copy.deepcopy` makes of the parameter, or the error that says why it cannot."""

    def pickled(self, param: nn.Parameter) -> Any:
        """What its `__reduce_ex__` returns, or the error that says why it cannot."""


OWNERS = WeakTensorKeyDictionary()
"""Parameter -> its `Owner`, or a weak reference to it. Of the process, because memory is: two parameters that share some are
found here, whatever made them."""


def owner_of(param: Tensor) -> Owner | None:
    """None for a plain parameter, and for one whose sharded model is gone."""
    owner: Any = OWNERS.get(param)
    return owner() if isinstance(owner, weakref.ref) else owner


def adopt(param: nn.Parameter, owner: Owner | weakref.ref[Any], *, shows_nan: bool = True) -> None:
    """From here on `owner` has the values of `param`.

    Args:
        shows_nan: whether copies and files of it, made by who does not know, would be of NaN.
    """
    release(param)
    OWNERS[param] = owner
    if shows_nan:
        # Weakly: who copies a parameter's attributes must not keep the parameter.
        param.__dict__[_COPY] = partial(_copy, weakref.ref(param))
        param.__dict__[_PICKLE] = partial(_pickle, weakref.ref(param))


def release(param: nn.Parameter) -> None:
    """The parameter has its own values again."""
    OWNERS.pop(param, None)
    for name in (_COPY, _PICKLE):
        param.__dict__.pop(name, None)


def _owned(reference: weakref.ref[nn.Parameter]) -> tuple[nn.Parameter, Owner]:
    param = reference()
    if param is None:
        raise StateError("a parameter was copied by something that does not hold it")
    owner = owner_of(param)
    if owner is None:
        raise StateError(
            "a parameter was copied or pickled whose sharded model no longer exists: its values are gone with it"
        )
    return param, owner


def _copy(reference: weakref.ref[nn.Parameter], memo: dict[int, Any]) -> nn.Parameter:
    param, owner = _owned(reference)
    if id(param) not in memo:
        memo[id(param)] = owner.copied(param, memo)
    copied: nn.Parameter = memo[id(param)]
    return copied


def _pickle(reference: weakref.ref[nn.Parameter], protocol: Any) -> Any:
    param, owner = _owned(reference)
    return owner.pickled(param)


# Before a model is sharded ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where a parameter's elements lie: bytes [start, stop) of its device."""

    name: str
    values: Tensor
    start: int
    stop: int


def refuse_owned(names: Mapping[nn.Parameter, list[str]]) -> None:
    """Every parameter is free to be sharded.

    Raises:
        ConfigError: an engine has it already: it is a part of a sharded model, or shared with one.
        LayoutError: it shares memory with another parameter of this model, or of a sharded one, without being the same
            parameter.
    """
    for param, (name, *_) in names.items():
        owner = OWNERS.get(param)
        if not isinstance(owner, weakref.ref):
            continue
        sharded = owner()
        if sharded is None:
            raise ConfigError(
                f"parameter {name!r} is of a sharded model that is gone, and its values with it: keep the whole model, or "
                "call detach() on its engine before you take a part of it"
            )
        raise ConfigError(
            f"parameter {name!r} belongs to a sharded {type(sharded.model).__name__} already, and a parameter has one engine: "
            "shard one module that holds everything, copy the part first (copy.deepcopy), or call detach() on that engine"
        )
    own = [memory for param, (name, *_) in names.items() if (memory := _memory_of(param, name)) is not None]
    theirs = []
    for param, owner in list(OWNERS.items()):
        if isinstance(owner, weakref.ref) and (sharded := owner()) is not None:
            memory = _memory_of(param, f"a parameter of the sharded {type(sharded.model).__name__}")
            if memory is not None:
                theirs.append(memory)
    _refuse_shared(own, theirs)


def _memory_of(param: nn.Parameter, name: str) -> _Memory | None:
    with AsTheyAre():  # where it lies, and not what is there
        values = param.detach()
    owner = OWNERS.get(param)
    is_deferred = owner is not None and not isinstance(owner, weakref.ref)
    if is_deferred or values.numel() == 0 or values.is_meta or values.layout != torch.strided:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride()))
    storage = values.untyped_storage()
    if (values.storage_offset() + extent) * values.element_size() > storage.nbytes():
        raise LayoutError(
            f"parameter {name!r} is a view of memory that was given back (of a sharded model, probably): give it values of "
            "its own, p.data = tensor.clone()"
        )
    start = values.data_ptr()
    return _Memory(name, values, start, start + extent * values.element_size())


def _refuse_shared(own: Iterable[_Memory], theirs: Iterable[_Memory]) -> None:
    """No one of `own` overlaps another, or one of `theirs`."""
    mine = {id(memory) for memory in own}
    ordered = sorted([*own, *theirs], key=lambda memory: (str(memory.values.device), memory.start))
    reach: list[_Memory] = []  # those that may go on beyond the start of the next
    for memory in ordered:
        reach = [each for each in reach if each.values.device == memory.values.device and each.stop > memory.start]
        for other in reach:
            if not mine.isdisjoint((id(memory), id(other))) and _overlap(memory, other):
                first, second = (memory, other) if id(memory) in mine else (other, memory)
                raise LayoutError(
                    f"parameter {first.name!r} shares memory with {second.name!r} and is another parameter (as after "
                    "p.data = q.data): sharding would part them without a word. Tie them by assigning the Parameter itself "
                    "(module.weight = other.weight), or give one a copy (p.data = p.data.clone())"
                )
        reach.append(memory)


def _overlap(one: _Memory, other: _Memory) -> bool:
    """Whether they have a byte in common: columns of one matrix, for instance, lie between one another and have none."""
    if one.values.is_contiguous() and other.values.is_contiguous():
        return True
    low = min(one.start, other.start)
    taken = torch.zeros(max(one.stop, other.stop) - low, dtype=torch.bool, device="cpu")
    _bytes_in(taken, one, low).fill_(True)
    return bool(_bytes_in(taken, other, low).any())


def _bytes_in(space: Tensor, memory: _Memory, low: int) -> Tensor:
    size = memory.values.element_size()
    strides = [stride * size for stride in memory.values.stride()]
    return space.as_strided((*memory.values.shape, size), (*strides, 1), memory.start - low)
