"""Warns about training loops whose gradients no optimizer of the engine will use."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..engine.engine import Engine
from ..engine.observer import Observer


class Unbound(Observer):
    """Warns once, at the second forward that builds a graph, if gradients exist and the engine has no optimizer."""

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._has_warned = False

    def before_forward(self, args: Any, kwargs: Any) -> None:
        engine = self._engine
        if self._has_warned or engine.bindings or not torch.is_grad_enabled():
            return
        if any(span.bucket.grad is not None for span in engine.trained):
            self._has_warned = True
            warnings.warn(
                f"this {type(engine.model).__name__} was sharded without an optimizer, and has gradients: no step will change "
                "it. Pass the optimizer to zero.shard (accelerator.prepare), or call engine.bind(optimizer)",
                stacklevel=2,
            )
