"""Inspects autograd's graph: the tensors in a module's output, and the nodes that made them.

Also counts running calls of modules: torch calls no hook at the end of a forward that Ctrl-C ends.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..errors import StateError

_PLAIN = frozenset({int, float, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size})
_OBJECT_DEPTH = 4
"""The depth to which attributes of unknown objects are followed: a cache holds layers, which hold lists of tensors."""
_MAX_DEPTH = 32
GONE = "a backward runs over a graph whose engine is gone: keep a reference to the engine or the model"


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, sets, mappings, dataclasses and attributes of plain objects."""
    if type(value) is Tensor:
        return [value]
    found: list[Tensor] = []
    known: set[int] = set()
    level, depth = [value], 0
    while level and depth < _MAX_DEPTH:
        deeper: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is Tensor:
                found += (each,)
            elif kind in _PLAIN:
                continue
            elif kind is tuple or kind is list:
                deeper += each
            elif kind is dict:
                deeper += each.values()
            elif isinstance(each, Tensor):
                found.append(each)
            elif isinstance(each, (tuple, list)):
                deeper += each
            elif id(each) not in known:
                known.add(id(each))
                deeper += _inside(each, depth)
        level, depth = deeper, depth + 1
    return found


def _inside(value: Any, depth: int) -> list[Any]:
    if isinstance(value, (dict, Mapping, MappingProxyType)):
        return list(value.values())
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, (nn.Module, type)) or callable(value):
        return []
    if is_dataclass(value):
        return [getattr(value, each.name, None) for each in fields(value)]
    return list(vars(value).values()) if depth < _OBJECT_DEPTH and hasattr(value, "__dict__") else []


def calls_of(modules: Collection[nn.Module | None]) -> int:
    """Return how many calls of these modules run in this thread, nested ones included."""
    count, frame = 0, sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] in modules:
            count += 1
    return count


def nodes_of(tensors: list[Tensor], first: int) -> list[Any]:
    """Return the autograd nodes that made these tensors, each once, without nodes older than sequence number `first`.

    For a view this includes the node of its base: autograd replaces a view's node when its base is written, never the base's.
    """
    nodes: list[Any] = []
    if forward_ad._current_level >= 0 and tensors:
        tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors if tensor.is_floating_point()]
        tensors = [*tensors, *(tangent for tangent in tangents if tangent is not None)]
    for tensor in tensors:
        node = tensor.grad_fn
        if node is None:
            tensor = _unwrapped(tensor)
            node = tensor.grad_fn
            if node is None:
                continue
        base = tensor._base
        for each in (node,) if base is None else (node, base.grad_fn):
            if each is not None and each not in nodes and each._sequence_nr() >= first:
                nodes += (each,)
    return nodes


def is_lookup(node: Any) -> bool:
    """Return whether a node looks rows up in a parameter itself, so that its backward reads no values of it."""
    parents = node.next_functions
    return node.name() == "EmbeddingBackward0" and bool(parents) and parents[0][0].name().endswith("AccumulateGrad")


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that a transform of `torch.func` wraps: inside `torch.vmap` the graph is made of these."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or of a sparse tensor's values; 0 for a tensor without storage."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        if tensor.layout is torch.sparse_coo:
            return tensor._values().untyped_storage()._cdata
        is_compressed = tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
        return tensor.values().untyped_storage()._cdata if is_compressed else 0


# Torch's own functions: a step calls them for every unit, some of them several times.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node of this thread gets. Nodes run in backward in descending order of it."""
backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread; -1 outside a backward."""


def weak_hook(owner: Any, method: Callable[..., object], *args: Any, gone: str = "") -> Callable[..., None]:
    """Return a hook that calls `method(owner, *args)` and refers to `owner` weakly, so that a graph does not keep it alive.

    Args:
        gone: message of the `StateError` that the hook raises once `owner` is freed; empty: the hook then does nothing.
    """
    found = weakref.ref(owner)

    def hook(*_: Any) -> None:
        alive = found()
        if alive is not None:
            method(alive, *args)
        elif gone:
            raise StateError(gone)

    return hook
