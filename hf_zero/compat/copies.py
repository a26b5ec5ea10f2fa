"""Makes `copy.deepcopy` of a sharded model, a part of it or a parameter return a plain one with full values. A collective.

Moving averages (`AveragedModel`), frozen reference models and evaluations on a copy need it. Pickling is refused: user code
pickles on one rank, which has only a part of the values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.build import full_values
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import original_class
from ..engine.span import Span
from ..errors import StateError

_OURS = (
    "hf_zero.core",
    "hf_zero.engine",
    "hf_zero.compat",
    "hf_zero.diagnostics",
    "hf_zero.params",
    "hf_zero.sequence",
)
_METHODS = ("__deepcopy__", "__reduce_ex__")
_WRAPPERS = ("func", "__func__", "hook")
Table = dict[Any, Any]


class Copies(Observer):
    """Gives the modules of one model their own `__deepcopy__` and `__reduce_ex__`."""

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._modules = [module for module in engine.model.modules() if next(module.parameters(), None) is not None]
        for module in self._modules:
            module.__dict__.update(zip(_METHODS, (partial(self._copied, module), _refuse_pickle)))

    def detach(self) -> None:
        for module in self._modules:
            for name in _METHODS:
                module.__dict__.pop(name, None)

    def param_copied(self, param: nn.Parameter) -> Tensor:
        found = self._values({param: None})
        return found[param]

    def _copied(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Copy a module as torch does, without the engine's hooks and attributes, and with plain copies of its parameters."""
        mine = {param: None for param in module.parameters() if id(param) not in memo}
        for param, values in self._values(mine).items():
            memo[id(param)] = original_class(param)(values, requires_grad=param.requires_grad)
        taken = _strip(module)
        try:
            out: nn.Module = copy.deepcopy(module, memo)
        finally:
            for table, before in reversed(taken):
                table.clear()
                table.update(before)
        return out

    @torch.no_grad()
    def _values(self, params: dict[nn.Parameter, None]) -> dict[nn.Parameter, Tensor]:
        """Return full values of those of these parameters that the engine has, in their own dtypes."""
        found: dict[nn.Parameter, Tensor] = {}
        with self._engine.wire.watch.operation("copy.deepcopy() of a sharded model"):
            spans = [span for unit in self._engine.units for span in unit.spans]
            spans = [span for span in spans if not params.keys().isdisjoint(span.params)]
            if not all(span.unit.is_pinned for span in spans):
                self._engine.exchange(None)  # ranks meet first, as for `state_dict()`
            self._engine.quiesce()
            for span in spans:
                # Inside zero.unsharded and GatheredParameters, the copy must have the values that user code sees.
                views = span.views if span.unit.is_pinned else _views(span, full_values(span))
                for slot, param, view in zip(span.layout.slots, span.params, views):
                    if param in params:
                        found[param] = view.to(getattr(torch, slot.spec.dtype), copy=True)
        return found


def _views(span: Span, whole: Tensor) -> list[Tensor]:
    return [whole[slot.offset : slot.stop].view(slot.spec.shape) for slot in span.layout.slots]


def _refuse_pickle(protocol: Any) -> Any:
    raise StateError(
        "a sharded model cannot be pickled (torch.save(model), a worker process): each rank has a part of it. Use "
        "engine.save(folder), torch.save(model.state_dict()) with state_dict() called on every rank, or pickle a plain copy: "
        "copy.deepcopy(model) on every rank. A DataLoader with spawned workers pickles its dataset, sampler and collate_fn: "
        "let these hold no model"
    )


def _strip(root: nn.Module) -> list[tuple[Table, Table]]:
    """Remove the engine's hooks and attributes from modules. Returns the tables that had any, each with its former contents."""
    taken: list[tuple[Table, Table]] = []

    def drop(table: Table, keys: set[Any]) -> None:
        if keys:
            taken.append((table, dict(table)))
            for key in keys:
                del table[key]

    for module in root.modules():
        gone: set[Any] = set()
        flags: list[Table] = []
        for name, table in [*module.__dict__.items()]:
            if isinstance(table, dict) and name.endswith("_hooks"):
                found = {key for key, value in table.items() if is_ours(value)}
                drop(table, found)
                gone |= found
            elif isinstance(table, dict) and "_hooks_" in name:  # lists hooks that take keywords, or are always called
                flags.append(table)
        for table in flags:
            drop(table, gone & set(table))
        drop(module.__dict__, {key for key, value in module.__dict__.items() if is_ours(value)})
    return taken


def is_ours(value: Any) -> bool:
    """Return whether a hook or an attribute of a module is the engine's, also if it is wrapped."""
    if isinstance(value, (Tensor, nn.Module, dict)):
        return False
    return any(
        isinstance(name, str) and name.startswith(_OURS)
        for each in _wrapped(value)
        for name in (
            getattr(each, "__module__", None),
            type(each).__module__,
            type(getattr(each, "__self__", None)).__module__,
        )
    )


def _wrapped(value: Any) -> Iterator[Any]:
    """Yield a hook or a method, and the callables that it wraps, outermost first."""
    for _ in range(8):
        yield value
        inner = next((each for name in _WRAPPERS if callable(each := getattr(value, name, None))), None)
        if inner is None:
            return
        value = inner
