"""Parameters that are bf16 themselves: masters are float32, and every stage and tier gives the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from tests import models
from tests.kit.bits import check_bits
from tests.kit.pool import RankPool, on_ranks
from tests.models import ids, token_loss
from tests.optimizers import Lars
from tests.oracle import Run
from tests.programs.architectures import Stack, on_tokens
from tests.programs.whole_matrices import frozen_thawed_and_grown
from tests.settings import Setting

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


def small_steps(run: Run) -> None:
    """Steps of 1e-5 are below the resolution of bf16 at 1: without float32 masters the norms would not move."""
    model = run.trained_model(Mixed, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-5, weight_decay=0.0))
    for step in range(10):
        on_tokens(model, run.rank, step).backward()
        run.update()
    assert (zero.full_parameter(model.blocks[0].norm.weight).float() - 1).abs().max() > 5e-5
    types = {name: value.dtype for name, value in Mixed().state_dict().items()}
    assert {name: value.dtype for name, value in model.state_dict().items()} == types


def test_steps_below_the_resolution_of_bfloat16_add_up(two: RankPool, tmp_path: Path) -> None:
    check_bits(two, small_steps, [Setting(stage=stage) for stage in (1, 2, 3)], tmp_path)


def see_masters(run: Run) -> None:
    for param in run.model.parameters():
        run.see(zero.full_parameter(param), "a master")


def over_matrices(run: Run) -> None:
    """Parts in groups of their own are unfrozen, and others frozen. The optimizer has all matrices from the start."""
    frozen_thawed_and_grown(run, lambda: models.Mixed().bfloat16())


def clipped_matrices(run: Run) -> None:
    """Gradients are stored in the type they come in; with and without clipping."""
    model = run.trained_model(lambda: models.Mixed().bfloat16(), lambda m: Lars(m.parameters()))
    for step in range(3):
        on_tokens(model, run.rank, step).backward()
        if step == 1:
            run.clip_grad_norm_(model, 0.05)
        run.update()
    see_masters(run)


@pytest.mark.parametrize("world", [1, 2])
def test_matrices_in_every_stage_and_tier(pools: dict[int, RankPool], tmp_path: Path, world: int) -> None:
    places = [(0, "none"), (1, "none"), (3, "none"), (3, "cpu"), (3, "disk")]
    rows = [Setting(ranks=world, stage=stage, tier=tier) for stage, tier in places]
    check_bits(pools[world], over_matrices, rows, tmp_path)
    if world == 1:
        rows = [Setting(ranks=1, stage=2, tier=tier) for tier in ("none", "cpu", "disk")]
        check_bits(pools[world], clipped_matrices, rows, tmp_path)


@on_ranks()
def test_masters_keep_their_digits(rank: int, world: int) -> None:
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
