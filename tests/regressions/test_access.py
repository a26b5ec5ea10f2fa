"""Whole values of sharded parameters: `GatheredParameters` and the accessors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import adamw, bert, gpt2, ids

pytestmark = pytest.mark.gloo


def plainly(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return gpt2().to(dtype)


def sharded(
    stage: int, precision: str = "no", dtype: torch.dtype = torch.float32
) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
    model = plainly(dtype)
    optimizer = adamw(model)
    return model, optimizer, zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=precision)


def backward(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    tokens = ids(rank, step)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def precise(rank: int, world: int) -> None:
    """Low precision parameters: accessors give the float32 master, and untouched elements keep their digits."""
    model, optimizer, _ = sharded(3, dtype=torch.bfloat16)
    backward(model, rank)
    optimizer.step()
    weight = model.transformer.h[0].mlp.c_fc.weight
    master = zero.full_parameter(weight)
    assert master.dtype == torch.float32
    assert not torch.equal(master, master.bfloat16().float())
    with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        assert weight.dtype == torch.bfloat16
        weight[0] = 2.0
    after = zero.full_parameter(weight)
    assert torch.equal(after[0], torch.full((128,), 2.0))
    assert torch.equal(after[1:], master[1:])
    model.transformer.h[1].requires_grad_(False)
    frozen = bert()
    zero.shard(frozen, None, zero.ZeroConfig(stage=3))
    with pytest.raises(zero.StateError, match="is frozen"):
        zero.full_gradient(frozen.bert.encoder.layer[0].output.dense.weight)


def test_low_precision_and_frozen_parameters(two: RankPool) -> None:
    two.run(precise)
