"""On CPU ranks a step fills memory that stayed mapped: page faults do not depend on what else the machine does."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo


def faults(rank: int, world: int, stage: int) -> tuple[int, int]:
    """(the fewest page faults of a steady step, pages of the model's parameters)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20_000, 512), nn.Linear(512, 512), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    ids = torch.arange(8) + rank
    found = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found[2:]), sum(param.nbytes for param in model.parameters()) // resource.getpagesize()


def test_a_step_maps_no_memory_anew() -> None:
    """An embedding of 41 MB, whose gradient malloc would map and give back in each step."""
    pool = RankPool(2, executed=True)  # what malloc is like in a process of its own
    try:
        for found, pages in pool.run(faults, 2):
            assert found < pages / 20
    finally:
        pool.stop()
