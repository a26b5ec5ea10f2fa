"""Replaces methods of a model: `zero_grad`, `no_sync`, moves, casts and resizes.

`.to()`, `.half()` and the like are allowed if they leave every sharded parameter unchanged. They then apply to buffers, and to
parameters that were added after sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..core.patching import Patches
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of
from ..errors import ConfigError, LayoutError, StateError

_RESIZE = "resize_token_embeddings"


class Methods(Observer):
    """Replaces methods of the model and of its parts."""

    def attach(self, engine: Engine) -> None:
        self._engine, self._patches = engine, Patches()
        method = self._patches.method
        method(engine.model, "zero_grad", lambda stock: engine.zero_grad)
        if not hasattr(engine.model, "no_sync"):
            method(engine.model, "no_sync", lambda stock: self._no_sync)
        for module in engine.model.modules():
            if hasattr(type(module), _RESIZE):
                method(module, _RESIZE, lambda stock: _refuse_resize)
            if next(module.parameters(), None) is not None:
                method(module, "_apply", partial(partial, self._apply, module))

    def detach(self) -> None:
        self._patches.restore()

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """As `DistributedDataParallel.no_sync`, but an optimizer's step inside raises."""
        handles = []
        for optimizer in self._engine.optimizers:
            handle = optimizer.register_step_pre_hook(_refuse_step)
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(handle.id, last=False)  # must run before any other work of the step
            handles.append(handle)
        try:
            with self._engine.no_sync():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _apply(
        self, module: nn.Module, stock: Callable[..., Any], fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        asked = set(module.parameters())
        for span in [span for unit in self._engine.units for span in unit.spans if not asked.isdisjoint(span.params)]:
            probe = torch.zeros((), dtype=span.compute_dtype, device=span.device)
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise LayoutError(
                    f"a sharded model cannot be moved or cast, nor can a part of it (from {probe.dtype} on {probe.device} to "
                    f"{moved.dtype} on {moved.device}). Do it before it is sharded, or after "
                    "zero.engine_of(model).detach()"
                )
        for each in module.modules() if recurse else (module,):
            if any(param is not None and place_of(param) is not None for param in each._parameters.values()):
                for name, buffer in each._buffers.items():
                    if buffer is not None:
                        each._buffers[name] = fn(buffer)
            else:
                nn.Module._apply(each, fn, recurse=False)
        return module


def _refuse_step(*_: Any) -> NoReturn:
    raise StateError(
        "optimizer.step() inside model.no_sync(): under DDP each rank makes a step of its own there (accelerate's LocalSGD "
        "does), and ranks of a sharded model hold parts of one. Step outside of it. Without LocalSGD every step is of averages"
    )


def _refuse_resize(*args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(
        f"{_RESIZE}() on a sharded model would replace parameters that its optimizer has. Resize before the model is sharded "
        "(before the Trainer trains; inside `with zero.Init():` if it was made there), or after zero.engine_of(model).detach()"
    )
