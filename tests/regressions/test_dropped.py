"""A sharded model that user code drops goes with its engine and its memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.models import LanguageModel, ids, token_loss


@pytest.mark.parametrize("settings", [{"stage": 2}, {"stage": 3, "offload_params": "cpu"}])
@pytest.mark.parametrize("ends", ["at once", "in forward", "after a step"])
def test_a_dropped_model_takes_its_engine_along(settings: dict[str, Any], ends: str) -> None:
    """Its blocks keep an activation, whose graph owns parameters and hooks."""
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**settings))
    tokens = ids(0, 0)
    if ends != "at once":
        loss = token_loss(model(tokens), tokens)
        if ends == "after a step":
            loss.backward()
            optimizer.step()
        del loss
    schedule = weakref.ref(engine.schedule)
    del model, optimizer, engine
    gc.collect()
    assert schedule() is None
