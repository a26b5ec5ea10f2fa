"""Reference models that follow the trained one: TRL's `sync_ref_model`.

TRL's callback mixes parameter by parameter, `target.data.mul_(1 - alpha).add_(model.data, alpha=alpha)`. At stage 3 both are
released between steps; they are gathered for it, one pair at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from ..params.access import GatheredParameters
from ..runtime.engine import engine_of


def adopt_callbacks(callbacks: Iterable[Any]) -> None:
    """Callbacks of a Trainer that mix two models know of sharded ones from here on."""
    for callback in callbacks:
        if callable(getattr(type(callback), "sync_target_model", None)):
            callback.sync_target_model = partial(_sync, type(callback).sync_target_model)


def _sync(stock: Any, model: nn.Module, target: nn.Module, alpha: float) -> None:
    """TRL's own function, over parameters that are whole. A collective where one of the models is sharded by stage 3."""
    engines = (engine_of(model), engine_of(target))
    if all(engine is None or engine.config.policy.keep_full for engine in engines):
        return stock(model, target, alpha)
    for trained, mixed in zip(model.parameters(), target.parameters(), strict=True):
        with GatheredParameters((trained, mixed), modifier_rank=0):
            stock(nn.ParameterList([trained]), nn.ParameterList([mixed]), alpha)
    return None
