"""Autograd's graph as the schedule sees it: the nodes that made a value, and the tensors that a forward saves for backward.

Everything here runs once per unit and forward, or once per saved tensor: it makes as few Python calls as it can.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = frozenset({int, float, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size})
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_DEPTH = 4
"""How deep unknown objects are looked into: a cache holds layers, which hold lists of tensors."""
_DEEPEST = 32

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Saved:
    """A tensor that a graph has saved while hooks were on; it lives as long as autograd keeps it.

    Attributes:
        tensor: The tensor itself where possible, so that its references show whether user code keeps it too.
        version: Its version when it was saved.
        memory: Address (`_cdata`) of its storage.
        owner: Weak reference to the unit whose memory that is; None for any other memory.
        is_parameter: Without hooks autograd would have saved the parameter itself, and no view of its memory.
    """

    __slots__ = ("__weakref__", "is_parameter", "memory", "owner", "tensor", "version")

    def __init__(self, tensor: Tensor, memory: int, owner: weakref.ref[Any] | None, is_parameter: bool) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.memory, self.owner = memory, owner
        self.is_parameter = is_parameter


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, sets, mappings, dataclasses and plain objects (their attributes)."""
    if type(value) is Tensor:
        return [value]
    found: list[Tensor] = []
    known: set[int] = set()
    level, depth = [value], 0
    while level and depth < _DEEPEST:
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
    return list(vars(value).values()) if depth < _DEPTH and hasattr(value, "__dict__") else []


def nodes_of(tensors: list[Tensor]) -> list[Any]:
    """The autograd nodes that made these tensors, and those that these are views of. Each once.

    Autograd replaces a view's node when its base is written to, never the base's: a hook on both is always found.
    """
    nodes: list[Any] = []
    for tensor in tensors:
        node = tensor.grad_fn
        if node is None:
            continue
        if node not in nodes:
            nodes += (node,)  # no call for each
        base = tensor._base
        if base is not None:
            node = base.grad_fn
            if node is not None and node not in nodes:
                nodes += (node,)
    return nodes


def youngest_of(tensors: list[Tensor]) -> Any | None:
    """The autograd node made last among those that made these tensors; None, where no node made any."""
    youngest, age = None, -1
    for tensor in tensors:
        node = tensor.grad_fn
        if node is not None:
            number = node._sequence_nr()
            if number > age:
                youngest, age = node, number
    return youngest


def in_backward_of_any() -> bool:
    """Whether autograd runs a backward in this thread just now."""
    return torch._C._current_graph_task_id() != -1


class SavedTensors:
    """Makes backward find a parameter's values whenever it needs them, however it got there: docs/DESIGN.md, "Saved tensors".

    Between `push` and `pop` every tensor that autograd saves passes through `_pack`. One that lies in the unsharded buffer
    of a unit (a weight, its transpose) is saved together with that unit: `_unpack` gathers it before autograd reads it. Hooks
    that are already on (`save_on_cpu`) go on working for what is not a parameter.

    Args:
        owner_of: address of a storage (`_cdata`) -> what to pass to `bring`; it is gone when the storage is.
        bring: called before a saved parameter is read.
        record: called with the owner and each tensor of its memory that is saved.
    """

    def __init__(
        self,
        owner_of: Mapping[int, weakref.ref[Any]],
        bring: Callable[[Any], None],
        record: Callable[[Any, Saved], None],
    ) -> None:
        self._owner_of = dict(owner_of)
        self._on: Callable[[Tensor], Any] | None = None
        self._bring, self._record = bring, record

    def rehome(self, old: int, new: int) -> None:
        """What lay in the storage at `old` is saved in the one at `new` from here on."""
        self._owner_of[new] = self._owner_of.pop(old)

    def push(self) -> bool:
        """From here on, in this thread. False, and nothing is done, where saved tensor hooks are disabled (`torch.func`), or
        where `checkpoint` has its own on."""
        autograd: Any = torch._C._autograd
        if not autograd._saved_tensors_hooks_is_enabled():
            return False
        outer = autograd._top_saved_tensors_default_hooks(True)
        while outer is not None and _is_left(outer[0]):
            autograd._pop_saved_tensors_default_hooks()
            outer = autograd._top_saved_tensors_default_hooks(True)
        if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            return False  # it counts what is saved, and its recomputation runs the forward hooks
        pack, unpack = (self._pack, self._unpack) if outer is None else self._around(*outer)
        self._on = pack
        autograd._push_saved_tensors_default_hooks(pack, unpack)
        return True

    def pop(self) -> None:
        """Take off what `push` has put on, if it is there: Ctrl-C may have come between that and what remembers it."""
        autograd: Any = torch._C._autograd
        top = autograd._top_saved_tensors_default_hooks(True)
        if top is not None and top[0] == self._on:
            autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: Tensor) -> Saved:
        try:
            memory = tensor.untyped_storage()._cdata
        except NotImplementedError:
            memory = _memory_without_storage(tensor)
        reference = self._owner_of.get(memory)
        owner = (
            None if reference is None else reference()
        )  # None: the unit is no more, its address is another storage's
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter or (tensor.requires_grad and (owner is None or _may_be_output(tensor))):
            # An operation's own output would keep the operation, and that the output, for ever.
            tensor = tensor.detach()
        saved = Saved(tensor, memory, None if owner is None else reference, is_parameter)
        if owner is not None:
            self._record(owner, saved)
        return saved

    def _unpack(self, saved: Saved) -> Tensor:
        tensor = saved.tensor
        if saved.owner is not None:
            self._bring(saved.owner)
        if tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {saved.version} "
                "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
        return tensor

    def _around(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        def packed(tensor: Tensor) -> Any:
            saved = self._pack(tensor)
            return saved if saved.owner is not None else (pack(tensor),)

        def unpacked(saved: Any) -> Tensor:
            return self._unpack(saved) if type(saved) is Saved else unpack(saved[0])

        return packed, unpacked


def _may_be_output(tensor: Tensor) -> bool:
    """Whether the operation that saves it may have made it; not a view of a leaf, which no operation changes in place."""
    return not (tensor if tensor._base is None else tensor._base).is_leaf


def _memory_without_storage(tensor: Tensor) -> int:
    """The address of the storage that a sparse tensor's elements lie in: they may be a weight. 0 of an opaque one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().untyped_storage()._cdata
    return tensor.values().untyped_storage()._cdata if tensor.layout in _COMPRESSED else 0


def _is_left(pack: Any) -> bool:
    """Whether it is of a model that is gone: Ctrl-C has ended its last forward, of which torch tells no hook."""
    saved = getattr(pack, "__self__", None)
    return isinstance(saved, SavedTensors) and all(owner() is None for owner in saved._owner_of.values())
