"""Parameters that are bf16 themselves, beside float32 ones: masters are float32, and every stage gives the same values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import ids, token_loss
from tests.programs.architectures import Stack

pytestmark = pytest.mark.gloo


class Mixed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
        self.blocks[1].norm.float()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x.to(block.norm.weight.dtype)).bfloat16())))
        return x


def small_steps(rank: int, world: int) -> None:
    """Steps of 1e-5 are below the resolution of bf16 at 1: without float32 masters the norms would not move."""
    results = []
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        model = Mixed()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
        for step in range(20):
            batch = ids(rank, step)
            token_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (zero.full_parameter(model.blocks[0].norm.weight).float() - 1).abs().max() > 5e-5
        state = model.state_dict()
        assert {name: value.dtype for name, value in state.items()} == {name: v.dtype for name, v in start.items()}
        results.append({name: value for name, value in state.items() if rank == 0})
    for state in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in state.items())


def test_steps_below_the_resolution_of_bfloat16_add_up(two: RankPool) -> None:
    two.run(small_steps)


def digits(rank: int, world: int) -> None:
    """Accessors give the float32 master, and elements that nobody edits keep their digits."""
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    batch = ids(rank, 0)
    token_loss(model(batch), batch).backward()
    optimizer.step()
    weight = model.blocks[0].up.weight
    master = zero.full_parameter(weight)
    assert master.dtype == torch.float32
    assert not torch.equal(master, master.bfloat16().float())
    with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        assert weight.dtype == torch.bfloat16
        weight[0] = 2.0
    after = zero.full_parameter(weight)
    assert torch.equal(after[0], torch.full_like(after[0], 2.0))
    assert torch.equal(after[1:], master[1:])


def test_masters_keep_their_digits(two: RankPool) -> None:
    two.run(digits)
