"""Buffers that ranks do not share at the start, that nobody changes, or that a forward of one rank alone has changed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import on_ranks
from tests.models import inputs, mlp, sgd
from tests.programs.buffers import Normed, Tracker

pytestmark = pytest.mark.gloo


@on_ranks()
def test_the_start_is_rank_0s(rank: int, world: int) -> None:
    """Rank 0's values with a warning, as for parameters; a buffer of another shape on each rank stays, and is named."""
    torch.manual_seed(0)
    model = Tracker()
    with torch.no_grad():
        model.queue.fill_(rank)
        model.phase.fill_(rank)
    model.register_buffer("own", torch.zeros(2 + rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero.shard(model, None, zero.ZeroConfig(stage=1))
    texts = [str(warning.message) for warning in caught]
    assert any("2 of 7 buffers differ between ranks, 'queue' first" in text for text in texts), texts
    assert any("not of one shape and type on all ranks, 'own' first" in text for text in texts), texts
    assert not model.queue.any()
    assert not model.phase.any()
    assert model.own.shape == (2 + rank,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        zero.shard(Tracker(), None, zero.ZeroConfig(stage=1))


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("scale", torch.arange(16.0) / 16, persistent=False)
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale * self.mask)


@on_ranks()
def test_still_buffers_cost_nothing(rank: int, world: int) -> None:
    """Unchanged buffers are not sent, nor are those that a state dict has set on all ranks."""
    torch.manual_seed(0)
    model = Static()
    optimizer = sgd(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    traffic = engine.traffic["other"]

    def run(steps: int) -> int:
        before = traffic.bytes
        for step in range(steps):
            model(inputs(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(inputs(rank, 9))
        return traffic.bytes - before

    assert run(3) == 0
    model.load_state_dict(model.state_dict())
    run(1)
    assert run(3) == 0
    if rank:
        with torch.no_grad():
            model.mask.mul_(2.0)
    run(1)
    assert run(1) > 0
    assert bool((model.mask == 1).all())


@on_ranks()
def test_forwards_of_one_rank(rank: int, world: int) -> None:
    """`ZeroTrainer` evaluates inside `apart()`: buffers are each rank's own there, as in the stock Trainer."""
    torch.manual_seed(0)
    model = Normed()
    optimizer = sgd(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=1))
    for step in range(2):
        model(inputs(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        with engine.own_buffers(), torch.no_grad():
            model(inputs(rank, 7))
    mine = model.blocks[0][1].running_mean.clone()
    everyone = [torch.empty_like(mine) for _ in range(world)]
    torch.distributed.all_gather(everyone, mine)
    assert not torch.equal(*everyone)
    model.eval()(inputs(rank, 7))
    torch.distributed.all_gather(everyone, model.blocks[0][1].running_mean)
    assert torch.equal(*everyone)
