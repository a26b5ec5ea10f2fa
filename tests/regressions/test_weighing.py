"""Losses and weights that cannot be weighed raise the same error on every rank, and leave nothing behind."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import inputs, mlp, sgd

pytestmark = pytest.mark.gloo


def refusals(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = sgd(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))

    def refused(text: str, loss: Tensor, weight: Any, total: float | None = None) -> None:
        with pytest.raises(zero.ConfigError, match=re.escape(text)):
            engine.weigh(loss, weight, total)

    loss = model(inputs(rank, 0)).square().mean()
    refused("rank 1: expected a weight that is a finite number", loss, (1, -2)[rank])
    refused("rank 0: expected a weight that is a finite number", loss, (math.nan, 1)[rank])
    refused("found 'many'", loss, (1, "many")[rank])
    refused("rank 1: expected a loss of one floating-point number", loss if rank == 0 else loss.repeat(2), 1)
    refused("the weights of all ranks are 0", loss, 0)
    refused("from 0 to the total", loss, 3, total=2.0)
    refused("expected a loss of one floating-point number", loss.repeat(2), 1, total=2.0)
    with pytest.raises(zero.ConfigError, match="all ranks are 0"):
        engine.total_weight(0)
    before = engine.traffic.to_dict()["scalar"]["calls"]
    engine.weigh(loss, 3).backward()
    assert engine.traffic.to_dict()["scalar"]["calls"] == before + 1
    optimizer.step()


def test_refused_on_every_rank(two: RankPool) -> None:
    two.run(refusals)
