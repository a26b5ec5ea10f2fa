"""Flags that differ between ranks, units that stay gathered, states that are away: what no program of tests/programs has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import Engine, RankMismatchError, StateError, ZeroConfig, shard
from tests.kit.pool import RankPool

WIDTH = 16


def sharded(stage: int, **config: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, shard(model, optimizer, ZeroConfig(stage=stage, stall_s=20.0, **config))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.full((2, WIDTH), 0.1 * step + 0.1)).square().mean()


def frozen_on_one_rank(rank: int, world: int, stage: int) -> None:
    model, _, _ = sharded(stage)
    loss_of(model, 0).backward()
    if rank == 1:
        model[1].requires_grad_(False)
    with pytest.raises(RankMismatchError, match=r"requires_grad of parameter '1\.0\.weight' is not the same"):
        loss_of(model, 1).backward()


@pytest.mark.parametrize("stage", [1, 3])
def test_freezing_on_one_rank_raises_on_every_rank(two: RankPool, stage: int) -> None:
    two.run(frozen_on_one_rank, stage)


def away(rank: int, world: int, stage: int) -> bool:
    """Whether losses are the same to the bit where states were away between backward and step."""

    def losses(leaves: bool) -> list[float]:
        model, optimizer, engine = sharded(stage)
        found = []
        for step in range(3):
            loss = loss_of(model, step)
            found.append(loss.item())
            loss.backward()
            if leaves:
                engine.offload_states()
                with pytest.raises(StateError, match="reload_states"):
                    loss_of(model, step)
                engine.reload_states()
            optimizer.step()
            optimizer.zero_grad()
        engine.detach()
        return found

    return losses(True) == losses(False)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_come_back_as_they_were(two: RankPool, stage: int) -> None:
    assert all(two.run(away, stage))


def gathers(rank: int, world: int, budget: int | None) -> tuple[int, int]:
    """How many times units are gathered in one pass, and how many are kept."""
    model, _, engine = sharded(3, keep_gathered=budget)
    found: list[Any] = []
    engine.events.unit_unsharded.append(found.append)
    loss_of(model, 0).backward()
    return len(found), len(engine.context.kept)


def test_units_within_the_budget_are_gathered_once(two: RankPool) -> None:
    for (usual, none), (fewer, kept) in zip(two.run(gathers, None), two.run(gathers, 2500)):
        assert none == 0 < kept
        assert usual - fewer == kept
