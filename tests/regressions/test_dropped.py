"""A sharded model that user code drops goes with its engine and its memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

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


def test_an_engine_is_collected_while_a_module_is_registered() -> None:
    """torch iterates over its registration hooks then: an engine that goes must not remove its own from among them."""

    def sharded() -> None:
        model = LanguageModel()
        model.cycle = [model]  # goes by a collection alone
        zero.shard(model, None, zero.ZeroConfig(stage=2))

    def collect(*_: object) -> None:
        gc.collect()

    collect()
    gc.disable()
    try:
        sharded()
        with register_module_module_registration_hook(collect):
            sharded()
            for number in range(3):
                nn.Sequential().add_module(f"layer {number}", nn.Linear(2, 2))
    finally:
        gc.enable()
