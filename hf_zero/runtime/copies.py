"""`copy.deepcopy` of a sharded model, or of a part: a plain one with whole values, on every rank. Pickling is refused by name.

A sharded module refers to its engine (hooks, overrides) and has a part of the values at most; a copy has neither. It is made
by torch's own deepcopy of the module without what is the engine's, parameters given as already copied.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.wire import SoloWire
from ..errors import StateError
from .build import Assembly
from .instance_methods import override
from .sharded import Sharded
from .unit import State

_PACKAGE = __name__.partition(".")[0]
_COPY, _PICKLE = "__deepcopy__", "__reduce_ex__"


def put_on(model: nn.Module, assembly: Assembly, wire: SoloWire, settle: Callable[[], None]) -> None:
    """On every module with parameters.

    Args:
        settle: returns when nothing is gathered or on the move.
    """
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            override(module, _COPY, partial(_plain_copy, module, assembly, wire, settle))
            override(module, _PICKLE, _refuse_pickle)
    protect(assembly.sharded)


def protect(sharded: Sharded) -> None:
    """A copy or a file of a released parameter would be one of NaN: both are refused while it is released."""
    # Weakly: a graph that a module keeps an activation of holds its parameters, past the garbage collector.
    there = weakref.ref(sharded)
    for param, (unit, _, _) in sharded.places.items():
        if not unit.policy.keep_full:
            param.__dict__[_COPY] = partial(_copy_parameter, weakref.ref(param), there)
            param.__dict__[_PICKLE] = partial(_pickle_parameter, weakref.ref(param), there)


def _there(reference: weakref.ref[nn.Parameter], sharded_of: weakref.ref[Sharded]) -> nn.Parameter:
    param = reference()
    if param is None:
        raise StateError("a parameter was copied by something that does not hold it")
    sharded = sharded_of()
    if sharded is None:
        raise StateError(
            "a parameter was copied or pickled whose sharded model no longer exists: its values are gone with it"
        )
    unit, flat, index = sharded.places[param]
    if unit.state is not State.GATHERED and index not in flat.pinned:
        raise StateError(
            f"parameter {flat.span.slots[index].spec.name!r} is released: its values are with the ranks' shards, and a copy or "
            "a file of it would hold NaN. Use model.state_dict() on every rank, or zero.full_parameter, or copy it inside "
            "zero.GatheredParameters"
        )
    return param


def _copy_parameter(
    reference: weakref.ref[nn.Parameter], sharded_of: weakref.ref[Sharded], memo: dict[int, Any]
) -> nn.Parameter:
    copied: nn.Parameter = nn.Parameter.__deepcopy__(_there(reference, sharded_of), memo)
    return copied


def _pickle_parameter(reference: weakref.ref[nn.Parameter], sharded_of: weakref.ref[Sharded], protocol: Any) -> Any:
    param = _there(reference, sharded_of)
    # As nn.Parameter does it, without the attributes that are ours.
    return torch._utils._rebuild_parameter, (param.data, param.requires_grad, OrderedDict())


def take_off(model: nn.Module) -> None:
    for param in model.parameters():
        for name in (_COPY, _PICKLE):
            param.__dict__.pop(name, None)
    for module in model.modules():
        for name in (_COPY, _PICKLE):
            module.__dict__.pop(name, None)


def refuse_copy(what: str) -> StateError:
    return StateError(
        f"{what} cannot be copied or pickled: it holds what this process shares with the other ranks. Copy the model instead "
        "(copy.deepcopy(model) on every rank gives a plain one), save with engine.save(folder) or model.state_dict()"
    )


def _refuse_pickle(protocol: Any) -> Any:
    raise StateError(
        "a sharded model cannot be pickled (torch.save(model), a worker process): each rank has a part of it. Use engine.save("
        "folder), torch.save(model.state_dict()) with state_dict() called on every rank, or pickle a plain copy: "
        "copy.deepcopy(model) on every rank"
    )


def _plain_copy(
    module: nn.Module, assembly: Assembly, wire: SoloWire, settle: Callable[[], None], memo: dict[int, Any]
) -> nn.Module:
    """A collective."""
    settle()
    wanted = {param for param in module.parameters() if id(param) not in memo}
    with wire.watch.doing("copy.deepcopy() of a sharded model"):
        for param, value in assembly.whole_values(wanted):
            memo[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
    with _bare(module):
        out: nn.Module = copy.deepcopy(module, memo)
    return out


@contextmanager
def _bare(root: nn.Module) -> Iterator[None]:
    """Modules without hooks and attributes of this package, for as long as they are copied."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def strip(table: dict[Any, Any], ours: Callable[[Any], bool]) -> set[Any]:
        found = {key: value for key, value in table.items() if ours(value)}
        if found:
            taken.append((table, dict(table)))
            for key in found:
                del table[key]
        return set(found)

    try:
        for module in root.modules():
            gone: set[Any] = set()
            flags: list[dict[Any, Any]] = []
            for name, table in list(module.__dict__.items()):
                if isinstance(table, dict) and name.endswith("_hooks"):
                    gone |= strip(table, _is_ours)
                elif isinstance(table, dict) and "_hooks_" in name:  # which of them take keywords, or are always called
                    flags.append(table)
            for table in flags:
                kept = {key: value for key, value in table.items() if key not in gone}
                if len(kept) < len(table):
                    taken.append((table, dict(table)))
                    for key in set(table) - set(kept):
                        del table[key]
            strip(module.__dict__, _is_ours)
        yield
    finally:
        for table, before in reversed(taken):
            table.clear()
            table.update(before)


def _is_ours(value: Any) -> bool:
    """A hook, a method or an object of this package, however it is wrapped."""
    if isinstance(value, (Tensor, nn.Module, Mapping)):
        return False
    for _ in range(8):
        names = (
            getattr(value, "__module__", None),
            type(value).__module__,
            type(getattr(value, "__self__", None)).__module__,
        )
        if any(isinstance(name, str) and name.partition(".")[0] == _PACKAGE for name in names):
            return True
        inner = [getattr(value, name) for name in ("func", "__func__", "hook") if callable(getattr(value, name, None))]
        if not inner:
            return False
        value = inner[0]
    return False
