"""`zero.unsharded` where memory is too small for the whole weights."""

from __future__ import annotations

import pytest
import torch

import hf_zero as zero
from tests.kit.common import gpt2, loss_of, optimizer_for
from tests.kit.pool import on_ranks

pytestmark = pytest.mark.gloo


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> torch.Tensor:
    loss = loss_of(model, rank, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@on_ranks()
def test_missing_memory_is_named_on_every_rank(rank: int, world: int) -> None:
    model = gpt2()
    optimizer = optimizer_for(model, 1)
    # The rest, gathers and buckets have room; the whole model has not.
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, device_memory="230KiB"))
    before = train(model, optimizer, rank, 0)
    with (
        pytest.raises(
            zero.OutOfMemoryError, match=r"full parameters take .* more than is free on rank \d of its device_memory"
        ),
        zero.unsharded(model),
    ):
        pass
    with torch._C.DisableTorchFunctionSubclass():  # else asking for the storage gathers the values
        assert all(param.untyped_storage().nbytes() == 0 for param in model.parameters())
    assert train(model, optimizer, rank, 0) < before
    engine.detach()
    with zero.unsharded(model):
        assert all(torch.isfinite(param).all() for param in model.parameters())
