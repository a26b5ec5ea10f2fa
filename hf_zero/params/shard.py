"""`zero.shard`: the engine with everything that observes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import compat, diagnostics
from ..config import ZeroConfig
from ..engine.shard import Optimizers
from ..engine.shard import shard as shard_core
from .deferred import check_ready
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
    check_ready(model)
    observers = [*compat.observers(), *diagnostics.observers(config)]
    return shard_core(
        model, optimizer, config, observers, mixed_precision=mixed_precision, device=device, kind=Engine, **options
    )
