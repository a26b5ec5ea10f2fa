"""`zero.shard`: the engine with everything that observes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import compat, diagnostics
from ..compat.compiling import take_wrapper_off
from ..config import ZeroConfig
from ..engine.shard import Optimizers
from ..engine.shard import shard as shard_core
from .alike import check_ready
from .engine import Engine


def shard(
    model: nn.Module,
    optimizer: Optimizers = None,
    config: ZeroConfig | None = None,
    *,
    mixed_precision: str | None = "no",
    device: torch.device | None = None,
    **options: Any,
) -> Engine:
    """Shard `model` and `optimizer` in place over the default process group. A collective.

    As `hf_zero.engine.shard`, with the observers of `compat` and `diagnostics`.
    """
    config = config or ZeroConfig()
    model, compile_ = take_wrapper_off(model)
    check_ready(model)
    observers = [*compat.observers(), *diagnostics.observers(config)]
    engine = shard_core(
        model, optimizer, config, observers, mixed_precision=mixed_precision, device=device, kind=Engine, **options
    )
    if compile_ is not None:
        engine.compile(using=compile_)
    return engine
