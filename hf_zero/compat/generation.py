"""Runs `generate` on several ranks, each with sequences of its own length.

If the stage releases full parameters, a rank that has finished its sequences keeps running forwards until the last rank has,
because the others need its slices. Each rank uses its own buffers meanwhile, as in the model that DDP wraps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.patching import Patches
from ..engine.engine import Engine
from ..engine.observer import Observer


class Generation(Observer):
    """Wraps `generate` of the model and of its parts, where several ranks share the parameters."""

    def attach(self, engine: Engine) -> None:
        self._engine, self._context, self._patches = engine, engine.context, Patches()
        if engine.world_size == 1:
            return
        for module in engine.model.modules():
            if callable(module.__dict__.get("generate") or getattr(type(module), "generate", None)):
                self._patches.method(module, "generate", partial(partial, self._generate))

    def detach(self) -> None:
        self._patches.restore()

    def _generate(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        takes = "synced_gpus" in inspect.signature(stock).parameters
        if takes and self._context.reshards and not self._context.is_unsharded:
            # Ranks must meet first: transformers' all-reduces would match other messages of a rank that does not generate.
            with self._context.wire.watch.operation("generate()"):
                self._engine.exchange(None)
            kwargs["synced_gpus"] = True  # Seq2SeqTrainer passes False, which is right for unsharded models
        with self._context.own_buffers():
            return stock(*args, **kwargs)
