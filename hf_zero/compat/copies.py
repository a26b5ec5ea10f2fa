"""`copy.deepcopy` of a sharded model, or of a part, gives a plain one with full values, on every rank. Pickling is refused.

torch's own deepcopy runs while the engine's hooks and methods are taken off, and finds parameters copied already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..core.instance import Patches
from ..core.precision import dtype_of
from ..engine.build import full_values
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import original_class
from ..errors import StateError

_PACKAGE = __name__.partition(".")[0]


class Copies(Observer):
    """Copies a sharded model as a plain one."""

    def attach(self, engine: Engine) -> None:
        self._engine, self._patches = engine, Patches()
        for module in engine.model.modules():
            if next(module.parameters(), None) is not None:
                self._patches.method(module, "__deepcopy__", partial(partial, self._copy, module))
                self._patches.method(module, "__reduce_ex__", lambda stock: _refuse_pickle)

    def detach(self) -> None:
        self._patches.take_off()

    def _copy(self, module: nn.Module, stock: Callable[..., Any], memo: dict[int, Any]) -> nn.Module:
        """A collective."""
        self._engine.quiesce()
        self._copy_params({param for param in module.parameters() if id(param) not in memo}, memo)
        with _without(module):
            out: nn.Module = copy.deepcopy(module, memo)
        return out

    @torch.no_grad()
    def _copy_params(self, wanted: set[nn.Parameter], memo: dict[int, Any]) -> None:
        with self._engine.wire.watch.doing("copy.deepcopy() of a sharded model"):
            for span in [span for unit in self._engine.units for span in unit.spans]:
                if wanted.isdisjoint(span.params):
                    continue
                whole = full_values(span)
                for slot, param in zip(span.layout.slots, span.params):
                    if param not in wanted:
                        continue
                    values = whole[slot.offset : slot.stop].view(slot.spec.shape)
                    values = values.to(dtype_of(slot.spec.dtype), copy=True)
                    made: Any = Tensor._make_subclass(original_class(param), values, param.requires_grad)
                    known = {key: each for key, each in param.__dict__.items() if not key.startswith("_zero")}
                    made.__dict__.update(copy.deepcopy(known, memo))
                    memo[id(param)] = made


def _refuse_pickle(protocol: Any) -> NoReturn:
    raise StateError(
        "a sharded model cannot be pickled (torch.save(model), a worker process): each rank has a part of it. Use engine.save("
        "folder), torch.save(model.state_dict()) with state_dict() called on every rank, or pickle a plain copy: "
        "copy.deepcopy(model) on every rank. Spawned workers of a DataLoader pickle its dataset, sampler and collate_fn: let "
        "these hold no model, only what they need of it (a tokenizer, the config)"
    )


@contextmanager
def _without(root: nn.Module) -> Iterator[None]:
    """Inside, modules have no hooks and attributes of this package."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def drop(table: dict[Any, Any], keys: set[Any]) -> None:
        if keys:
            taken.append((table, dict(table)))
            for key in keys:
                del table[key]

    try:
        for module in root.modules():
            gone: set[Any] = set()
            flags: list[dict[Any, Any]] = []
            for name, table in list(module.__dict__.items()):
                if isinstance(table, dict) and name.endswith("_hooks"):
                    found = {key for key, value in table.items() if _is_ours(value)}
                    drop(table, found)
                    gone |= found
                elif isinstance(table, dict) and "_hooks_" in name:  # which hooks take keywords, or are always called
                    flags.append(table)
            for table in flags:
                drop(table, gone & set(table))
            drop(module.__dict__, {key for key, value in module.__dict__.items() if _is_ours(value)})
        yield
    finally:
        for table, before in reversed(taken):
            table.clear()
            table.update(before)


def _is_ours(value: Any) -> bool:
    """Return whether a hook, a method or an object is of this package, however it is wrapped."""
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
