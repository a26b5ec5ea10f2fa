"""Tensors without values: operations on large ones give memory of the right shape that nobody has filled.

Memory that is never written or read takes no pages, so models far larger than this machine go through the real engine. Small
tensors and integers are computed as ever: control flow rests on those. Collectives of large tensors move nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

LARGE_NUMEL = 4096
_META = torch.device("meta")


class Valueless(TorchDispatchMode):
    """While it is entered, floating-point tensors of `large_numel` elements or more are neither computed nor written.

    What is computed from them and is smaller is zero, and so are truth values.
    """

    def __init__(self, large_numel: int = LARGE_NUMEL) -> None:
        super().__init__()
        self._large_numel = large_numel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func.namespace == "c10d"
        ):  # over ranks that are not there some copy what this one sends to where others' is due
            if self._any_large(tree_flatten((args, kwargs))[0]):
                args, kwargs = tree_map(_nothing, args), tree_map(_nothing, kwargs)
            return func(*args, **kwargs)
        if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        schema = func._schema.arguments
        written = [argument for argument in schema if argument.alias_info is not None and argument.alias_info.is_write]
        if written:
            places = {argument.name: at for at, argument in enumerate(schema)}
            out = [kwargs[each.name] if each.name in kwargs else args[places[each.name]] for each in written]
            if not self._any_large(tree_flatten(out)[0]):
                return func(*args, **kwargs)
            returned = len(func._schema.returns)
            return None if not returned else out[0] if returned == 1 else tuple(out)
        if any(argument.alias_info is not None for argument in schema):  # a view
            return func(*args, **kwargs)
        is_factory = any(argument.name == "device" for argument in schema)
        if not is_factory and not self._any_large(tree_flatten((args, kwargs))[0]):
            return func(*args, **kwargs)
        device = {"device": _META} if is_factory else {}
        try:
            shapes = func(*tree_map(_on_meta, args), **{**tree_map(_on_meta, kwargs), **device})
        except (NotImplementedError, RuntimeError):  # what has no shape without values
            return func(*args, **kwargs)
        leaves = tree_flatten(((args, kwargs), shapes))[0]
        if not self._any_large(leaves) or kwargs.get("device") not in (None, torch.device("cpu"), "cpu"):
            return func(*args, **kwargs)
        return tree_map(self._filled, shapes)

    def _any_large(self, leaves: Iterable[Any]) -> bool:
        return any(
            isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() >= self._large_numel
            for leaf in leaves
        )

    def _filled(self, shape: Any) -> Any:
        if not isinstance(shape, Tensor):
            return shape
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
        return made if self._any_large([made]) else made.zero_()


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


def _nothing(value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, Tensor) else value
